"""K(C, C) as a product with vectors, and its Lanczos decomposition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._engine.chunks import Work, cut
from .._engine.lanczos import random_direction, tridiagonalise
from .._engine.linalg import eigh
from .._engine.loops import map_over, num_rows
from .._tree import PyTree
from ._checks import check_definite
from ._kernels import KernelFn, gram, gram_diagonal


class KernelMatrix:
    """v -> K(x, x) v. The matrix is kept if it fits the budget, else computed block by block."""

    def __init__(self, kernel: KernelFn, x: PyTree, dtype: jnp.dtype, memory_budget: int) -> None:
        self.kernel = kernel
        self.x = x
        self.trace = jnp.sum(gram_diagonal(kernel, x).astype(dtype))
        count = num_rows(x)
        row = count * dtype.itemsize
        self.matrix = gram(kernel, x) if count * row <= memory_budget else None
        self.chunks = cut(Work(4 * row), count, memory_budget)  # a row, its distances, copies

    def mv(self, v: jax.Array) -> jax.Array:
        """The kernel matrix times a vector: `K v`."""
        if self.matrix is not None:
            return _dense_product(self.matrix, v)
        return map_over(_row_products, self.x, self.chunks, self.kernel, self.x, v)


_dense_product = jax.jit(jnp.matmul)


def _row_products(part: PyTree, kernel: KernelFn, x: PyTree, v: jax.Array) -> jax.Array:
    return gram(kernel, part, x).astype(v.dtype) @ v


class Decomposition(NamedTuple):
    """K + noise I ~= Q diag(values) Q^T + floor (I - Q Q^T) for one component."""

    vectors: jax.Array  # Q, (n, r) orthonormal
    values: jax.Array  # (r,)
    floor: jax.Array
    captured: jax.Array  # the share of the prior's variance that lies in Q

    @property
    def inverse_root(self) -> jax.Array:
        """L of the paper: L L^T ~= K^-1 on the span of Q."""
        return self.vectors * jax.lax.rsqrt(self.values)[None]

    def outside(self, g: jax.Array) -> jax.Array:
        """g^T (I - Q Q^T) g / floor: what the prior says of g (n,) or (n, k) outside of Q."""
        rest = g - self.vectors @ (self.vectors.T @ g)
        return rest.T @ rest / self.floor

    def squared_norm(self, g: jax.Array) -> jax.Array:
        """The squared norm of g under the kernel: `g^T K^-1 g`."""
        return jnp.sum(jnp.square(self.vectors.T @ g) / self.values) + self.outside(g)


def decompose(
    matrix: KernelMatrix,
    scale: jax.Array,
    noise: jax.Array,
    start: jax.Array,
    rank: int,
    key: jax.Array,
    progress: bool | None,
) -> Decomposition:
    """scale K + noise I by `rank` products of Lanczos from `start`.

    It goes on where the kernel is exhausted: those directions have the variance of the jitter, and
    the network needs them to undo what its Jacobian adds to the smooth ones. What lies outside
    keeps its mean eigenvalue, so that it counts as a prior, not as freedom.
    """

    def product(rows: jax.Array) -> jax.Array:
        return (scale * matrix.mv(rows[0]) + noise * rows[0])[None]

    spare = random_direction(key, start.size, start.dtype)
    basis, alpha, beta = tridiagonalise(product, start, rank, spare, progress)
    values, turn = eigh(_tridiagonal(alpha, beta))
    total = scale * matrix.trace + start.size * noise
    level = float(noise)
    check_definite(float(values[0]) - level, float(total) / start.size - level, level)
    rest = total - jnp.sum(alpha)
    return _decomposition(basis, values, turn, rest, total, noise)


@jax.jit
def _tridiagonal(alpha: jax.Array, beta: jax.Array) -> jax.Array:
    off = jnp.diag(beta[:-1], 1)
    return jnp.diag(alpha) + off + off.T


@jax.jit
def _decomposition(
    basis: jax.Array,
    values: jax.Array,
    turn: jax.Array,
    rest: jax.Array,
    total: jax.Array,
    noise: jax.Array,
) -> Decomposition:
    """`rest` is the part of the total variance outside of the basis: spread evenly there."""
    rank, size = basis.shape
    outside = max(size - rank, 1)
    floor = jnp.maximum(rest / outside, noise)
    captured = 1 - outside * (floor - noise) / total
    return Decomposition(basis.T @ turn, jnp.maximum(values, noise), floor, captured)
