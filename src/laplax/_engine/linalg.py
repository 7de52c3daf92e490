"""Factorisations that run one matrix at a time on a CPU when they are batched.

jaxlib 0.10 hands the matrices of a batched LAPACK call to the same threads that run the program,
and waits for them. Two such calls in one program (two chunks of predictions, two blocks of a
posterior under `vmap`) can occupy every thread with waiting: the program never ends. On two cores
that takes a second; `tests/test_linalg.py` has the program. A loop over single matrices never
waits, and costs about as much as the batched call. Other devices keep the batched call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular as lapack_solve_triangular

from .arrays import is_concrete
from .chunks import on_cpu
from .shards import Shards

HOST_SIDE = 256  # a larger matrix takes longer to decompose than the overhead of NumPy
HOST_ROWS = 1024  # fewer rows are decomposed in double precision

# Gram-Schmidt of both Lanczos: a second pass where less than this share is left of a vector's norm.
REORTHOGONALISE_BELOW = 0.7
BREAKDOWN_EPS = 10  # what is left of a product after a breakdown, in eps of the largest value


def _one_at_a_time(op: Callable[..., Any]) -> Any:
    """`op` of single matrices whose `vmap` is a loop on a CPU."""
    call = custom_vmap(op)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *args: jax.Array) -> tuple[Any, Any]:
        def loop(*args: jax.Array) -> Any:
            def one(batched: Sequence[jax.Array]) -> Any:
                rest = iter(batched)
                return call(
                    *(next(rest) if b else x for x, b in zip(args, in_batched, strict=True))
                )

            return jax.lax.map(one, [x for x, b in zip(args, in_batched, strict=True) if b])

        together = jax.vmap(op, [0 if b else None for b in in_batched], axis_size=axis_size)
        out = jax.lax.platform_dependent(*args, cpu=loop, default=together)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _over_leading_axes(op: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`op` of a matrix, for arrays with batch axes in front."""

    def batched(a: jax.Array) -> Any:
        if a.ndim == 2:
            return op(a)
        if a.shape[0] == 1:  # no loop to compile
            return jax.tree.map(lambda x: x[None], batched(a[0]))
        return jax.vmap(batched)(a)

    return batched


_eigh = _one_at_a_time(lambda a: tuple(jnp.linalg.eigh(a)))
_cholesky = _one_at_a_time(jnp.linalg.cholesky)


@jax.custom_jvp
def _eigh_of_matrix(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = _eigh(a)
    return values, vectors


@_eigh_of_matrix.defjvp
def _eigh_jvp(primals: Any, tangents: Any) -> Any:
    values, vectors = _eigh_of_matrix(primals[0])
    inner = vectors.T @ ((tangents[0] + tangents[0].T) / 2) @ vectors
    gap = values[None, :] - values[:, None] + jnp.eye(values.size, dtype=values.dtype)
    turn = inner / gap * (1 - jnp.eye(values.size, dtype=values.dtype))
    return (values, vectors), (diagonal(inner), vectors @ turn)


@jax.custom_jvp
def _cholesky_of_matrix(a: jax.Array) -> jax.Array:
    factor: jax.Array = _cholesky(a)
    return factor


@_cholesky_of_matrix.defjvp
def _cholesky_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # L^-1 dA L^-T = L^-1 dL + (L^-1 dL)^T, and L^-1 dL is lower triangular.
    factor = _cholesky_of_matrix(primals[0])
    half = solve_triangular(factor, (tangents[0] + tangents[0].T) / 2)
    inner = solve_triangular(factor, half.T)
    lower = jnp.tril(inner) - jnp.diag(diagonal(inner)) / 2
    return factor, factor @ lower


_qr = _one_at_a_time(lambda a: tuple(jnp.linalg.qr(a)))


@jax.custom_jvp
def _qr_of_matrix(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, r = _qr(a)
    return q, r


@_qr_of_matrix.defjvp
def _qr_jvp(primals: Any, tangents: Any) -> Any:
    # Q^T dQ is skew and dR R^-1 upper triangular, and the two add up to Q^T dA R^-1.
    q, r = _qr_of_matrix(primals[0])
    turned = solve_triangular(r.T, tangents[0].T).T
    inner = q.T @ turned
    lower = jnp.tril(inner, -1)
    upper = inner - (lower - lower.T)
    return (q, r), (turned - q @ upper, upper @ r)


def _make_solve(trans: int) -> Any:
    def op(factor: jax.Array, b: jax.Array) -> jax.Array:
        return lapack_solve_triangular(factor, b, lower=True, trans=trans)

    looped = _one_at_a_time(op)
    solve = custom_vmap(op)

    @solve.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], factor: Any, b: Any) -> tuple[Any, bool]:
        if in_batched[0]:
            return jax.vmap(looped, [0 if x else None for x in in_batched])(factor, b), True
        # One factor for all: more columns, not more solves.
        columns = jnp.moveaxis(b, 0, -1).reshape(b.shape[1], -1)
        out = solve(factor, columns).reshape(*b.shape[1:], axis_size)
        return jnp.moveaxis(out, -1, 0), True

    return solve


