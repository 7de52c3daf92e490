"""`calibration(...)`: hyperparameters by evidence or by a metric on held-out data."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._arguments import in_our_words
from .._data import whole_batch
from .._enums import CalibrationMethod, CalibrationObjective, as_member, near_miss
from .._model import check_signature
from .._problem import make_problem
from .._tree import PyTree
from ..evidence import data_fit_of
from ..likelihoods import Likelihood
from ..posterior import CurvEstimate, PosteriorFn, check_posterior_fn
from ..pushforward import SetProbPredictive, predictive
from ._methods import GradientDescent as GradientDescent
from ._methods import GridSearch as GridSearch
from ._methods import Method as Method
from ._methods import Trace as Trace
from ._noise import CalibrationWarning as CalibrationWarning
from ._noise import natural_scale, noisy_objective, warn_if_contradicted
from ._objectives import EvidenceObjective, predictive_objective

METHODS: dict[str, type[Method]] = {
    CalibrationMethod.GRID_SEARCH: GridSearch,
    CalibrationMethod.GRADIENT_DESCENT: GradientDescent,
}
EVIDENCE = CalibrationObjective.MARGINAL_LOG_LIKELIHOOD


def register_calibration_method(name: str, method: type[Method]) -> None:
    """Give a search a name for `calibration(..., calibration_method=name)`.

    A convenience: `calibration` takes the object itself as well.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"method must be a subclass of Method; got {method!r}")
    if name in METHODS:
        raise ValueError(f"calibration_method {name!r} exists already; choose another name")
    METHODS[name] = method


@in_our_words
def calibration(
    posterior_fn: PosteriorFn,
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    loss_fn: str | Likelihood | Callable | None = None,
    curv_estimate: CurvEstimate | None = None,
    calibration_objective: Any = EVIDENCE,
    calibration_method: str | Method = CalibrationMethod.GRID_SEARCH,
    pushforward_type: str = "linear",
    predictive_type: str | None = None,
    num_samples: int = 100,
    key: jax.Array | None = None,
    prior_arguments: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> tuple[dict[str, Any], SetProbPredictive]:
    """Choose the prior precision and, for `loss_fn="mse"`, the noise variance.

    The answer does not depend on the units of the target: searches start at the residuals and at
    the scale of weights and outputs. A `CalibrationWarning` says that an answer lies at the edge of
    a grid, is still moving, or contradicts the residuals.

    Args:
        posterior_fn: From `laplace`.
        model_fn: The same model.
        params: The weights that `posterior_fn` was fitted at.
        data: The *training* data for `"marginal_log_likelihood"`, *held-out* data otherwise.
        loss_fn: If given, it must be the likelihood that `posterior_fn` was fitted with.
        curv_estimate: If given, it must be the one that came with `posterior_fn`.
        calibration_objective: `"marginal_log_likelihood"` (maximised), `"nll"`, `"ece"`,
            `"chi_squared"` (brought to one), a metric, or a function of prediction fields
            (minimised). In a grid that chooses the noise, the noise brings `"chi_squared"` to one
            at every point, and the NLL chooses among them.
        calibration_method: `"grid_search"` over a scalar prior precision, with the best noise of
            each; `"gradient_descent"` for every hyperparameter at once; or a `Method`.
        pushforward_type: See `predictive`.
        predictive_type: See `predictive`.
        num_samples: See `predictive`.
        key: See `predictive`.
        prior_arguments: What is known: a grid keeps all of it but `prior_prec`, gradient descent
            starts there. `prior_prec` may then be a pytree, one number per layer. What is left out
            starts at its natural scale; for a likelihood without noise, at one.
        progress: Show a bar; by default when a terminal is attached.

    Returns:
        The chosen prior arguments, and `set_prob_predictive`, whose `.trace` holds every point
        of the search and its value.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> x = jnp.linspace(0.0, 1.0, 20)
        >>> y = 2 * x + 0.1 * jnp.cos(40 * x)
        >>> model_fn = lambda input, params: params["a"] * input
        >>> params = {"a": jnp.asarray(2.0)}
        >>> posterior_fn, _ = laplace(model_fn, params, (x, y), loss_fn="mse")
        >>> prior_arguments, set_prob_predictive = calibration(
        ...     posterior_fn, model_fn, params, (x, y)
        ... )
        >>> print(f"{prior_arguments['prior_prec']:.2f} {prior_arguments['sigma_squared']:.4f}")
        0.22 0.0054
    """
    check_posterior_fn(posterior_fn)
    check_signature(model_fn)
    posterior_fn.check_params(params)
    posterior_fn.check_loss(loss_fn)
    if curv_estimate is not None and curv_estimate.structure is not posterior_fn.structure:
        raise ValueError("curv_estimate is not the one that came with posterior_fn")
    method = _resolve_method(calibration_method)
    if isinstance(calibration_objective, str):
        calibration_objective = as_member(
            CalibrationObjective, calibration_objective, "calibration_objective"
        )
    given = dict(prior_arguments or {})
    posterior_fn.parse({"prior_prec": 1.0, **given})  # bad input is refused before work starts
    if calibration_objective is EVIDENCE and isinstance(method, GradientDescent):
        _refuse_temperature(given)
    noisy = posterior_fn.likelihood.has_noise
    profiled = noisy and isinstance(method, GridSearch) and "sigma_squared" not in given
    if profiled and calibration_objective is CalibrationObjective.CHI_SQUARED:
        # The noise brings it to one at every prior precision; among those the NLL tells.
        calibration_objective = CalibrationObjective.NLL
    made = predictive(
        posterior_fn,
        model_fn,
        pushforward_type=pushforward_type,
        predictive_type=predictive_type,
        num_samples=num_samples,
        key=key,
    )
    objective: Any
    if calibration_objective is EVIDENCE:
        fit = data_fit_of(posterior_fn, model_fn, params, data, progress)
        objective = EvidenceObjective(posterior_fn.spectral(), fit, made.model)
    else:
        problem = make_problem(
            model_fn,
            params,
            data,
            posterior_fn.likelihood,
            vmap_over_data=posterior_fn.vmap_over_data,
            progress=progress,
        )
        held_out = whole_batch(problem.data)
        objective = predictive_objective(calibration_objective, made, held_out)
    # The form that was searched is the form that predicts: where a weak prior is chosen, a Cholesky
    # factorisation in single precision could fail although the eigenvalues served.
    searched = getattr(objective, "predictive", made)
    start = {"prior_prec": 1.0}
    if noisy:
        start = natural_scale(objective, searched.posterior_fn, given)
        objective = noisy_objective(
            objective, start, "sigma_squared" not in given, posterior_fn.space.dtype
        )
    chosen, trace = method.search(objective, {**start, **given}, progress)
    if noisy and not profiled:
        warn_if_contradicted(objective, chosen)
    return chosen, dataclasses.replace(searched, trace=trace)


def _resolve_method(method: Any) -> Method:
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"calibration_method is a class; hand over {method.__name__}()")
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    raise ValueError(f"unknown calibration_method {method!r}{near_miss(method, METHODS)}")


def _refuse_temperature(initial: Mapping[str, Any]) -> None:
    """p(D | theta)^(1 / temperature) is no density of D: it improves without end."""
    if "temperature" in initial:
        raise ValueError(
            "the evidence cannot choose a temperature: a tempered likelihood is no density, and "
            "its evidence grows without end. Leave 'temperature' out of prior_arguments, choose it "
            "by calibration_objective='nll' on held-out data, or keep it fixed in a grid search"
        )
