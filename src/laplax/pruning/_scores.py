"""What it costs to remove a parameter, or a unit, by the posterior."""

import dataclasses

import jax
import jax.numpy as jnp

from .._tree import PyTree
from ..posterior import Posterior
from ._units import Slices, UnitGroup, Units


def parameter_scores(posterior: Posterior) -> PyTree:
    """The score `Lambda_kk theta_k^2` of every parameter; the smallest are pruned first.

    `Lambda = c G + T` is the posterior precision. Half of the score is what setting one parameter
    to zero adds to the negative log joint density, to second order and with all others fixed: it
    is exact for a quadratic loss. LeCun et al. (1989) call it the saliency; Dhahri et al. (2024)
    take it from a posterior whose prior precision maximises the evidence.

    Args:
        posterior: Of any structure. Only the diagonal of its precision is read.

    Returns:
        A pytree like `params`. Parameters that the posterior keeps fixed (outside of its `subset`)
        have the score `inf`, so that nothing prunes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> def model_fn(input, params):
        ...     return input @ params
        >>> params = jnp.array([1.0, 3.0])
        >>> data = (jnp.array([[4.0, 0.0], [0.0, 1.0]]), jnp.array([4.0, 3.0]))
        >>> posterior_fn, _ = laplace(
        ...     model_fn, params, data, loss_fn="mse", curv_type="diagonal"
        ... )
        >>> parameter_scores(posterior_fn({"prior_prec": 2.0}))
        Array([18., 27.], dtype=float32)
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(
            "parameter_scores takes a posterior, posterior_fn(prior_arguments); got "
            f"{type(posterior).__name__}"
        )
    space = posterior.space
    # In half precision a score would overflow: it grows with the number of examples.
    wide = dataclasses.replace(space, dtypes=(space.dtype,) * len(space.dtypes))
    flat = posterior.precision.diagonal() * jnp.square(space.flatten(posterior.mean))
    scores = wide.unflatten(flat)
    if all(space.selected) and space.whole is space:
        return scores
    varies = wide.unflatten(jnp.ones_like(flat))
    return jax.tree.map(lambda x, score: jnp.where(x > 0, score, jnp.inf), varies, scores)


def unit_scores(scores: PyTree, units: Units, *, outgoing: bool = False) -> dict[str, jax.Array]:
    """The sum of the scores of every unit's parameters.

    Args:
        scores: Scores of the parameters: those of `parameter_scores`, or any pytree like `params`.
        units: The units, as `find_units` returns them.
        outgoing: Whether the weights with which later layers read a unit count, too. By default
            its incoming weights and its bias count, and nothing else.

    Returns:
        For every group by its name, the scores of its units, shape (num_units,).
    """
    leaves = units.check_tree(scores, "scores")
    return {
        group.name: _scores_of(group, leaves, group.slices if outgoing else group.incoming)
        for group in units.groups
    }


def _scores_of(group: UnitGroup, leaves: list, parts: tuple[Slices, ...]) -> jax.Array:
    arrays = [jnp.asarray(leaves[slices.leaf]) for slices in parts]
    total = jnp.zeros(group.num_units, jnp.result_type(*arrays))
    for slices, array in zip(parts, arrays, strict=True):
        others = tuple(axis for axis in range(array.ndim) if axis != slices.axis)
        belongs = slices.units >= 0
        by_index = jnp.sum(array, axis=others)[belongs]
        total = total.at[slices.units[belongs]].add(by_index.astype(total.dtype))
    return total