_solves = {trans: _make_solve(trans) for trans in (0, 1)}


def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices."""
    values, vectors = _over_leading_axes(_eigh_of_matrix)(a)
    return values, vectors


def eigh_all(
    matrices: list[jax.Array], shards: Shards | None = None
) -> list[tuple[jax.Array, jax.Array]]:
    """`eigh` of every matrix or stack, in one compiled call or, if one is large, on the host.

    Where there are several devices, each decomposes its share of the list.
    """
    if not matrices:
        return []
    if shards is not None and len(matrices) > 1:
        return _eigh_spread(matrices, shards)
    large = max(matrix.shape[-1] for matrix in matrices) > HOST_SIDE
    if not (large and on_cpu() and is_concrete(matrices)):
        return _eigh_all(matrices)
    # `jnp.asarray` would compile a program for every shape.
    return jax.device_put([eigh_on_host(matrix) for matrix in matrices])


@jax.jit
def _eigh_all(matrices: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [eigh(matrix) for matrix in matrices]


@functools.partial(jax.jit, static_argnums=1)
def _eigh_spread(matrices: list[jax.Array], shards: Shards) -> list[tuple[jax.Array, jax.Array]]:
    """Every decomposition is added to the zeros of the other devices: one reduction for all."""
    owners = _owners([x.size * x.shape[-1] for x in matrices], shards.count)

    def share(owner: int, matrices: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        zeros = [(jnp.zeros_like(x[..., 0]), jnp.zeros_like(x)) for x in matrices]
        triples = zip(owners, matrices, zeros, strict=True)
        return [eigh(matrix) if mine == owner else zero for mine, matrix, zero in triples]

    def local(_: tuple[()], matrices: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        # The branch after the last owner's has nothing to do.
        branches = [functools.partial(share, owner) for owner in range(max(owners) + 2)]
        rank = jnp.minimum(jax.lax.axis_index(shards.axes), max(owners) + 1)
        return jax.lax.psum(jax.lax.switch(rank, branches, matrices), shards.axes)

    decompositions: list[tuple[jax.Array, jax.Array]] = shards.run(local, (), matrices, apart=False)
    return decompositions


def _owners(costs: list[int], count: int) -> list[int]:
    """Which of `count` devices does which work: the largest first, to whoever has least."""
    loads = [0] * count
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def eigh_on_host(a: Any) -> tuple[np.ndarray, np.ndarray]:
    """`eigh` of matrices by NumPy's LAPACK: nothing is compiled, and each has all cores."""
    matrices = np.asarray(a)
    if not np.isfinite(matrices).all():  # LAPACK would not say why
        return np.full(matrices.shape[:-1], np.nan, a.dtype), np.full_like(matrices, np.nan)
    values, vectors = np.linalg.eigh(matrices)
    return values, vectors


def tridiagonal_eigh(diagonal: Any, off_diagonal: Any) -> tuple[Any, Any]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric tridiagonal matrix.

    On the host where that is possible: nothing is compiled.
    """
    if not is_concrete(diagonal, off_diagonal):
        off = jnp.diag(off_diagonal, 1)
        return eigh(jnp.diag(diagonal) + off + off.T)
    above = np.diag(np.asarray(off_diagonal), 1)
    return eigh_on_host(np.diag(np.asarray(diagonal)) + above + above.T)


def eigenpairs_of_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors (P, r) and eigenvalues of R^T R for few rows R, the largest first.

    Directions of round-off are left out where values are known.
    """
    if not is_concrete(rows):
        return _eigenpairs(rows)
    if on_cpu() and rows.shape[0] <= HOST_ROWS and rows.dtype == np.float32:
        return _eigenpairs_on_host(np.asarray(rows))
    basis, values = _eigenpairs(rows)
    return _leading(basis, values, numerical_rank(np.sqrt(values)))


