"""Predictions and targets of held-out data, in double precision, and which of them count."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ._data import Batch, Data, Loader
from ._engine.shards import everywhere
from .evaluation import NOTHING_LEFT, Judged, kept_entries
from .likelihoods import weigh


class HeldOut(NamedTuple):
    """Examples on the first axis. The weight, zero or one, has the shape of the events."""

    fields: list[np.ndarray]
    target: np.ndarray
    weight: np.ndarray


def held_out(predictive: Judged, data: Data, fields: Sequence[str] = ("pred_mean",)) -> HeldOut:
    """Some fields of the shape of the outputs, and the targets, from checked data."""
    batches = data if isinstance(data, Loader) else [data]
    parts = [_of_batch(predictive, batch, fields) for batch in batches]
    joined = HeldOut(
        fields=[np.concatenate(x) for x in zip(*(part.fields for part in parts), strict=True)],
        target=np.concatenate([part.target for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
    )
    if not np.any(joined.weight):
        raise ValueError(NOTHING_LEFT)
    return joined


def _of_batch(predictive: Judged, batch: Batch, names: Sequence[str]) -> HeldOut:
    kept_entries(batch)  # a weight must be a mask
    recipe = predictive.recipe
    prediction = everywhere(predictive(batch.input, names))
    shape = prediction[names[0]].shape
    # Of a variance head the fields show the mean alone: they have the shape of the events.
    events = shape if recipe.regression else recipe.likelihood.batch_shape(shape)
    return HeldOut(
        fields=[np.asarray(prediction[name], np.float64) for name in names],
        target=np.asarray(everywhere(batch.target)),
        weight=np.asarray(weigh(jnp.ones(events), batch.weight)),
    )


def by_output(values: np.ndarray) -> np.ndarray:
    """(N, *outputs) as rows, one per output."""
    return values.reshape(len(values), -1).T
