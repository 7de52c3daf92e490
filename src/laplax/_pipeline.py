"""The functions of the paper: checked calls of the chain, with the model passed again."""

from collections.abc import Callable, Mapping

import jax

from ._arguments import in_our_words
from ._chain import GRID_SEARCH, PosteriorFn, SetProbPredictive, check_posterior_fn
from ._data import DataLike
from ._engine.chunks import MEMORY_BUDGET
from ._enums import PUSHFORWARD
from ._tree import PyTree
from .calibration import EVIDENCE, Method
from .evaluation import MetricLike, Metrics, Results
from .evidence import evidence_sums
from .likelihoods import DataFit, Likelihood
from .posterior import CurvEstimate
from .pushforward import ProbPredictive

ModelFn = Callable[..., jax.Array]


@in_our_words
def predictive(
    posterior_fn: PosteriorFn,
    model_fn: ModelFn,
    *,
    pushforward_type: str = PUSHFORWARD,
    predictive_type: str | None = None,
    num_samples: int | None = None,
    key: jax.Array | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> SetProbPredictive:
    """Push a posterior through the network.

    Args:
        posterior_fn: From `laplace`.
        model_fn: The model of the fit. A function with other outputs is refused.
        pushforward_type: `"linear"` (the linearised network, closed form) or `"nonlinear"`
            (sampled networks).
        predictive_type: How logits become class probabilities: `"mc_bridge"`,
            `"laplace_bridge"`, `"mean_field_0"`, `"mean_field_1"`, `"mean_field_2"`;
            `"probit"` for binary outputs; `"map"` is the network without its uncertainty, to
            compare with. None takes the likelihood's default.
        num_samples: Sampled networks or functions, 100 by default; with the linear pushforward of
            a classifier, the points of `"mc_bridge"` and of the mutual information, 512 by
            default. A power of two is most accurate there.
        key: Seeds the samples, `jax.random.key(0)` if not given; equal keys, equal functions.
        memory_budget: Bytes of temporaries that a chunk of inputs may need.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> model_fn = lambda input, params: params["a"] * input
        >>> posterior_fn, _ = laplace(
        ...     model_fn, {"a": jnp.asarray(2.0)}, (x, 2 * x), loss_fn="mse"
        ... )
        >>> set_prob_predictive = predictive(posterior_fn, model_fn)
        >>> prob_predictive = set_prob_predictive({"prior_prec": 1.0, "sigma_squared": 0.1})
        >>> print(f"{prob_predictive(jnp.asarray(2.0)).pred_mean:.2f}")
        4.00
    """
    fitted = check_posterior_fn(posterior_fn)
    model = fitted.model_of(model_fn)
    return fitted.predictive_of(
        model, {}, pushforward_type, predictive_type, num_samples, key, memory_budget
    )


@in_our_words
def calibration(
    posterior_fn: PosteriorFn,
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: str | Likelihood | Callable | None = None,
    curv_estimate: CurvEstimate | None = None,
    calibration_objective: MetricLike = EVIDENCE,
    calibration_method: str | Method = GRID_SEARCH,
    pushforward_type: str | None = None,
    predictive_type: str | None = None,
    num_samples: int | None = None,
    key: jax.Array | None = None,
    prior_arguments: Mapping[str, PyTree] | None = None,
    progress: bool | None = None,
) -> tuple[dict[str, PyTree], SetProbPredictive]:
    """Choose the prior precision and, if the likelihood has one, the noise variance.

    With a metric of held-out data, a likelihood without noise and the linear pushforward, the
    default grid chooses the temperature too. What is not chosen is what `prior_arguments` keeps:
    the prior's mean is zero and the temperature one if it names no others.

    The answer does not depend on the units of targets, inputs or weights: searches start at the
    residuals and at the scale of weights and outputs. A `CalibrationWarning` says that an answer
    lies at the edge of a grid, and what that means; is still moving; or contradicts the residuals.

    Args:
        posterior_fn: From `laplace`.
        model_fn: The model of the fit. A function with other outputs is refused.
        params: The weights that `posterior_fn` was fitted at.
        data: The *training* data for `"marginal_log_likelihood"` and `"leave_one_out"`, *held-out*
            data otherwise.
        loss_fn: If given, it must be the likelihood that `posterior_fn` was fitted with.
        curv_estimate: If given, it must be the one that came with `posterior_fn`.
        calibration_objective: `"marginal_log_likelihood"` (maximised), `"leave_one_out"` (the NLL
            of every training example without itself, with no refit), `"nll"`, `"ece"`, `"crps"`
            (regression), `"chi_squared"` (brought to one), a metric, or a function of prediction
            fields (minimised). In a grid that chooses the noise, the noise brings `"chi_squared"`
            to one at every point, and the NLL chooses among them.
        calibration_method: `"grid_search"` over a scalar prior precision, with the best noise of
            each; `"gradient_descent"` for every hyperparameter at once; or a `Method`.
        pushforward_type: See `predictive`; `"linear"` if None.
        predictive_type: See `predictive`.
        num_samples: See `predictive`.
        key: See `predictive`.
        prior_arguments: What is known: a grid keeps all of it but `prior_prec`, gradient descent
            starts there. `prior_prec` may then be a pytree, one number per layer. What is left out
            starts at its natural scale. Gradient descent moves a temperature that is named here,
            and an `output_scale`: factors of the predictive variances, one for every output.
        progress: Show a bar; by default when a terminal is attached.

    Returns:
        The chosen prior arguments, and `set_prob_predictive`, whose `.trace` holds every point
        of the search and its value. The arguments remember the predictive they were chosen for,
        and `evaluation` judges that one.

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
    fitted = check_posterior_fn(posterior_fn)
    model = fitted.model_of(model_fn)
    fitted.check_params(params)
    fitted.check_loss(loss_fn)
    if curv_estimate is not None and curv_estimate.structure is not fitted.structure:
        raise ValueError("curv_estimate is not the one that came with posterior_fn")
    set_prob_predictive = fitted.predictive_of(
        model, {}, pushforward_type, predictive_type, num_samples, key
    )
    chosen, searched = set_prob_predictive.calibrate(
        data,
        calibration_objective=calibration_objective,
        calibration_method=calibration_method,
        prior_arguments=prior_arguments,
        progress=progress,
    )
    asked = (pushforward_type, predictive_type, num_samples, key)
    if str(calibration_objective) == EVIDENCE and all(option is None for option in asked):
        return dict(chosen), searched  # the evidence belongs to every predictive
    return chosen, searched


@in_our_words
def evaluation(
    posterior_fn: PosteriorFn,
    model_fn: ModelFn,
    params: PyTree,
    prior_arguments: Mapping[str, PyTree],
    data: DataLike,
    *,
    metrics: Metrics = None,
    pushforward_type: str | None = None,
    predictive_type: str | None = None,
    num_samples: int | None = None,
    key: jax.Array | None = None,
    progress: bool | None = None,
) -> tuple[Results, ProbPredictive]:
    """Metrics over a whole data set, exact on ragged batches.

    Args:
        posterior_fn: From `laplace`.
        model_fn: The model of the fit. A function with other outputs is refused.
        params: The weights that `posterior_fn` was fitted at.
        prior_arguments: Hyperparameters, for example from `calibration`. Those that were chosen
            for a pushforward are judged with it, and another one is refused.
        data: Arrays or a loader, as for `laplace`. Of a weight only a mask has a meaning here:
            examples, or tokens, of weight 0 are left out.
        metrics: Names, `Metric` objects, or plain functions whose parameters are fields of the
            prediction (`pred_mean`, `total_var`, `pred_act`, ..., `target`); a mapping names
            them. By default the usual ones for the likelihood.
        pushforward_type: See `predictive`; None takes that of the calibration, or `"linear"`.
        predictive_type: See `predictive`.
        num_samples: See `predictive`.
        key: See `predictive`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Returns:
        A dict from metric to number, and the predictive that was judged.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> model_fn = lambda input, params: params["a"] * input
        >>> params = {"a": jnp.asarray(2.0)}
        >>> posterior_fn, _ = laplace(model_fn, params, (x, 2 * x), loss_fn="mse")
        >>> results, _ = evaluation(
        ...     posterior_fn, model_fn, params, {"prior_prec": 1.0}, (x, 2 * x), metrics=["rmse"]
        ... )
        >>> results
        {'rmse': 0.0}
    """
    fitted = check_posterior_fn(posterior_fn)
    model = fitted.model_of(model_fn)
    fitted.check_params(params)
    set_prob_predictive = fitted.predictive_of(
        model, prior_arguments, pushforward_type, predictive_type, num_samples, key
    )
    return set_prob_predictive.evaluate(prior_arguments, data, metrics=metrics, progress=progress)


@in_our_words
def log_marginal_likelihood(
    posterior_fn: PosteriorFn,
    prior_arguments: Mapping[str, PyTree],
    model_fn: ModelFn | None = None,
    params: PyTree = None,
    data: DataLike | DataFit | None = None,
    *,
    loss_fn: str | Likelihood | Callable | None = None,
    corrected: bool = False,
) -> jax.Array:
    """log p(D) under the Laplace approximation, differentiable in every prior argument.

        sum_n log p(y_n | f_n) - 1/2 (theta* - mu0)^T T (theta* - mu0)
            + 1/2 log det T - 1/2 log det Lambda

    `data` are the training data, or the `DataFit` of them; with the latter, neither `model_fn`
    nor `params` is needed and nothing passes over the data again. Where the fit was scaled up to
    `num_total_samples`, so is the part that `data` contribute; a `DataFit` is taken as it is.

    The formula belongs to a mode. `corrected=True` adds `1/2 g^T Lambda^-1 g`, which holds
    elsewhere too: see `PosteriorFn.mode_distance`. A `DataFit` then needs `gradient=True`.
    """
    fitted = check_posterior_fn(posterior_fn)
    fitted.check_loss(loss_fn)
    if isinstance(data, DataFit):
        return fitted.log_marginal_likelihood(prior_arguments, data, corrected=corrected)
    if model_fn is None:
        raise ValueError("model_fn, params and data are needed; or data=data_fit(...)")
    if callable(prior_arguments):
        raise TypeError(
            "prior_arguments is a function; the order is log_marginal_likelihood(posterior_fn, "
            "prior_arguments, model_fn, params, data)"
        )
    model = fitted.model_of(model_fn)
    fitted.check_params(params)
    sums = evidence_sums(fitted, model, data, gradient=corrected)
    return fitted.log_marginal_likelihood(prior_arguments, sums, corrected=corrected)


def effective_parameters(
    posterior_fn: PosteriorFn, prior_arguments: Mapping[str, PyTree]
) -> jax.Array:
    """gamma = P - tr(T Lambda^-1): how many parameters the data determine (MacKay)."""
    return check_posterior_fn(posterior_fn).effective_parameters(prior_arguments)
