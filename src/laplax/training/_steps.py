"""Steps of the optimiser down the negative log joint: the losses of the data, and the prior."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch, Data, Loader
from .._engine.chunks import cut
from .._engine.loops import sum_over
from .._engine.memo import WeakInside, model_jit
from .._engine.samples import take
from .._engine.shards import shards_of
from .._model import Model
from .._problem import Problem
from .._tree import PyTree, pytree, static
from ..evidence import DataTerm, fit_of_batch
from ..likelihoods import DataFit, Likelihood
from ..prior import Prior

if TYPE_CHECKING:
    from optax import GradientTransformation


class DataSize(NamedTuple):
    """How much there is to train on."""

    examples: float  # that take part, not masked out
    weight: float  # sum of the examples' weights: what the loss is divided by
    steps: int  # in an epoch
    fit: DataFit  # at the initial weights


def measure_data(problem: Problem, batch_size: int | None) -> DataSize:
    """One pass over the data, before training."""
    data = problem.data
    term = DataTerm(problem.params, problem.model, problem.likelihood)
    work = problem.traced.cost.forward_work
    total: PyTree = None
    for steps, batch in enumerate([data] if isinstance(data, Batch) else data, 1):  # noqa: B007
        part = sum_over(_size_of_batch, batch, cut(work, batch.num_examples), term)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    fit, examples, weight = total
    if isinstance(data, Batch) and batch_size is not None:
        steps = max(1, data.num_examples // batch_size)
    return DataSize(float(examples), float(weight), steps, fit)


def _size_of_batch(batch: Batch, term: DataTerm) -> tuple[DataFit, jax.Array, jax.Array]:
    fit = fit_of_batch(batch, term)
    examples = jnp.asarray(batch.num_counted).astype(fit.loss.dtype)
    if batch.weight is None:
        return fit, examples, examples
    own = jnp.mean(batch.weight.reshape(batch.num_examples, -1), axis=1)
    return fit, examples, jnp.sum(own).astype(fit.loss.dtype)


@pytree
class Joint(WeakInside):
    """The negative log joint per unit of weight in the data, of a batch that stands for all."""

    prior: Prior
    likelihood_scale: jax.Array  # c
    examples: jax.Array
    weight: jax.Array
    model: Model = static()
    likelihood: Likelihood = static()

    def __call__(self, params: PyTree, batch: Batch) -> jax.Array:
        """The value to descend."""
        shards = shards_of(batch)
        loss = (
            self._loss(batch, params)
            if shards is None
            else shards.sum(self._loss, batch, params)  # of every device's own examples
        )
        counted = jnp.maximum(jnp.asarray(batch.num_counted), 1).astype(loss.dtype)
        share = self.examples.astype(loss.dtype) / counted
        data = self.likelihood_scale.astype(loss.dtype) * share * loss
        penalty = self.prior.neg_log_prob(params).astype(loss.dtype)
        return (data + penalty) / self.weight.astype(loss.dtype)

    def _loss(self, batch: Batch, params: PyTree) -> jax.Array:
        return fit_of_batch(batch, DataTerm(params, self.model, self.likelihood)).loss


class Taken(NamedTuple):
    """Where steps led."""

    params: PyTree
    optimizer_state: PyTree
    losses: np.ndarray  # before every step; NaN after the last where the parameters are not finite
    steps: int


def epochs(
    data: Data, batch_size: int | None, key: jax.Array | None, steps: int, by_step: bool
) -> Iterator[Iterator[tuple[Batch, Any]]]:
    """Data and the rows of its steps, epoch after epoch; a loader's batches as they come."""
    number = 0
    while True:
        if isinstance(data, Loader):
            yield ((batch, None) for batch in data)
        elif batch_size is None or batch_size >= data.num_examples:
            yield iter([(data, None)])
        else:
            assert key is not None
            order = jax.random.permutation(jax.random.fold_in(key, number), data.num_examples)
            rows = order[: steps * batch_size].reshape(steps, batch_size)  # the rest: another time
            parts = np.split(rows, steps) if by_step else [rows]
            yield ((data, part) for part in parts)
        number += 1


def descend(
    joint: Joint,
    optimizer: "GradientTransformation",
    start: tuple[PyTree, PyTree],
    parts: Iterator[tuple[Batch, Any]],
    most: int,
) -> Taken:
    """The steps of one epoch, `most` at most."""
    losses: list[jax.Array] = []
    done = 0
    for batch, order in parts:
        rows = None if order is None else order[: most - done]
        start, loss = _take_steps(joint, optimizer, start, batch, rows)
        losses.append(loss)
        done += len(loss) - 1
        if done >= most:
            break
    # The last entry of each says whether the parameters after it are finite.
    kept = [np.asarray(x) for x in losses]
    values = np.concatenate([*(x[:-1] for x in kept), kept[-1][-1:]])
    return Taken(*start, values, done)


@functools.partial(model_jit, static_argnums=(1,))
def _take_steps(
    joint: Joint, optimizer: Any, start: PyTree, batch: Batch, rows: jax.Array | None
) -> tuple[PyTree, jax.Array]:
    """A step on each row of examples, or one on all; the losses, and zero if all is finite."""
    import optax

    def step(carry: PyTree, chosen: jax.Array | None) -> tuple[PyTree, jax.Array]:
        params, state = carry
        part = batch if chosen is None else take(batch, chosen)
        loss, gradient = jax.value_and_grad(joint)(params, part)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), loss

    if rows is not None and rows.shape[0] > 1:
        end, losses = jax.lax.scan(step, start, rows)
    else:  # no loop, in which convolutions would be slow
        end, loss = step(start, None if rows is None else rows[0])
        losses = loss[None]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(end[0])]
    last = jnp.where(jnp.all(jnp.asarray(finite)), 0, jnp.nan).astype(losses.dtype)
    return end, jnp.append(losses, last)