@jax.jit
def _eigenpairs(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A QR keeps the basis orthonormal where R^T R W / sqrt(s) would not."""
    q, t = jnp.linalg.qr(rows.T)
    w, s, _ = jnp.linalg.svd(t)
    return q @ w, jnp.square(s)


@functools.partial(jax.jit, static_argnums=2)
def _leading(basis: jax.Array, values: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    return basis[:, :rank], values[:rank]


def _eigenpairs_on_host(rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The same by R R^T in double precision, which loses nothing that float32 rows have.

    A QR of few columns instead of all: half of the time of `_eigenpairs`.
    """
    if not np.isfinite(rows).all():  # LAPACK raises where NaN should be seen
        nan = np.full((rows.shape[1], min(rows.shape)), np.nan, rows.dtype)
        return jax.device_put(nan), jax.device_put(nan[0])
    wide = rows.astype(np.float64)
    values, vectors = np.linalg.eigh(wide @ wide.T)
    rank = numerical_rank(np.sqrt(np.maximum(values, 0)).astype(rows.dtype))
    q, t = np.linalg.qr(wide.T @ vectors[:, ::-1][:, :rank])
    w, s, _ = np.linalg.svd(t)
    with np.errstate(over="ignore"):  # infinity is refused with its cause, later
        basis = (q @ w).astype(rows.dtype)
        values = np.square(s).astype(rows.dtype)
    return jax.device_put(basis), jax.device_put(values)


RANK_STEP = 8  # ranks are rounded up to it, so that fewer programs serve


def numerical_rank(values: np.ndarray, noise: float = 1.0) -> int:
    """How many values are more than round-off of the largest, `noise` times eps; rounded up.

    A direction of round-off has no curvature and no direction. Data of low dimension leave few
    others: everything that goes through the basis is that much faster. NaN counts, so that it is
    seen later.
    """
    least = noise * np.finfo(values.dtype).eps * values.max()
    count = int(np.sum(~(values <= least)))
    return min(-(-max(count, 1) // RANK_STEP) * RANK_STEP, values.size)


def cholesky(a: jax.Array) -> jax.Array:
    """Lower Cholesky factors; NaN where a matrix is not positive definite."""
    factor: jax.Array = _over_leading_axes(_cholesky_of_matrix)(a)
    return factor


def semidefinite_cholesky(a: jax.Array, computed_from: jax.Array) -> jax.Array:
    """Lower-triangular L with L L^T = a, for a positive semi-definite matrix (d, d).

    A pivot that is round-off, or below zero, has a column of zeros: L exists for singular
    matrices without a jitter, and its derivatives are finite. Columns are computed one by one
    without LAPACK, which makes a batch of small matrices fast.

    Args:
        a: The matrix.
        computed_from: The size of the numbers that `a` was computed from: their round-off is in it.
    """
    size = a.shape[-1]
    index = jnp.arange(size)
    round_off = 4 * float(jnp.finfo(a.dtype).eps)
    floor = round_off * (size * diagonal(a) + computed_from)

    def column(rest: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        entries = jax.lax.dynamic_index_in_dim(rest, j, axis=-1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(entries, j, keepdims=False)
        least = jax.lax.dynamic_index_in_dim(floor, j, keepdims=False)
        sound = pivot > jnp.maximum(least, 0)
        below = jnp.where(sound & (index >= j), entries, 0)
        factor = below * jax.lax.rsqrt(jnp.where(sound, pivot, 1))
        return rest - factor[:, None] * factor[None, :], factor

    _, columns = jax.lax.scan(column, a, index)
    return columns.T


def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Orthonormal columns Q and upper triangular R of tall matrices with full column rank."""
    q, r = _over_leading_axes(_qr_of_matrix)(a)
    return q, r


def solve_triangular(factor: jax.Array, b: jax.Array, *, trans: bool = False) -> jax.Array:
    """C^-1 b, or C^-T b, for one lower triangular C and a vector or columns b."""
    if b.ndim == 1:
        return solve_triangular(factor, b[:, None], trans=trans)[:, 0]
    lower = jnp.tril(factor)
    matrix = lower.T if trans else lower
    out: jax.Array = jax.lax.custom_linear_solve(
        lambda x: matrix @ x,
        b,
        solve=lambda _, y: _solves[int(trans)](factor, y),
        transpose_solve=lambda _, y: _solves[1 - int(trans)](factor, y),
    )
    return out


def cho_solve(factor: jax.Array, b: jax.Array) -> jax.Array:
    """(C C^T)^-1 b for one lower triangular C."""
    return solve_triangular(factor, solve_triangular(factor, b), trans=True)


def diagonal(matrices: jax.Array) -> jax.Array:
    """The diagonals of square matrices on the last two axes: a strided slice, not a gather."""
    size = matrices.shape[-1]
    return matrices.reshape(*matrices.shape[:-2], size * size)[..., :: size + 1]


def positions(x: jax.Array, axis: int) -> jax.Array:
    """The place of every entry along an axis, an integer array of the shape of x."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)


def entry_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[..., index] along the last axis, one index for each; NaN where there is no such entry.

    By comparison and a sum: XLA's CPU backend can end the process where it fuses a gather into a
    selection (jaxlib 0.10 on AVX-512), and the derivative needs no scatter.
    """
    at = positions(x, -1) == index[..., None].astype(jnp.int32)
    value = jnp.sum(jnp.where(at, x, 0), axis=-1)
    return jnp.where(jnp.any(at, axis=-1), value, jnp.nan)
