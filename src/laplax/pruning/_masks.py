"""Masks of what stays: True for every parameter that is kept."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._tree import PyTree, leaf_names
from ..subset import largest_entries
from ._units import Kept, Units, check_kept

ROUND_OFF = 1e-6  # of a share times a count: 0.29 * 100 is less than 29


def parameter_mask(scores: PyTree, sparsity: float, *, per_layer: bool = False) -> PyTree:
    """A mask without the parameters that have the smallest scores.

    Args:
        scores: Scores of the parameters: those of `parameter_scores`, or any pytree like `params`.
            The squares of the parameters give magnitude pruning.
        sparsity: The share of the parameters that go, at least 0 and below 1; their number is
            rounded down.
        per_layer: Whether that share goes from every leaf. By default all are ranked together.

    Returns:
        A pytree like `params` of boolean arrays, True for what stays. `subset=` takes it, and
        `masked(params, mask)` applies it.

    Example:
        >>> parameter_mask({"a": jnp.array([0.1, 3.0]), "b": jnp.array([2.0, 0.5])}, 0.5)
        {'a': array([False,  True]), 'b': array([ True, False])}
    """
    check_sparsity(sparsity)
    if per_layer:
        return jax.tree.map(lambda leaf: parameter_mask(leaf, sparsity), scores)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(scores))
    count = min(math.floor(sparsity * size + ROUND_OFF), size - 1)
    mask = largest_entries(scores, size - count, "scores")
    finite = sum(int(np.isfinite(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(scores))
    if count > finite:
        raise ValueError(
            f"sparsity={sparsity} removes {count} of {size} parameters, and only {finite} have a "
            "finite score: those that the posterior keeps fixed are not pruned"
        )
    return mask


def unit_mask(units: Units, kept: Kept) -> PyTree:
    """The mask of a choice of units.

    Args:
        units: The units, as `find_units` returns them.
        kept: For every group by its name, which of its units stay; a group without an entry stays
            whole. `kept_units` chooses by scores.

    Returns:
        A pytree like `params` of boolean arrays. All that belongs to a unit that goes is False:
        its incoming weights, its bias, and the weights that read it.
    """
    kept = check_kept(units, kept)
    masks = [np.ones(shape, bool) for shape in units.shapes]
    for group, slices in units.divided():
        shape = [1] * masks[slices.leaf].ndim
        shape[slices.axis] = -1
        masks[slices.leaf] &= slices.kept(kept[group.name]).reshape(shape)
    return jax.tree.unflatten(units.treedef, masks)


def masked(params: PyTree, mask: PyTree) -> PyTree:
    """The parameters with zeros where the mask is False.

    In a training loop, apply it to the parameters after every step, or inside of the loss: the
    gradient of what is masked is then zero.

    Args:
        params: The parameters.
        mask: A pytree of booleans and boolean arrays that matches `params` from the top.
    """
    names = leaf_names(params)
    leaves, treedef = jax.tree.flatten(params)
    try:
        masks = jax.tree.leaves(jax.tree.broadcast(mask, params))
    except ValueError:
        raise ValueError(
            "mask must be a pytree of booleans that matches params from the top; given was "
            f"{jax.tree.structure(mask)} for {treedef}"
        ) from None
    triples = zip(leaves, masks, names, strict=True)
    return jax.tree.unflatten(treedef, [_masked_leaf(*triple) for triple in triples])


def _masked_leaf(leaf: ArrayLike, mask: ArrayLike, name: str) -> jax.Array:
    leaf = jnp.asarray(leaf)
    mask = jnp.asarray(mask)
    if mask.dtype != bool or mask.shape not in ((), leaf.shape):
        raise ValueError(
            f"mask at {name!r} must be True, False or a boolean array of the leaf's shape "
            f"{leaf.shape}; got {mask.dtype} of shape {mask.shape}"
        )
    return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))


def check_sparsity(sparsity: float) -> None:
    """A share of what goes."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float, np.number)):
        raise TypeError(f"sparsity must be a number; got {sparsity!r}")
    if not 0 <= sparsity < 1:
        percent = 1 < sparsity < 100
        hint = f"; write sparsity={sparsity / 100:g}" if percent else ""
        raise ValueError(
            "sparsity is the share of the parameters that go, at least 0 and below 1; got "
            f"{sparsity}{hint}"
        )
