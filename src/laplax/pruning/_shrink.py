"""Smaller arrays: parameters without the units that go."""

from typing import Any

import jax
import numpy as np

from .._tree import PyTree
from ._units import Kept, Units, check_kept


def shrink(params: PyTree, units: Units, kept: Kept) -> PyTree:
    """The parameters of the network without the units that go, as smaller arrays.

    The same `model_fn` takes them, and gives what it gives for `masked(params, unit_mask(units,
    kept))` up to rounding. `units.after(kept)` are the units of the smaller network.

    Args:
        params: The parameters, or any pytree of arrays like them: gradients, the moments of an
            optimizer, a mask.
        units: The units, as `find_units` returns them.
        kept: For every group by its name, which of its units stay, as `kept_units` returns it.
    """
    kept = check_kept(units, kept)
    leaves = units.check_tree(params, "params")
    for group, slices in units.divided():
        stays = slices.kept(kept[group.name])
        if not stays.all():
            leaves[slices.leaf] = _take(leaves[slices.leaf], np.flatnonzero(stays), slices.axis)
    return jax.tree.unflatten(units.treedef, leaves)


def _take(array: Any, indices: np.ndarray, axis: int) -> Any:
    """Also of NumPy arrays, which stay such."""
    return array[(slice(None),) * axis + (indices,)]
