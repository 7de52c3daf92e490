"""From a posterior to a smaller or sparser network, in one call."""

from typing import NamedTuple

import numpy as np

from .._tree import PyTree
from ..posterior import Posterior
from ._condition import conditional_mean
from ._masks import masked, parameter_mask, unit_mask
from ._scores import parameter_scores, unit_scores
from ._select import kept_units
from ._shrink import shrink
from ._units import Units


class Pruned(NamedTuple):
    """A pruned network.

    Attributes:
        params: The parameters: smaller arrays if units were pruned, arrays of the same shapes with
            zeros if single parameters were.
        mask: What stays of the parameters before, a pytree of boolean arrays.
        units: The units of the smaller network; None if single parameters were pruned.
        kept: Which units stayed, by the name of their group; None if single parameters were pruned.
    """

    params: PyTree
    mask: PyTree
    units: Units | None
    kept: dict[str, np.ndarray] | None


def prune(
    posterior: Posterior,
    sparsity: float,
    units: Units | None = None,
    *,
    outgoing: bool = False,
    per_layer: bool = False,
    compensate: bool = False,
) -> Pruned:
    """Remove what the posterior says costs least: whole units, or single parameters.

    It is one step of any loop: train, fit a posterior, prune, train on. Let the sparsity grow from
    step to step; it counts from the network that it is given. Units are ranked by their scores per
    parameter that goes with them (`kept_units`).

    Args:
        posterior: `posterior_fn(prior_arguments)`, of any structure; its mean are the parameters.
        sparsity: The share of the parameters that go, at least 0 and below 1.
        units: The units, as `find_units` returns them: arrays get smaller. By default single
            parameters are set to zero.
        outgoing: Whether the weights that read a unit count in its score (`unit_scores`).
        per_layer: Whether every layer loses the same share. By default all are ranked together.
        compensate: Whether the other parameters move to make up for those that go
            (`conditional_mean`), which needs a posterior that knows correlations.
    """
    if outgoing and units is None:
        raise ValueError("outgoing=True is for units: prune(posterior, sparsity, units)")
    scores = parameter_scores(posterior)
    if units is None:
        mask = parameter_mask(scores, sparsity, per_layer=per_layer)
        return Pruned(_without(posterior, mask, compensate), mask, None, None)
    by_unit = unit_scores(scores, units, outgoing=outgoing)
    kept = kept_units(by_unit, units, sparsity, per_layer=per_layer)
    mask = unit_mask(units, kept)
    smaller = shrink(_without(posterior, mask, compensate), units, kept)
    return Pruned(smaller, mask, units.after(kept), kept)


def _without(posterior: Posterior, mask: PyTree, compensate: bool) -> PyTree:
    return conditional_mean(posterior, mask) if compensate else masked(posterior.mean, mask)
