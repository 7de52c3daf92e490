"""Leading eigenpairs by Lanczos with full re-orthogonalisation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import whole_number
from .._data import progress_bar
from .._linalg import eigh
from .._tree import is_concrete
from ..curvature import CurvatureOperator
from ..structures import LowRank, Structure
from ._base import (
    CONVERGED,
    Diagnostics,
    Estimator,
    settle_negative,
    told_from_zero,
    warn_of_residuals,
)
from ._rows import BROKEN, MOST, combine_rows, tridiagonalise_rows

LARGE_BASIS = 2**28  # bytes; beyond them rows are kept one by one

# A product is cheap up to this many parameters, or bytes of activations, times examples: some
# milliseconds. Three times the rank, and never fewer than 20 more, converges on what was tried.
CHEAP = 2**22
GENEROUS = 3
MORE = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Lanczos(Estimator):
    """`"lanczos"`: the leading `rank` Ritz pairs.

    `num_products` is how many products with the curvature find them. By default they are a tenth
    more than the rank; where a product is cheap (parameters times examples up to 4 million),
    three times the rank, and 20 more at least: the last pairs are the last to converge.

    A pair (u, s) is kept when its residual |G u - s u| is at most `tol * s`; the default keeps
    whatever can be told from zero. Dropped pairs have eigenvalue zero, and the residuals of all
    are in the diagnostics. A warning says how many kept pairs have residuals above s / 4: raise
    `num_products`, or drop them with a smaller `tol`. `key` seeds the start vector.
    """

    rank: int = 20
    num_products: int | None = None
    tol: float = 1.0
    key: jax.Array | None = None

    def __post_init__(self) -> None:
        check_rank(self.rank)
        if self.num_products and whole_number(self.num_products, "num_products") < self.rank:
            raise ValueError(
                f"num_products ({self.num_products}) must not be smaller than rank ({self.rank})"
            )

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Products driven from Python, so that any data source serves."""
        size = operator.size
        products = self.num_products or self._default_products(operator)
        steps, rank = min(products, size), min(self.rank, size)
        key = jax.random.key(0) if self.key is None else self.key
        start = random_direction(key, size, operator.space.dtype)
        operator = operator.linearised()
        combine, alpha, beta = _run(operator, start, steps)
        values, weights, residuals = _ritz(alpha, beta, rank)
        values = settle_negative(values, operator)
        kept = ~(residuals > self.tol * values) & told_from_zero(values)  # NaN is kept, and shows
        cure = (
            f"Raise num_products ({steps} now), for example to {GENEROUS * max(steps, rank)}, or "
            f"drop such pairs with tol={CONVERGED} (tol={self.tol:g} now)"
        )
        warn_of_residuals(values, residuals, kept, cure)
        diagnostics = {"residuals": residuals, "kept": kept, "num_products": steps}
        return LowRank(*combine(weights, values, kept)), diagnostics

    def _default_products(self, operator: CurvatureOperator) -> int:
        examples = operator.num_examples
        wide = max(operator.size, operator.cost.activation_bytes)
        if examples is not None and wide * examples <= CHEAP:
            return max(GENEROUS * self.rank, self.rank + MORE)
        return self.rank + max(2, self.rank // 10)


def _run(operator: CurvatureOperator, start: jax.Array, steps: int) -> tuple[Any, Any, Any]:
    """What makes pairs of (weights in the basis, values, kept); diagonal and off-diagonal."""
    known = is_concrete(start, operator.local, operator.data)
    if known and steps * start.nbytes > LARGE_BASIS:
        rows, alpha, beta = tridiagonalise_rows(operator, start, steps)
        return functools.partial(combine_rows, rows), alpha, beta
    state = tridiagonalise(operator.mm, start, steps, start, operator.progress)
    return functools.partial(_combine, state[0]), *state[1:]


# Every operation outside of a compiled function is compiled on its own, at the first call.
@functools.partial(jax.jit, static_argnums=(1, 2))
def random_direction(key: jax.Array, size: int, dtype: Any) -> jax.Array:
    """A Gaussian vector."""
    return jax.random.normal(key, (size,), dtype)


def check_rank(rank: int) -> None:
    """A rank counts eigenpairs."""
    whole_number(rank, "rank")


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
    broken = norm <= BROKEN * jnp.finfo(w.dtype).eps * scale
    beta = beta.at[k].set(jnp.where(broken, 0, norm))
    w = jax.lax.cond(broken, lambda: project_out(basis, jnp.roll(spare, k + 1)), lambda: w)
    return (basis, alpha, beta), (w / jnp.linalg.norm(w))[None]


_step_in_place = jax.jit(_step, donate_argnums=(0, 2))  # a batch has no place in what is not one


def project_out(basis: jax.Array, w: jax.Array) -> jax.Array:
    """What of w is orthogonal to the rows of the basis.

    Two passes are enough, and one where little was taken away: each reads all of the basis.
    """

    def once(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, left = state
        rest = w - (basis @ w) @ basis
        little = jnp.linalg.norm(rest) > MOST * jnp.linalg.norm(w)
        return rest, jnp.where(little, 0, left - 1)

    out: jax.Array = jax.lax.while_loop(
        lambda state: state[1] > 0, once, (w, jnp.asarray(2, jnp.int32))
    )[0]
    return out


def _ritz(alpha: Any, beta: Any, rank: int) -> tuple[Any, Any, Any]:
    """Leading Ritz values, largest first, their weights in the basis, residuals |beta_m s_m|.

    On the host where that is possible: nothing is compiled, and NumPy decomposes in float64.
    """
    xp, decompose = (np, np.linalg.eigh) if is_concrete(alpha, beta) else (jnp, eigh)
    alpha, beta = xp.asarray(alpha), xp.asarray(beta)
    if xp is np and not np.isfinite([alpha, beta]).all():  # LAPACK would not say why
        nothing = np.full((alpha.size, rank), np.nan, alpha.dtype)
        return nothing[0], nothing, nothing[0]
    off = xp.diag(beta[:-1], 1)
    values, vectors = decompose(xp.diag(alpha) + off + off.T)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    return values, vectors, abs(beta[-1] * vectors[-1])


@jax.jit
def _combine(
    basis: jax.Array, weights: jax.Array, values: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ritz vectors as columns, and their values; a pair that is not kept has the value zero."""
    return basis.T @ weights, jnp.where(kept, values, 0)
