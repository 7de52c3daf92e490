"""Averages over points of a Gaussian, a few examples at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .chunks import even_size
from .linalg import diagonal, semidefinite_cholesky

LOGITS_AT_ONCE = 2**16  # logits of one step on a CPU: they are read several times, in its cache


def over_gaussians(
    statistic: Callable[[jax.Array], jax.Array],
    mean: jax.Array,
    cov: jax.Array,
    points: jax.Array,
    basis: jax.Array,
) -> jax.Array:
    """`statistic(z)` of every example, z (C, num_points) being its logits at the points.

    z = mean + basis L points with L L^T = basis^T cov basis. Logits are kept for a few examples
    at a time, and computed again for a gradient.

    Args:
        statistic: From the logits (C, num_points) of one example to an array.
        mean: Means (n, C).
        cov: Covariances (n, C, C).
        points: Points (num_points, d) of N(0, I).
        basis: Orthonormal columns (C, d).
    """

    @jax.checkpoint
    def one(example: tuple[jax.Array, jax.Array]) -> jax.Array:
        example_mean, example_cov = example
        seen = basis.T @ example_cov @ basis
        size = jax.lax.stop_gradient(diagonal(example_cov).max())
        root = basis @ semidefinite_cholesky((seen + seen.T) / 2, size)
        return statistic(example_mean[:, None] + root @ points.T)

    count = mean.shape[0]
    at_once = max(1, LOGITS_AT_ONCE // (mean.shape[1] * points.shape[0]))
    return jax.lax.map(one, (mean, cov), batch_size=max(1, even_size(count, at_once)))


def log_mean_softmax(logits: jax.Array) -> jax.Array:
    """log of the mean over points of softmax(z), from z (C, num_points) to (C,).

    One exponential per logit, and finite where a probability underflows: every class is scaled
    by its largest share of the largest class. Classes that are the largest somewhere are not
    scaled, so that the sum over classes is at least one.
    """
    below = logits - jax.lax.stop_gradient(logits.max(axis=0, keepdims=True))
    scale = jax.lax.stop_gradient(below.max(axis=1))
    share = jnp.exp(below - scale[:, None])
    total = jnp.exp(scale) @ share
    return scale + jnp.log(share @ (1 / total) / logits.shape[1])


def mean_entropy(logits: jax.Array) -> jax.Array:
    """The mean over points of the entropy of softmax(z), from z (C, num_points), in nats."""
    below = logits - jax.lax.stop_gradient(logits.max(axis=0, keepdims=True))
    share = jnp.exp(below)
    total = share.sum(axis=0)
    return jnp.mean(jnp.log(total) - (share * below).sum(axis=0) / total)
