"""Which parameters are random: a part of the network, the rest stays at the MAP."""

import fnmatch
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._enums import near_miss
from ._model import Traced
from ._space import ParamSpace
from ._tree import PyTree, leaf_names
from .taps import Program
from .taps._uses import LinearUse

Subset = str | re.Pattern[str] | Callable[[str], bool] | PyTree | None
Masks = tuple[bool | np.ndarray, ...]


def largest_variance(variances: PyTree, k: int) -> PyTree:
    """The subnetwork of the `k` parameters with the largest marginal variances, as a mask.

    The criterion of Daxberger et al. (2021): fixing a parameter removes its variance, so fixing
    those with the smallest ones changes the posterior least. `variances` come from a cheap
    posterior, such as `posterior.variance()` of a diagonal one. Of equal values those that come
    first in `jax.tree.leaves` order are taken.

    Example:
        >>> import jax.numpy as jnp
        >>> largest_variance({"a": jnp.asarray([0.1, 3.0]), "b": jnp.asarray([2.0, 0.5])}, 2)
        {'a': array([False,  True]), 'b': array([ True, False])}
    """
    return _largest(variances, k, "variances")


def largest_magnitude(params: PyTree, k: int) -> PyTree:
    """The subnetwork of the `k` parameters with the largest absolute values, as a mask.

    Example:
        >>> import jax.numpy as jnp
        >>> largest_magnitude({"a": jnp.asarray([-4.0, 3.0]), "b": jnp.asarray(1.0)}, 1)
        {'a': array([ True, False]), 'b': array(False)}
    """
    return _largest(jax.tree.map(abs, params), k, "params")


def _largest(scores: PyTree, k: int, what: str) -> PyTree:
    leaves, treedef = jax.tree.flatten(scores)
    _require_known(leaves, what)
    flat = np.concatenate([np.zeros(0), *(np.asarray(x, np.float64).reshape(-1) for x in leaves)])
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= flat.size:
        raise ValueError(
            f"k must be a whole number from 1 to {flat.size}, the number of parameters; got {k!r}"
        )
    if np.isnan(flat).any():
        raise ValueError(f"{what} hold NaN, which has no place in an order")
    chosen = np.zeros(flat.size, bool)
    chosen[np.argsort(-flat, kind="stable")[:k]] = True  # stable: ties are settled by position
    parts = np.split(chosen, np.cumsum([np.size(x) for x in leaves])[:-1])
    masks = [part.reshape(np.shape(x)) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(treedef, masks)


def select(subset: Subset, params: PyTree, known: Traced) -> ParamSpace:
    """The space of what varies.

    `subset` is None (all), `"last_layer"`, a glob on path names (`"Dense_2/*"`), a compiled
    regular expression, a predicate on the path, or a pytree of booleans and boolean arrays that
    matches `params` from the top.
    """
    if subset is None:
        return known.space
    return ParamSpace.of(params, _masks(subset, params, known))


def _masks(subset: Subset, params: PyTree, known: Traced) -> Masks:
    """What varies, leaf by leaf of `params`: a truth value, or a mask of the leaf's shape."""
    selected: Masks
    names = leaf_names(params)
    if isinstance(subset, str) and subset == "last_layer":
        chosen = _last_layer(known.program)
        return tuple(i in chosen for i in range(len(names)))
    if isinstance(subset, str):
        selected = tuple(fnmatch.fnmatchcase(name, subset) for name in names)
    elif isinstance(subset, re.Pattern):
        selected = tuple(subset.search(name) is not None for name in names)
    elif callable(subset):
        selected = tuple(bool(subset(name)) for name in names)
    else:
        return _from_tree(subset, params)
    if not any(selected):
        given = subset if isinstance(subset, str) else getattr(subset, "pattern", "")
        hint = (
            near_miss(given, [*names, "last_layer"]) if given else f" (leaves: {', '.join(names)})"
        )
        raise ValueError(f"subset={subset!r} selects no parameter{hint}")
    return selected


def _from_tree(subset: PyTree, params: PyTree) -> Masks:
    names, leaves = leaf_names(params), jax.tree.leaves(params)
    try:
        given = jax.tree.leaves(jax.tree.broadcast(subset, params))
    except ValueError:
        raise ValueError(
            "subset must be None, 'last_layer', a glob, a regular expression, a predicate on path "
            "names, or a pytree of booleans that matches params from the top (boolean arrays of a "
            f"leaf's shape select single entries); given was {jax.tree.structure(subset)} for "
            f"{jax.tree.structure(params)}"
        ) from None
    _require_known(given, "a mask given as subset")
    masks = tuple(
        _as_mask(mask, name, leaf.shape)
        for mask, name, leaf in zip(given, names, leaves, strict=True)
    )
    if not any(np.any(mask) for mask in masks):
        raise ValueError(
            "the mask given as subset selects no parameter: it is False everywhere (leaves: "
            f"{', '.join(names)}). Set at least one entry to True, or let "
            "laplax.largest_variance(variances, k) choose k of them"
        )
    return masks


def _as_mask(given: Any, name: str, shape: tuple[int, ...]) -> bool | np.ndarray:
    allowed = f"True, False or a boolean array of the leaf's shape {shape}"
    mask = np.asarray(given)
    if mask.dtype != bool:
        is_array = hasattr(given, "dtype")
        found = f"an array of {given.dtype}" if is_array else type(given).__name__
        raise TypeError(
            f"a subset given as a pytree must hold booleans; found {found} at {name!r}, where "
            f"{allowed} is expected. A comparison makes one: scores > threshold"
        )
    if mask.shape not in ((), shape):
        raise ValueError(
            f"the mask given as subset has shape {mask.shape} at {name!r}; it must be {allowed}, "
            "for example jnp.abs(leaf) > threshold"
        )
    return mask if mask.ndim else bool(mask)


def _require_known(leaves: list[Any], what: str) -> None:
    """Which parameters vary decides the shapes of everything, so it cannot be traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{what} must be known numbers; inside jax.jit, jax.vmap or jax.grad they are traced. "
            "Choose the subnetwork outside"
        )


def last_product(program: Program) -> int:
    """The weight of the last parametrised product before the output."""
    candidates = sorted({program.uses[tap].leaf for tap in program.last_products})
    named = ", ".join(program.names[i] for i in candidates)
    if not candidates:
        raise ValueError(
            "subset='last_layer' finds no product of a parameter with data; name the leaves: "
            f"{', '.join(program.names)}"
        )
    if len(candidates) > 1:
        raise ValueError(
            f"subset='last_layer' is ambiguous: several products reach the output ({named}). Name "
            f"one, for example subset={program.names[candidates[-1]]!r}"
        )
    return candidates[0]


def _last_layer(program: Program) -> set[int]:
    """The leaves of the last parametrised product before the output, with its bias."""
    leaf = last_product(program)
    taps = program.uses_of(leaf)
    biases = {
        use.leaf for use in program.uses if isinstance(use, LinearUse) and use.added_to in taps
    }
    return {leaf, *biases}
