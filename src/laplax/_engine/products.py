"""Sums and products in the form that XLA runs fast.

Every function here is plain algebra; the reason for its form is beside it. Measured with jaxlib
0.10 on CPUs; `docs/performance.md` has the numbers.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._tree import PyTree
from .chunks import even_size, on_cpu

POINTS_AT_ONCE = 10  # of a search over hyperparameters
ROWS_AT_ONCE = 2**22  # entries of rows that are formed only to be summed


def batched_matmul(x: jax.Array, matrices: jax.Array) -> jax.Array:
    """x (..., b, t, i) times matrices (b, i, j), one for every group b."""
    if matrices.shape[0] == 1:  # a plain GEMM: XLA would copy transposes for a batch of one
        return x @ matrices[0]
    return jnp.einsum("...bti,bij->...btj", x, matrices)


def gram(rows: jax.Array) -> jax.Array:
    """R^T R from its upper blocks of columns: XLA has no symmetric product, which halves the work.

    Up to four blocks, each of at least 128 columns.
    """
    size = rows.shape[1]
    blocks = min(4, size // 128)
    if blocks < 2:
        return rows.T @ rows
    edges = [size * i // blocks for i in range(blocks + 1)]
    upper = [rows[:, :end].T @ rows[:, start:end] for start, end in itertools.pairwise(edges)]
    below = [
        jnp.concatenate([upper[j][start:end].T for j in range(i + 1, blocks)], axis=0)
        for i, (start, end) in enumerate(itertools.pairwise(edges[:-1]))
    ]
    columns = [jnp.concatenate([u, b]) for u, b in zip(upper, below, strict=False)]
    return jnp.concatenate([*columns, upper[-1]], axis=1)


def second_moment(x: jax.Array, axis: int) -> jax.Array:
    """Sum over all but groups b (at `axis`) and entries i of x_bi x_bj, shape (b, i, i)."""
    if x.shape[axis] == 1:  # a plain GEMM: XLA would copy a transpose for a batch of one
        rows = x.reshape(-1, x.shape[-1])
        return jax.lax.dot_general(rows, rows, (((0,), (0,)), ((), ())))[None]
    groups = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1, x.shape[-1])
    return jnp.einsum("bmi,bmj->bij", groups, groups)


def matrix_diagonal(a: jax.Array, g: jax.Array) -> jax.Array:
    """Sum over n, k of (sum_t a_nbti g_nkbto)^2, for a (n, B, T, I) and g (n, K, B, T, O)."""
    if a.shape[2] == 1:  # a weight used once by an example: one GEMM over the batch
        squares = jnp.square(a), jnp.sum(jnp.square(g), axis=1)
        if a.shape[1] == 1:  # XLA would copy a transpose for a batch of one
            left, right = (s[:, 0, 0] for s in squares)
            return jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())))[None]
        return jnp.einsum("nbti,nbto->bio", *squares)
    if not on_cpu():
        return jnp.sum(jnp.square(jnp.einsum("nbti,nkbto->nbiko", a, g)), axis=(0, 3))

    def add(total: jax.Array, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows = jnp.einsum("bti,kbto->biko", *factors)  # of one example: they stay in a cache
        return total + jnp.sum(jnp.square(rows), axis=2), None

    zeros = jnp.zeros((a.shape[1], a.shape[3], g.shape[4]), a.dtype)
    return jax.lax.scan(add, zeros, (a, g))[0]


def layer_sum(a: jax.Array, g: jax.Array) -> jax.Array:
    """Sum over n of a a^T (x) h with h = sum_k g g^T, for a (n, I) and g (n, K, O): (O, I, O, I).

    One output at a time, so that the temporaries are those of one GEMM.
    """
    h = jnp.einsum("nko,nkp->nop", g, g)

    def one_output(_: None, weights: jax.Array) -> tuple[None, jax.Array]:
        weighted = weights[:, :, None] * a[:, None, :]  # (n, O, I)
        return None, jnp.tensordot(a, weighted, axes=(0, 0))

    return jax.lax.scan(one_output, None, h.swapaxes(0, 1))[1]


def joined(parts: list[jax.Array]) -> jax.Array:
    """One vector after the other.

    Not by `concatenate`: XLA's CPU backend would compute the sums of a small leaf inside its loop,
    once per entry of all leaves, three times slower than the rest of the fit together. A barrier is
    gone before it fuses.
    """
    out = jnp.zeros(sum(part.size for part in parts), parts[0].dtype)
    start = 0
    for part in parts:
        out = jax.lax.dynamic_update_slice(out, part, (start,))
        start += part.size
    return out


def each_example(fn: Callable[[PyTree], jax.Array], examples: PyTree) -> jax.Array:
    """fn of every example: on a CPU one after the other, so that a cache holds its temporaries."""
    return jax.lax.map(fn, examples) if on_cpu() else jax.vmap(fn)(examples)


def one_by_one(fn: Callable[[PyTree], PyTree], xs: PyTree) -> PyTree:
    """fn of every x, one after the other, as each stays in a CPU's cache: twice as fast as vmap."""
    return jax.lax.map(fn, xs)


def in_groups(fn: Callable[[PyTree], PyTree], points: jax.Array) -> PyTree:
    """fn of every point, some together: more would leave a CPU's cache, fewer leave cores idle."""
    return jax.lax.map(fn, points, batch_size=min(POINTS_AT_ONCE, points.shape[0]))


def few_examples(fn: Callable[[PyTree], jax.Array], examples: PyTree, entries: int) -> jax.Array:
    """fn of every example, as many together as form `ROWS_AT_ONCE` entries."""
    count = jax.tree.leaves(examples)[0].shape[0]
    size = even_size(count, max(1, ROWS_AT_ONCE // entries))
    return jax.lax.map(fn, examples, batch_size=size)
