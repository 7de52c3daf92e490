"""The posterior precision of a low-rank curvature U S U^T with orthonormal U."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import cho_solve, cholesky, diagonal, qr, solve_triangular
from .._tree import pytree, static
from ._base import Precision, Projection, columns, t_mv
from ._jacobian import PLENTY, Jacobian, split, total

# Of a vector inside of U, round-off leaves eps outside, where its variance is eps^2 / tau: by more
# than this share of 1 / (c s), the variance that it has, no posterior is given.
ROUND_OFF = 1e-2


@pytree
class SpectralProjection(Projection):
    """R R^T / tau + J U [1 / (c S + tau)] U^T J^T with R = J - J U U^T, absent if U is complete."""

    coordinates: jax.Array  # J U, (n, C, R)
    outside: jax.Array | None  # R R^T, (n, C, C)
    eigenvalues: jax.Array
    per_example: ClassVar[tuple[str, ...]] = ("coordinates", "outside")

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        scaled = self.coordinates / (c * self.eigenvalues + prior)[None, None]
        inside = jnp.einsum("ncr,ndr->ncd", scaled, self.coordinates)
        return inside if self.outside is None else inside + self.outside / prior

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        inside = jnp.square(self.coordinates) @ (1 / (c * self.eigenvalues + prior))
        if self.outside is None:
            return inside
        return inside + diagonal(self.outside) / prior


def spectral_projection(
    jacobian: jax.Array | Jacobian, basis: jax.Array, eigenvalues: jax.Array
) -> SpectralProjection:
    """J U, and the rest of J, which lies outside of U."""
    return SpectralProjection(*split(jacobian, basis), eigenvalues)


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
        return self.basis.shape[-2]

    @property
    def width(self) -> int:
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
        return self._apply(lambda s: s, v)

    def solve(self, v: jax.Array) -> jax.Array:
        return self._apply(lambda s: 1 / s, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
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
        return inside + outside_of(self.basis) / self.prior

    def is_resolved(self) -> jax.Array:
        """By the largest precision beside the smallest."""
        complete = self.basis.shape[-1] == self.size
        smallest = jnp.min(self.eigenvalues) + self.prior if complete else self.prior
        return resolves(jnp.max(self.eigenvalues) / smallest)

    def covariance(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Through the basis: J U is narrower than J."""
        return self._projection(jacobian).covariance(jnp.ones_like(self.prior), self.prior)

    def marginal(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Through the basis."""
        return self._projection(jacobian).marginal(jnp.ones_like(self.prior), self.prior)

    def _projection(self, jacobian: jax.Array | Jacobian) -> SpectralProjection:
        return spectral_projection(jacobian, self.basis, self.eigenvalues)

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c S / tau): P, not R, copies of log tau belong to the prior."""
        return jnp.sum(jnp.log1p(self.eigenvalues / self.prior))

    @property
    def scale(self) -> "jax.Array | IsotropicLowRank":
        """A map, or the (P, P) array for a full curvature."""
        return self.scale_mv(_eye(self)) if self.dense_scale else self


@pytree
class GeneralLowRank(Precision):
    """T^1/2 (I + V V^T) T^1/2 with V = T^-1/2 U (c S)^1/2 = Q K, in an orthonormal basis Q.

    I + V V^T is I + K K^T = C C^T inside of Q and I outside. Q is that of T^-1/2 U, which has full
    rank where S is zero, too; an eigenbasis would have no gradient at equal eigenvalues.
    """

    q: jax.Array
    inner: jax.Array  # K
    cholesky: jax.Array  # of I + V^T V: the determinant needs no Q
    prior: jax.Array
    dense_scale: bool = static(default=False)

    @property
    def size(self) -> int:
        return self.q.shape[-2]

    @property
    def _root(self) -> jax.Array:
        return jnp.sqrt(self.prior)

    @property
    def _factor(self) -> jax.Array:
        return _shifted_gram(self.inner.T)

    def _apply(self, fn: Callable[[jax.Array], jax.Array], v: jax.Array) -> jax.Array:
        """Q fn(Q^T v) + v - Q Q^T v."""
        coordinates = t_mv(self.q, v)
        inside = self.q @ fn(coordinates)
        if self.q.shape[-1] == self.size:  # nothing lies outside
            return inside
        return inside + (v - self.q @ coordinates)

    def mv(self, v: jax.Array) -> jax.Array:
        """T v + T^1/2 V V^T T^1/2 v."""
        u = columns(self._root, v)
        inside = self.inner @ (self.inner.T @ t_mv(self.q, u))
        return columns(self._root, u + self.q @ inside)

    def solve(self, v: jax.Array) -> jax.Array:
        """T^-1/2 (Q C^-T C^-1 Q^T + I - Q Q^T) T^-1/2 v."""
        u = columns(1 / self._root, v)
        return columns(1 / self._root, self._apply(lambda x: cho_solve(self._factor, x), u))

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """T^-1/2 (Q C^-T Q^T + I - Q Q^T) v."""
        turned = self._apply(lambda x: solve_triangular(self._factor, x, trans=True), v)
        return columns(1 / self._root, turned)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """(Q C^-1 Q^T + I - Q Q^T) T^-1/2 v."""
        u = columns(1 / self._root, v)
        return self._apply(lambda x: solve_triangular(self._factor, x), u)

    def variance(self) -> jax.Array:
        """Inside of Q and outside, as for one prior."""
        inside = jnp.sum(jnp.square(solve_triangular(self._factor, self.q.T)), axis=0)
        complete = self.q.shape[-1] == self.size
        return (inside if complete else inside + outside_of(self.q)) / self.prior

    def covariance(self, jacobian: jax.Array) -> jax.Array:
        """Inside and outside apart: their product is zero, and its round-off is not."""
        return total([jnp.einsum("ncp,ndp->ncd", half, half) for half in self._halves(jacobian)])

    def marginal(self, jacobian: jax.Array) -> jax.Array:
        """The same for the diagonals."""
        return total([jnp.sum(jnp.square(half), axis=-1) for half in self._halves(jacobian)])

    def _halves(self, jacobian: jax.Array) -> list[jax.Array]:
        """J T^-1/2 Q C^-T, (n, C, R), and J T^-1/2 (I - Q Q^T), (n, C, P)."""
        u = columns(1 / self._root, jacobian.reshape(-1, self.size).T)
        coordinates = t_mv(self.q, u)
        halves = [solve_triangular(self._factor, coordinates)]
        if self.q.shape[-1] < self.size:
            halves.append(u - self.q @ coordinates)
        return [half.T.reshape(*jacobian.shape[:-1], -1) for half in halves]

    def is_resolved(self) -> jax.Array:
        """By the largest diagonal entry of I + V^T V beside one, or beside the smallest pivot."""
        complete = self.q.shape[-1] == self.size
        smallest = jnp.min(jnp.square(diagonal(self.cholesky))) if complete else 1
        return resolves(jnp.max(jnp.sum(jnp.square(self.cholesky), axis=1)) / smallest)

    def logdet_ratio(self) -> jax.Array:
        """log det (I + V^T V)."""
        return 2 * jnp.sum(jnp.log(diagonal(self.cholesky)))

    @property
    def scale(self) -> "jax.Array | GeneralLowRank":
        """A map, or the (P, P) array for a full curvature."""
        return self.scale_mv(_eye(self)) if self.dense_scale else self


def general_low_rank(
    basis: jax.Array, eigenvalues: jax.Array, c: jax.Array, prior: jax.Array, dense_scale: bool
) -> GeneralLowRank:
    """c U S U^T + T for one prior precision per parameter."""
    # Two roots, not the root of the product: its gradient in c fails where S is zero.
    roots = jnp.sqrt(c) * jnp.sqrt(eigenvalues)
    white = basis / jnp.sqrt(prior)[:, None]
    q, r = qr(white)
    return GeneralLowRank(
        q=q,
        inner=r * roots[None],
        cholesky=_shifted_gram(white * roots[None]),
        prior=prior,
        dense_scale=dense_scale,
    )


def _shifted_gram(x: jax.Array) -> jax.Array:
    """C with C C^T = I + X^T X."""
    return cholesky(jnp.eye(x.shape[-1], dtype=x.dtype) + x.T @ x)


def outside_of(basis: jax.Array) -> jax.Array:
    """|e_i - U U^T e_i|^2 of every axis, (P,): how much of it lies outside of U.

    Where that is little, 1 - |u_i|^2 would be round-off, which a weak prior divides by tau: there
    the rest itself is formed. As all |u_i|^2 add up to R, no more than about R axes are such.
    """
    inside = jnp.sum(jnp.square(basis), axis=-1)
    few = min(basis.shape[0], int(basis.shape[1] / (1 - PLENTY)) + 1)

    def formed() -> jax.Array:
        deep = jax.lax.top_k(inside, few)[1]
        rest = jax.lax.map(lambda i: jnp.sum(jnp.square((basis @ basis[i]).at[i].add(-1))), deep)
        return (1 - inside).at[deep].set(rest)

    return jax.lax.cond(jnp.all(1 - inside >= PLENTY), lambda: 1 - inside, formed)


def resolves(ratio: jax.Array) -> jax.Array:
    """Whether a largest precision of `ratio` times the smallest leaves digits of either."""
    return ratio * float(jnp.finfo(ratio.dtype).eps) ** 2 <= ROUND_OFF


def _eye(precision: Precision) -> jax.Array:
    return jnp.eye(precision.size, dtype=precision.prior.dtype)
