"""Which slices of which leaves belong to a unit: a neuron, a filter, a head."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from .._enums import near_miss
from .._tree import PyTree, leaf_names

Kept = Mapping[str, np.ndarray]  # for every group by its name, which of its units stay
NO_UNIT = -1  # what belongs to no unit of a group


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
    """The units that the indices along one axis of a leaf belong to.

    Attributes:
        leaf: The number of the leaf in `jax.tree.leaves` order.
        axis: The axis along which units are told apart.
        units: The unit of every index along that axis, -1 where it belongs to none. A channel that
            is flattened comes at many indices.
    """

    leaf: int
    axis: int
    units: np.ndarray

    @property
    def place(self) -> tuple[int, int]:
        """The leaf and the axis."""
        return self.leaf, self.axis

    def kept(self, kept: np.ndarray) -> np.ndarray:
        """Which indices along the axis stay."""
        return np.append(kept, True)[self.units]  # the last entry is that of -1


@dataclasses.dataclass(frozen=True, eq=False)
class UnitGroup:
    """The units of one layer, of which any can go without the others.

    Attributes:
        name: The path of the leaf that holds most of a unit: its weight.
        num_units: How many units there are.
        incoming: What makes a unit: its weights and its bias.
        outgoing: What reads it: its rows in the layers that follow.
    """

    name: str
    num_units: int
    incoming: tuple[Slices, ...]
    outgoing: tuple[Slices, ...]

    @property
    def slices(self) -> tuple[Slices, ...]:
        """All that goes with a unit."""
        return self.incoming + self.outgoing

    @property
    def places(self) -> set[tuple[int, int]]:
        """The leaves and axes that it divides."""
        return {slices.place for slices in self.slices}


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """The units of a network that can be pruned, as `find_units` returns them.

    Attributes:
        groups: The layers whose units can go, in the order of their leaves.
        names: The path of every leaf.
        shapes: The shape of every leaf.
        skipped: Weights whose units cannot go, with the reason.
    """

    groups: tuple[UnitGroup, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    treedef: jax.tree_util.PyTreeDef
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        rows = []
        for group in self.groups:
            incoming = ", ".join(self.names[s.leaf] for s in group.incoming)
            outgoing = ", ".join(self.names[s.leaf] for s in group.outgoing)
            rows.append((group.name, f"{group.num_units} units", f"{incoming} -> {outgoing}"))
        rows += [(name, "kept whole", reason) for name, reason in self.skipped.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows)

    def __getitem__(self, name: str) -> UnitGroup:
        """The group of that name."""
        for group in self.groups:
            if group.name == name:
                return group
        names = [group.name for group in self.groups]
        raise KeyError(f"there is no group of units {name!r}{near_miss(name, names)}")

    @property
    def num_units(self) -> dict[str, int]:
        """How many units every group has."""
        return {group.name: group.num_units for group in self.groups}

    @property
    def sizes(self) -> dict[str, np.ndarray]:
        """How many parameters go with every unit of every group, if it goes alone."""
        sizes = {name: np.zeros(count, int) for name, count in self.num_units.items()}
        for group, slices in self.divided():
            shape = self.shapes[slices.leaf]
            belongs = slices.units[slices.units != NO_UNIT]
            others = math.prod(shape) // shape[slices.axis]
            sizes[group.name] += others * np.bincount(belongs, minlength=group.num_units)
        return sizes

    @property
    def all_kept(self) -> dict[str, np.ndarray]:
        """A choice of units to start from: all of them stay."""
        return {name: np.ones(count, bool) for name, count in self.num_units.items()}

    def shapes_after(self, kept: Kept) -> tuple[tuple[int, ...], ...]:
        """The shapes of the leaves with the units that are kept."""
        shapes = [list(shape) for shape in self.shapes]
        for group, slices in self.divided():
            shapes[slices.leaf][slices.axis] = int(np.count_nonzero(slices.kept(kept[group.name])))
        return tuple(tuple(shape) for shape in shapes)

    def num_parameters(self, kept: Kept | None = None) -> int:
        """How many parameters the network has with the units that are kept, by default all."""
        kept = self.all_kept if kept is None else check_kept(self, kept)
        return sum(math.prod(shape) for shape in self.shapes_after(kept))

    def after(self, kept: Kept) -> "Units":
        """The units of the smaller network that `shrink(params, units, kept)` returns."""
        kept = check_kept(self, kept)
        return dataclasses.replace(
            self,
            groups=tuple(_smaller(group, kept[group.name]) for group in self.groups),
            shapes=self.shapes_after(kept),
        )

    def check_tree(self, tree: PyTree, what: str) -> list:
        """The leaves of a tree that must have the structure and the shapes of the parameters."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"{what} must be a pytree like the params that find_units was given: "
                f"{self.treedef}; got {treedef}"
            )
        for name, shape, leaf in zip(self.names, self.shapes, leaves, strict=True):
            if np.shape(leaf) != shape:
                raise ValueError(
                    f"{what} have the shape {np.shape(leaf)} at {name!r}, and the units are those "
                    f"of {shape}. After shrink, use units.after(kept)"
                )
        return leaves

    def divided(self) -> Iterator[tuple[UnitGroup, Slices]]:
        """Every division of a leaf, with its group."""
        for group in self.groups:
            for slices in group.slices:
                yield group, slices


