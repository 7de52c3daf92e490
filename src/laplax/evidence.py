"""The log marginal likelihood of a Laplace approximation: one function for all structures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import in_our_words, whole_number
from ._data import Batch, Loader
from ._engine.chunks import Work, cut
from ._engine.loops import sum_over
from ._engine.memo import WeakInside
from ._engine.vectors import Vector, dot, each
from ._model import Model
from ._problem import Problem, make_problem
from ._tree import PyTree, pytree, static, widen
from .curvature import subset_scale
from .likelihoods import DataFit, Likelihood, weigh
from .posterior import PosteriorFamily
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
    gradient: bool = False,
    progress: bool | None = None,
) -> DataFit:
    """The sums over the data that the evidence needs; they hold for every hyperparameter.

    Compute it once and hand it to `log_marginal_likelihood` in the place of the data.
    `num_total_samples` scales a subset up to the whole, as it does in `laplace`. With
    `gradient=True` the sums include the gradient of the losses in the parameters, which
    `mode_distance` and `corrected=True` need.
    """
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    return fit_of(problem, num_total_samples, gradient)


def fit_of(problem: Problem, num_total_samples: int | None, gradient: bool) -> DataFit:
    """The sums of a checked problem, scaled up to the whole; with the gradient, if asked for."""
    if num_total_samples is not None:
        num_total_samples = whole_number(num_total_samples, "num_total_samples")
    cost = problem.traced.cost
    count = None if isinstance(problem.data, Loader) else problem.data.num_examples
    work = Work(4 * cost.activation_bytes, cost.has_convolution) if gradient else cost.forward_work
    term = DataTerm(problem.params, problem.model, problem.likelihood)
    step = _gradient_of_batch if gradient else fit_of_batch
    fit: DataFit = sum_over(step, problem.data, cut(work, count), term)
    if num_total_samples is None:
        return fit
    scale = subset_scale(num_total_samples, problem.data.num_counted)
    return jax.tree.map(lambda part: jnp.asarray(scale, part.dtype) * part, fit)


@pytree
class DataTerm(WeakInside):
    """What a step over the data needs of a problem."""

    params: PyTree
    model: Model = static()
    likelihood: Likelihood = static()


@in_our_words
def residual_variance(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> jax.Array:
    """The mean squared residual of every output, in the units of the target squared.

    The ratios between them are what `Gaussian(noise_ratio=...)` needs to know at the fit:

        noise_ratio = laplax.residual_variance(model_fn, params, data)
        laplace(model_fn, params, data, loss_fn=Gaussian(noise_ratio=noise_ratio))

    Outputs are told apart along the last axis; the mean is over examples, with their weights, and
    over all other axes.

    Args:
        model_fn: The model, as for `laplace`.
        params: Its weights.
        data: Arrays or a loader, as for `laplace`.
        vmap_over_data: Whether the model sees one example.
        progress: Show a bar while a loader is read; by default when a terminal is attached.
    """
    problem = make_problem(
        model_fn, params, data, "mse", vmap_over_data=vmap_over_data, progress=progress
    )
    count = None if isinstance(problem.data, Loader) else problem.data.num_examples
    chunks = cut(problem.traced.cost.forward_work, count)
    term = DataTerm(problem.params, problem.model, problem.likelihood)
    squares, weights = sum_over(_residuals_of_batch, problem.data, chunks, term)
    found: jax.Array = squares / weights
    return found


def _residuals_of_batch(batch: Batch, term: DataTerm) -> tuple[jax.Array, jax.Array]:
    """Sums of squares and of weights, one for each output."""
    f = term.model.batch(batch.input, term.params)
    squares = jnp.square(f - batch.target.astype(f.dtype))
    ones = jnp.ones_like(f)
    if batch.weight is not None:
        squares, ones = weigh(squares, batch.weight), weigh(ones, batch.weight)
    axes = tuple(range(max(f.ndim - 1, 1)))
    return jnp.sum(squares, axis=axes), jnp.sum(ones, axis=axes)


def evidence_sums(
    posterior_fn: PosteriorFamily,
    model: Model,
    data: Any,
    progress: bool | None = None,
    gradient: bool = False,
) -> DataFit:
    """`data_fit` for the evidence of a posterior, scaled as its curvature is."""
    problem = posterior_fn.problem(model, data, progress)
    fit = fit_of(problem, posterior_fn.num_total_samples, gradient)
    posterior_fn.check_data(problem.data.fingerprint)
    return fit


def fit_of_batch(batch: Batch, term: DataTerm) -> DataFit:
    """The sums of one batch."""
    return _fit_of_outputs(batch, term, term.model.batch(batch.input, term.params))


def _gradient_of_batch(batch: Batch, term: DataTerm) -> DataFit:
    f, pull = jax.vjp(lambda params: term.model.batch(batch.input, params), term.params)
    fit, pull_loss = jax.vjp(lambda f: _fit_of_outputs(batch, term, f), f)
    zero = jnp.zeros_like(fit.loss)
    (residual,) = pull_loss(DataFit(loss=jnp.ones_like(fit.loss), constant=zero, count=zero))
    return dataclasses.replace(fit, gradient=jax.tree.map(widen, pull(residual)[0]))


def _fit_of_outputs(batch: Batch, term: DataTerm, f: jax.Array) -> DataFit:
    if batch.weight is None:
        fits = jax.vmap(term.likelihood.data_fit)(f, batch.target)
    else:
        fits = jax.vmap(term.likelihood.data_fit)(f, batch.target, batch.weight)
    return jax.tree.map(lambda part: jnp.sum(part).astype(f.dtype), fits)


def log_evidence(
    posterior_fn: PosteriorFamily, prior_arguments: Mapping[str, Any], fit: DataFit
) -> jax.Array:
    """log p(D) under the Laplace approximation, from the sums over the data.

    sum_n log p(y_n | f_n) - 1/2 (theta* - mu0)^T T (theta* - mu0)
        + 1/2 log det T - 1/2 log det Lambda
    """
    arguments = posterior_fn.parse(prior_arguments)
    posterior = posterior_fn.at(arguments)
    offset = prior_offset(posterior_fn, arguments)
    noise = arguments.sigma_squared.astype(fit.loss.dtype)
    log_likelihood = posterior_fn.likelihood.log_likelihood(fit, noise)
    log_likelihood = log_likelihood.astype(posterior_fn.space.dtype) / arguments.temperature
    precision = posterior.precision
    return log_likelihood - 0.5 * (precision.prior_energy(offset) + precision.logdet_ratio())


def prior_offset(posterior_fn: PosteriorFamily, arguments: PriorArguments) -> Vector:
    """How far the weights lie from the prior's mean."""
    offset = posterior_fn.space.vector(posterior_fn.mean, posterior_fn.structure.by_leaf)
    return offset if arguments.mean is None else each(jnp.subtract, offset, arguments.mean)


