"""The Gaussian process without a network: exact regression, its evidence, its hyperparameters."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import _optim
from .._arguments import whole_number
from .._data import as_data
from .._engine.linalg import cholesky, diagonal, solve_triangular
from .._engine.samples import draw, whole_batch
from .._tree import PyTree
from ..likelihoods import Categorical, Gaussian, Likelihood, as_likelihood
from ._kernels import KernelFn
from ._prior import GPPrior, as_prior


class _Observed(NamedTuple):
    """Gaussian observations: a weight w of an example is w observations of the same."""

    x: PyTree
    y: jax.Array  # (n, C)
    weight: jax.Array  # (n,)
    noise: jax.Array | None = None  # (n, C), where they have one of their own


class _Factors(NamedTuple):
    """Per component: the Cholesky factor C of R K R + variance, and C^-1 R times the residual.

    R is the diagonal of the roots of the weights: variance / w, in a form that takes w = 0.
    """

    factors: list[jax.Array]
    white: list[jax.Array]
    rotation: jax.Array
    variance: jax.Array  # of the noise, jitter included


def _factor(prior: GPPrior, data: _Observed, sigma_squared: ArrayLike) -> _Factors:
    """With a coregionalisation the noise must be one number."""
    dtype = data.y.dtype
    outputs = data.y.shape[1]
    parts, rotation = prior.components(outputs)
    W = rotation.astype(dtype)
    root = jnp.sqrt(data.weight)[:, None]
    residual = root * (data.y - prior.mean_at(data.x, (outputs,), dtype)) @ W
    noise = jnp.asarray(sigma_squared).astype(dtype) if data.noise is None else data.noise
    variance = jnp.broadcast_to(noise + prior.noise(data.x, outputs, dtype), data.y.shape)
    factors = [
        cholesky(root * part.matrix(data.x).astype(dtype) * root.T + jnp.diag(variance[:, i]))
        for i, part in enumerate(parts)
    ]
    white = [solve_triangular(f, residual[:, i]) for i, f in enumerate(factors)]
    return _Factors(factors, white, W, variance)


@jax.jit
def _log_evidence(prior: GPPrior, data: _Observed, sigma_squared: ArrayLike) -> jax.Array:
    """-1/2 [r^T M^-1 r + log det M + n log 2 pi + sum (w - 1) log(2 pi variance)], M = C C^T."""
    gp = _factor(prior, data, sigma_squared)
    quadratic = sum(jnp.sum(jnp.square(w)) for w in gp.white)
    logdet = sum(2 * jnp.sum(jnp.log(diagonal(f))) for f in gp.factors)
    constant = data.y.size * jnp.log(2 * jnp.pi).astype(data.y.dtype)
    constant += jnp.sum((data.weight - 1)[:, None] * jnp.log(2 * jnp.pi * gp.variance))
    return -0.5 * (quadratic + logdet + constant)


def gp_log_evidence(prior: GPPrior | KernelFn, data: Any, sigma_squared: ArrayLike) -> jax.Array:
    """log p(y) of exact Gaussian-process regression, differentiable in every hyperparameter."""
    return _log_evidence(as_prior(prior), _observed(data, Gaussian()), sigma_squared)


def gp_regression(
    prior: GPPrior | KernelFn, data: Any, sigma_squared: ArrayLike, input: PyTree
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of f at `input` under exact Gaussian-process regression, (n, C) each.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax.fsp import RBF
        >>> x = jnp.asarray([0.0, 1.0])
        >>> mean, variance = gp_regression(RBF(), (x, jnp.sin(x)), 0.01, jnp.asarray([0.0]))
        >>> print(f"{mean[0, 0]:.3f} {variance[0, 0]:.3f}")
        0.008 0.010
    """
    return _regression(as_prior(prior), _observed(data, Gaussian()), sigma_squared, input)


@jax.jit
def _regression(
    prior: GPPrior, seen: _Observed, sigma_squared: ArrayLike, input: PyTree
) -> tuple[jax.Array, jax.Array]:
    dtype = seen.y.dtype
    outputs = seen.y.shape[1]
    parts, _ = prior.components(outputs)
    gp = _factor(prior, seen, sigma_squared)
    root = jnp.sqrt(seen.weight)[:, None]
    means = []
    variances = []
    for part, factor, white in zip(parts, gp.factors, gp.white, strict=True):
        half = solve_triangular(factor, root * part.matrix(seen.x, input).astype(dtype))
        means.append(half.T @ white)
        variances.append(part.diagonal(input).astype(dtype) - jnp.sum(half**2, axis=0))
    mean = jnp.stack(means, axis=-1) @ gp.rotation.T + prior.mean_at(input, (outputs,), dtype)
    return mean, jnp.stack(variances, axis=-1) @ jnp.square(gp.rotation).T


