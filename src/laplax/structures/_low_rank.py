"""Low-rank curvature U S U^T with orthonormal U."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._linalg import cho_solve, cholesky, diagonal, solve_triangular
from .._tree import pytree, static
from ._base import Precision, Projection, Structure, columns, t_mv
from ._jacobian import Jacobian, split


@pytree
class LowRank(Structure):
    """G ~= U diag(S) U^T, U of shape (P, R) orthonormal, S >= 0.

    `dense_scale` marks an exact full curvature kept on its smaller side (fewer rows than
    parameters): its `state["scale"]` is then the (P, P) array that "full" promises.
    """

    basis: jax.Array
    eigenvalues: jax.Array
    dense_scale: bool = static(default=False)
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """P."""
        return self.basis.shape[-2]

    @property
    def rank(self) -> int:
        """R."""
        return self.basis.shape[-1]

    @property
    def width(self) -> int:
        """R."""
        return self.rank

    def mv(self, v: jax.Array) -> jax.Array:
        """U S U^T v."""
        return self.basis @ columns(self.eigenvalues, t_mv(self.basis, v))

    def diagonal(self) -> jax.Array:
        """Rows of U squared, weighted by S."""
        return jnp.square(self.basis) @ self.eigenvalues

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """Elementwise in the basis for T = tau I; by an R x R Cholesky for a general T."""
        if prior.ndim == 0:
            return IsotropicLowRank(self.basis, c * self.eigenvalues, prior, self.dense_scale)
        # Two roots, not the root of the product: its gradient in c fails where S is zero.
        factor = self.basis * (jnp.sqrt(c) * jnp.sqrt(self.eigenvalues))
        white = factor / jnp.sqrt(prior)[:, None]
        inner = jnp.eye(self.rank, dtype=self.dtype) + white.T @ white
        return GeneralLowRank(white, cholesky(inner), prior, self.dense_scale)

    def spectral(self) -> "LowRank":
        """It is in its eigenbasis."""
        return self

    def project(self, jacobian: jax.Array | Jacobian) -> "SpectralProjection":
        """J U, and the rest of J, which lies outside of U."""
        return SpectralProjection(*split(jacobian, self.basis), self.eigenvalues)


@pytree
class SpectralProjection(Projection):
    """R R^T / tau + J U [1 / (c S + tau)] U^T J^T with R = J - J U U^T, absent if U is complete."""

    coordinates: jax.Array  # J U, (n, C, R)
    outside: jax.Array | None  # R R^T, (n, C, C)
    eigenvalues: jax.Array
    per_example: ClassVar[tuple[str, ...]] = ("coordinates", "outside")

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        scaled = self.coordinates / (c * self.eigenvalues + prior)
        inside = jnp.einsum("ncr,ndr->ncd", scaled, self.coordinates)
        return inside if self.outside is None else inside + self.outside / prior

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C)."""
        inside = jnp.square(self.coordinates) @ (1 / (c * self.eigenvalues + prior))
        if self.outside is None:
            return inside
        return inside + diagonal(self.outside) / prior


