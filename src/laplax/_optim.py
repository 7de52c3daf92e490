"""The one loop of every optimiser. optax is imported for the first step: it takes long to load."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._data import progress_bar
from ._engine.memo import model_jit
from ._tree import PyTree

if TYPE_CHECKING:
    from optax import GradientTransformation

STEPS_AT_ONCE = 50  # between two moves of the progress bar
WATCH_EVERY = 100
ROUNDING = 16  # of the values of an objective, in eps

Loss = Callable[..., tuple[jax.Array, PyTree]]  # of parameters, an owner and more: value, record


class Step(NamedTuple):
    """Where a step led, its record with a leading axis, and what it saw of the data."""

    params: PyTree
    record: PyTree
    args: tuple[PyTree, ...]


@functools.cache
def default_optimizer(learning_rate: float, num_steps: int) -> "GradientTransformation":
    """Adam with a cosine decay to zero; one object per setting, as programs are looked up by it."""
    import optax

    return optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))


def minimise(
    steps: Any, params: PyTree, watch: Callable[[int, Step], dict[str, float]] | None = None
) -> tuple[PyTree, PyTree]:
    """Take all steps, a progress bar of them or not: the last parameters, and the joined records.

    `watch(number, step)` raises if a step went wrong, or returns what the bar shows. Where no step
    was taken there is no record, but None.
    """
    records = []
    for i, step in enumerate(steps):
        params = step.params
        records.append(step.record)
        if watch is not None and (i == 0 or (i + 1) % WATCH_EVERY == 0):
            shown = watch(i, step)
            if hasattr(steps, "set_postfix"):
                steps.set_postfix(shown)
    if watch is not None and records:
        watch(i, step)
    return params, jax.tree.map(lambda *x: jnp.concatenate(x), *records) if records else None


@dataclasses.dataclass(frozen=True)
class Descent:
    """Steps of an optax optimiser down a loss that stays the same."""

    optimizer: "GradientTransformation"
    num_steps: int
    label: str
    progress: bool | None

    def records(self, loss: Loss, owner: Any, params: PyTree, *args: PyTree) -> PyTree:
        """The records of all steps from `params` on; see `gradient_steps`."""
        firsts = range(0, self.num_steps, STEPS_AT_ONCE)
        counts = [min(STEPS_AT_ONCE, self.num_steps - first) for first in firsts]
        steps = gradient_steps(loss, owner, params, self.optimizer, itertools.repeat(args), counts)
        return minimise(progress_bar(steps, len(counts), self.label, self.progress), params)[1]


def gradient_steps(
    loss: Loss,
    owner: Any,
    params: PyTree,
    optimizer: "GradientTransformation",
    inputs: Iterable[tuple[PyTree, ...]],
    counts: Iterable[int],
) -> Iterator[Step]:
    """Steps of an optax optimiser down `loss(params, owner, *args)`, args from `inputs`.

    Each of `counts` is a number of steps at once, with the same arguments. `loss` is a module-level
    function; `owner` has the model whose function keeps the programs.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        state = optimizer.init(params)
    for count, args in zip(counts, inputs, strict=False):
        (params, state), record = _take_steps(owner, loss, optimizer, count, (params, state), args)
        yield Step(params, record, args)


@functools.partial(model_jit, static_argnums=(1, 2, 3))
def _take_steps(
    owner: Any, loss: Loss, optimizer: Any, count: int, start: PyTree, args: PyTree
) -> PyTree:
    """Parameters and state after `count` steps, and the records."""
    import optax

    def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[PyTree, PyTree]:
        params, state = carry
        gradient, record = jax.grad(loss, has_aux=True)(params, owner, *args)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), record

    if count > 1:
        return jax.lax.scan(step, start, None, length=count)
    end, record = step(start, None)  # no loop, in which convolutions would be slow
    return end, stacked(record)


def stacked(record: PyTree) -> PyTree:
    """The record of a single step, with its leading axis."""
    return jax.tree.map(lambda x: x[None], record)


def last_of_best(values: np.ndarray) -> int:
    """The last finite value that rounding cannot tell from the lowest: the most settled one."""
    finite = np.where(np.isfinite(values), values, np.inf)
    lowest = finite.min()
    rounding = ROUNDING * np.finfo(values.dtype).eps * abs(lowest)
    return int(np.flatnonzero(finite <= lowest + rounding)[-1])