class FittedPrior(NamedTuple):
    """What `fit_prior` returns: the prior, the noise variance, the log evidence on the way."""

    prior: GPPrior
    sigma_squared: jax.Array
    log_evidence: jax.Array


def fit_prior(
    prior: GPPrior | KernelFn,
    data: Any,
    *,
    loss_fn: str | Likelihood = "mse",
    sigma_squared: ArrayLike = 0.1,
    num_points: int = 500,
    key: jax.Array | None = None,
    num_steps: int = 200,
    progress: bool | None = None,
) -> FittedPrior:
    """Hyperparameters of the kernel and the noise by the evidence of the GP itself, on a subset.

    Args:
        prior: Where the search starts; all of the kernel's hyperparameters must be positive. They
            move in log space; mean and coregionalisation stay.
        data: Training data, as in `laplace`.
        loss_fn: `"mse"`, or `"cross_entropy"`: labels then become Gaussian observations of logits
            (Milios et al. 2018, *Dirichlet-based Gaussian Processes*), with noise of their own.
        sigma_squared: Where the noise variance starts.
        num_points: Examples that are used, at most; a GP costs their cube.
        key: Draws the examples, `jax.random.key(0)` if not given.
        num_steps: Steps of Adam, 0.1 with a cosine decay to zero.
        progress: Show a progress bar; by default when a terminal is attached.
    """
    checked = as_prior(prior)
    likelihood = as_likelihood(loss_fn)
    if not isinstance(likelihood, Gaussian | Categorical):
        raise ValueError(
            f"fit_prior knows loss_fn='mse' and 'cross_entropy'; got {likelihood.name!r}. Choose "
            "the kernel's hyperparameters by hand, or by validation"
        )
    if isinstance(likelihood, Categorical) and checked.coregionalisation is not None:
        raise ValueError("fit_prior with labels needs independent outputs: no coregionalisation")
    batch = whole_batch(as_data(data).on_automatic_axes())
    if batch.num_examples > whole_number(num_points, "num_points"):
        batch = draw(batch, num_points, jax.random.key(0) if key is None else key)
    seen = _observed(batch, likelihood)
    dtype = seen.y.dtype
    start = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), (checked.kernel, sigma_squared))
    if not all(bool(jnp.all(leaf > 0)) for leaf in jax.tree.leaves(start)):
        raise ValueError("fit_prior moves hyperparameters in log space: all must be positive")
    num_steps = whole_number(num_steps, "num_steps")
    optimizer = _optim.default_optimizer(0.1, num_steps)
    descent = _optim.Descent(optimizer, num_steps, "kernel evidence", progress)
    start = jax.tree.map(jnp.log, start)
    logs, values = descent.records(_negative_log_evidence, checked, start, seen)
    if not bool(jnp.any(jnp.isfinite(values))):
        raise ValueError(
            "the evidence of the Gaussian process is not finite at any step: the kernel matrix is "
            "not positive definite; raise the prior's jitter or sigma_squared"
        )
    best = _optim.last_of_best(np.asarray(values))
    kernel, noise = jax.tree.map(lambda x: jnp.exp(x[best]), logs)
    return FittedPrior(dataclasses.replace(checked, kernel=kernel), noise, -values)


def _negative_log_evidence(
    logs: PyTree, prior: GPPrior, seen: _Observed
) -> tuple[jax.Array, PyTree]:
    """What is minimised, and the record of the point."""
    kernel, noise = jax.tree.map(jnp.exp, logs)
    value = -_log_evidence(dataclasses.replace(prior, kernel=kernel), seen, noise)
    return value, (logs, value)


def _observed(data: Any, likelihood: Likelihood) -> _Observed:
    """Labels become Gaussian observations with a noise of their own."""
    batch = whole_batch(as_data(data).on_automatic_axes())
    y = batch.target
    noise = None
    if isinstance(likelihood, Categorical):
        y, noise = dirichlet_observations(y)
    elif not jnp.issubdtype(y.dtype, jnp.floating):
        y = y.astype(float)
    y = y.reshape(y.shape[0], -1)
    weight = jnp.ones(y.shape[0], y.dtype) if batch.weight is None else batch.weight
    if weight.shape != y.shape[:1]:
        raise ValueError(
            f"a Gaussian process takes one weight per example, shape {y.shape[:1]}; got "
            f"{weight.shape}"
        )
    return _Observed(batch.input, y, weight.astype(y.dtype), noise)


def dirichlet_observations(
    labels: jax.Array, concentration: float = 0.01
) -> tuple[jax.Array, jax.Array]:
    """Log-normal moments of Gamma variables: observations of logits and their variances, (n, C).

    Integer labels count classes up to the largest one; rows of probabilities are taken as they are.
    """
    if labels.ndim == 1:
        labels = jax.nn.one_hot(labels, int(labels.max()) + 1, dtype=float)
    alpha = labels + concentration
    variance = jnp.log1p(1 / alpha)
    return jnp.log(alpha) - variance / 2, variance
