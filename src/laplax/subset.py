"""Which parameters are random: a part of the network, the rest stays at the MAP."""

import fnmatch
import re
from collections.abc import Callable

import jax

from ._enums import near_miss
from ._model import Model
from ._tree import PyTree, leaf_names
from .taps import Program, trace_taps
from .taps._uses import LinearUse

Subset = str | re.Pattern[str] | Callable[[str], bool] | PyTree | None


def select_leaves(
    subset: Subset, model: Model, params: PyTree, example: PyTree
) -> tuple[bool, ...]:
    """One truth value per leaf of `params`.

    `subset` is None (all), `"last_layer"`, a glob on path names (`"*/Dense_2/*"`), a compiled
    regular expression, a predicate on the path, or a pytree of booleans that matches `params`
    from the top.
    """
    names = leaf_names(params)
    if subset is None:
        return (True,) * len(names)
    if isinstance(subset, str) and subset == "last_layer":
        chosen = _last_layer(trace_taps(model, params, example))
        return tuple(i in chosen for i in range(len(names)))
    if isinstance(subset, str):
        selected = tuple(fnmatch.fnmatchcase(name, subset) for name in names)
    elif isinstance(subset, re.Pattern):
        selected = tuple(subset.search(name) is not None for name in names)
    elif callable(subset):
        selected = tuple(bool(subset(name)) for name in names)
    else:
        selected = _from_booleans(subset, params)
    if not any(selected):
        given = subset if isinstance(subset, str) else getattr(subset, "pattern", "")
        hint = (
            near_miss(given, [*names, "last_layer"]) if given else f" (leaves: {', '.join(names)})"
        )
        raise ValueError(f"subset={subset!r} selects no parameter{hint}")
    return selected


def _from_booleans(subset: PyTree, params: PyTree) -> tuple[bool, ...]:
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(subset, params))
    except ValueError:
        raise ValueError(
            "subset must be None, 'last_layer', a glob, a regular expression, a predicate on path "
            "names, or a pytree of booleans that matches params from the top; given was "
            f"{jax.tree.structure(subset)} for {jax.tree.structure(params)}"
        ) from None
    if not all(isinstance(leaf, bool) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(f"a subset given as a pytree must hold booleans; found {', '.join(kinds)}")
    return tuple(leaves)


def _last_layer(program: Program) -> set[int]:
    """The leaves of the last parametrised product before the output, with its bias."""
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
    leaf = candidates[0]
    taps = program.uses_of(leaf)
    biases = {
        use.leaf for use in program.uses if isinstance(use, LinearUse) and use.added_to in taps
    }
    return {leaf, *biases}
