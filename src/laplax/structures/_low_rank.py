"""The posterior precision of a low-rank curvature under one prior precision per parameter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._engine.linalg import cho_solve, cholesky, diagonal, qr, solve_triangular
from .._tree import pytree
from ._base import Precision, columns, resolves, t_mv
from ._blocks import outside_of
from ._coordinates import RowCoordinates, total
from ._jacobian import Jacobian


@pytree
class GeneralLowRank(Precision):
    """T^1/2 (I + V V^T) T^1/2 with V = T^-1/2 U B = Q K, in an orthonormal basis Q.

    I + V V^T is I + K K^T = C C^T inside of Q and I outside. Q is that of T^-1/2 U, which has full
    rank where B has not; an eigenbasis would have no gradient at equal eigenvalues.
    """

    q: jax.Array
    inner: jax.Array  # K
    cholesky: jax.Array  # of I + V^T V: the determinant needs no Q
    prior: jax.Array

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

    def diagonal(self) -> jax.Array:
        """Of I + V V^T, times T."""
        return self.prior * (1 + jnp.sum(jnp.square(self.q @ self.inner), axis=1))

    def covariance(self, J: Jacobian) -> jax.Array:
        """Inside and outside apart: their product is zero, and its round-off is not."""
        return total(RowCoordinates(half).gram() for half in self._halves(J))

    def marginal(self, J: Jacobian) -> jax.Array:
        return total(jnp.sum(jnp.square(half), axis=-1) for half in self._halves(J))

    def _halves(self, J: Jacobian) -> list[jax.Array]:
        """J T^-1/2 Q C^-T, (n, C, r), and J T^-1/2 (I - Q Q^T), (n, C, P)."""
        u = columns(1 / self._root, J.array.reshape(-1, self.size).T)
        coordinates = t_mv(self.q, u)
        halves = [solve_triangular(self._factor, coordinates)]
        if self.q.shape[-1] < self.size:
            halves.append(u - self.q @ coordinates)
        return [half.T.reshape(*J.shape, -1) for half in halves]

    def is_resolved(self) -> jax.Array:
        """By the largest diagonal entry of I + V^T V beside one, or beside the smallest pivot."""
        complete = self.q.shape[-1] == self.size
        smallest = jnp.min(jnp.square(diagonal(self.cholesky))) if complete else 1
        return resolves(jnp.max(jnp.sum(jnp.square(self.cholesky), axis=1)) / smallest)

    def logdet_ratio(self) -> jax.Array:
        """log det (I + V^T V)."""
        return 2 * jnp.sum(jnp.log(diagonal(self.cholesky)))

    def factor(self) -> tuple[jax.Array, jax.Array]:
        """U and B of U B B^T U^T = Lambda - T, U orthonormal."""
        basis, turn = qr(columns(self._root, self.q))
        return basis, turn @ self.inner


def general_low_rank(basis: jax.Array, root: jax.Array, prior: jax.Array) -> GeneralLowRank:
    """U B B^T U^T + T for one prior precision per parameter; B (r, m), or a diagonal (r,)."""
    white = basis / jnp.sqrt(prior)[:, None]
    q, r = qr(white)
    return GeneralLowRank(
        q=q,
        inner=_times(r, root),
        cholesky=_shifted_gram(_times(white, root)),
        prior=prior,
    )


def _times(matrix: jax.Array, root: jax.Array) -> jax.Array:
    return matrix * root[None] if root.ndim == 1 else matrix @ root


def _shifted_gram(x: jax.Array) -> jax.Array:
    """C with C C^T = I + X^T X."""
    return cholesky(jnp.eye(x.shape[-1], dtype=x.dtype) + x.T @ x)
