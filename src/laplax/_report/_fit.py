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
from .._chain import PosteriorFn, SetProbPredictive
from .._pipeline import calibration as calibrate
from .._pipeline import effective_parameters, log_marginal_likelihood, predictive
from .._tree import PyTree
from ..calibration import GridSearch, Trace
from ..likelihoods import Bernoulli, Categorical, DataFit, HeteroscedasticGaussian
from ..posterior import CurvEstimate
from ..pushforward import ProbPredictive
from ._budget import estimated_cost
from ._setting import Arrays, Setting

# What a fit may meet that is not a mistake in the call: memory, an indefinite Hessian, a layer
# that the curvature cannot keep. Each becomes a row that says so.
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError)
CURVE_POINTS = 41
CURVE_REACH = 2.5  # decades to either side
MAP_BATCH = 128  # inputs of one call of the network itself


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A curvature that fits: its numbers, its predictions, and what figures need."""

    name: str
    row: dict[str, Any]
    estimate: CurvEstimate
    posterior_fn: PosteriorFn
    prior_arguments: dict[str, float]
    curve: Trace
    variances: PyTree
    prediction: Arrays


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
            cost = estimated_cost(setting.problem, setting.curvatures[name], setting.num_inputs)
            excess = setting.budget.excess(cost)
            if excess is not None:
                return Refused(name, excess)
            fitted = _fit(setting, name)
        except EXPECTED as error:
            return Refused(name, f"{type(error).__name__}: {error}".split("\n")[0])
    notes = list(dict.fromkeys(str(w.message).split(";")[0] for w in caught))
    return dataclasses.replace(fitted, row={**fitted.row, "note": "; ".join(notes)})


def _fit(setting: Setting, name: str) -> Fitted:
    problem = setting.problem
    start = time.perf_counter()
    posterior_fn, estimate = laplace(
        setting.model_fn,
        problem.params,
        problem.data,
        loss_fn=problem.likelihood,
        vmap_over_data=problem.model.vmap_over_data,
        progress=setting.progress,
        **setting.curvatures[name],
    )
    jax.block_until_ready(estimate.structure)
    fit_end = time.perf_counter()
    # Eigenvalues serve where a Cholesky factorisation in single precision could fail.
    posterior_fn = posterior_fn.spectral()
    prior_arguments, curve = _search(setting, posterior_fn)
    search_end = time.perf_counter()
    set_prob_predictive = predictive(posterior_fn, setting.model_fn)
    # A function of this call alone: what JAX remembers of it does not hold the user's model.
    compiled = jax.jit(functools.partial(_answers))
    answers = compiled(set_prob_predictive, prior_arguments, setting.fit)
    evidence, effective, variances, prob_predictive = answers
    if not math.isfinite(float(evidence)):
        raise ValueError(
            f"the evidence is not finite at the chosen hyperparameters {prior_arguments}"
        )
    prediction = prob_predictive(setting.everything(), setting.fields)
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
        prediction={field: np.asarray(x) for field, x in prediction.items()},
    )


def _search(setting: Setting, posterior_fn: PosteriorFn) -> tuple[dict[str, float], Trace]:
    """The chosen hyperparameters, and the objective along the prior precision through them."""
    problem = setting.problem
    # A grid has one axis; where the noise is to be found as well, both descend together.
    usual = "gradient_descent" if problem.likelihood.has_noise else "grid_search"
    data = problem.data if setting.by_evidence else setting.calibration
    assert data is not None
    search = functools.partial(
        calibrate,
        posterior_fn,
        setting.model_fn,
        problem.params,
        data,
        calibration_objective=setting.objective,
        progress=setting.progress,
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
    set_prob_predictive: SetProbPredictive, prior_arguments: Mapping[str, float], fit: DataFit
) -> tuple[jax.Array, jax.Array, PyTree, ProbPredictive]:
    """Evidence, effective parameters, variances and the predictive.

    They are one program, without predictions: convolutions in one program with the loop over
    inputs are slow on a CPU.
    """
    posterior_fn = set_prob_predictive.posterior_fn
    return (
        log_marginal_likelihood(posterior_fn, prior_arguments, data=fit),
        effective_parameters(posterior_fn, prior_arguments),
        posterior_fn(prior_arguments).variance(),
        set_prob_predictive(prior_arguments),
    )


def predict_map(setting: Setting) -> Arrays:
    """The network as it is: no variance but the noise that its training residuals show."""
    f = _outputs(setting)
    likelihood = setting.problem.likelihood
    if isinstance(likelihood, Bernoulli):
        f = jnp.stack([jnp.zeros_like(f), f], axis=-1)
    if isinstance(likelihood, Bernoulli | Categorical):
        return {"log_pred_act": np.asarray(jax.nn.log_softmax(f, axis=-1))}
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean = f[..., 0]
        noise = jnp.exp(f[..., 1])
    else:
        mean = f
        # Of a perfect fit: what the outputs cannot resolve, for a variance of zero has no
        # likelihood.
        resolved = float(jnp.finfo(f.dtype).eps) * float(jnp.max(jnp.abs(f)))
        noise = jnp.full_like(f, setting.residual or resolved**2 or 1.0)
    fields = {"pred_mean": mean, "pred_var": jnp.zeros_like(mean), "total_var": noise}
    return {name: np.asarray(x) for name, x in fields.items()}


def _outputs(setting: Setting) -> jax.Array:
    """Outputs of the network for all inputs, a part of them at a time."""
    problem = setting.problem
    run = jax.jit(problem.model.batch)
    inputs = setting.everything()
    slices = [slice(i, i + MAP_BATCH) for i in range(0, setting.num_inputs, MAP_BATCH)]
    parts = [jax.tree.map(operator.itemgetter(part), inputs) for part in slices]
    return jnp.concatenate([run(part, problem.params) for part in parts])


def judge(setting: Setting, prediction: Arrays) -> dict[str, float]:
    """The default metrics on the test data; how well uncertainty reveals the inputs `ood`."""
    results = metrics_on(setting, prediction, "test")
    if "ood" in setting.inputs:
        inside, outside = (uncertainty(setting.part(prediction, x)) for x in ("test", "ood"))
        if outside.max() > 0:  # the MAP of a regression has no uncertainty to compare
            results["auroc"] = float(metrics.auroc(inside, outside))
            results["fpr95"] = float(metrics.fpr95(inside, outside))
    return results


def metrics_on(setting: Setting, prediction: Arrays, part: str) -> dict[str, float]:
    """The default metrics on the test or the calibration data."""
    fields: dict[str, Any] = {**setting.part(prediction, part), "target": setting.target(part)}
    usual = metrics.REGRESSION_METRICS
    if setting.classification:
        fields["pred_act"] = np.exp(fields["log_pred_act"])
        usual = metrics.CLASSIFICATION_METRICS
    return {name: float(_value(metric, fields)) for name, metric in usual.items()}


@functools.partial(jax.jit, static_argnums=0)
def _value(metric: metrics.Metric, fields: Mapping[str, jax.Array]) -> jax.Array:
    return metric.stream([fields])


def uncertainty(part: Arrays) -> np.ndarray:
    """One score per input: entropy of the classes, or the epistemic deviation of the output."""
    if "log_pred_act" in part:
        return _mean_per_input(metrics.entropy_per_example(np.exp(part["log_pred_act"])))
    return np.sqrt(_mean_per_input(part["pred_var"]))


def _mean_per_input(scores: Any) -> np.ndarray:
    return np.asarray(scores).reshape(len(scores), -1).mean(axis=-1)
