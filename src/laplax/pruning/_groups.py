"""Units that users name themselves."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._enums import check_names, near_miss
from .._tree import PyTree, leaf_names
from ._units import NO_UNIT, Slices, UnitGroup

Division = int | tuple[int, Any]  # an axis, and the unit of every index along it
Groups = Mapping[str, Mapping[str, Mapping[str, Division]]]
EXAMPLE = "{'incoming': {'w1': 1, 'b1': 0}, 'outgoing': {'w2': 0}}"


def parse_groups(groups: Groups, params: PyTree) -> list[UnitGroup]:
    """Check what users write, and bring it into the form of what is found."""
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"groups must be a dict such as {{'hidden': {EXAMPLE}}}; got {type(groups).__name__}"
        )
    return [_parse(name, parts, params) for name, parts in groups.items()]


def _parse(name: str, parts: Any, params: PyTree) -> UnitGroup:
    if not isinstance(parts, Mapping) or not parts.get("incoming"):
        raise TypeError(f"groups[{name!r}] must be a dict such as {EXAMPLE}; got {parts!r}")
    check_names(parts, ("incoming", "outgoing"), f"part of groups[{name!r}]")
    shapes = dict(zip(leaf_names(params), map(np.shape, jax.tree.leaves(params)), strict=True))
    divisions = {
        part: tuple(
            _division(f"groups[{name!r}][{part!r}]", path, given, shapes)
            for path, given in parts.get(part, {}).items()
        )
        for part in ("incoming", "outgoing")
    }
    counts = {
        list(shapes)[s.leaf]: int(s.units.max(initial=NO_UNIT)) + 1
        for s in (*divisions["incoming"], *divisions["outgoing"])
    }
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ValueError(
            f"the parts of groups[{name!r}] must have the same number of units; got {counts}. "
            "Where a unit has several indices, write (axis, units) with the unit of every index"
        )
    return UnitGroup(name, max(counts.values()), divisions["incoming"], divisions["outgoing"])


def _division(
    where: str, path: str, given: Division, shapes: Mapping[str, tuple[int, ...]]
) -> Slices:
    if path not in shapes:
        raise ValueError(f"{where} names no leaf {path!r}{near_miss(path, shapes)}")
    shape = shapes[path]
    axis, units = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{where} at {path!r} must be an axis of its shape {shape}, or (axis, units); got "
            f"{given!r}"
        )
    axis %= len(shape)
    numbers = np.arange(shape[axis]) if units is None else np.asarray(units)
    if numbers.shape != (shape[axis],) or numbers.dtype.kind not in "iu" or numbers.min() < NO_UNIT:
        raise ValueError(
            f"{where} at {path!r} must give a whole number, -1 or more, for each of the "
            f"{shape[axis]} indices along axis {axis}; got {numbers.dtype} of shape "
            f"{numbers.shape}"
        )
    return Slices(list(shapes).index(path), axis, numbers)
