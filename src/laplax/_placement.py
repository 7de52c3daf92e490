"""Where parameters and data lie among devices and processes, and what cannot work there."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from ._data import Batch
from ._engine.arrays import is_concrete
from ._engine.shards import axes_in_use, shards_of
from ._tree import PyTree, leaf_names


def check_placement(params: PyTree, batch: Batch) -> None:
    """Refuse a placement under which the loops over examples cannot run."""
    shards = shards_of(batch)
    examples = shards.axes if shards else ()
    for i, leaf in enumerate(jax.tree.leaves(params)):
        for axis, kind in axes_in_use(leaf).items():
            if axis in examples:
                raise ValueError(
                    f"the axis {axis!r} of the mesh divides the data and the leaf "
                    f"{leaf_names(params)[i]!r} of params. Give the parameters an axis of their "
                    "own, as in jax.make_mesh((2, 4), ('data', 'model')), or replicate them"
                )
            if kind is AxisType.Explicit:  # in a trace: elsewhere they are on automatic axes now
                raise ValueError(
                    f"the leaf {leaf_names(params)[i]!r} of params is divided along the explicit "
                    f"axis {axis!r}, inside a traced function. Call laplax outside of jax.jit, or "
                    "make the mesh with automatic axes: jax.make_mesh(shape, names, axis_types="
                    "(jax.sharding.AxisType.Auto,) * len(names))"
                )
    if shards is not None and jax.process_count() > 1 and is_concrete(params):
        _check_equal(params)


def _check_equal(params: PyTree) -> None:
    """Every process must have the same parameters, or each would add up another curvature."""
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
        if not leaf.is_fully_addressable:
            continue  # one array for all processes
        digest = hashlib.sha256(np.asarray(leaf).tobytes()).digest()
        digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
        differs = np.any(digests != digests[:1], axis=1)
        if differs.any():
            raise ValueError(
                f"the leaf {name!r} of params differs between process 0 and process "
                f"{int(np.argmax(differs))}. Every process must start from the same parameters"
            )
