"""Lanczos with full re-orthogonalisation, for vectors of every size."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._data import progress_bar
from .._space import ParamSpace
from .arrays import is_concrete
from .lanczos_large import (
    combine_leaves,
    combine_rows,
    tridiagonalise_leaves,
    tridiagonalise_rows,
)
from .linalg import BREAKDOWN_EPS, REORTHOGONALISE_BELOW, tridiagonal_eigh

LARGE_BASIS = 2**28  # bytes; beyond them rows are kept one by one


class Krylov(NamedTuple):
    """An orthonormal basis Q, and T = Q^T G Q by its diagonal and off-diagonal."""

    combine: Callable[..., tuple[jax.Array, jax.Array]]  # (weights in Q, values, kept) to pairs
    alpha: Any
    beta: Any

    def ritz_pairs(self, rank: int) -> tuple[Any, Any, Any]:
        """Leading Ritz values, largest first, their weights in Q, residuals |beta_m s_m|."""
        values, vectors = tridiagonal_eigh(self.alpha, self.beta[:-1])
        weights = vectors[:, ::-1][:, :rank]
        return values[::-1][:rank], weights, abs(self.beta[-1] * weights[-1])


def krylov_space(
    product: Callable[[Any], Any],
    start: jax.Array,
    steps: int,
    space: ParamSpace,
    progress: bool | None,
    reads: Any = None,
) -> Krylov:
    """`steps` products of Lanczos, driven from Python, so that any data source serves.

    `product` multiplies rows (1, P), or lists of leaves (1, *shape).
    `reads` is what it reads: Python can decide between steps unless that is traced.
    """
    if is_concrete(start, reads) and steps * start.nbytes > LARGE_BASIS:
        rows, *tridiagonal = tridiagonalise_rows(product, start, steps, space, progress)
        return Krylov(functools.partial(combine_rows, rows), *tridiagonal)
    basis, alpha, beta = tridiagonalise(product, start, steps, start, progress)
    return Krylov(functools.partial(_combine, basis), alpha, beta)


def krylov_by_leaf(
    product: Callable[[Any], Any],
    key: jax.Array,
    steps: int,
    space: ParamSpace,
    progress: bool | None,
) -> Krylov:
    """The same for leaves that devices divide, each of whose parts stays where it is."""
    rows, *tridiagonal = tridiagonalise_leaves(product, key, steps, space, progress)
    return Krylov(functools.partial(combine_leaves, rows), *tridiagonal)


# Every operation outside of a compiled function is compiled on its own, at the first call.
@functools.partial(jax.jit, static_argnums=(1, 2))
def random_direction(key: jax.Array, size: int, dtype: Any) -> jax.Array:
    """A Gaussian vector."""
    return jax.random.normal(key, (size,), dtype)


def tridiagonalise(
    mm: Callable[[jax.Array], jax.Array],
    start: jax.Array,
    steps: int,
    spare: jax.Array,
    progress: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """G Q = Q T + beta_m q e_m^T with Q^T Q = I: (Q^T of shape (m, P), diagonal, off-diagonal).

    `mm` multiplies rows, (1, P) to (1, P). After a breakdown (an invariant subspace was found, as
    happens when the curvature has lower rank) another direction goes on with off-diagonal zero, so
    that the basis stays orthonormal, no spurious pair appears and repeated eigenvalues are found.
    That direction is `spare`, which must be random, turned by some places: as good as a new
    one, and to draw it in every step would double the compile time.
    """
    state, row = _begin(start, steps)
    for k in progress_bar(range(steps), steps, "lanczos", progress):
        product = mm(row)
        step = _step_in_place if is_concrete(product) else _step
        state, row = step(state, row, product, k, spare)
    return state


State = tuple[jax.Array, jax.Array, jax.Array]  # basis, alpha, beta


@functools.partial(jax.jit, static_argnums=1)
def _begin(start: jax.Array, steps: int) -> tuple[State, jax.Array]:
    zeros = jnp.zeros(steps, start.dtype)
    state = (jnp.zeros((steps, start.size), start.dtype), zeros, zeros)
    return state, (start / jnp.linalg.norm(start))[None]


@jax.jit
def _step(
    state: State, row: jax.Array, product: jax.Array, k: int | jax.Array, spare: jax.Array
) -> tuple[State, jax.Array]:
    """Row k joins the basis and the next one is made. Rows beyond k are zero: no mask is needed."""
    basis, alpha, beta = state
    q, w = row[0], product[0]
    basis = basis.at[k].set(q)
    alpha = alpha.at[k].set(q @ w)
    scale = jnp.maximum(jnp.max(jnp.abs(alpha)), jnp.max(beta))
    before = jnp.maximum(k - 1, 0)  # beta of a row before the first is zero
    w = w - alpha[k] * q - jnp.where(k > 0, beta[before], 0) * basis[before]
    w = project_out(basis, w)
    norm = jnp.linalg.norm(w)
    broken = norm <= BREAKDOWN_EPS * jnp.finfo(w.dtype).eps * scale
    beta = beta.at[k].set(jnp.where(broken, 0, norm))
    w = jax.lax.cond(broken, lambda: project_out(basis, jnp.roll(spare, k + 1)), lambda: w)
    return (basis, alpha, beta), (w / jnp.linalg.norm(w))[None]


# Donation only works on concrete arrays: under vmap the product is batched and the buffer is not.
_step_in_place = jax.jit(_step, donate_argnums=(0, 2))


def project_out(basis: jax.Array, w: jax.Array) -> jax.Array:
    """What of w is orthogonal to the rows of the basis.

    Two passes are enough, and one where little was taken away: each reads all of the basis.
    """

    def once(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, left = state
        rest = w - (basis @ w) @ basis
        little = jnp.linalg.norm(rest) > REORTHOGONALISE_BELOW * jnp.linalg.norm(w)
        return rest, jnp.where(little, 0, left - 1)

    out: jax.Array = jax.lax.while_loop(
        lambda state: state[1] > 0, once, (w, jnp.asarray(2, jnp.int32))
    )[0]
    return out


@jax.jit
def _combine(
    basis: jax.Array, weights: jax.Array, values: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ritz vectors as columns, and their values; a pair that is not kept has the value zero."""
    return basis.T @ weights, jnp.where(kept, values, 0)
