"""Leading eigenpairs by Lanczos with full re-orthogonalisation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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
        start = random_row(key, steps, size, operator.space.dtype)
        mm = operator.linearised().mm
        basis, alpha, beta = tridiagonalise(mm, start, steps, key, operator.progress)
        values, vectors, residuals = _ritz(basis, alpha, beta, rank)
        values, kept = _keep(settle_negative(values, operator), residuals, self.tol)
        diagnostics = {"residuals": residuals, "kept": kept, "num_products": steps}
        return LowRank(vectors, values), diagnostics


# Every operation outside of a compiled function is compiled on its own, at the first call.
@functools.partial(jax.jit, static_argnums=(2, 3))
def random_row(key: jax.Array, number: int, size: int, dtype: Any) -> jax.Array:
    """A direction for every number."""
    return jax.random.normal(jax.random.fold_in(key, number), (size,), dtype)


@jax.jit
def _keep(values: jax.Array, residuals: jax.Array, tol: float) -> tuple[jax.Array, jax.Array]:
    kept = ~(residuals > tol * values)  # not a number is kept, so that it shows
    return jnp.where(kept, values, 0), kept


def check_rank(rank: int) -> None:
    """A rank counts eigenpairs."""
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}")


def tridiagonalise(
    mm: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    steps: int,
    key: jax.Array,
    progress: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """G Q = Q T + beta_m q e_m^T with Q^T Q = I: (Q^T of shape (m, P), diagonal, off-diagonal).

    `mm` multiplies rows, (1, P) to (1, P). After a breakdown (an invariant subspace was found, as
    happens when the curvature has lower rank) another random direction goes on with off-diagonal
    zero, so that the basis stays orthonormal, no spurious pair appears and repeated eigenvalues
    are found.
    """
    state, spare = _begin(start, steps), random_row(key, steps + 1, start.size, start.dtype)
    for k in progress_bar(range(steps), steps, "lanczos", progress):
        state = _step(*state[:3], mm(state[3]), k, spare)
    return state[:3]


State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # basis, alpha, beta, the next row


@functools.partial(jax.jit, static_argnums=1)
def _begin(start: jax.Array, steps: int) -> State:
    row = start / jnp.linalg.norm(start)
    basis = jnp.zeros((steps, start.size), start.dtype).at[0].set(row)
    return basis, jnp.zeros(steps, start.dtype), jnp.zeros(steps, start.dtype), row[None]


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def _step(
    basis: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    product: jax.Array,
    k: int | jax.Array,
    spare: jax.Array,
) -> State:
    """One more row. Rows beyond k are zero, so Gram-Schmidt needs no mask."""
    w = product[0]
    alpha = alpha.at[k].set(basis[k] @ w)
    scale = jnp.maximum(jnp.max(jnp.abs(alpha)), jnp.max(beta))
    before = jnp.maximum(k - 1, 0)  # beta of a row before the first is zero
    w = w - alpha[k] * basis[k] - jnp.where(k > 0, beta[before], 0) * basis[before]
    w = project_out(basis, w)
    norm = jnp.linalg.norm(w)
    broken = norm <= 10 * jnp.finfo(w.dtype).eps * scale
    beta = beta.at[k].set(jnp.where(broken, 0, norm))
    # Turned by k places it is another direction; to draw one here would double the compile time.
    w = jax.lax.cond(broken, lambda: project_out(basis, jnp.roll(spare, k)), lambda: w)
    w = w / jnp.linalg.norm(w)
    return basis.at[k + 1].set(w, mode="drop"), alpha, beta, w[None]


def project_out(basis: jax.Array, w: jax.Array) -> jax.Array:
    """What of w is orthogonal to the rows of the basis.

    Twice is enough, and once where little was taken away: each time reads all of the basis.
    """
    once = w - (basis @ w) @ basis
    little = jnp.linalg.norm(once) > 0.7 * jnp.linalg.norm(w)
    return jax.lax.cond(little, lambda: once, lambda: once - (basis @ once) @ basis)


@functools.partial(jax.jit, static_argnums=3)
def _ritz(
    basis: jax.Array, alpha: jax.Array, beta: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The leading Ritz pairs, largest first, with their residual norms |beta_m s_m|."""
    off = jnp.diag(beta[:-1], 1)
    values, vectors = eigh(jnp.diag(alpha) + off + off.T)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    return values, basis.T @ vectors, jnp.abs(beta[-1] * vectors[-1])
