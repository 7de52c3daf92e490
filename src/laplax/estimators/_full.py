"""The full curvature: one blocked GEMM over rows, or its smaller side."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._data import Batch
from .._engine.chunks import total_memory
from .._engine.linalg import eigenpairs_of_rows, eigh
from .._engine.loops import map_over
from .._engine.products import gram
from .._engine.shards import everywhere
from ..curvature import CurvatureOperator, LocalCurvature
from ..structures import Dense, LowRank, Structure
from ._base import Diagnostics, Estimator, identity_blocks, settle_negative
from ._one_layer import layer_curvature, layer_eigenpairs, the_layer

GIB = 2**30


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
        countable = operator.has_rows and operator.num_examples is not None
        rows = operator.rows_per_example * (operator.num_examples or 0) if countable else size
        self._check_memory(operator, min(rows, size))
        if not operator.has_rows:
            operator.require_passes("a dense Hessian")
            return Dense(settle_dense(dense_by_products(operator), operator)), {}
        layer = the_layer(operator)
        if 2 * rows <= size:
            if layer is not None and layer.shape[2] <= 2 * operator.rows_per_example:
                return layer_eigenpairs(operator, layer), {}
            return _smaller_side(operator), {}
        if layer is not None:
            return Dense(layer_curvature(operator, layer)), {}
        return Dense(dense_curvature(operator)), {}

    def _check_memory(self, operator: CurvatureOperator, side: int) -> None:
        size = operator.size
        itemsize = operator.space.dtype.itemsize
        # G, the precision and its factor: three arrays are alive while the posterior is formed.
        need = 3 * side * size * itemsize
        have = self.memory_share * total_memory()
        if need > have:
            rank = int(have // (3 * size * itemsize))
            lanczos = f", curv_type='lanczos' up to rank {rank}" if rank else ""
            raise ValueError(
                f"curv_type='full' for {size:,} parameters needs {need / GIB:.1f} GiB; allowed is "
                f"{have / GIB:.1f} GiB (memory_share={self.memory_share:g} of this machine). "
                f"What fits: curv_type='diagonal' ({3 * size * itemsize / GIB:.2g} GiB){lanczos}."
            )


def _gram_of_batch(batch: Batch, local: LocalCurvature) -> jax.Array:
    return gram(local.rows(batch))


def _rows_of_batch(batch: Batch, local: LocalCurvature) -> jax.Array:
    return local.rows(batch)


def _smaller_side(operator: CurvatureOperator) -> LowRank:
    assert isinstance(operator.data, Batch)
    chunks = operator.chunks(operator.row_work)
    rows = map_over(_rows_of_batch, operator.data, chunks, operator.local)
    return LowRank(*eigenpairs_of_rows(everywhere(rows)), dense_scale=True)


def dense_curvature(operator: CurvatureOperator) -> jax.Array:
    """G as a (P, P) array: from rows if it has them, else from P products."""
    if not operator.has_rows:
        return dense_by_products(operator)
    total: jax.Array = operator.sum(_gram_of_batch, operator.row_work)
    return total


def dense_by_products(operator: CurvatureOperator) -> jax.Array:
    """G column by column: the only way for a curvature without rows."""
    dtype = operator.space.dtype
    blocks = [operator.mm(eye) for _, eye in identity_blocks(operator.size, dtype)]
    matrix = jnp.concatenate(blocks)
    return 0.5 * (matrix + matrix.T)


def settle_dense(matrix: jax.Array, operator: CurvatureOperator) -> jax.Array:
    """A dense matrix with the policy for negative eigenvalues applied."""
    values, vectors = eigh(matrix)
    settled = settle_negative(values, operator)
    return jnp.where(values[0] < 0, (vectors * settled[None]) @ vectors.T, matrix)
