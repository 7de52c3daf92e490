"""One curvature: fitted, calibrated, and predicting; or the reason why not."""

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._api import laplace
from .._chain import PosteriorFn, SetProbPredictive
from .._engine.memo import compiled
from .._model import Model
from .._pipeline import calibration as calibrate
from .._pipeline import effective_parameters, log_marginal_likelihood, predictive
from .._tree import PyTree
from ..calibration import GridSearch, Trace
from ..evaluation import needed_fields, observe, resolve_metrics
from ..likelihoods import DataFit
from ..metrics import auroc, fpr95
from ..posterior import CurvEstimate
from ..pushforward import (
    Moments,
    ProbPredictive,
    Recipe,
    make_fields,
    make_recipe,
    predict,
)
from ._budget import Budget, estimated_cost
from ._setting import Setting

# What a fit may meet that is not a mistake in the call: memory, an indefinite Hessian, a layer
# that the curvature cannot keep. Each becomes a row that says so.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)
CURVE_POINTS, CURVE_REACH = 41, 2.5  # decades to either side


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A curvature that fits: its numbers, its predictions, and what figures need."""

    name: str
    row: dict[str, Any]
    estimate: CurvEstimate
    posterior_fn: PosteriorFn
    prior_arguments: dict[str, Any]
    curve: Trace
    variances: PyTree
    prediction: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Refused:
    """A curvature that does not fit, and why."""

    name: str
    reason: str


def fit_curvature(setting: Setting, name: str) -> Fitted | Refused:
    """Fit, calibrate and predict. Warnings become notes of the row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            excess = _excess(setting, name)
            if excess is not None:
                return Refused(name, excess)
            fitted = _fit(setting, name)
        except EXPECTED as error:
            return Refused(name, f"{type(error).__name__}: {error}".split("\n")[0])
    notes = list(dict.fromkeys(str(w.message).split(";")[0] for w in caught))
    return dataclasses.replace(fitted, row={**fitted.row, "note": "; ".join(notes)})


def _excess(setting: Setting, name: str) -> str | None:
    """Why a curvature is not tried at all, or None."""
    cost = estimated_cost(setting.problem, setting.curvatures[name], setting.num_inputs)
    return Budget(setting.max_bytes, setting.max_seconds).excess(cost)


def _fit(setting: Setting, name: str) -> Fitted:
    problem = setting.problem
    start = time.perf_counter()
    posterior_fn, estimate = laplace(
        setting.model_fn,
        problem.params,
        setting.train,
        loss_fn=problem.likelihood,
        vmap_over_data=problem.model.vmap_over_data,
        progress=setting.progress,
        **setting.curvatures[name],
    )
    jax.block_until_ready(estimate.structure)
    fitted = time.perf_counter()
    # Eigenvalues serve where a Cholesky factorisation in single precision could fail.
    spectral = posterior_fn.spectral()
    chosen, curve = _search(setting, spectral)
    calibrated = time.perf_counter()
    made = predictive(spectral, setting.model_fn)
    evidence, effective, variances, judged = _answers(made, chosen, setting.fit)
    if not math.isfinite(float(evidence)):
        raise ValueError(f"the evidence is not finite at the chosen hyperparameters {chosen}")
    prediction = predict(judged, setting.everything(), _fields(setting))
    row = {
        "name": name,
        "parameters": posterior_fn.space.size,
        "fit_seconds": fitted - start,
        "calibrate_seconds": calibrated - fitted,
        "structure_bytes": sum(x.nbytes for x in jax.tree.leaves(estimate.structure)),
        "log_evidence": float(evidence),
        "effective_parameters": float(effective),
        **chosen,
    }
    arrays = {name: np.asarray(x) for name, x in prediction.items()}
    return Fitted(name, row, estimate, spectral, chosen, curve, variances, arrays)


