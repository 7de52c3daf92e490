"""Outputs and targets of held-out data, in double precision, with what a mask leaves of them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._data import Batch, Data, Loader
from .._engine.shards import everywhere
from ..evaluation import NOTHING_LEFT, Judged, kept_entries
from ..likelihoods import Likelihood, weigh


class HeldOut(NamedTuple):
    """Examples on the first axis. The weight, zero or one, has the shape of the events."""

    outputs: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def held_out(predictive: Judged, data: Data, field: str = "pred_mean") -> HeldOut:
    """All of them, from checked data; in place of the outputs another field of their shape."""
    likelihood = predictive.recipe.likelihood
    batches = data if isinstance(data, Loader) else [data]
    parts = [_of_batch(predictive, likelihood, batch, field) for batch in batches]
    joined = HeldOut(*(np.concatenate(x) for x in zip(*parts, strict=True)))
    if not np.any(joined.weight):
        raise ValueError(NOTHING_LEFT)
    return joined


def _of_batch(predictive: Judged, likelihood: Likelihood, batch: Batch, field: str) -> HeldOut:
    kept_entries(batch)  # a weight must be a mask
    outputs = everywhere(predictive(batch.input, [field])[field])
    events = likelihood.batch_shape(outputs.shape)
    return HeldOut(
        outputs=np.asarray(outputs, np.float64),
        target=np.asarray(everywhere(batch.target)),
        weight=np.asarray(weigh(jnp.ones(events), batch.weight)),
    )
