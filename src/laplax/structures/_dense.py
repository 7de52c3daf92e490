"""The posterior precision of a dense curvature, by Cholesky."""

import math

import jax
import jax.numpy as jnp

from .._engine.linalg import cho_solve, cholesky, diagonal, solve_triangular
from .._tree import pytree
from ._base import LOST, Precision
from ._jacobian import Jacobian


@pytree
class DensePrecision(Precision):
    """Lambda by its lower Cholesky factor C; L = C^-T."""

    cholesky: jax.Array
    prior: jax.Array

    @property
    def size(self) -> int:
        return self.cholesky.shape[-1]

    @property
    def width(self) -> int:
        return self.size

    def mv(self, v: jax.Array) -> jax.Array:
        return self.cholesky @ (self.cholesky.T @ v)

    def solve(self, v: jax.Array) -> jax.Array:
        return cho_solve(self.cholesky, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        return solve_triangular(self.cholesky, v, trans=True)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        return solve_triangular(self.cholesky, v)

    def variance(self) -> jax.Array:
        """Column norms of C^-1."""
        return jnp.sum(jnp.square(self._inverse_factor), axis=0)

    def diagonal(self) -> jax.Array:
        """Row norms of C."""
        return jnp.sum(jnp.square(self.cholesky), axis=1)

    def _half(self, J: Jacobian) -> jax.Array:
        """J C^-T, (n, C, P): a solve for a few rows; for many, factors of J times the inverse."""
        if math.prod(J.shape) > self.size:
            return J.coordinates(((0, self.size),)).matmul(self.scale)
        return super()._half(J)

    def logdet_ratio(self) -> jax.Array:
        """Sum of 2 log C_ii - log t_i."""
        roots = diagonal(self.cholesky)
        return jnp.sum(2 * jnp.log(roots) - jnp.log(self.prior))

    @property
    def scale(self) -> jax.Array:
        """C^-T as a (P, P) array."""
        return self._inverse_factor.T

    @property
    def _inverse_factor(self) -> jax.Array:
        return self.scale_t_mv(jnp.eye(self.size, dtype=self.cholesky.dtype))


def dense_precision(matrix: jax.Array, c: jax.Array, prior: jax.Array) -> DensePrecision:
    """Lambda = c G + T = C C^T for G as a (P, P) array."""
    precision = c * matrix + jnp.diag(jnp.broadcast_to(prior, matrix.shape[-1:]))
    factor = cholesky(precision)
    # A pivot that is round-off of its diagonal entry is positive by luck.
    least = LOST * jnp.finfo(factor.dtype).eps * diagonal(precision)
    sound = jnp.all(jnp.square(diagonal(factor)) > least)
    return DensePrecision(jnp.where(sound, factor, jnp.nan), prior)