def _search(setting: Setting, posterior_fn: PosteriorFn) -> tuple[dict[str, float], Trace]:
    """The chosen hyperparameters, and the objective along the prior precision through them."""
    problem, noise = setting.problem, setting.problem.likelihood.has_noise
    # A grid has one axis; where the noise is to be found as well, both descend together.
    method = setting.method or ("gradient_descent" if noise else "grid_search")
    search = functools.partial(
        calibrate,
        posterior_fn,
        setting.model_fn,
        problem.params,
        setting.train if setting.by_evidence else setting.calibration,
        calibration_objective=setting.objective,
        progress=setting.progress,
    )
    found, set_prob_predictive = search(calibration_method=method)
    chosen = {key: float(x) for key, x in found.items()}
    trace: Any = set_prob_predictive.trace
    if set(trace.points) == {"prior_prec"}:
        return chosen, trace
    centre = math.log10(chosen["prior_prec"])
    around = GridSearch(centre - CURVE_REACH, centre + CURVE_REACH, CURVE_POINTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this grid is for the eye, and chooses nothing
        shown: Any = search(calibration_method=around, prior_arguments=chosen)[1].trace
    return chosen, shown


@compiled
def _answers(
    made: SetProbPredictive, prior_arguments: Mapping[str, Any], fit: DataFit
) -> tuple[jax.Array, jax.Array, PyTree, ProbPredictive]:
    """Evidence, effective parameters, variances and the predictive, compiled as one.

    Predictions are not: convolutions in one program with the loop over inputs are slow on a CPU.
    """
    posterior_fn = made.posterior_fn
    evidence = log_marginal_likelihood(posterior_fn, prior_arguments, data=fit)
    effective = effective_parameters(posterior_fn, prior_arguments)
    variances = posterior_fn(prior_arguments).variance()
    return evidence, effective, variances, made(prior_arguments)


def _recipe(setting: Setting, predictive_type: str | None = None) -> Recipe:
    return make_recipe(setting.problem.likelihood, "linear", predictive_type, 100)


def _fields(setting: Setting) -> tuple[str, ...]:
    recipe = _recipe(setting)
    names = set(needed_fields(resolve_metrics(None, recipe).values(), recipe))
    return tuple(sorted(names | ({"pred_var"} if recipe.regression else set())))


def predict_map(setting: Setting) -> dict[str, np.ndarray]:
    """The network as it is: no variance but the noise that its training residuals show."""
    problem = setting.problem
    recipe = _recipe(setting, "map" if setting.classification else None)
    f = _outputs(problem.model, problem.params, setting.everything())
    # Of a perfect fit: what the outputs cannot resolve, for a variance of zero has no likelihood.
    resolved = float(jnp.finfo(f.dtype).eps) * float(jnp.max(jnp.abs(f)))
    noise = jnp.asarray(setting.residual or resolved**2 or 1.0, f.dtype)
    moments = Moments(f, f, jnp.zeros_like(f), None, None)
    made = make_fields(recipe, moments, noise, jax.random.key(0), _fields(setting))
    return {name: np.asarray(x) for name, x in made.items()}


@functools.partial(compiled, static_argnums=(0,))
def _outputs(model: Model, params: PyTree, input: PyTree) -> jax.Array:
    return model.batch(input, params)


def judge(setting: Setting, prediction: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The default metrics on the test data; how well foreign inputs are told apart, if any."""
    part = setting.part(prediction, "test")
    found = _metrics(_recipe(setting), None, part, setting.test.target)
    # A compiled call returns names in alphabetical order; the tables keep that of the metrics.
    results = {name: found[name] for name in resolve_metrics(None, _recipe(setting))}
    if "ood" in setting.inputs:
        known, foreign = uncertainty(part), uncertainty(setting.part(prediction, "ood"))
        if foreign.max() > 0:  # the MAP of a regression has no uncertainty to compare
            results |= _told_apart(known, foreign)
    return {name: float(value) for name, value in results.items()}


@jax.jit
def _told_apart(known: jax.Array, foreign: jax.Array) -> dict[str, jax.Array]:
    return {"auroc": auroc(known, foreign), "fpr95": fpr95(known, foreign)}


def calibration_nll(setting: Setting, prediction: Mapping[str, np.ndarray]) -> float:
    """The NLL on the calibration data: a choice by it touches no test data."""
    assert setting.calibration is not None
    part, target = setting.part(prediction, "calibration"), setting.calibration.target
    return float(_metrics(_recipe(setting), ("nll",), part, target)["nll"])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _metrics(
    recipe: Recipe, names: tuple[str, ...] | None, prediction: Any, target: jax.Array
) -> dict[str, jax.Array]:
    observed = observe(recipe, prediction, target)
    metrics = resolve_metrics(names, recipe)
    return {name: metric.finalise(metric.batch(observed)) for name, metric in metrics.items()}


def uncertainty(part: Mapping[str, np.ndarray]) -> np.ndarray:
    """One score per input: entropy of the classes, or the epistemic deviation of the output."""
    if "log_pred_act" in part:
        logs = part["log_pred_act"]
        terms = np.where(np.exp(logs) > 0, np.exp(logs) * logs, 0)  # 0 log 0 is 0
        entropy = -terms.sum(axis=-1)
        return entropy.reshape(len(entropy), -1).mean(axis=-1)
    variance = part["pred_var"]
    return np.sqrt(variance.reshape(len(variance), -1).mean(axis=-1))
