"""Lanczos for vectors beyond every cache.

Memory that is touched for the first time costs as much as several readings of it, so that hardly
anything of a vector's size is made but the basis. Each row of the basis is a list of arrays of its
own, the parameters' leaves where these are large, and no row is read before it exists. Python
decides between steps, which takes no time beside them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import progress_bar
from .._space import ParamSpace
from .linalg import BREAKDOWN_EPS, REORTHOGONALISE_BELOW
from .vectors import dot

GROUP = 4  # rows that share a reading of the vector; one program for every number up to it
CHUNK = 2**16  # entries of all rows that are combined at once

LARGE_LEAF = 2**20  # entries; every leaf of a row is a kernel to compile in every program

Row = list[jax.Array]  # (1, *shape) each, or one (1, P)


def tridiagonalise_rows(
    product: Callable[[Any], Any],
    start: jax.Array,
    steps: int,
    space: ParamSpace,
    progress: bool | None,
) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """As `tridiagonalise`, with the rows of Q^T in a list."""
    leaves = space.is_all_leaves and space.size >= LARGE_LEAF * len(space.shapes)

    def image(row: Row) -> Row:
        return product(row) if leaves else [product(row[0])]

    def direction(k: int) -> Row:
        return _as_row(jnp.roll(start, k) if k else start, space, leaves)

    return _tridiagonalise(image, direction, steps, start.dtype, progress)


def tridiagonalise_leaves(
    product: Callable[[Row], Row],
    key: jax.Array,
    steps: int,
    space: ParamSpace,
    progress: bool | None,
) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """The same for leaves that devices divide; random numbers are drawn where the leaf lies."""

    def direction(k: int) -> Row:
        return _random_row(jax.random.fold_in(key, k), space)

    return _tridiagonalise(product, direction, steps, space.dtype, progress)


def _tridiagonalise(
    product: Callable[[Row], Row],
    direction: Callable[[int], Row],
    steps: int,
    dtype: np.dtype,
    progress: bool | None,
) -> tuple[list[Row], np.ndarray, np.ndarray]:
    """`direction(k)` is random: the start, and where row k ends an invariant subspace."""
    rows: list[Row] = []
    alpha, beta = np.zeros((2, steps), dtype)
    tiny = BREAKDOWN_EPS * jnp.finfo(dtype).eps
    w = direction(0)
    row = _unit(w, _norm(w))
    for k in progress_bar(range(steps), steps, "lanczos", progress):
        rows.append(row)
        last = max(k - 1, 0)  # for the first row itself, whose beta is still zero
        image = product(row)
        w, alpha[k] = _recur(image, row, rows[last], beta[last])
        w, norm = _project_out(rows, w)
        if norm > tiny * max(abs(alpha).max(), beta.max()):
            beta[k] = norm
        elif k < steps - 1:
            w, norm = _project_out(rows, direction(k + 1))
        row = _unit(w, norm)
    return rows, alpha, beta


@jax.jit
def combine_rows(
    rows: list[Row], weights: jax.Array, values: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ritz vectors as columns, and their values; a pair that is not kept has the value zero."""
    out, start = jnp.zeros((sum(q.size for q in rows[0]), weights.shape[1]), weights.dtype), 0
    for parts in zip(*rows, strict=True):
        out = _write(out, [part.reshape(1, -1) for part in parts], weights, start)
        start += parts[0].size
    return out, jnp.where(kept, values, 0)


@jax.jit
def combine_leaves(
    rows: list[Row], weights: jax.Array, values: jax.Array, kept: jax.Array
) -> tuple[Row, jax.Array]:
    """As `combine_rows`, leaf by leaf: (*leaf shape, r) each."""
    parts = [jnp.concatenate(column) for column in zip(*rows, strict=True)]
    basis = [jnp.tensordot(part, weights, axes=(0, 0)) for part in parts]
    return basis, jnp.where(kept, values, 0)


@functools.partial(jax.jit, static_argnums=1)
def _random_row(key: jax.Array, space: ParamSpace) -> Row:
    return [leaf[None] for leaf in space.normal(key, by_leaf=True)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _as_row(flat: jax.Array, space: ParamSpace, leaves: bool) -> Row:
    row = flat[None]
    return jax.tree.leaves(space.unflatten(row)) if leaves else [row]


def _project_out(rows: list[Row], w: Row) -> tuple[Row, Any]:
    """What of w, whose memory is used again, is orthogonal to all rows; and its norm."""
    norm = _norm(w)
    for _ in range(2):  # twice is enough, and once where little was taken away
        before = norm
        for i in range(0, len(rows), GROUP):
            w = _take_away(w, rows[i : i + GROUP])
        norm = _norm(w)
        if norm > REORTHOGONALISE_BELOW * before:
            break
    return w, norm


def _norm(w: Row) -> Any:
    return np.sqrt(np.asarray(_inner(w, w)))


@jax.jit
def _inner(v: Row, w: Row) -> jax.Array:
    return dot(v, w)


@functools.partial(jax.jit, donate_argnums=0)
def _unit(w: Row, norm: jax.Array) -> Row:
    return [part / norm for part in w]


@functools.partial(jax.jit, donate_argnums=0)
def _recur(product: Row, row: Row, last: Row, beta: jax.Array) -> tuple[Row, jax.Array]:
    alpha = _inner(row, product)
    parts = zip(product, row, last, strict=True)
    return [w - alpha * q - beta * before for w, q, before in parts], alpha


@functools.partial(jax.jit, donate_argnums=0)
def _take_away(w: Row, rows: list[Row]) -> Row:
    weights = [_inner(row, w) for row in rows]
    for weight, row in zip(weights, rows, strict=True):
        w = [part - weight * q for part, q in zip(w, row, strict=True)]
    return w


def _write(out: jax.Array, rows: Row, weights: jax.Array, start: int) -> jax.Array:
    """Rows times weights, from row `start` of `out` on."""
    size = rows[0].size
    chunk = min(CHUNK, size)

    def write(i: jax.Array, out: jax.Array) -> jax.Array:
        at = jnp.minimum(i * chunk, size - chunk)  # the last chunk overlaps the one before it
        part = [jax.lax.dynamic_slice_in_dim(row, at, chunk, axis=1) for row in rows]
        block = jnp.concatenate(part).T @ weights
        return jax.lax.dynamic_update_slice_in_dim(out, block, start + at, axis=0)

    return jax.lax.fori_loop(0, -(-size // chunk), write, out) if size else out
