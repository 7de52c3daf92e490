"""Training with a prior on the function: a small loop around the FSP objective."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _optim
from .._data import Batch, Loader, progress_bar, whole_batch
from .._problem import Problem, make_problem
from .._tree import PyTree
from ._gauss_newton import gauss_newton_steps
from ._objective import FSPObjective, Parts
from ._prior import check_positive_definite

if TYPE_CHECKING:
    from optax import GradientTransformation

Context = Callable[[jax.Array], PyTree]  # key -> points


class Trained(NamedTuple):
    """What `train` returns. `history` holds `nll` and `norm` (half the squared RKHS norm)."""

    params: PyTree
    history: dict[str, jax.Array]


def train(
    objective: FSPObjective,
    params: PyTree,
    data: Any,
    *,
    context: Context | PyTree,
    key: jax.Array,
    num_steps: int = 1000,
    batch_size: int | None = None,
    optimizer: "GradientTransformation | str | None" = None,
    progress: bool | None = None,
) -> Trained:
    """Train a network under a prior on its function (Algorithm 1 of FSP-Laplace).

    Args:
        objective: From `fsp_objective`.
        params: Where training starts.
        data: As in `laplace`. A loader's batches are taken as they come.
        context: A function of a key, called anew for every step
            (`lambda key: uniform(50, box, key)`), fixed points, or `"batch"`: the inputs of the
            step's batch.
        key: Seeds batches and context points.
        num_steps: Steps of the optimiser.
        batch_size: Examples per step; None takes all of them.
        optimizer: Any optax transformation; by default Adam, 1e-2 with a cosine decay to zero.
            `"gauss_newton"` takes Levenberg-Marquardt steps on all data and fixed points, each
            as expensive as a Jacobian, and stops before `num_steps` when none lowers the
            objective. On stiff objectives (a sharp kernel, little noise) it gets much lower than
            Adam.
        progress: Show a progress bar; by default when a terminal is attached.

    Returns:
        The trained parameters, and the history of both parts of the objective.
    """
    _check_counts(num_steps, batch_size)
    model = objective.model
    problem = make_problem(
        model.fn, params, data, objective.likelihood, vmap_over_data=model.vmap_over_data
    )
    draw = _context_sampler(context)
    if optimizer == "gauss_newton":
        steps = _gauss_newton(objective, problem, draw, context, batch_size)
    elif isinstance(optimizer, str):
        raise ValueError(
            f"optimizer={optimizer!r}: the only name is 'gauss_newton'; else pass an optax "
            "transformation such as optax.adam(1e-3)"
        )
    else:
        optimizer = optimizer or _optim.default_optimizer(1e-2, num_steps)
        steps = _first_order(objective, problem, draw, key, batch_size, optimizer)
    return _run(steps, objective, problem, num_steps, progress)


class Step(NamedTuple):
    """Where a step led: parameters, the objective (before it, if first order), its points."""

    params: PyTree
    parts: Parts
    points: PyTree


def _run(
    steps: Iterator[Step],
    objective: FSPObjective,
    problem: Problem,
    num_steps: int,
    progress: bool | None,
) -> Trained:
    params = problem.params
    bar: Any = progress_bar(range(num_steps), num_steps, "fsp training", progress)
    history: list[Parts] = []
    for i, step in zip(bar, steps, strict=False):
        params, parts, points = step
        history.append(parts)
        if i == 0 or (i + 1) % 100 == 0 or i + 1 == num_steps:
            _check_progress(parts, objective, points, problem.output.shape, i)
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(nll=float(parts.nll), norm=float(parts.norm))
    empty = jnp.zeros(0)  # Gauss-Newton that starts at the minimum takes no step
    columns = zip(*history, strict=True) if history else ([empty], [empty])
    nll, norm = (jnp.stack(list(values)).reshape(-1) for values in columns)
    return Trained(params, {"nll": nll, "norm": norm})


def _first_order(
    objective: FSPObjective,
    problem: Problem,
    draw: Context | None,
    key: jax.Array,
    batch_size: int | None,
    optimizer: "GradientTransformation",
) -> Iterator[Step]:
    params, state = problem.params, _optim.start(optimizer, problem.params)
    step = _make_step(optimizer)
    batch_key, context_key = jax.random.split(key)
    for i, batch in enumerate(_batches(problem.data, batch_size, batch_key)):
        points = batch.input if draw is None else draw(jax.random.fold_in(context_key, i))
        params, state, parts = step(objective.weakly(), params, state, batch, points)
        yield Step(params, parts, points)


def _gauss_newton(
    objective: FSPObjective,
    problem: Problem,
    draw: Context | None,
    context: Context | PyTree,
    batch_size: int | None,
) -> Iterator[Step]:
    if batch_size is not None or callable(context):
        raise ValueError(
            "optimizer='gauss_newton' descends one fixed objective: leave batch_size out, and hand "
            "over fixed context points, for example context=halton(200, box)"
        )
    batch = whole_batch(problem.data)
    points = batch.input if draw is None else context
    start = objective.parts(problem.params, batch, points)
    _check_progress(start, objective, points, problem.output.shape, -1)
    outputs = math.prod(problem.output.shape)
    for params, parts in gauss_newton_steps(objective, problem.params, batch, points, outputs):
        yield Step(params, parts, points)


def _check_counts(num_steps: int, batch_size: int | None) -> None:
    if num_steps < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(
            f"num_steps and batch_size must be at least 1; got {num_steps}, {batch_size}"
        )


def _context_sampler(context: Context | PyTree) -> Context | None:
    if isinstance(context, str):
        if context != "batch":
            raise ValueError(
                f"context={context!r}: the only name is 'batch'; else pass points, or a "
                "function of a key such as lambda key: uniform(50, box, key)"
            )
        return None
    if callable(context):
        return context
    return lambda key: context


def _batches(data: Batch | Loader, size: int | None, key: jax.Array) -> Iterator[Batch]:
    """Shuffled batches of one size, pass after pass; or a loader's own."""
    if isinstance(data, Loader):
        data.require_passes("training")
        while True:
            yield from data
    count = data.num_examples
    if size is None or size >= count:
        while True:
            yield data
    epoch = 0
    while True:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), count)
        for start in range(0, count - size + 1, size):  # a ragged rest comes in another epoch
            chosen = order[start : start + size]
            yield jax.tree.map(lambda x, at=chosen: x[at], data)
        epoch += 1


