"""Leading eigenpairs by JAX's LOBPCG."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .._arguments import check_key, whole_number
from .._data import Batch, Loader
from .._engine.arrays import is_concrete
from .._engine.chunks import Chunks
from .._engine.linalg import eigh
from .._engine.loops import sum_over
from .._engine.memo import model_jit
from ..curvature import CurvatureOperator, LocalCurvature, product_of_batch
from ..structures import LowRank, Structure
from ._base import Diagnostics, Estimator, settle_negative, told_from_zero, warn_of_residuals
from ._full import dense_curvature

DENSE_BELOW = 12  # times the rank: four iterations of three blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Lobpcg(Estimator):
    """`"lobpcg"`: the leading `rank` eigenpairs by `jax.experimental.sparse.linalg`.

    JAX's routine takes fewer than P/5 eigenpairs and a product that it can trace. Where forming
    the dense matrix costs no more products than a few iterations, the pairs are taken from it
    (`num_iterations` is then 0); for the routine itself a loader is refused. `tol` is its
    relative tolerance, 10 eps if not given: below what the dtype can reach it does not stop
    and loses its basis, which is an error here.
    """

    rank: int = 20
    max_iterations: int = 100
    tol: float | None = None
    key: jax.Array | None = None

    def __post_init__(self) -> None:
        whole_number(self.rank, "rank")
        if self.key is not None:
            check_key(self.key)

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Block products inside one program."""
        rank = min(self.rank, operator.size)
        iterations: int | jax.Array = 0
        if operator.size <= DENSE_BELOW * rank:
            values, vectors = _leading(dense_curvature(operator), rank)
        else:
            values, vectors, iterations = self._iterate(operator, rank)
        rest = operator.mm(vectors.T) - values[:, None] * vectors.T
        residuals = jnp.linalg.norm(rest, axis=1)
        values = settle_negative(values, operator)
        kept = told_from_zero(values)
        cure = f"Raise max_iterations ({self.max_iterations} now), or use curv_type='lanczos'"
        warn_of_residuals(values, residuals, kept, cure)
        diagnostics = {"residuals": residuals, "kept": kept, "num_iterations": iterations}
        return LowRank(vectors, jnp.where(kept, values, 0)), diagnostics

    def _iterate(
        self, operator: CurvatureOperator, rank: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if isinstance(operator.data, Loader):
            raise ValueError(
                "curv_type='lobpcg' runs inside one compiled call and cannot drive a loader; "
                "pass arrays (input, target), or use curv_type='lanczos'"
            )
        key = jax.random.key(0) if self.key is None else self.key
        start = jax.random.normal(key, (operator.size, rank), operator.space.dtype)
        product = operator.mm(start.T)
        if is_concrete(product) and not bool(jnp.any(product)):  # it divides by the largest value
            return jnp.zeros(rank, start.dtype), jnp.linalg.qr(start)[0], jnp.zeros((), int)
        # The search space holds three blocks, so a product sees 3 * rank vectors at once.
        chunks = operator.chunks(operator.product_work(3 * rank))
        tol = 10 * float(jnp.finfo(start.dtype).eps) if self.tol is None else self.tol
        values, vectors, iterations = _lobpcg(
            operator.local, chunks, self.max_iterations, tol, operator.data, start
        )
        gram = vectors.T @ vectors - jnp.eye(rank, dtype=vectors.dtype)
        limit = float(jnp.finfo(start.dtype).eps) ** 0.5
        sound = jnp.isfinite(values).all() & (jnp.abs(gram).max() <= limit)
        if not is_concrete(sound):  # inside jit the failure travels as NaN
            return jnp.where(sound, values, jnp.nan), vectors, iterations
        if not bool(sound):
            raise ValueError(
                "JAX's LOBPCG broke down on this curvature (its eigenvalues are not finite or its "
                "basis is not orthonormal), as it does when the rank asked for exceeds the rank of "
                "the curvature, or when tol is below what the dtype can reach; use "
                "curv_type='lanczos', which does not"
            )
        return values, vectors, iterations


@functools.partial(jax.jit, static_argnums=1)
def _leading(matrix: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    values, vectors = eigh(matrix)
    return values[::-1][:rank], vectors[:, ::-1][:, :rank]


@functools.partial(model_jit, static_argnums=(1, 2, 3))
def _lobpcg(
    local: LocalCurvature,
    chunks: Chunks,
    max_iterations: int,
    tol: float,
    data: Batch,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def product(V: jax.Array) -> jax.Array:
        total: jax.Array = sum_over(product_of_batch, data, chunks, local, V.T)
        return total.T

    from jax.experimental.sparse.linalg import lobpcg_standard  # loads SciPy's sparse matrices

    return lobpcg_standard(product, start, m=max_iterations, tol=tol)
