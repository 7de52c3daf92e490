"""Diagonal curvature: every operation is elementwise."""

import jax
import jax.numpy as jnp

from .._tree import pytree
from ._base import Precision, Structure, columns


@pytree
class Diagonal(Structure):
    """The diagonal of G alone."""

    values: jax.Array

    @property
    def size(self) -> int:
        """P."""
        return self.values.shape[-1]

    def mv(self, v: jax.Array) -> jax.Array:
        """d v."""
        return columns(self.values, v)

    def diagonal(self) -> jax.Array:
        """d."""
        return self.values

    def precision(self, c: jax.Array, prior: jax.Array) -> "DiagonalPrecision":
        """c d + t."""
        return DiagonalPrecision(c * self.values, prior)


@pytree
class DiagonalPrecision(Precision):
    """Lambda = diag(c d + t); everything is elementwise."""

    curvature: jax.Array
    prior: jax.Array

    @property
    def size(self) -> int:
        """P."""
        return self.curvature.shape[-1]

    @property
    def _values(self) -> jax.Array:
        return self.curvature + self.prior

    def mv(self, v: jax.Array) -> jax.Array:
        """(c d + t) v."""
        return columns(self._values, v)

    def solve(self, v: jax.Array) -> jax.Array:
        """V / (c d + t)."""
        return columns(1 / self._values, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """V / sqrt(c d + t)."""
        return columns(self.scale, v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> jax.Array:
        """1 / (c d + t)."""
        return 1 / self._values

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c d / t)."""
        return jnp.sum(jnp.log1p(self.curvature / self.prior))

    @property
    def scale(self) -> jax.Array:
        """(c d + t)^-1/2."""
        return jax.lax.rsqrt(self._values)