def make_units(params: PyTree, groups: tuple[UnitGroup, ...], skipped: Mapping[str, str]) -> Units:
    """Groups of units of these parameters."""
    leaves, treedef = jax.tree.flatten(params)
    return Units(
        groups=groups,
        names=tuple(leaf_names(params)),
        shapes=tuple(tuple(leaf.shape) for leaf in leaves),
        treedef=treedef,
        skipped=skipped,
    )


def check_kept(units: Units, kept: Kept) -> dict[str, np.ndarray]:
    """A choice of units by name: a truth value for each, and one unit of every group at least.

    A group that is not named stays whole.
    """
    if not isinstance(kept, Mapping):
        raise TypeError(
            "kept must be a dict from names of groups to boolean arrays, as kept_units(...) "
            f"returns it; got {type(kept).__name__}"
        )
    unknown = [name for name in kept if name not in units.num_units]
    if unknown:
        hint = near_miss(str(unknown[0]), list(units.num_units))
        raise ValueError(f"kept names a group of units {unknown[0]!r} that there is not{hint}")
    return {
        group.name: _check_group(group, kept[group.name])
        if group.name in kept
        else np.ones(group.num_units, bool)
        for group in units.groups
    }


def _check_group(group: UnitGroup, given: object) -> np.ndarray:
    if isinstance(given, jax.core.Tracer):
        raise TypeError(
            f"kept[{group.name!r}] must be known: it decides the shapes. Choose the units outside "
            "of jax.jit"
        )
    stays = np.asarray(given)
    if stays.dtype != bool or stays.shape != (group.num_units,):
        raise ValueError(
            f"kept[{group.name!r}] must be a boolean array of shape ({group.num_units},), True for "
            f"every unit that stays; got {stays.dtype} of shape {stays.shape}"
        )
    if not stays.any():
        raise ValueError(
            f"kept[{group.name!r}] keeps none of its {group.num_units} units, and without one "
            "nothing of the input gets through the layer. Keep at least one"
        )
    return stays


def _smaller(group: UnitGroup, kept: np.ndarray) -> UnitGroup:
    numbers = np.cumsum(kept) - 1  # of the units that stay

    def part(slices: Slices) -> Slices:
        units = slices.units[slices.kept(kept)]
        renumbered = np.where(units == NO_UNIT, NO_UNIT, numbers[units])
        return dataclasses.replace(slices, units=renumbered)

    return dataclasses.replace(
        group,
        num_units=int(np.count_nonzero(kept)),
        incoming=tuple(part(s) for s in group.incoming),
        outgoing=tuple(part(s) for s in group.outgoing),
    )
