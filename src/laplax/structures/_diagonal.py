"""Diagonal curvature: every operation is elementwise."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._tree import pytree
from ._base import Precision, Projection, columns
from ._coordinates import Coordinates
from ._jacobian import Jacobian, as_jacobian, diagonal_coordinates, take, total
from ._structure import Structure


@pytree
class Diagonal(Structure):
    """The diagonal of G alone."""

    values: jax.Array
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.values.shape[-1]

    def mv(self, v: jax.Array) -> jax.Array:
        return columns(self.values, v)

    def diagonal(self) -> jax.Array:
        return self.values

    def times(self, scale: float | jax.Array) -> "Diagonal":
        """Every entry times the scale."""
        return Diagonal(jnp.asarray(scale, self.dtype) * self.values)

    def precision(self, c: jax.Array, prior: jax.Array) -> "DiagonalPrecision":
        return DiagonalPrecision(c * self.values, prior)

    def spectral(self) -> "Diagonal":
        """It is diagonal as it is."""
        return self

    def project(self, jacobian: jax.Array | Jacobian) -> "CoordinateProjection":
        """The basis is the identity: the Jacobians themselves."""
        J = as_jacobian(jacobian)
        return CoordinateProjection(
            tuple(diagonal_coordinates(J, group).kept() for group in J.groups),
            tuple(take(self.values, group) for group in J.groups),
        )


@pytree
class CoordinateProjection(Projection):
    """J Q diag(c e + tau)^-1 Q^T J^T, part by part. A grid of tau is a few GEMMs."""

    coordinates: tuple[Any, ...]  # J Q of every part
    values: tuple[jax.Array, ...]  # e of every part

    def join(self, others: Sequence[Any]) -> "CoordinateProjection":
        """Further examples, part by part."""
        first, *rest = [self.coordinates, *(x.coordinates for x in others)]
        joined = [mine.join(more) for mine, *more in zip(first, *rest, strict=True)]
        return CoordinateProjection(tuple(joined), self.values)

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        return sum_covariance(self.coordinates, [1 / (c * e + prior) for e in self.values])

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        return sum_marginal(self.coordinates, [1 / (c * e + prior) for e in self.values])


def sum_marginal(coordinates: Sequence[Coordinates], variances: Sequence[jax.Array]) -> jax.Array:
    """Diagonals of J Q diag(d) Q^T J^T, parts added."""
    return total([x.marginal(d) for x, d in zip(coordinates, variances, strict=True)])


def sum_covariance(coordinates: Sequence[Coordinates], variances: Sequence[jax.Array]) -> jax.Array:
    """J Q diag(d) Q^T J^T, parts added."""
    return total([x.covariance(d) for x, d in zip(coordinates, variances, strict=True)])


@pytree
class DiagonalPrecision(Precision):
    """Lambda = diag(c d + t); everything is elementwise."""

    curvature: jax.Array
    prior: jax.Array
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.curvature.shape[-1]

    @property
    def _values(self) -> jax.Array:
        return self.curvature + self.prior

    def mv(self, v: jax.Array) -> jax.Array:
        return columns(self._values, v)

    def solve(self, v: jax.Array) -> jax.Array:
        return columns(1 / self._values, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """V / sqrt(c d + t)."""
        return columns(self.scale, v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> jax.Array:
        return 1 / self._values

    def covariance(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Leaf by leaf, from factors where there are some."""
        return sum_covariance(*self._parts(as_jacobian(jacobian)))

    def marginal(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Leaf by leaf, from factors where there are some."""
        return sum_marginal(*self._parts(as_jacobian(jacobian)))

    def _parts(self, J: Jacobian) -> tuple[list[Coordinates], list[jax.Array]]:
        variance = self.variance()
        parts = [(diagonal_coordinates(J, group), take(variance, group)) for group in J.groups]
        return [x for x, _ in parts], [d for _, d in parts]

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c d / t)."""
        return jnp.sum(jnp.log1p(self.curvature / self.prior))

    @property
    def scale(self) -> jax.Array:
        """(c d + t)^-1/2."""
        return jax.lax.rsqrt(self._values)