def _make_step(optimizer: "GradientTransformation") -> Callable[..., Any]:
    @jax.jit
    def step(
        objective: FSPObjective, params: PyTree, state: PyTree, batch: Batch, points: PyTree
    ) -> tuple[PyTree, PyTree, Parts]:
        def value(params: PyTree) -> tuple[jax.Array, Parts]:
            parts = objective.parts(params, batch, points)
            return parts.value, parts

        gradient, parts = jax.grad(value, has_aux=True)(params)
        return *_optim.step(optimizer, gradient, state, params), parts

    return step


def _check_progress(
    parts: Parts,
    objective: FSPObjective,
    points: PyTree,
    output: tuple[int, ...],
    step: int,
) -> None:
    """Training that went wrong stops, and says which part did."""
    if bool(jnp.isfinite(parts.nll)) and bool(jnp.isfinite(parts.norm)):
        return
    if not bool(jnp.isfinite(parts.norm)):
        check_positive_definite(objective.prior, points, math.prod(output))
    raise ValueError(
        f"training diverged by step {step + 1}: negative log-likelihood {float(parts.nll):.4g}, "
        f"RKHS term {float(parts.norm):.4g}. A smaller learning rate (optimizer=optax.adam(1e-3)), "
        "or a larger jitter of the prior, tames it."
    )
