"""One curvature: fitted, calibrated, and predicting; or the reason why not."""

import dataclasses
import functools
import math
import operator
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import metrics
from .._api import laplace
from .._chain import PosteriorFn
from .._tree import PyTree
from ..calibration import GridSearch, Trace
from ..evaluation import Judged
from ..likelihoods import DataFit
from ..posterior import CurvEstimate
from ..pushforward import ProbPredictive
from ._budget import estimated_cost
from ._scores import Scores
from ._setting import Fields, Parts, Setting

# What a fit may meet that is not a mistake in the call: memory, an indefinite Hessian, a layer
# that the curvature cannot keep. Each becomes a row that says so.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)
CURVE_POINTS = 41
CURVE_REACH = 2.5  # decades to either side
TIMED = 64  # inputs of the batch whose time is taken
REPEATS = 3  # of which the shortest counts: other work on the machine only adds
TEST_DATA = "the test data"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A curvature that fits: its numbers, its predictions, and what figures need."""

    name: str
    row: Row
    estimate: CurvEstimate
    posterior_fn: PosteriorFn
    prior_arguments: dict[str, float]
    curve: Trace
    variances: PyTree
    prob_predictive: ProbPredictive
    prediction: Parts


def excess(setting: Setting, name: str) -> str | None:
    """Why a curvature is not even tried, or None: known before any work starts."""
    try:
        options = setting.curvatures[name]
        cost = estimated_cost(setting.problem, options, sum(setting.counts.values()))
    except EXPECTED:  # the fit will say so itself
        return None
    return setting.budget.excess(cost)


def fit_curvature(setting: Setting, name: str) -> tuple[Row, Fitted | None]:
    """Fit, calibrate and predict. What does not fit, and warnings, become notes of the row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fitted = _fit(setting, name)
        except EXPECTED as error:
            fitted = None
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
    if fitted is None:
        return does_not_fit(name, reason), None
    return {**fitted.row, "note": joined_warnings(caught)}, fitted


def joined_warnings(caught: Sequence[warnings.WarningMessage]) -> str:
    """What was warned of, as one note."""
    return "; ".join(dict.fromkeys(str(w.message).split(";")[0] for w in caught))


def does_not_fit(name: str, reason: str) -> Row:
    """The row of a curvature that is left out."""
    return {"name": name, "note": f"does not fit: {reason}"}


def _fit(setting: Setting, name: str) -> Fitted:
    start = time.perf_counter()
    posterior_fn, estimate = laplace(**setting.problem, **setting.curvatures[name])
    jax.block_until_ready(estimate.structure)
    fit_end = time.perf_counter()
    # Eigenvalues serve where a Cholesky factorisation in single precision could fail.
    posterior_fn = posterior_fn.spectral()
    prior_arguments, curve = _search(setting, posterior_fn)
    search_end = time.perf_counter()
    # A function of this call alone: what JAX remembers of it does not hold the user's model.
    answers = jax.jit(functools.partial(_answers))(posterior_fn, prior_arguments, setting.fit)
    evidence, effective, variances, prob_predictive = answers
    if not math.isfinite(float(evidence)):
        raise ValueError(
            f"the evidence is not finite at the chosen hyperparameters {prior_arguments}"
        )
    row = {
        "name": name,
        "parameters": posterior_fn.space.size,
        "fit_seconds": fit_end - start,
        "calibrate_seconds": search_end - fit_end,
        "structure_bytes": sum(x.nbytes for x in jax.tree.leaves(estimate.structure)),
        # A tempered likelihood is no density of the data: its evidence compares with nothing.
        **({} if "temperature" in prior_arguments else {"log_evidence": float(evidence)}),
        "effective_parameters": float(effective),
        **prior_arguments,
    }
    return Fitted(
        name=name,
        row=row,
        estimate=estimate,
        posterior_fn=posterior_fn,
        prior_arguments=prior_arguments,
        curve=curve,
        variances=variances,
        prob_predictive=prob_predictive,
        prediction=setting.by_part(prob_predictive(setting.everything(), setting.fields)),
    )


