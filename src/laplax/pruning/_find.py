"""Which slices of which leaves belong to a unit, for any JAX model."""

import fnmatch
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from .._engine.arrays import owned
from .._enums import near_miss
from .._model import Model, check_signature
from .._problem import check_params
from .._tree import PyTree, leaf_names
from ._check import OTHER_OUTPUTS, Reason, runs_without, same_outputs
from ._groups import Groups, parse_groups
from ._probe import Labels, Probe, along_axis
from ._units import Slices, UnitGroup, Units, make_units

# Why the slices of a weight are no units that can go; what shows later in the search has a higher
# number. `_check.py` has the last two.
NOT_READ = Reason(0, "no weight reads its units: they are the outputs, or meet no further product")
MIXED = Reason(1, "its units are mixed before a weight reads them, as by a normalisation")
NOT_SLICES = Reason(2, "what reads one of its units is no slice of an array")
ESCAPES = Reason(
    3, "its units reach the outputs past the weights that read them: a skip connection"
)
SHARED = Reason(4, "its units share weights with those of another group")

BY_HAND = (
    "If you know better, name units yourself: groups={'hidden': {'incoming': {'w1': 1, 'b1': 0}, "
    "'outgoing': {'w2': 0}}}"
)


def find_units(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    input: PyTree,
    *,
    layers: str | Sequence[str] | None = None,
    groups: Groups | None = None,
    vmap_over_data: bool = True,
) -> Units:
    """Find the units of a network (neurons, filters, heads) and all that belongs to each.

    A unit is a slice of a weight that later weights read apart from all other slices. With it go
    its bias and its scales, and the rows of the weights that read it: one row for a neuron, a
    block of rows for a filter whose image is flattened.

    No layer needs a name or a class. The model runs on parameters that are drawn at random, with
    some slices changed, and is differentiated with some rows set to zero. Then it runs with
    smaller arrays, and must give the outputs of the masked network. So only units that can really
    go are found: not the inputs, not the outputs, not what a skip connection adds to something
    else.

    Args:
        model_fn: `model_fn(input, params)`. It must read sizes from `params`: a flax module is
            built inside of it, with `features=params["Dense_0"]["bias"].size`.
        params: The parameters. Their shapes matter alone.
        input: A batch of inputs. Their shapes matter, and the values of whole numbers, such as
            tokens.
        layers: Names of weights whose units are wanted, with wildcards. An error names those that
            have none. By default, all units that there are.
        groups: Units that you know, for every group by a name of your own:
            `{"incoming": {path: axis, ...}, "outgoing": {path: axis, ...}}`. `(axis, units)` in
            place of the axis gives the unit of every index along it, -1 for none. They are checked
            like all others.
        vmap_over_data: Whether `model_fn` takes single examples.

    Returns:
        The units. `print(units)` shows them, and why other weights are kept whole.

    Example:
        >>> import jax.numpy as jnp
        >>> def model_fn(input, params):
        ...     hidden = jnp.tanh(input @ params["w1"] + params["b1"])
        ...     return hidden @ params["w2"]
        >>> params = {"w1": jnp.ones((3, 8)), "b1": jnp.ones(8), "w2": jnp.ones((8, 2))}
        >>> find_units(model_fn, params, jnp.ones((1, 3))).num_units
        {'w1': 8}
    """
    check_signature(model_fn)
    params = check_params(params)
    probe = Probe.of(Model(model_fn, vmap_over_data), params, jax.tree.map(owned, input))
    search = Search(probe, params)
    for group in parse_groups(groups or {}, params):
        search.add(group)
    wanted = _wanted(layers, probe)
    for leaf in wanted:
        search.look_at(leaf)
    search.compare_outputs()
    units = search.units(wanted)
    refused = units.skipped if layers is not None or not units.groups else {}
    if refused:
        listed = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise ValueError(f"the units of these weights cannot be pruned:{listed}\n{BY_HAND}")
    return units


