"""The full curvature: one blocked GEMM over rows, or its smaller side."""

import dataclasses
import functools
import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._fold import Zeros
from .._linalg import eigh, gram
from .._machine import on_cpu
from .._tree import is_concrete
from ..curvature import CurvatureOperator, LocalCurvature
from ..structures import Dense, LowRank, Structure
from ._base import Diagnostics, Estimator, identity_blocks, numerical_rank, settle_negative
from ._layer import layer_curvature, layer_eigenpairs, the_layer

GIB = 2**30
HOST_ROWS = 1024  # fewer are decomposed in double precision


@dataclasses.dataclass(frozen=True, eq=False)
class Full(Estimator):
    """`"full"`: G exactly.

    G = R^T R over rows, so no P products are needed. With fewer rows than half the parameters
    it is kept on its smaller side (R^T = Q T, and an SVD of T), exactly and faster; for the
    parameters of one layer no rows are formed at all. `memory_share` is the share of this
    machine's memory that the work may need.
    """

    memory_share: float = 0.5
    several_passes: ClassVar[bool] = False

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Choose the side, refuse what does not fit, then one pass."""
        size = operator.size
        small = operator.has_rows and operator.num_examples is not None
        rows = operator.rows_per_example * (operator.num_examples or 0) if small else size
        self._check_memory(operator, min(rows, size))
        if not operator.has_rows:
            operator.require_passes("a dense Hessian")
            return Dense(settle_dense(dense_by_products(operator), operator)), {}
        layer = the_layer(operator)
        if 2 * rows <= size:
            if layer is not None and layer.shape[2] <= 2 * operator.rows_per_example:
                return layer_eigenpairs(operator, layer), {}
            return _smaller_side(operator, rows), {}
        if layer is not None:
            return Dense(layer_curvature(operator, layer)), {}
        return Dense(dense_curvature(operator)), {}

    def _check_memory(self, operator: CurvatureOperator, side: int) -> None:
        size, itemsize = operator.size, operator.space.dtype.itemsize
        # G, the precision and its factor: three arrays are alive while the posterior is formed.
        need, have = 3 * side * size * itemsize, self.memory_share * total_memory()
        if need > have:
            rank = int(have // (3 * size * itemsize))
            lanczos = f", curv_type='lanczos' up to rank {rank}" if rank else ""
            raise ValueError(
                f"curv_type='full' for {size:,} parameters needs {need / GIB:.1f} GiB; allowed is "
                f"{have / GIB:.1f} GiB (memory_share={self.memory_share:g} of this machine). "
                f"What fits: curv_type='diagonal' ({3 * size * itemsize / GIB:.2g} GiB){lanczos}."
            )


def total_memory() -> float:
    """Bytes of physical memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _add_gram(total: jax.Array, batch: Batch, local: LocalCurvature) -> jax.Array:
    return total + gram(local.rows(batch))


def _write_rows(buffer: jax.Array, batch: Batch, local: LocalCurvature) -> jax.Array:
    rows = local.rows(batch)
    start = batch.index[0] * (rows.shape[0] // batch.num_examples)
    return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, axis=0)


def _smaller_side(operator: CurvatureOperator, rows: int) -> LowRank:
    buffer = Zeros.of((rows, operator.size), operator.space.dtype)
    filled = operator.fold_rows(_write_rows, buffer)
    if operator.num_total_samples is not None:
        # fold_rows scales by the factor that belongs to G; rows carry its root.
        filled = filled / jnp.sqrt(jnp.asarray(operator.scale, filled.dtype))
    if not is_concrete(filled):
        return eigenpairs(filled)
    if on_cpu() and rows <= HOST_ROWS and filled.dtype == np.float32:
        return _eigenpairs_on_host(np.asarray(filled))
    pairs = eigenpairs(filled)
    return _leading(pairs, numerical_rank(np.sqrt(pairs.eigenvalues)))


def _eigenpairs_on_host(rows: np.ndarray) -> LowRank:
    """The same by R R^T in double precision, which loses nothing that float32 rows have.

    A QR of few columns instead of all: half of the time of `eigenpairs`.
    """
    wide = rows.astype(np.float64)
    values, vectors = np.linalg.eigh(wide @ wide.T)
    rank = numerical_rank(np.sqrt(np.maximum(values, 0)).astype(rows.dtype))
    q, t = np.linalg.qr(wide.T @ vectors[:, ::-1][:, :rank])
    w, s, _ = np.linalg.svd(t)
    with np.errstate(over="ignore"):  # infinity is refused with its cause, later
        basis, values = (q @ w).astype(rows.dtype), np.square(s).astype(rows.dtype)
    return LowRank(jax.device_put(basis), jax.device_put(values), dense_scale=True)


@functools.partial(jax.jit, static_argnums=1)
def _leading(pairs: LowRank, rank: int) -> LowRank:
    kept = pairs.basis[:, :rank], pairs.eigenvalues[:rank]
    return LowRank(*kept, dense_scale=pairs.dense_scale)


@jax.jit
def eigenpairs(rows: jax.Array) -> LowRank:
    """Eigenpairs of R^T R. A QR keeps the basis orthonormal where R^T R W / sqrt(s) would not."""
    q, t = jnp.linalg.qr(rows.T)
    w, s, _ = jnp.linalg.svd(t)
    return LowRank(q @ w, jnp.square(s), dense_scale=True)


def dense_curvature(operator: CurvatureOperator) -> jax.Array:
    """G as a (P, P) array: from rows if it has them, else from P products."""
    if not operator.has_rows:
        return dense_by_products(operator)
    zeros = Zeros.of((operator.size, operator.size), operator.space.dtype)
    return operator.fold_rows(_add_gram, zeros)


def dense_by_products(operator: CurvatureOperator, block: int = 64) -> jax.Array:
    """G column by column: the only way for a curvature without rows."""
    dtype = operator.space.dtype
    blocks = [operator.mm(eye) for _, eye in identity_blocks(operator.size, block, dtype)]
    matrix = jnp.concatenate(blocks)
    return 0.5 * (matrix + matrix.T)


def settle_dense(matrix: jax.Array, operator: CurvatureOperator) -> jax.Array:
    """A dense matrix with the policy for negative eigenvalues applied."""
    values, vectors = eigh(matrix)
    settled = settle_negative(values, operator)
    return jnp.where(values[0] < 0, (vectors * settled[None]) @ vectors.T, matrix)