@pytree
class IsotropicLowRank(Precision):
    """U diag(c S) U^T + tau I: every power of it is elementwise in the basis."""

    basis: jax.Array
    eigenvalues: jax.Array
    prior: jax.Array
    dense_scale: bool = static(default=False)
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """P."""
        return self.basis.shape[-2]

    @property
    def width(self) -> int:
        """R."""
        return self.basis.shape[-1]

    def _apply(self, fn: Callable[[jax.Array], jax.Array], v: jax.Array) -> jax.Array:
        """fn(Lambda) v = U fn(c S + tau) U^T v + fn(tau) (v - U U^T v).

        The difference fn(c S + tau) - fn(tau) would save a product, and cancel for a weak prior.
        """
        coordinates = t_mv(self.basis, v)
        inside = self.basis @ columns(fn(self.eigenvalues + self.prior), coordinates)
        if self.basis.shape[-1] == self.size:  # nothing lies outside
            return inside
        return inside + fn(self.prior) * (v - self.basis @ coordinates)

    def mv(self, v: jax.Array) -> jax.Array:
        """Lambda v."""
        return self._apply(lambda s: s, v)

    def solve(self, v: jax.Array) -> jax.Array:
        """Lambda^-1 v."""
        return self._apply(lambda s: 1 / s, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """Lambda^-1/2 v."""
        return self._apply(jax.lax.rsqrt, v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> jax.Array:
        """1/tau outside the basis, 1/(c S + tau) inside."""
        squares = jnp.square(self.basis)
        inside = squares @ (1 / (self.eigenvalues + self.prior))
        if self.basis.shape[-1] == self.size:
            return inside
        return inside + jnp.maximum(1 - jnp.sum(squares, axis=-1), 0) / self.prior

    def covariance(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Through the basis: J U is narrower than J."""
        return self._projection(jacobian).covariance(jnp.ones_like(self.prior), self.prior)

    def marginal(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Through the basis."""
        return self._projection(jacobian).marginal(jnp.ones_like(self.prior), self.prior)

    def _projection(self, jacobian: jax.Array | Jacobian) -> "SpectralProjection":
        return LowRank(self.basis, self.eigenvalues).project(jacobian)

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c S / tau): P, not R, copies of log tau belong to the prior."""
        return jnp.sum(jnp.log1p(self.eigenvalues / self.prior))

    @property
    def scale(self) -> "jax.Array | IsotropicLowRank":
        """A map, or the (P, P) array for a full curvature."""
        return self.scale_mv(_eye(self)) if self.dense_scale else self


@pytree
class GeneralLowRank(Precision):
    """T^1/2 (I + V V^T) T^1/2 with V = T^-1/2 U (c S)^1/2, and I + V^T V = C C^T.

    The root of the inverse needs no eigendecomposition (whose gradient fails on equal
    eigenvalues): with B = C^-T (C + I)^-1, (I - V B V^T)(I - V B V^T)^T = (I + V V^T)^-1.
    """

    white: jax.Array
    cholesky: jax.Array
    prior: jax.Array
    dense_scale: bool = static(default=False)

    @property
    def size(self) -> int:
        """P."""
        return self.white.shape[-2]

    @property
    def _root(self) -> jax.Array:
        return jnp.sqrt(self.prior)

    @property
    def _shifted(self) -> jax.Array:
        return self.cholesky + jnp.eye(self.cholesky.shape[-1], dtype=self.cholesky.dtype)

    def mv(self, v: jax.Array) -> jax.Array:
        """T v + T^1/2 V V^T T^1/2 v."""
        u = columns(self._root, v)
        return columns(self._root, u + self.white @ t_mv(self.white, u))

    def solve(self, v: jax.Array) -> jax.Array:
        """Woodbury."""
        u = columns(1 / self._root, v)
        inner = cho_solve(self.cholesky, t_mv(self.white, u))
        return columns(1 / self._root, u - self.white @ inner)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """T^-1/2 (v - V B V^T v)."""
        inner = solve_triangular(self._shifted, t_mv(self.white, v))
        inner = solve_triangular(self.cholesky, inner, trans=True)
        return columns(1 / self._root, v - self.white @ inner)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """(I - V B^T V^T) T^-1/2 v."""
        u = columns(1 / self._root, v)
        inner = solve_triangular(self.cholesky, t_mv(self.white, u))
        inner = solve_triangular(self._shifted, inner, trans=True)
        return u - self.white @ inner

    def variance(self) -> jax.Array:
        """(1 - |row of V C^-T|^2) / t."""
        half = solve_triangular(self.cholesky, self.white.T)
        return (1 - jnp.sum(jnp.square(half), axis=0)) / self.prior

    def logdet_ratio(self) -> jax.Array:
        """log det (I + V^T V)."""
        return 2 * jnp.sum(jnp.log(diagonal(self.cholesky)))

    @property
    def scale(self) -> "jax.Array | GeneralLowRank":
        """A map, or the (P, P) array for a full curvature."""
        return self.scale_mv(_eye(self)) if self.dense_scale else self


def _eye(precision: Precision) -> jax.Array:
    return jnp.eye(precision.size, dtype=precision.prior.dtype)
