"""K(C, C) as a product with vectors, and its Lanczos decomposition."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._engine.chunks import Work, cut
from .._engine.lanczos import random_direction, tridiagonalise
from .._engine.linalg import eigh
from .._engine.loops import map_over
from .._tree import PyTree
from ._kernels import KernelFn, gram
from ._prior import Component


class KernelMatrix:
    """v -> K(x, x) v. The matrix is kept if it fits the budget, else computed block by block."""

    def __init__(self, kernel: KernelFn, x: PyTree, dtype: Any, memory_budget: int) -> None:
        self.kernel = kernel
        self.x = x
        count = jax.tree.leaves(x)[0].shape[0]
        row = count * jnp.dtype(dtype).itemsize
        self.matrix = _gram(kernel, x) if count * row <= memory_budget else None
        self.chunks = cut(Work(4 * row), count, memory_budget)  # a row, its distances, copies

    def mv(self, v: jax.Array) -> jax.Array:
        """The kernel matrix times a vector: `K v`."""
        if self.matrix is not None:
            return _dense_product(self.matrix, v)
        return map_over(_row_products, self.x, self.chunks, self.kernel, self.x, v)


_gram = jax.jit(gram)
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

    def rest(self, g: jax.Array) -> jax.Array:
        """What of g (n, k) lies outside of Q."""
        return g - self.vectors @ (self.vectors.T @ g)

    def squared_norm(self, g: jax.Array) -> jax.Array:
        """The squared norm of g under the kernel: `g^T K^-1 g`."""
        inside = jnp.square(self.vectors.T @ g) / self.values
        return jnp.sum(inside) + jnp.sum(jnp.square(self.rest(g[:, None]))) / self.floor


def decompose(
    component: Component,
    matrix: KernelMatrix,
    diagonal: jax.Array,
    noise: jax.Array,
    start: jax.Array,
    rank: int,
    key: jax.Array,
    progress: bool | None,
) -> Decomposition:
    """`rank` products of Lanczos from `start`.

    It goes on where the kernel is exhausted: those directions have the variance of the jitter, and
    the network needs them to undo what its Jacobian adds to the smooth ones. What lies outside
    keeps its mean eigenvalue, so that it counts as a prior, not as freedom.
    """
    scale = component.scale.astype(start.dtype)

    def product(rows: jax.Array) -> jax.Array:
        return (scale * matrix.mv(rows[0]) + noise * rows[0])[None]

    spare = random_direction(key, start.size, start.dtype)
    basis, alpha, beta = tridiagonalise(product, start, rank, spare, progress)
    off = jnp.diag(beta[:-1], 1)
    values, turn = eigh(jnp.diag(alpha) + off + off.T)
    total = scale * jnp.sum(diagonal) + start.size * noise
    check_definite(values, noise, float(total) / start.size)
    outside = max(start.size - rank, 1)
    floor = jnp.maximum((total - jnp.sum(alpha)) / outside, noise)
    captured = 1 - outside * (floor - noise) / total
    return Decomposition(basis.T @ turn, jnp.maximum(values, noise), floor, captured)


def check_definite(values: jax.Array, noise: jax.Array, mean: float) -> None:
    """Ritz values of K + noise I show a negative eigenvalue of K."""
    smallest, level = float(values[0]), float(noise)
    if smallest > 0:
        return
    raise ValueError(
        f"the kernel is not positive definite on the context points: smallest eigenvalue "
        f"{smallest - level:.3g}, mean variance {mean - level:.3g}. A jitter of at least "
        f"{2 * (level - smallest) / (mean - level):.1e} would mend it: GPPrior(kernel, jitter=...)"
    )
