"""Training with a prior on the function: a small loop around the FSP objective."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _optim
from .._arguments import check_key, whole_number
from .._data import Data, progress_bar
from .._engine.samples import random_batches, whole_batch
from .._problem import make_problem
from .._tree import PyTree
from ._checks import check_kernels
from ._gauss_newton import gauss_newton_steps
from ._objective import FSPObjective, Parts, value_and_parts

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
    num_steps = whole_number(num_steps, "num_steps")
    if batch_size is not None:
        batch_size = whole_number(batch_size, "batch_size")
    check_key(key)
    model = objective.model
    problem = make_problem(
        model.fn, params, data, objective.likelihood, vmap_over_data=model.vmap_over_data
    )
    draw = _context_sampler(context)
    check = functools.partial(_check_step, objective, problem.output.shape)
    if optimizer == "gauss_newton":
        if batch_size is not None or callable(context):
            raise ValueError(
                "optimizer='gauss_newton' descends one fixed objective: leave batch_size out, and "
                "hand over fixed context points, for example context=halton(200, box)"
            )
        inputs = next(_inputs(whole_batch(problem.data.on_automatic_axes()), draw, None, key))
        start = objective.parts(problem.params, *inputs)
        check(-1, _optim.Step(problem.params, _optim.stacked(start), inputs))
        steps = gauss_newton_steps(objective, problem.params, *inputs, problem.output.size)
    elif isinstance(optimizer, str):
        raise ValueError(
            f"optimizer={optimizer!r}: the only name is 'gauss_newton'; else pass an optax "
            "transformation such as optax.adam(1e-3)"
        )
    else:
        steps = _optim.gradient_steps(
            value_and_parts,
            objective,
            problem.params,
            optimizer or _optim.default_optimizer(1e-2, num_steps),
            _inputs(problem.data, draw, batch_size, key),
            itertools.repeat(1),
        )
    taken = itertools.islice(steps, num_steps)
    bar = progress_bar(taken, num_steps, "fsp training", progress)
    trained, parts = _optim.minimise(bar, problem.params, check)
    if parts is None:  # Gauss-Newton that starts at the minimum takes no step
        parts = Parts(jnp.zeros(0), jnp.zeros(0))
    return Trained(trained, parts._asdict())


def _inputs(
    data: Data, draw: Context | None, batch_size: int | None, key: jax.Array
) -> Iterator[tuple[PyTree, PyTree]]:
    """A batch and context points for every step."""
    batch_key, context_key = jax.random.split(key)
    for i, batch in enumerate(random_batches(data, batch_size, batch_key)):
        yield batch, batch.input if draw is None else draw(jax.random.fold_in(context_key, i))


def _context_sampler(context: Context | PyTree) -> Context | None:
    if isinstance(context, str):
        if context != "batch":
            raise ValueError(
                f"context={context!r}: the only name is 'batch'; else pass points, or a "
                "function of a key such as lambda key: uniform(50, box, key)"
            )
        return None
    return context if callable(context) else lambda key: context


def _check_step(
    objective: FSPObjective, output: tuple[int, ...], i: int, step: _optim.Step
) -> dict[str, float]:
    """Training that went wrong stops, and says which part did; else both parts, for the bar."""
    parts = {name: float(values[-1]) for name, values in step.record._asdict().items()}
    if all(map(math.isfinite, parts.values())):
        return parts
    if not math.isfinite(parts["norm"]):
        check_kernels(objective.prior, step.args[1], output, objective.prior.training_jitter)
    raise ValueError(
        f"training diverged by step {i + 1}: negative log-likelihood {parts['nll']:.4g}, "
        f"RKHS term {parts['norm']:.4g}. A smaller learning rate (optimizer=optax.adam(1e-3)), "
        "or a larger jitter of the prior, tames it."
    )
