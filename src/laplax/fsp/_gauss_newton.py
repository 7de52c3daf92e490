"""Gauss-Newton training: the FSP objective of all data and fixed points, in tens of steps.

Whitening by a kernel matrix makes the objective stiff (condition numbers of 1e6 and more), and
first-order steps stop far above the minimum. In the objective's own curvature it is not stiff.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .._data import Batch
from .._engine.linalg import cho_solve, cholesky
from .._tree import PyTree
from ..likelihoods import weigh
from ._objective import FSPObjective, Parts

DAMPING_DECREASE = 1 / 3  # after a step that lowered the objective
DAMPING_INCREASE = 4.0  # after one that did not
MAX_TRIES = 12
FIRST_DAMPING = 1e-3  # relative to the largest curvature of a row
ROWS_LIMIT = 4 * 2**30  # bytes


def gauss_newton_steps(
    objective: FSPObjective, params: PyTree, batch: Batch, points: PyTree, outputs: int
) -> Iterator[tuple[PyTree, Parts]]:
    """Parameters and objective after each Levenberg-Marquardt step; ends when none lowers it."""
    flat, unravel = ravel_pytree(params)
    _check_size(batch, points, outputs, flat)
    step = _make_step(unravel)
    damping = jnp.zeros((), flat.dtype)
    while True:
        flat, damping, parts, lowered = step(objective.weakly(), flat, damping, batch, points)
        if not bool(lowered):
            return
        yield unravel(flat), parts


def _check_size(batch: Batch, points: PyTree, outputs: int, flat: jax.Array) -> None:
    count = jax.tree.leaves(points)[0].shape[0]
    rows = (batch.num_examples + count) * outputs
    size = rows * flat.size * flat.dtype.itemsize
    if size > ROWS_LIMIT:
        raise ValueError(
            f"optimizer='gauss_newton' keeps one gradient per output of every example and context "
            f"point: {rows:,} x {flat.size:,} numbers, {size / 2**30:.1f} GiB, over the limit of "
            f"{ROWS_LIMIT / 2**30:.0f} GiB. Use fewer context points, or an optax optimiser with "
            "batch_size=..."
        )


def _make_step(unravel: Callable[[jax.Array], PyTree]) -> Callable[..., Any]:
    @jax.jit
    def step(
        objective: FSPObjective,
        flat: jax.Array,
        damping: jax.Array,
        batch: Batch,
        points: PyTree,
    ) -> tuple[jax.Array, jax.Array, Parts, jax.Array]:
        def value(flat: jax.Array) -> tuple[jax.Array, Parts]:
            parts = objective.parts(unravel(flat), batch, points)
            return parts.value, parts

        (start, parts), gradient = jax.value_and_grad(value, has_aux=True)(flat)
        rows = _curvature_rows(objective, unravel, flat, batch, points)
        gram = rows @ rows.T if _few(rows) else rows.T @ rows
        first = FIRST_DAMPING * jnp.max(jnp.sum(jnp.square(rows), axis=1))
        damping = jnp.where(damping > 0, damping, first)

        def attempt(state: Any) -> Any:
            tries, damping, *_ = state
            new = flat - _damped_solve(rows, gram, damping, gradient)
            reached, parts = value(new)
            lowered = reached < start  # False for NaN, too
            return (
                tries + 1,
                jnp.where(lowered, damping, DAMPING_INCREASE * damping),
                new,
                parts,
                lowered,
            )

        def refused(state: Any) -> jax.Array:
            return ~state[-1] & (state[0] < MAX_TRIES)

        start_state = (0, damping, flat, parts, jnp.zeros((), bool))
        _, damping, new, reached, lowered = jax.lax.while_loop(refused, attempt, start_state)
        return new, damping * DAMPING_DECREASE, reached, lowered

    return step


def _curvature_rows(
    objective: FSPObjective,
    unravel: Callable[[jax.Array], PyTree],
    flat: jax.Array,
    batch: Batch,
    points: PyTree,
) -> jax.Array:
    """A with A^T A the Gauss-Newton matrix: S^T J of the data above C^-1 J of the points."""
    model, likelihood = objective.model, objective.likelihood
    noise = jnp.asarray(objective.sigma_squared if likelihood.has_noise else 1.0)
    scale = jnp.asarray(objective.num_total_samples / batch.num_counted, noise.dtype)
    root = jnp.sqrt(scale / noise)

    def factor(f: jax.Array, y: jax.Array, *weight: jax.Array) -> jax.Array:
        S = weigh(likelihood.hessian_factor(f, y), jnp.sqrt(weight[0]) if weight else None)
        return root.astype(f.dtype) * S

    weights = () if batch.weight is None else (batch.weight,)
    factors = jax.vmap(factor)(model.batch(batch.input, unravel(flat)), batch.target, *weights)

    def whitened(flat: jax.Array) -> jax.Array:
        params = unravel(flat)
        data = jax.vmap(lambda f, S: jnp.tensordot(f, S, f.ndim))(
            model.batch(batch.input, params), factors
        )
        f = model.batch(points, params)
        prior = objective.prior.whitened(f.reshape(f.shape[0], -1), points)
        return jnp.concatenate([data.ravel(), prior.ravel()])

    return jax.jacrev(whitened)(flat)


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