def _search(setting: Setting, posterior_fn: PosteriorFn) -> tuple[dict[str, float], Trace]:
    """The chosen hyperparameters, and the objective along the prior precision through them."""
    # A grid has one axis; where the noise is to be found as well, both descend together.
    usual = "gradient_descent" if setting.likelihood.has_noise else "grid_search"
    data = setting.problem["data"]
    if not setting.by_evidence:
        data = (setting.inputs["calibration"], setting.targets["calibration"])
    search = functools.partial(
        posterior_fn.calibrate,
        data,
        calibration_objective=setting.objective,
        progress=setting.problem["progress"],
    )
    best, set_prob_predictive = search(calibration_method=setting.method or usual)
    prior_arguments = {key: float(x) for key, x in best.items()}
    if set(set_prob_predictive.trace.points) == {"prior_prec"}:
        return prior_arguments, set_prob_predictive.trace
    centre = math.log10(prior_arguments["prior_prec"])
    around = GridSearch(centre - CURVE_REACH, centre + CURVE_REACH, CURVE_POINTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this grid is for the eye, and chooses nothing
        _, along = search(calibration_method=around, prior_arguments=prior_arguments)
    return prior_arguments, along.trace


def _answers(
    posterior_fn: PosteriorFn, prior_arguments: Mapping[str, float], fit: DataFit
) -> tuple[jax.Array, jax.Array, PyTree, ProbPredictive]:
    """Evidence, effective parameters, variances and the predictive: one program for all.

    Predictions are left out: convolutions in one program with the loop over inputs are slow on a
    CPU.
    """
    return (
        posterior_fn.log_marginal_likelihood(prior_arguments, fit),
        posterior_fn.effective_parameters(prior_arguments),
        posterior_fn(prior_arguments).variance(),
        posterior_fn.predictive()(prior_arguments),
    )


def seconds_per_prediction(setting: Setting, predictive: Judged) -> float:
    """For one input of a batch, once everything is compiled."""
    first = operator.itemgetter(slice(0, TIMED))
    inputs = jax.tree.map(first, setting.inputs["test"])
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(dict(predictive(inputs, setting.fields)))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / jax.tree.leaves(inputs)[0].shape[0]


def scores_of(setting: Setting, prediction: Parts) -> Scores:
    """One number per test point."""
    usual = (
        metrics.CLASSIFICATION_METRICS
        if setting.recipe.classification
        else (metrics.REGRESSION_METRICS)
    )
    each = usual["nll"].each
    assert each is not None
    names = {"test": TEST_DATA, **{part: part for part in setting.shifted}}
    observed = {name: prediction[part] for part, name in names.items()}
    fields = usual["nll"].fields
    return Scores(
        nll={
            name: _mean_per_input(each(*(values[field] for field in fields)))
            for name, values in observed.items()
        },
        inside=uncertainty(prediction["test"]),
        outside={part: uncertainty(prediction[part]) for part in setting.foreign},
    )


def judge(setting: Setting, prediction: Parts) -> dict[str, float]:
    """The default metrics on the test data; how well uncertainty reveals foreign inputs."""
    results = default_metrics(prediction["test"])
    inside = uncertainty(prediction["test"])
    for part in setting.foreign:
        outside = uncertainty(prediction[part])
        more = "" if len(setting.foreign) == 1 else f" {part}"
        if outside.max() > 0:  # the MAP of a regression has no uncertainty to compare
            results[f"auroc{more}"] = float(metrics.auroc(inside, outside))
            results[f"fpr95{more}"] = float(metrics.fpr95(inside, outside))
    return results


def default_metrics(observed: Fields) -> dict[str, float]:
    """The default metrics of predictions and targets."""
    classes = "pred_act" in observed
    usual = metrics.CLASSIFICATION_METRICS if classes else metrics.REGRESSION_METRICS
    return {name: float(_value(metric, observed)) for name, metric in usual.items()}


@functools.partial(jax.jit, static_argnums=0)
def _value(metric: metrics.Metric, fields: Fields) -> jax.Array:
    return metric.stream([fields])


def uncertainty(fields: Fields) -> np.ndarray:
    """One score per input: entropy of the classes, or the epistemic deviation of the output."""
    if "log_pred_act" in fields:
        return _mean_per_input(metrics.entropy_per_example(np.exp(fields["log_pred_act"])))
    return np.sqrt(_mean_per_input(fields["pred_var"]))


def _mean_per_input(scores: jax.Array) -> np.ndarray:
    return np.asarray(scores).reshape(len(scores), -1).mean(axis=-1)
