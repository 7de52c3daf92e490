"""The log marginal likelihood of a Laplace approximation: one function for all structures."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import in_our_words, whole_number
from ._data import Batch
from ._fold import Chunking, fold
from ._machine import MEMORY_BUDGET, on_cpu
from ._memo import WeakInside
from ._model import Model
from ._problem import Problem, make_problem
from ._tree import PyTree, pytree, static
from .curvature import subset_scale
from .likelihoods import DataFit, Likelihood
from .posterior import PosteriorFn, check_posterior_fn
from .priors import PriorArguments


@in_our_words
def data_fit(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    loss_fn: str | Likelihood | Callable,
    vmap_over_data: bool = True,
    num_total_samples: int | None = None,
    progress: bool | None = None,
) -> DataFit:
    """The sums over the data that the evidence needs; they hold for every hyperparameter.

    Compute it once and hand it to `log_marginal_likelihood` in the place of the data.
    `num_total_samples` scales a subset up to the whole, as it does in `laplace`.
    """
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    return _data_fit(problem, num_total_samples)


def _data_fit(problem: Problem, num_total_samples: int | None) -> DataFit:
    if num_total_samples is not None:
        num_total_samples = whole_number(num_total_samples, "num_total_samples")
    cost = problem.traced.cost
    chunking = Chunking(cost.examples_within(MEMORY_BUDGET), cost.has_convolution and on_cpu())
    zero = jnp.zeros((), problem.output.dtype)
    start = DataFit(zero, zero.copy(), zero.copy())
    term = _DataTerm(problem.params, problem.model, problem.likelihood)
    fit = fold(_add_fit, start, problem.data, chunking, term)
    if num_total_samples is None:
        return fit
    scale = jnp.asarray(subset_scale(num_total_samples, problem.data.num_counted), zero.dtype)
    return jax.tree.map(lambda part: scale * part, fit)


def data_fit_of(
    posterior_fn: PosteriorFn,
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    progress: bool | None = None,
) -> DataFit:
    """`data_fit` for the evidence of a posterior: as it sees its model, data and their number."""
    problem = make_problem(
        model_fn,
        params,
        data,
        posterior_fn.likelihood,
        vmap_over_data=posterior_fn.vmap_over_data,
        progress=progress,
    )
    fit = _data_fit(problem, posterior_fn.num_total_samples)
    posterior_fn.check_data(problem.data.fingerprint)
    return fit


@pytree
class _DataTerm(WeakInside):
    """What a step over the data needs of a problem."""

    params: PyTree
    model: Model = static()
    likelihood: Likelihood = static()


def _add_fit(total: DataFit, batch: Batch, term: _DataTerm) -> DataFit:
    likelihood = term.likelihood
    f = term.model.batch(batch.input, term.params)
    if batch.weight is None:
        fits = jax.vmap(likelihood.data_fit)(f, batch.target)
    else:
        fits = jax.vmap(likelihood.data_fit)(f, batch.target, batch.weight)
    return jax.tree.map(lambda a, b: a + jnp.sum(b), total, fits)


@in_our_words
def log_marginal_likelihood(
    posterior_fn: PosteriorFn,
    prior_arguments: Mapping[str, Any],
    model_fn: Callable[..., jax.Array] | None = None,
    params: PyTree = None,
    data: Any = None,
    *,
    loss_fn: str | Likelihood | Callable | None = None,
) -> jax.Array:
    """log p(D) under the Laplace approximation, differentiable in every prior argument.

        sum_n log p(y_n | f_n) - 1/2 (theta* - mu0)^T T (theta* - mu0)
            + 1/2 log det T - 1/2 log det Lambda

    `data` are the training data, or the `DataFit` of them; with the latter, neither `model_fn`
    nor `params` is needed and nothing passes over the data again. Where the fit was scaled up to
    `num_total_samples`, so is what `data` say; a `DataFit` is taken as it is.
    """
    likelihood = check_posterior_fn(posterior_fn).likelihood
    posterior_fn.check_loss(loss_fn)
    if isinstance(data, DataFit):
        fit = data
    else:
        if model_fn is None:
            raise ValueError("model_fn, params and data are needed; or data=data_fit(...)")
        _check_order(prior_arguments)
        posterior_fn.check_model(model_fn)
        posterior_fn.check_params(params)
        fit = data_fit_of(posterior_fn, model_fn, params, data)
    arguments = posterior_fn.parse(prior_arguments)
    posterior = posterior_fn.at(arguments)
    offset = prior_offset(posterior_fn, arguments)
    log_likelihood = likelihood.log_likelihood(fit, arguments.sigma_squared.astype(fit.loss.dtype))
    log_likelihood = log_likelihood.astype(offset.dtype) / arguments.temperature
    precision = posterior.precision
    return log_likelihood - 0.5 * (precision.prior_energy(offset) + precision.logdet_ratio())


def _check_order(prior_arguments: Any) -> None:
    if callable(prior_arguments):
        raise TypeError(
            "prior_arguments is a function; the order is log_marginal_likelihood(posterior_fn, "
            "prior_arguments, model_fn, params, data)"
        )


def prior_offset(posterior_fn: PosteriorFn, arguments: PriorArguments) -> jax.Array:
    """How far the weights lie from the prior's mean, shape (P,)."""
    offset = posterior_fn.space.flatten(posterior_fn.mean)
    return offset if arguments.mean is None else offset - arguments.mean


def effective_parameters(
    posterior_fn: PosteriorFn, prior_arguments: Mapping[str, Any]
) -> jax.Array:
    """gamma = P - tr(T Lambda^-1): how many parameters the data determine (MacKay)."""
    return check_posterior_fn(posterior_fn)(prior_arguments).precision.effective_parameters()
