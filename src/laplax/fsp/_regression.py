"""The Gaussian process without a network: exact regression, its evidence, its hyperparameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _optim
from .._data import Batch, as_data, progress_bar, whole_batch
from .._engine.arrays import is_concrete
from .._engine.linalg import cholesky, diagonal, solve_triangular
from .._tree import PyTree
from ..likelihoods import Categorical, Gaussian, Likelihood, as_likelihood
from ._prior import GPPrior, as_prior


class _Observed(NamedTuple):
    """Gaussian observations: a weight w of an example is w observations of the same."""

    x: PyTree
    y: jax.Array  # (n, C)
    weight: jax.Array  # (n,)
    noise: jax.Array | None = None  # (n, C), where they have one of their own

    def with_noise(self, sigma_squared: Any) -> "_Observed":
        """The same noise variance for all."""
        noise = jnp.asarray(sigma_squared).astype(self.y.dtype)
        return self._replace(noise=jnp.broadcast_to(noise, self.y.shape))


class _Factors(NamedTuple):
    """Per component: the Cholesky factor C of R K R + variance, and C^-1 R times the residual.

    R is the diagonal of the roots of the weights: variance / w, in a form that takes w = 0.
    """

    factors: list[jax.Array]
    white: list[jax.Array]
    rotation: jax.Array
    variance: jax.Array  # of the noise, jitter included


def _factor(prior: GPPrior, data: _Observed) -> _Factors:
    """With a coregionalisation the noise must be one number."""
    x, y, weight, noise = data
    assert noise is not None
    outputs, root = y.shape[1], jnp.sqrt(weight)
    parts, rotation = prior.components(outputs)
    W = jnp.eye(outputs, dtype=y.dtype) if rotation is None else rotation.astype(y.dtype)
    residual = root[:, None] * (y - prior.mean_at(x, (outputs,), y.dtype)) @ W
    variance = noise + prior.noise(x, outputs, y.dtype)
    roots = root[:, None] * root[None]
    factors = [
        cholesky(roots * part.matrix(x).astype(y.dtype) + jnp.diag(variance[:, i]))
        for i, part in enumerate(parts)
    ]
    white = [solve_triangular(f, residual[:, i]) for i, f in enumerate(factors)]
    return _Factors(factors, white, W, variance)


def _log_evidence(prior: GPPrior, data: _Observed) -> jax.Array:
    """-1/2 [r^T M^-1 r + log det M + n log 2 pi + sum (w - 1) log(2 pi variance)], M = C C^T."""
    found, y = _factor(prior, data), data.y
    quadratic = sum(jnp.sum(jnp.square(w)) for w in found.white)
    logdet = sum(2 * jnp.sum(jnp.log(diagonal(f))) for f in found.factors)
    constant = y.size * jnp.log(2 * jnp.pi).astype(y.dtype)
    constant += jnp.sum((data.weight - 1)[:, None] * jnp.log(2 * jnp.pi * found.variance))
    return -0.5 * (quadratic + logdet + constant)


def gp_log_evidence(
    prior: GPPrior | Callable[..., Any], data: Any, sigma_squared: Any
) -> jax.Array:
    """log p(y) of exact Gaussian-process regression, differentiable in every hyperparameter."""
    return _log_evidence(as_prior(prior), _observed(data, Gaussian()).with_noise(sigma_squared))


def gp_regression(
    prior: GPPrior | Callable[..., Any], data: Any, sigma_squared: Any, input: PyTree
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
    seen = _observed(data, Gaussian()).with_noise(sigma_squared)
    checked, y, outputs = as_prior(prior), seen.y, seen.y.shape[1]
    found, root = _factor(checked, seen), jnp.sqrt(seen.weight)
    parts, _ = checked.components(outputs)
    means, variances = [], []
    for part, factor, white in zip(parts, found.factors, found.white, strict=True):
        cross = root[:, None] * part.matrix(seen.x, input).astype(y.dtype)
        half = solve_triangular(factor, cross)
        means.append(half.T @ white)
        variances.append(part.diagonal(input).astype(y.dtype) - jnp.sum(half**2, axis=0))
    W = found.rotation
    mean = jnp.stack(means, axis=-1) @ W.T + checked.mean_at(input, (outputs,), y.dtype)
    return mean, jnp.stack(variances, axis=-1) @ jnp.square(W).T


class FittedPrior(NamedTuple):
    """What `fit_prior` returns: the prior, the noise variance, the log evidence on the way."""

    prior: GPPrior
    sigma_squared: jax.Array
    log_evidence: jax.Array


def fit_prior(
    prior: GPPrior | Callable[..., Any],
    data: Any,
    *,
    loss_fn: str | Likelihood = "mse",
    sigma_squared: Any = 0.1,
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
    chosen = jax.random.key(0) if key is None else key
    seen = _observed(_sample(whole_batch(as_data(data)), num_points, chosen), likelihood)
    dtype = seen.y.dtype
    leaves = [jnp.asarray(leaf).astype(dtype) for leaf in jax.tree.leaves(checked.kernel)]
    if is_concrete(leaves) and not all(bool(jnp.all(leaf > 0)) for leaf in leaves):
        raise ValueError("fit_prior moves hyperparameters in log space: all must be positive")
    free = [*leaves, jnp.asarray(sigma_squared).astype(dtype)]
    treedef = jax.tree.structure(checked.kernel)

    def built(logs: list[jax.Array]) -> tuple[GPPrior, jax.Array]:
        *kernel, noise = (jnp.exp(x) for x in logs)
        tree = jax.tree.unflatten(treedef, kernel)
        return GPPrior(tree, checked.mean, checked.coregionalisation, checked.jitter), noise

    def loss(logs: list[jax.Array]) -> jax.Array:
        made, noise = built(logs)
        return -_log_evidence(made, seen.with_noise(noise) if seen.noise is None else seen)

    logs, values = _ascend(loss, [jnp.log(x) for x in free], num_steps, progress)
    fitted, noise = built(logs)
    return FittedPrior(fitted, noise, -values)


def _ascend(
    loss: Callable[[Any], jax.Array], logs: list[jax.Array], num_steps: int, progress: bool | None
) -> tuple[list[jax.Array], jax.Array]:
    optimizer = _optim.default_optimizer(0.1, num_steps)
    state = _optim.start(optimizer, logs)

    @jax.jit
    def step(logs: list[jax.Array], state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(logs)
        return *_optim.step(optimizer, gradient, state, logs), value

    values = []
    best, lowest = logs, float("inf")
    for _ in progress_bar(range(num_steps), num_steps, "kernel evidence", progress):
        before = logs
        logs, state, value = step(logs, state)
        values.append(value)
        if float(value) < lowest:
            best, lowest = before, float(value)
    if lowest == float("inf"):
        raise ValueError(
            "the evidence of the Gaussian process is not finite at any step: the kernel matrix is "
            "not positive definite; raise the prior's jitter or sigma_squared"
        )
    return best, jnp.stack(values)


def _sample(data: Batch, num: int, key: jax.Array) -> Batch:
    if data.num_examples <= num:
        return data
    chosen = jax.random.choice(key, data.num_examples, (num,), replace=False)
    return jax.tree.map(lambda x: x[chosen], data)


def _observed(data: Any, likelihood: Likelihood) -> _Observed:
    """Labels become Gaussian observations with a noise of their own."""
    batch = whole_batch(as_data(data))
    y, noise = batch.target, None
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
