"""Diagonal curvature: every operation is elementwise."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from .._tree import pytree
from ._base import Precision, Projection, Structure, columns


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

    def spectral(self) -> "Diagonal":
        """It is diagonal as it is."""
        return self

    def project(self, jacobian: jax.Array) -> "DiagonalProjection":
        """The basis is the identity: the Jacobians themselves."""
        return DiagonalProjection(jacobian, self.values)


@pytree
class DiagonalProjection(Projection):
    """J diag(c d + tau)^-1 J^T. For a whole grid of tau the marginals are one GEMM."""

    jacobian: jax.Array
    values: jax.Array
    per_example: ClassVar[tuple[str, ...]] = ("jacobian",)

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        return DiagonalPrecision(c * self.values, prior).covariance(self.jacobian)

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C)."""
        return DiagonalPrecision(c * self.values, prior).marginal(self.jacobian)


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

    def marginal(self, jacobian: jax.Array) -> jax.Array:
        """Squared Jacobians times variances, without a copy of the Jacobians."""
        return jnp.square(jacobian) @ self.variance()

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c d / t)."""
        return jnp.sum(jnp.log1p(self.curvature / self.prior))

    @property
    def scale(self) -> jax.Array:
        """(c d + t)^-1/2."""
        return jax.lax.rsqrt(self._values)
