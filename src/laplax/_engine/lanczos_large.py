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
    rows: list[Row] = []
    alpha, beta = np.zeros((2, steps), start.dtype)
    tiny = BREAKDOWN_EPS * jnp.finfo(start.dtype).eps
    leaves = space.is_all_leaves and space.size >= LARGE_LEAF * len(space.shapes)
    w = _as_row(start, space, leaves)
    row = _unit(w, _norm(w))
    for k in progress_bar(range(steps), steps, "lanczos", progress):
        rows.append(row)
        last = max(k - 1, 0)  # for the first row itself, whose beta is still zero
        image = product(row) if leaves else [product(row[0])]
        w, alpha[k] = _recur(image, row, rows[last], beta[last])
        w, norm = _project_out(rows, w)
        if norm > tiny * max(abs(alpha).max(), beta.max()):
            beta[k] = norm
        elif k < steps - 1:
            w, norm = _project_out(rows, _as_row(jnp.roll(start, k + 1), space, leaves))
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
    parts = [jnp.vdot(a, b) for a, b in zip(v, w, strict=True)]
    return sum(parts[1:], parts[0])


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
