"""Examples that are spread over devices: where they lie, and a step that runs on every device.

Only the axes of a mesh that divide the examples are taken in hand (`jax.shard_map`). Other axes,
over which parameters may be divided, stay with the compiler.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from .._tree import PyTree
from . import versions


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices among which the examples of a batch are divided equally."""

    mesh: Mesh | AbstractMesh  # the latter inside a trace
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Into how many parts the examples are divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def sharding(self) -> NamedSharding:
        """That of an array with one row for every example."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes))

    @property
    def count_here(self) -> int:
        """Into how many parts the devices of this process divide its examples."""
        places = self.sharding.addressable_devices_indices_map((self.count,))
        return len({place[0].indices(self.count) for place in places.values() if place})

    def shared(self, x: jax.Array) -> jax.Array:
        """The array, divided along the last axis whose size these devices divide."""
        axes = [i for i, size in enumerate(x.shape) if size and size % self.count == 0]
        spec: list[tuple[str, ...] | None] = [None] * x.ndim
        if axes:
            spec[axes[-1]] = self.axes
        place = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, place)

    def sum(self, fn: Callable[..., PyTree], batch: PyTree, *whole: PyTree) -> PyTree:
        """The sum over all devices of `fn(part, *whole)`, in one reduction."""

        def local(part: PyTree, *whole: PyTree) -> PyTree:
            return jax.lax.psum(fn(part, *whole), self.axes)

        return self.run(local, batch, *whole, apart=False)

    def run(self, fn: Callable[..., PyTree], batch: PyTree, *whole: PyTree, apart: bool) -> PyTree:
        """`fn(part, *whole)` on every device, whose part of the batch is `part`.

        Results lie one after the other along their first axis if they are `apart`, and are equal
        on all devices if not.
        """
        examples = PartitionSpec(self.axes)
        replicated = PartitionSpec()
        spread = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(examples, *[replicated for _ in whole]),
            out_specs=examples if apart else replicated,
            axis_names=set(self.axes),
            check_vma=False,  # the equations of a traced model do not say over what they vary
        )
        return spread(self._placed(batch), *whole)

    def _placed(self, batch: PyTree) -> PyTree:
        """The batch with all its arrays divided, as explicit axes ask for."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return batch
        place = NamedSharding(self.mesh.abstract_mesh, PartitionSpec(self.axes))
        return jax.tree.map(lambda x: versions.reshard(x, place), batch)


def all_devices(*trees: PyTree) -> Shards | None:
    """The devices of the mesh on which arrays lie, if there are several."""
    for leaf in jax.tree.leaves(trees):
        sharding = _sharding_of(leaf)
        if sharding is not None and sharding.mesh.size > 1:
            return Shards(sharding.mesh, tuple(sharding.mesh.axis_names))
    return None


def everywhere(tree: PyTree) -> PyTree:
    """The same arrays, whole on every device that has a part of them."""
    shards = shards_of(tree)
    if shards is None:
        return tree
    return jax.device_put(tree, NamedSharding(shards.mesh, PartitionSpec()))


def on_one_device(tree: PyTree) -> PyTree:
    """Arrays of single devices, all on the first device of this process."""
    here = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x, here) if _is_elsewhere(x, here) else x, tree)


def _is_elsewhere(x: object, device: jax.Device) -> bool:
    if not (isinstance(x, jax.Array) and isinstance(x.sharding, SingleDeviceSharding)):
        return False
    return x.devices() != {device}


def parts_here(tree: PyTree) -> list[PyTree]:
    """Arrays that devices of this process divide by examples, device by device.

    One part, whole on every device, where they are not, or where other processes have some.
    """
    shards = shards_of(tree)
    leaves, treedef = jax.tree.flatten(tree)
    if shards is None or not all(_is_divided_among(leaf, shards) for leaf in leaves):
        return [everywhere(tree)]
    places = shards.sharding.devices_indices_map((shards.count,))
    devices = {place[0].indices(shards.count)[0]: device for device, place in places.items()}
    data = [{part.device: part.data for part in leaf.addressable_shards} for leaf in leaves]
    return [
        jax.tree.unflatten(treedef, [of_device[devices[i]] for of_device in data])
        for i in range(shards.count)
    ]


def _is_divided_among(leaf: object, shards: Shards) -> bool:
    sharding = _sharding_of(leaf)
    if sharding is None or not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return False
    return sharding.mesh == shards.mesh and tuple(axis_names(sharding)) == shards.axes


def to_numpy(x: Any) -> np.ndarray:
    """The values of an array, also where other processes hold parts of it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def shards_of(batch: PyTree) -> Shards | None:
    """Where the first axis of a batch is divided among devices, if it is.

    Inside a trace this is known for meshes with explicit axes alone; with automatic ones the
    compiler decides.
    """
    for leaf in jax.tree.leaves(batch):
        sharding = _sharding_of(leaf)
        if sharding is None or not sharding.spec:
            continue
        shards = Shards(sharding.mesh, _names(sharding.spec[0]))
        # Explicit axes are typed even where they have one device.
        if shards.count > 1 or (shards.axes and AxisType.Explicit in sharding.mesh.axis_types):
            return shards
    return None


def axes_in_use(array: object) -> dict[str, AxisType]:
    """The axes of a mesh that divide an array, with their types."""
    sharding = _sharding_of(array)
    if sharding is None:
        return {}
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return {name: types[name] for name in axis_names(sharding) if sharding.mesh.shape[name] > 1}


def axis_names(sharding: NamedSharding) -> list[str]:
    """The axes of the mesh that divide some axis of an array."""
    return [name for entry in sharding.spec for name in _names(entry)]


def is_divided(params: PyTree) -> bool:
    """Whether devices divide one of these arrays."""
    return any(axes_in_use(leaf) for leaf in jax.tree.leaves(params))


def needs_automatic_axes(params: PyTree) -> bool:
    """Whether what is computed from these parameters must lie on automatic axes of a mesh.

    They do so themselves, or their axes are divided: explicit ones, even of one device, would ask
    of every equation of a model how its result is divided.
    """
    return any(_needs_automatic_axes(leaf) for leaf in jax.tree.leaves(params))


def _needs_automatic_axes(leaf: object) -> bool:
    sharding = _sharding_of(leaf)
    if sharding is None or isinstance(leaf, jax.core.Tracer):
        return False
    return bool(axis_names(sharding)) or AxisType.Explicit not in sharding.mesh.axis_types


def on_automatic_axes(tree: PyTree) -> PyTree:
    """Arrays on explicit axes of a mesh, on automatic axes of the same devices.

    How a model's equations divide their results is left to the compiler; nothing is moved.
    """
    return jax.tree.map(_on_automatic_axes, tree)


def _on_automatic_axes(x: Any) -> Any:
    sharding = None if isinstance(x, jax.core.Tracer) else _sharding_of(x)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    mesh = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.device_put(x, NamedSharding(automatic, sharding.spec))


def places_of(leaves: Sequence[jax.Array]) -> tuple[NamedSharding | None, ...] | None:
    """Where each array lies, one entry for each of its axes; None if no array is divided."""
    if not is_divided(leaves):
        return None
    return tuple(_full(_sharding_of(leaf), leaf.ndim) for leaf in leaves)


def _full(sharding: NamedSharding | None, ndim: int) -> NamedSharding | None:
    if sharding is None:
        return None
    rest = (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *rest))


def _sharding_of(array: object) -> NamedSharding | None:
    if not isinstance(array, jax.Array):
        return None
    traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if traced else array.sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def _names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes that one entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
