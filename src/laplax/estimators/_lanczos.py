"""Leading eigenpairs by Lanczos with full re-orthogonalisation."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._data import progress_bar
from .._linalg import eigh
from ..curvature import CurvatureOperator
from ..structures import LowRank, Structure
from ._base import Diagnostics, Estimator, settle_negative


@dataclasses.dataclass(frozen=True, eq=False)
class Lanczos(Estimator):
    """`"lanczos"`: the leading `rank` Ritz pairs, from a few more products than that.

    A pair (u, s) is kept when its residual |G u - s u| is at most `tol * s`; the default keeps
    whatever can be told from zero. Dropped pairs have eigenvalue zero, and the residuals of all
    are in the diagnostics. `key` seeds the start vector.
    """

    rank: int = 20
    num_products: int | None = None
    tol: float = 1.0
    key: jax.Array | None = None

    def __post_init__(self) -> None:
        check_rank(self.rank)
        if self.num_products is not None and self.num_products < self.rank:
            raise ValueError(
                f"num_products ({self.num_products}) must not be smaller than rank ({self.rank})"
            )

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Products driven from Python, so that any data source serves."""
        size = operator.size
        products = self.num_products or self.rank + max(2, self.rank // 10)
        steps, rank = min(products, size), min(self.rank, size)
        key = jax.random.key(0) if self.key is None else self.key
        start_key = jax.random.fold_in(key, steps)
        start = jax.random.normal(start_key, (size,), operator.space.dtype)
        mv = operator.linearised().mv
        basis, alpha, beta = tridiagonalise(mv, start, steps, key, operator.progress)
        values, vectors, residuals = _ritz(basis, alpha, beta, rank)
        values = settle_negative(values, operator)
        kept = ~(residuals > self.tol * values)  # not a number is kept, so that it shows
        diagnostics = {"residuals": residuals, "kept": kept, "num_products": steps}
        return LowRank(vectors, jnp.where(kept, values, 0)), diagnostics


def check_rank(rank: int) -> None:
    """A rank counts eigenpairs."""
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}")


def tridiagonalise(
    mv: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    steps: int,
    key: jax.Array,
    progress: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """G Q = Q T + beta_m q e_m^T with Q^T Q = I: (Q^T of shape (m, P), diagonal, off-diagonal).

    After a breakdown (an invariant subspace was found, as happens when the curvature has lower
    rank) a fresh random direction goes on with off-diagonal zero, so that the basis stays
    orthonormal, no spurious pair appears and repeated eigenvalues are found.
    """
    basis = jnp.zeros((steps, start.size), start.dtype)
    basis = basis.at[0].set(start / jnp.linalg.norm(start))
    alpha, beta = jnp.zeros(steps, basis.dtype), jnp.zeros(steps, basis.dtype)
    for k in progress_bar(range(steps), steps, "lanczos", progress):
        alpha, beta, q = _orthogonalise(basis, mv(basis[k]), alpha, beta, k, key)
        if k + 1 < steps:
            basis = _set_row(basis, q, k + 1)
    return basis, alpha, beta


@jax.jit
def _orthogonalise(
    basis: jax.Array,
    w: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    k: int | jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of the basis beyond k are zero, so two plain Gram-Schmidt passes need no mask."""
    alpha = alpha.at[k].set(basis[k] @ w)
    scale = jnp.maximum(jnp.max(jnp.abs(alpha)), jnp.max(beta))
    w = project_out(basis, w)
    norm = jnp.linalg.norm(w)
    broken = norm <= 10 * jnp.finfo(w.dtype).eps * scale
    beta = beta.at[k].set(jnp.where(broken, 0, norm))
    fresh = jax.random.normal(jax.random.fold_in(key, k), w.shape, w.dtype)
    w = jax.lax.cond(broken, lambda: project_out(basis, fresh), lambda: w)
    return alpha, beta, w / jnp.linalg.norm(w)


def project_out(basis: jax.Array, w: jax.Array) -> jax.Array:
    """What of w is orthogonal to the rows of the basis; twice is enough."""
    for _ in range(2):
        w = w - (basis @ w) @ basis
    return w


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(basis: jax.Array, row: jax.Array, k: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(basis, row, k, axis=0)


@functools.partial(jax.jit, static_argnums=3)
def _ritz(
    basis: jax.Array, alpha: jax.Array, beta: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The leading Ritz pairs, largest first, with their residual norms |beta_m s_m|."""
    off = jnp.diag(beta[:-1], 1)
    values, vectors = eigh(jnp.diag(alpha) + off + off.T)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    return values, basis.T @ vectors, jnp.abs(beta[-1] * vectors[-1])
