"""Which units stay: those with the largest scores, as many as a sparsity allows."""

import bisect
from collections.abc import Mapping

import numpy as np
from jax.typing import ArrayLike

from ..subset import require_known
from ._masks import ROUND_OFF, check_sparsity
from ._units import UnitGroup, Units

Unit = tuple[str, int]  # the name of its group, and its number there


def kept_units(
    scores: Mapping[str, ArrayLike],
    units: Units,
    sparsity: float,
    *,
    per_layer: bool = False,
    per_parameter: bool = True,
) -> dict[str, np.ndarray]:
    """The units that stay if those that cost least go.

    As many go as it takes until at least `sparsity` of the network's parameters are gone: those of
    the units and those that read them. One unit of every group stays, that with the largest score.

    Args:
        scores: For every group by its name, the scores of its units: those of `unit_scores`, or
            numbers of your own.
        units: The units, as `find_units` returns them.
        sparsity: The share of the network's parameters that go, at least 0 and below 1.
        per_layer: Whether every group loses the same share of its units. By default the units of
            all groups are ranked together.
        per_parameter: Whether units are ranked by their scores divided by the number of parameters
            that go with them: by the cost of each parameter saved. Otherwise the scores themselves
            rank them, and small units go first.

    Returns:
        For every group by its name, a boolean array: True for the units that stay.
    """
    check_sparsity(sparsity)
    ranks = {group.name: _checked_scores(group, scores) for group in units.groups}
    if per_parameter:
        ranks = {name: values / units.sizes[name] for name, values in ranks.items()}
    if per_layer:
        ranks = {name: _share_below(values) for name, values in ranks.items()}
    order = _order_of_removal(ranks)
    most = (1 - sparsity) * units.num_parameters() + ROUND_OFF

    def fits(count: int) -> bool:
        return units.num_parameters(_without(units, order[:count])) <= most

    count = bisect.bisect_left(range(len(order) + 1), True, key=fits)
    if count > len(order):
        raise ValueError(_too_sparse(units, order, sparsity))
    return _without(units, order[:count])


def _checked_scores(group: UnitGroup, scores: Mapping[str, ArrayLike]) -> np.ndarray:
    if not isinstance(scores, Mapping) or group.name not in scores:
        raise ValueError(
            f"scores need an entry {group.name!r} with a number for each of its {group.num_units} "
            "units: unit_scores(scores, units) makes them"
        )
    require_known([scores[group.name]], "scores")
    values = np.asarray(scores[group.name], np.float64)
    if values.shape != (group.num_units,) or np.isnan(values).any():
        raise ValueError(
            f"scores[{group.name!r}] must be an array of shape ({group.num_units},) without NaN; "
            f"got shape {values.shape}"
        )
    return values


def _share_below(values: np.ndarray) -> np.ndarray:
    """The share of its group that is gone once a unit is; `inf` stays what it is."""
    ranks = np.empty(values.size)
    ranks[np.argsort(values, kind="stable")] = np.arange(1, values.size + 1) / values.size
    return np.where(np.isinf(values), values, ranks)


def _order_of_removal(ranks: Mapping[str, np.ndarray]) -> list[Unit]:
    """All units that may go, the first to go first: neither the best of a group nor a fixed one."""
    candidates = [
        (rank, name, number)
        for name, values in ranks.items()
        for number, rank in enumerate(values)
        if number != np.argmax(values) and rank < np.inf
    ]
    return [(name, number) for _, name, number in sorted(candidates, key=lambda unit: unit[0])]


def _without(units: Units, removed: list[Unit]) -> dict[str, np.ndarray]:
    kept = units.all_kept
    for name, number in removed:
        kept[name][number] = False
    return kept


def _too_sparse(units: Units, order: list[Unit], sparsity: float) -> str:
    smallest = units.num_parameters(_without(units, order))
    total = units.num_parameters()
    return (
        f"sparsity={sparsity:g} would prune below one unit of a layer: with one unit left in each "
        f"of {', '.join(units.num_units)}, {smallest:,} of {total:,} parameters remain (units "
        f"that the posterior keeps fixed stay, too). The largest possible sparsity is "
        f"{1 - smallest / total:.4f}"
    )
