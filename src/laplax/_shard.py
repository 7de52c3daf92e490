"""Data of a user, divided among the devices of a mesh."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from ._data import Batch, Loader, as_batch, as_data
from ._engine.shards import Shards
from ._enums import check_names
from ._tree import PyTree


def shard(data: Any, mesh: Mesh, axis: str | Sequence[str] | None = None) -> Any:
    """Divide data among the devices of a mesh, for `laplace` and everything after it.

    A number of examples that the devices do not divide is filled up with examples of weight zero,
    which count nowhere.

    Args:
        data: As for `laplace`: arrays, or an iterable of batches, which is divided batch by batch
            as it is read. In a run of several processes, the examples of this process alone; the
            data set is that of all processes together, each of which must give as many batches.
        mesh: The devices, as `jax.make_mesh` makes them.
        axis: The axis or axes of the mesh that divide the examples. By default the first one; the
            others are left to parameters.

    Returns:
        A dict with 'input', 'target' and, where needed, 'weight', or an iterable of them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from laplax import shard
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> data = shard((jnp.ones((4, 3)), jnp.ones((4, 2))), mesh)
        >>> print(data["input"].sharding.spec[0])
        data
    """
    shards = Shards(mesh, _axes(mesh, axis))
    checked = as_data(data)
    if isinstance(checked, Loader):
        return _ShardedBatches(data, shards)
    return _spread(checked, _counts(checked), shards, masked=False)


def _axes(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, as jax.make_mesh(shape, names) makes it; got "
            f"{type(mesh).__name__}"
        )
    names = mesh.axis_names[:1] if axis is None else (axis,) if isinstance(axis, str) else axis
    check_names(names, mesh.axis_names, "axis of the mesh")
    return tuple(names)


class _ShardedBatches:
    """Batches of an iterable, divided as they are read."""

    def __init__(self, batches: Iterable[Any], shards: Shards) -> None:
        self._batches = batches
        self._shards = shards

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, PyTree]]:
        batches = iter(self._batches)
        for number in itertools.count(1):
            raw = next(batches, None)
            batch = None if raw is None else as_batch(raw)
            counts = _counts(batch)
            if not counts.any():
                return
            _check_none_ended(counts, number)
            assert batch is not None
            yield _spread(batch, counts, self._shards, masked=True)


def _counts(batch: Batch | None) -> np.ndarray:
    """How many examples every process has in its batch; 0 where there is no batch."""
    here = np.array(0 if batch is None else batch.num_examples)
    if jax.process_count() == 1:
        return here.reshape(1)
    counts: np.ndarray = multihost_utils.process_allgather(here)
    return counts


def _check_none_ended(counts: np.ndarray, number: int) -> None:
    """Every process must have a batch if one has."""
    if not counts.all():
        ended = ", ".join(str(i) for i in np.flatnonzero(counts == 0))
        raise ValueError(
            f"the processes have different numbers of batches: there is no batch {number} on "
            f"process {ended}, and there is one on the others. Every process must give as many "
            "batches; the batches themselves may differ in size"
        )


def _spread(batch: Batch, counts: np.ndarray, shards: Shards, masked: bool) -> dict[str, PyTree]:
    """One batch on the devices; `masked` gives it a weight even where it needs none."""
    here = shards.count_here
    size = -(-int(counts.max()) // here) * here
    place = shards.sharding
    parts: dict[str, PyTree] = {"input": batch.input, "target": batch.target}
    if masked or batch.weight is not None or np.any(counts < size):
        parts["weight"] = _weight(batch)
    missing = size - batch.num_examples
    # Copies of the last example, which every model and likelihood takes.
    filled = jax.tree.map(lambda x: _with_more(x, np.repeat(x[-1:], missing, axis=0)), parts)
    if "weight" in filled:
        filled["weight"][batch.num_examples :] = 0
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(place, x), filled)


def _weight(batch: Batch) -> np.ndarray:
    return np.ones(batch.num_examples) if batch.weight is None else np.asarray(batch.weight)


def _with_more(array: ArrayLike, more: ArrayLike) -> np.ndarray:
    return np.concatenate([np.asarray(array), np.asarray(more)])