def determined_by_data(posterior_fn: PosteriorFamily, arguments: PriorArguments) -> jax.Array:
    """Gamma as the slope of log det Lambda in log c: its diagonal would cost a product."""

    def logdet(log_c: jax.Array) -> jax.Array:
        scaled = arguments._replace(sigma_squared=jnp.exp(-log_c), temperature=jnp.ones_like(log_c))
        return posterior_fn.precision(scaled).logdet_ratio()

    return jax.grad(logdet)(jnp.log(arguments.likelihood_scale))


def mode_distance(
    posterior_fn: PosteriorFamily, prior_arguments: Mapping[str, Any], fit: DataFit
) -> jax.Array:
    """1/2 g^T Lambda^-1 g in nats, g being the gradient of the negative log joint."""
    if posterior_fn.structure.own_prior:
        raise ValueError(
            "the distance from a mode needs a Gaussian prior on weights; a function-space prior "
            "has no gradient in them"
        )
    if fit.gradient is None:
        raise ValueError(
            "these sums have no gradient: data_fit(..., gradient=True), or pass the data"
        )
    arguments = posterior_fn.parse(prior_arguments)
    slope = gradient_of_joint(posterior_fn, arguments, fit)
    # By the root: a square is never negative, and a weak prior costs no digits.
    half = posterior_fn.at(arguments).precision.scale_t_mv(slope)
    return 0.5 * dot(half, half)


def gradient_of_joint(
    posterior_fn: PosteriorFamily, arguments: PriorArguments, fit: DataFit
) -> Vector:
    """`c g_data + T (theta - mu0)`, the slope of the negative log joint at the weights."""
    gradient = posterior_fn.space.vector(fit.gradient, posterior_fn.structure.by_leaf)
    pull = arguments.prior_mv(prior_offset(posterior_fn, arguments))
    return each(lambda g, p: arguments.likelihood_scale * g + p, gradient, pull)
