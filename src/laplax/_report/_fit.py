"""One curvature: fitted, calibrated, and predicting; or the reason why not."""

import dataclasses
import functools
import math
import operator
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import metrics
from .._api import laplace
from .._chain import PosteriorFn
from .._tree import PyTree
from ..calibration import GridSearch, Trace
from ..likelihoods import Bernoulli, DataFit, HeteroscedasticGaussian
from ..posterior import CurvEstimate
from ..pushforward import ProbPredictive
from ._budget import estimated_cost
from ._setting import Fields, Parts, Setting

# What a fit may meet that is not a mistake in the call: memory, an indefinite Hessian, a layer
# that the curvature cannot keep. Each becomes a row that says so.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)
CURVE_POINTS = 41
CURVE_REACH = 2.5  # decades to either side
MAP_BATCH = 128  # inputs of one call of the network itself
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
    prediction: Parts


def fit_curvature(setting: Setting, name: str) -> tuple[Row, Fitted | None]:
    """Fit, calibrate and predict. What does not fit, and warnings, become notes of the row."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            options = setting.curvatures[name]
            cost = estimated_cost(setting.problem, options, sum(setting.counts.values()))
            reason = setting.budget.excess(cost)
            fitted = None if reason else _fit(setting, name)
        except EXPECTED as error:
            fitted = None
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
    if fitted is None:
        return {"name": name, "note": f"does not fit: {reason}"}, None
    notes = dict.fromkeys(str(w.message).split(";")[0] for w in caught)
    return {**fitted.row, "note": "; ".join(notes)}, fitted


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
        "log_evidence": float(evidence),
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


def predict_map(setting: Setting) -> Parts:
    """The network as it is: no variance but the noise that its training residuals show."""
    f = _outputs(setting)
    if isinstance(setting.likelihood, Bernoulli):
        f = jnp.stack([jnp.zeros_like(f), f], axis=-1)
    if setting.recipe.classification:
        return setting.by_part({"log_pred_act": jax.nn.log_softmax(f, axis=-1)})
    if isinstance(setting.likelihood, HeteroscedasticGaussian):
        mean = f[..., 0]
        noise = jnp.exp(f[..., 1])
    else:
        mean = f
        # Of a perfect fit: what the outputs cannot resolve, for a variance of zero has no
        # likelihood.
        resolved = float(jnp.finfo(f.dtype).eps) * float(jnp.max(jnp.abs(f)))
        noise = jnp.full_like(f, setting.residual or resolved**2 or 1.0)
    variance = jnp.zeros_like(mean)
    return setting.by_part({"pred_mean": mean, "pred_var": variance, "total_var": noise})


def _outputs(setting: Setting) -> jax.Array:
    """Outputs of the network for all inputs, a part of them at a time."""
    local = setting.training.local
    run = jax.jit(local.model.batch)
    inputs = setting.everything()
    starts = range(0, sum(setting.counts.values()), MAP_BATCH)
    slices = [operator.itemgetter(slice(start, start + MAP_BATCH)) for start in starts]
    parts = (jax.tree.map(take, inputs) for take in slices)
    return jnp.concatenate([run(part, local.params) for part in parts])


def judge(prediction: Parts) -> dict[str, float]:
    """The default metrics on the test data; how well uncertainty reveals the inputs `ood`."""
    results = default_metrics(prediction["test"])
    if "ood" in prediction:
        inside, outside = (uncertainty(prediction[part]) for part in ("test", "ood"))
        if outside.max() > 0:  # the MAP of a regression has no uncertainty to compare
            results["auroc"] = float(metrics.auroc(inside, outside))
            results["fpr95"] = float(metrics.fpr95(inside, outside))
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
