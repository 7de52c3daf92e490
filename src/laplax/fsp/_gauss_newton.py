"""Gauss-Newton training: the FSP objective of all data and fixed points, in tens of steps.

Whitening by a kernel matrix makes the objective stiff (condition numbers of 1e6 and more), and
first-order steps stop far above the minimum. In the objective's own curvature it is not stiff.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._data import Batch
from .._engine.linalg import cho_solve, cholesky
from .._engine.loops import num_rows
from .._engine.memo import model_jit
from .._optim import Step, stacked
from .._space import ParamSpace
from .._tree import PyTree
from ..curvature import GGN, LocalCurvature
from ._objective import FSPObjective, Parts, value_and_parts

DAMPING_DECREASE = 1 / 3  # after a step that lowered the objective
DAMPING_INCREASE = 4.0  # after one that did not
MAX_TRIES = 12
FIRST_DAMPING = 1e-3  # relative to the largest curvature of a row
ROWS_LIMIT = 4 * 2**30  # bytes


class Attempt(NamedTuple):
    """Where a step of some damping leads, and whether the objective is lower there."""

    tries: int | jax.Array
    damping: jax.Array
    params: PyTree
    parts: Parts
    lowered: jax.Array


def gauss_newton_steps(
    objective: FSPObjective, params: PyTree, batch: Batch, points: PyTree, outputs: int
) -> Iterator[Step]:
    """Levenberg-Marquardt steps and the objective after each; ends when none lowers it."""
    space = ParamSpace.of(params)
    _check_size((batch.num_examples + num_rows(points)) * outputs, space)
    damping = jnp.zeros((), space.dtype)
    while True:
        _, damping, params, parts, lowered = _step(objective, params, damping, batch, points)
        if not bool(lowered):
            return
        yield Step(params, stacked(parts), (batch, points))


def _check_size(rows: int, space: ParamSpace) -> None:
    size = rows * space.size * space.dtype.itemsize
    if size > ROWS_LIMIT:
        raise ValueError(
            f"optimizer='gauss_newton' keeps one gradient per output of every example and context "
            f"point: {rows:,} x {space.size:,} numbers, {size / 2**30:.1f} GiB, over the limit of "
            f"{ROWS_LIMIT / 2**30:.0f} GiB. Use fewer context points, or an optax optimiser with "
            "batch_size=..."
        )


@model_jit
def _step(
    objective: FSPObjective, params: PyTree, damping: jax.Array, batch: Batch, points: PyTree
) -> Attempt:
    """The first attempt that lowers the objective, the damping raised after every other one."""
    space = ParamSpace.of(params)
    slope, start = jax.grad(value_and_parts, has_aux=True)(params, objective, batch, points)
    gradient = space.flatten(slope)
    rows = _curvature_rows(objective, space, params, batch, points)
    gram = rows @ rows.T if _few(rows) else rows.T @ rows
    first = FIRST_DAMPING * jnp.max(jnp.sum(jnp.square(rows), axis=1))

    def attempt(last: Attempt) -> Attempt:
        change = space.unflatten(_damped_solve(rows, gram, last.damping, gradient))
        new = jax.tree.map(jnp.subtract, params, change)
        parts = objective.parts(new, batch, points)
        lowered = parts.value < start.value  # False for NaN, too
        factor = jnp.where(lowered, DAMPING_DECREASE, DAMPING_INCREASE).astype(gram.dtype)
        return Attempt(last.tries + 1, factor * last.damping, new, parts, lowered)

    def refused(last: Attempt) -> jax.Array:
        return ~last.lowered & (last.tries < MAX_TRIES)

    damping = jnp.where(damping > 0, damping, first)
    none = Attempt(0, damping, params, start, jnp.zeros((), bool))
    return jax.lax.while_loop(refused, attempt, none)


def _curvature_rows(
    objective: FSPObjective, space: ParamSpace, params: PyTree, batch: Batch, points: PyTree
) -> jax.Array:
    """A with A^T A the Gauss-Newton matrix: S^T J of the data above C^-1 J of the points."""
    model = objective.model
    likelihood = objective.likelihood
    noise = jnp.asarray(objective.sigma_squared if likelihood.has_noise else 1.0)
    data = LocalCurvature(params, GGN(), model, likelihood, space).rows(batch)
    root = jnp.sqrt(objective.batch_scale(batch).astype(noise.dtype) / noise)

    def output(flat: jax.Array, x: PyTree) -> jax.Array:
        return model.one(x, space.unflatten(flat)).ravel()

    J = jax.vmap(jax.jacrev(output), (None, 0))(space.flatten(params), points)
    whiten = jax.vmap(lambda column: objective.prior.whitened(column, points), -1, -1)
    prior = whiten(J).reshape(-1, space.size)
    return jnp.concatenate([root.astype(data.dtype) * data, prior.astype(data.dtype)])


def _damped_solve(
    rows: jax.Array, gram: jax.Array, damping: jax.Array, gradient: jax.Array
) -> jax.Array:
    """(A^T A + damping)^-1 g through `gram`, the smaller of the two Gram matrices of A."""
    factor = cholesky(gram + damping * jnp.eye(gram.shape[0], dtype=gram.dtype))
    if not _few(rows):
        return cho_solve(factor, gradient)
    return (gradient - rows.T @ cho_solve(factor, rows @ gradient)) / damping


def _few(rows: jax.Array) -> bool:
    """Whether there are fewer rows than parameters."""
    return rows.shape[0] < rows.shape[1]