class Search:
    """The groups found so far, and what stands against other weights."""

    def __init__(self, probe: Probe, params: PyTree) -> None:
        self.probe = probe
        self.params = params
        self.names = leaf_names(params)
        self.groups: list[UnitGroup] = []
        self.reasons: dict[int, Reason] = {}

    @property
    def places(self) -> set[tuple[int, int]]:
        """The leaves and axes that are divided already."""
        return {place for group in self.groups for place in group.places}

    def axes(self, leaf: int) -> list[int]:
        """The axes along which a leaf can make units: not those along which a product sums."""
        shape = self.probe.shapes[leaf]
        matrices = [matrix for _, matrix in self.probe.readers.get(leaf, [])]

        def summed(axis: int) -> bool:
            stride = math.prod(shape[axis + 1 :])
            indices = [matrix // stride % shape[axis] for matrix in matrices]  # (B, I, O)
            return any((index != index[:, :1]).any() for index in indices)

        return [axis for axis, size in enumerate(shape) if size > 1 and not summed(axis)]

    def add(self, group: UnitGroup) -> None:
        """A group by the user's own hand: if its units cannot go, that is an error."""
        reason = SHARED if group.places & self.places else self._obstacle([group])
        if reason is None and not self._same_outputs([group]):
            reason = OTHER_OUTPUTS
        if reason is not None:
            raise ValueError(f"groups[{group.name!r}] cannot be pruned: {reason.text}")
        self.groups.append(group)

    def look_at(self, leaf: int) -> None:
        """Find the units along each axis of a leaf."""
        for axis in self.axes(leaf):
            if (leaf, axis) in self.places:
                continue
            found = self._group_of(leaf, axis)
            if isinstance(found, UnitGroup):
                self.groups.append(found)
            elif leaf not in self.reasons or found.stage > self.reasons[leaf].stage:
                self.reasons[leaf] = found

    def _group_of(self, leaf: int, axis: int) -> UnitGroup | Reason:
        labels = self.probe.read_by(leaf, axis)
        if not labels:
            return NOT_READ
        if not any((x >= 0).any() for x in labels.values()):
            return MIXED
        outgoing = _slices(labels)
        if not outgoing:
            return NOT_SLICES
        num_units = self.probe.shapes[leaf][axis]
        used = dict(enumerate(self.probe.used_for(outgoing, num_units)))
        read = {slices.place for slices in outgoing}
        incoming = tuple(s for s in _slices(used) if s.place not in read)
        own = [slices for slices in (*incoming, *outgoing) if slices.place == (leaf, axis)]
        if not incoming or not own or not np.array_equal(own[0].units, np.arange(num_units)):
            return ESCAPES
        group = UnitGroup(self._name(incoming), num_units, incoming, outgoing)
        if group.places & self.places:
            return SHARED
        return self._obstacle([group]) or group

    def _name(self, incoming: Sequence[Slices]) -> str:
        """The path of the leaf with the most entries for a unit."""
        shapes = self.probe.shapes
        slices = max(incoming, key=lambda s: np.prod(shapes[s.leaf]) / shapes[s.leaf][s.axis])
        name = self.names[slices.leaf]
        taken = any(group.name == name for group in self.groups)
        return f"{name}, axis {slices.axis}" if taken else name

    def _obstacle(self, groups: Sequence[UnitGroup]) -> Reason | None:
        return runs_without(self.probe, self._made_of(groups))

    def _fit_together(self, groups: Sequence[UnitGroup]) -> bool:
        return self._obstacle(groups) is None and self._same_outputs(groups)

    def _same_outputs(self, groups: Sequence[UnitGroup]) -> bool:
        return same_outputs(self.probe, self._made_of(groups))

    def _made_of(self, groups: Sequence[UnitGroup]) -> Units:
        return make_units(self.params, tuple(groups), {})

    def compare_outputs(self) -> None:
        """Leave out groups without whose units the outputs are not those of the masked network."""
        if self._fit_together(self.groups):
            return
        right = [group for group in self.groups if self._same_outputs([group])]
        right = right if self._fit_together(right) else []
        for group in self.groups:
            if group not in right:
                self.reasons.update({slices.leaf: OTHER_OUTPUTS for slices in group.incoming})
        self.groups = right

    def units(self, wanted: Sequence[int]) -> Units:
        """What was found, and why other weights are kept whole."""
        whole = [i for i in wanted if not self.places & {(i, axis) for axis in self.axes(i)}]
        skipped = {
            self.names[leaf]: self.reasons.get(leaf, NOT_READ).text
            for leaf in whole
            if leaf in _weights(self.probe)
        }
        return make_units(self.params, tuple(self.groups), skipped)


def _slices(labels: Labels) -> tuple[Slices, ...]:
    """The leaves whose labels are told apart along one axis."""
    found = [(leaf, along_axis(x)) for leaf, x in labels.items()]
    return tuple(Slices(leaf, *along) for leaf, along in found if along is not None)


def _weights(probe: Probe) -> list[int]:
    """Leaves that people call weights: they make products, or have more than one axis."""
    return [i for i, shape in enumerate(probe.shapes) if i in probe.readers or len(shape) > 1]


def _wanted(layers: str | Sequence[str] | None, probe: Probe) -> list[int]:
    """The leaves whose units are wanted."""
    names = probe.program.names
    if layers is None:
        return list(range(len(names)))
    weights = _weights(probe)
    wanted: set[int] = set()
    for pattern in [layers] if isinstance(layers, str) else layers:
        matches = [i for i in weights if fnmatch.fnmatchcase(names[i], pattern)]
        if not matches:
            hint = near_miss(pattern, [names[i] for i in weights])
            raise ValueError(f"layers={pattern!r} names no weight{hint}")
        wanted.update(matches)
    return sorted(wanted)
