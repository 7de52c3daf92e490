"""Whether a model of batches treats its examples independently, as everything here assumes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ._data import Batch
from ._engine.arrays import is_concrete
from ._engine.memo import model_jit
from ._model import Model
from ._traced import Traced
from ._tree import PyTree, coarsest_eps

CHECK = "examples are independent"


def check_independent(known: Traced, params: PyTree, batch: Batch) -> None:
    """Refuse a model whose output for one example depends on the others in the batch.

    Two examples together against one each, once for a model and shapes.
    """
    if known.model.vmap_over_data or CHECK in known.checked or not is_concrete(params, batch):
        return
    pair = _two_examples(batch)
    if pair is None:
        return
    outputs = _outputs(known.model, params, pair)
    together, apart = (np.asarray(x, np.float64) for x in outputs)
    if not np.all(np.isfinite([together, apart])):
        known.checked.add(CHECK)
        return  # not a number differs from itself; the curvature is refused for it later
    difference = np.abs(together - apart).max(initial=0)
    if difference > _allowed(together, apart, (params, pair, outputs)):
        raise ValueError(
            "model_fn's output for an example depends on the other examples of the batch (by up to "
            f"{difference:.3g}), as with batch normalisation in training mode. With "
            "vmap_over_data=False examples must be independent: use evaluation mode with running "
            "statistics (train=False, use_running_average=True)"
        )
    known.checked.add(CHECK)


def _two_examples(batch: Batch) -> PyTree | None:
    """The first example and one that differs from it."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(batch.input)]
    differs = np.zeros(batch.num_examples, bool)
    for x in leaves:
        differs |= (x != x[:1]).reshape(batch.num_examples, -1).any(axis=1)
    if not differs.any():
        return None
    rows = np.array([0, int(np.argmax(differs))])
    return jax.tree.unflatten(jax.tree.structure(batch.input), [x[rows] for x in leaves])


@functools.partial(model_jit, static_argnums=(0,))
def _outputs(model: Model, params: PyTree, pair: PyTree) -> tuple[jax.Array, jax.Array]:
    singles = [jax.tree.map(lambda x, i=i: x[i : i + 1], pair) for i in (0, 1)]
    apart = [model.fn(input=single, params=params) for single in singles]  # in the model's dtype
    return model.fn(input=pair, params=params), jnp.concatenate(apart)


def _allowed(together: np.ndarray, apart: np.ndarray, given: PyTree) -> float:
    """Rounding, and what a coarse product inside of the model may make of it."""
    eps = coarsest_eps(given)
    spread = max(np.abs(x[0] - x[1]).max(initial=0) for x in (together, apart))
    size = float(np.abs([together, apart]).max(initial=0))
    return min(0.05, eps**0.25) * float(spread) + 32 * eps * size
