"""Which parameters are random: a part of the network, the rest stays at the MAP."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._enums import near_miss
from ._space import ParamSpace
from ._traced import Traced
from ._tree import PyTree, leaf_names
from .taps import ADDITIONS, PRODUCTS, Meeting, Program

Subset = str | re.Pattern[str] | Callable[[str], bool] | PyTree | None
Masks = tuple[bool | np.ndarray, ...]
LAST_LAYER = "last_layer"


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
    return largest_entries(variances, k, "variances")


def largest_magnitude(params: PyTree, k: int) -> PyTree:
    """The subnetwork of the `k` parameters with the largest absolute values, as a mask.

    Example:
        >>> import jax.numpy as jnp
        >>> largest_magnitude({"a": jnp.asarray([-4.0, 3.0]), "b": jnp.asarray(1.0)}, 1)
        {'a': array([ True, False]), 'b': array(False)}
    """
    return largest_entries(jax.tree.map(abs, params), k, "params")


def largest_entries(scores: PyTree, k: int, what: str) -> PyTree:
    """A mask of the `k` largest entries of all leaves together; `what` names them in errors."""
    leaves, treedef = jax.tree.flatten(scores)
    require_known(leaves, what)
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

    `subset` is None (all), `"last_layer"`, a glob on path names (`"Dense_2/*"`), a regular
    expression (`re.Pattern`), a predicate on the path, or a pytree of booleans and boolean arrays
    that matches `params` from the top.
    """
    if subset is None:
        return known.space
    if isinstance(subset, str) and subset == LAST_LAYER:
        chosen = last_layer(known.program)
        return ParamSpace.of(params, [i in chosen for i in range(len(known.space.shapes))])
    return ParamSpace.of(params, _masks(subset, params))


def select_leaves(subset: Subset, params: PyTree) -> ParamSpace:
    """The same where there is no model, which alone knows its last layer."""
    if subset is None:
        return ParamSpace.of(params)
    if isinstance(subset, str) and subset == LAST_LAYER:
        raise ValueError(
            "subset='last_layer' needs a model, and there is none here: name the leaves (a glob, a "
            "mask), or take the prior of a fit, posterior_fn.prior(prior_arguments)"
        )
    return ParamSpace.of(params, _masks(subset, params))


def _masks(subset: Subset, params: PyTree) -> Masks:
    """What varies, leaf by leaf of `params`: a truth value, or a mask of the leaf's shape."""
    selected: Masks
    names = leaf_names(params)
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
    names = leaf_names(params)
    leaves = jax.tree.leaves(params)
    try:
        given = jax.tree.leaves(jax.tree.broadcast(subset, params))
    except ValueError:
        raise ValueError(
            "subset must be None, 'last_layer', a glob, a regular expression, a predicate on path "
            "names, or a pytree of booleans that matches params from the top (boolean arrays of a "
            f"leaf's shape select single entries); given was {jax.tree.structure(subset)} for "
            f"{jax.tree.structure(params)}"
        ) from None
    require_known(given, "a mask given as subset")
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


def require_known(leaves: Sequence[object], what: str) -> None:
    """Which parameters vary decides the shapes of everything, so it cannot be traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{what} must be known numbers; inside jax.jit, jax.vmap or jax.grad they are traced. "
            "Choose the subnetwork outside"
        )


def last_layer(program: Program) -> tuple[int, ...]:
    """The leaves of the last layer, weight first: the last product, and what is added behind it.

    A weight that is changed on its way, used elsewhere too, or followed by parameters in another
    role is refused: whatever was taken in its place could be another layer.
    """
    if all(meeting.how in ADDITIONS for meeting in program.last):
        raise ValueError(
            "subset='last_layer' finds no product of a parameter with data; name the leaves: "
            f"{', '.join(program.names)}"
        )
    _require_plain(program)
    weights = sorted({i for meeting in program.last if meeting.product for i in meeting.leaves})
    if len(weights) > 1:
        named = ", ".join(program.names[i] for i in weights)
        raise ValueError(
            f"subset='last_layer' is ambiguous: several products reach the output ({named}). Name "
            f"one, for example subset={program.names[weights[-1]]!r}"
        )
    biases = sorted({i for meeting in program.last if meeting.bias for i in meeting.leaves})
    taps = {meeting.tap for meeting in program.last}
    for i in (*weights, *biases):
        _require_owned(program, i, taps)
    return (*weights, *biases)


def _require_plain(program: Program) -> None:
    """All that parameters do from the last product on is to multiply and to be added."""
    if all(meeting.tap is not None for meeting in program.last):
        return
    found = ", ".join(
        f"{', '.join(repr(program.names[i]) for i in meeting.leaves)} ({_role(meeting)})"
        for meeting in program.last
    )
    leaves = sorted({i for meeting in program.last for i in meeting.leaves})
    raise ValueError(
        "subset='last_layer' takes one weight that is multiplied with the features as it is, and "
        f"the biases that are added after it. Here the output depends on {found}, of which no "
        f"such layer can be told apart. {_by_hand(program, leaves)}"
    )


def _role(meeting: Meeting) -> str:
    if meeting.product:
        return "a product"
    if meeting.bias:
        return "added"
    return "transformed, then a product" if meeting.how in PRODUCTS else f"`{meeting.how}`"


def _require_owned(program: Program, leaf: int, taps: set[int | None]) -> None:
    """What the last layer owns is used in it alone."""
    uses = program.uses_of(leaf)
    name = program.names[leaf]
    reason = dict(program.uncovered).get(leaf)
    if reason is None and taps.issuperset(uses):
        return
    count = len(uses) + (reason is not None)
    raise ValueError(
        f"the last layer's {name!r} is used {count} times, also elsewhere "
        f"({reason or 'in another layer'}), so that subset='last_layer' would make more than the "
        f"last layer random. {_by_hand(program, [leaf])}"
    )


def _by_hand(program: Program, leaves: Sequence[int]) -> str:
    """How to name the subset."""
    names = [program.names[i] for i in leaves]
    if len(names) == 1:
        return f"Name by hand what should vary, for example subset={names[0]!r}"
    return (
        "Name by hand which of them should vary, for example all: "
        f"subset=lambda name: name in {names}"
    )
