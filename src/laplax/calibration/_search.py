"""A search over hyperparameters, from the objective to the predictive that it chose."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax.numpy as jnp

from .._engine.samples import whole_batch
from .._engine.shards import everywhere
from .._enums import CalibrationMethod, CalibrationObjective, as_member
from .._registry import Registry
from .._tree import PyTree
from ..evidence import evidence_sums
from ..pushforward import PredictiveFamily
from ._chosen import Calibrated
from ._methods import GradientDescent, GridSearch, Method
from ._noise import NoisyObjective, warn_if_contradicted
from ._objectives import (
    EvidenceObjective,
    Objective,
    PredictiveObjective,
    Target,
    left_out_objective,
    predictive_objective,
)
from ._points import Searched, natural_scale
from ._temperature import UntemperedObjective

METHODS = Registry[Method](
    "calibration_method",
    Method,
    {
        CalibrationMethod.GRID_SEARCH: GridSearch,
        CalibrationMethod.GRADIENT_DESCENT: GradientDescent,
    },
)
EVIDENCE = CalibrationObjective.MARGINAL_LOG_LIKELIHOOD


def register_calibration_method(name: str, method: type[Method]) -> None:
    """Give a search a name for `calibration(..., calibration_method=name)`.

    A convenience: `calibration` takes the object itself as well.
    """
    METHODS.register(name, method)


def calibrate(
    predictive: PredictiveFamily,
    data: Any,
    objective: Target,
    method: str | Method,
    prior_arguments: Mapping[str, PyTree] | None,
    progress: bool | None,
) -> tuple[Calibrated, PredictiveFamily]:
    """The best prior arguments, and the predictive with the record of the search."""
    search = method if isinstance(method, Method) else METHODS.make(method)
    fixed = dict(prior_arguments or {})
    predictive.posterior_fn.parse({"prior_prec": 1.0, **fixed})  # refused before work starts
    target = _resolve_objective(objective, search, fixed)
    has_noise = predictive.posterior_fn.likelihood.has_noise
    chooses_noise = has_noise and "sigma_squared" not in fixed
    noise_by_grid = chooses_noise and isinstance(search, GridSearch)
    if noise_by_grid and target is CalibrationObjective.CHI_SQUARED:
        # The noise brings it to one at every prior precision; among those the NLL tells.
        target = CalibrationObjective.NLL
    judged = _make_objective(predictive, data, target, fixed.get("prior_mean"), progress)
    # The form that was searched is the form that predicts: where a weak prior is chosen, a Cholesky
    # factorisation in single precision could fail although the eigenvalues served.
    searched = getattr(judged, "predictive", predictive)
    start = natural_scale(judged, searched.posterior_fn, fixed)
    dtype = predictive.posterior_fn.space.dtype
    scale = {name: jnp.asarray(value, dtype) for name, value in start.items()}
    to_minimise = Searched(judged, scale)
    if has_noise:
        to_minimise = NoisyObjective(judged, scale, chooses_noise)
    elif _has_temperature(judged):
        to_minimise = UntemperedObjective(judged, scale)
    best, trace = search.search(to_minimise, {**start, **fixed}, progress)
    if has_noise and not noise_by_grid:
        warn_if_contradicted(judged, best)
    chosen = Calibrated(best, predictive.recipe, predictive.key)
    return chosen, dataclasses.replace(searched, trace=trace)


def _has_temperature(objective: Objective) -> TypeGuard[PredictiveObjective]:
    """Whether a temperature scales the covariances that the objective judges."""
    if not isinstance(objective, PredictiveObjective) or objective.projection is None:
        return False
    return not objective.predictive.posterior_fn.structure.own_prior


def _make_objective(
    predictive: PredictiveFamily,
    data: Any,
    target: Target,
    prior_mean: PyTree,
    progress: bool | None,
) -> Objective:
    posterior_fn = predictive.posterior_fn
    if target is EVIDENCE:
        fit = evidence_sums(posterior_fn, predictive.model, data, progress)
        return EvidenceObjective(posterior_fn.spectral(), fit, predictive.model)
    problem = posterior_fn.problem(predictive.model, data, progress)
    batch = everywhere(whole_batch(problem.data))
    if target is CalibrationObjective.LEAVE_ONE_OUT:
        posterior_fn.check_data(problem.data.fingerprint)
        return left_out_objective(predictive, batch, prior_mean)
    return predictive_objective(target, predictive, batch)


def _resolve_objective(objective: Target, method: Method, fixed: Mapping[str, PyTree]) -> Target:
    if isinstance(objective, str):
        objective = as_member(CalibrationObjective, objective, "calibration_objective")
    if objective is EVIDENCE and "output_scale" in fixed:
        raise ValueError(
            "the evidence does not see 'output_scale', which scales predictions alone; choose it "
            "by calibration_objective='nll' on held-out data, or leave it out"
        )
    if objective is EVIDENCE and isinstance(method, GradientDescent):
        _refuse_temperature("temperature" in fixed)
    if objective is EVIDENCE and isinstance(method, GridSearch):
        _refuse_temperature(method.temperatures is not None)
    return objective


def _refuse_temperature(asked: bool) -> None:
    """p(D | theta)^(1 / temperature) is no density of D: it improves without end."""
    if asked:
        raise ValueError(
            "the evidence cannot choose a temperature: a tempered likelihood is no density, and "
            "its evidence grows without end. Leave 'temperature' out of prior_arguments and of "
            "GridSearch(...), choose it by calibration_objective='nll' on held-out data, or keep "
            "it fixed in a grid search, by prior_arguments"
        )
