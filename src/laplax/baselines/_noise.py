"""Observation noise that held-out data ask for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._data import Data
from ..evaluation import Judged
from ._held_out import held_out


def residual_variance(predictive: Judged, data: Data) -> jax.Array:
    """The mean squared residual of every output: the noise of lowest NLL if nothing else varies."""
    f, y, weight = held_out(predictive, data)
    count = weight.sum(axis=0)
    variance = (weight * (f - y) ** 2).sum(axis=0) / np.maximum(count, 1)
    if not np.all(variance > 0):
        raise ValueError(
            "the residuals of an output on these data are all zero, or all of it is masked, so "
            "that they ask for no noise at all. Give held-out data, or sigma_squared"
        )
    return jnp.asarray(variance)


def positive_noise(sigma_squared: ArrayLike) -> jax.Array:
    """Observation variances as users write them."""
    noise = jnp.asarray(sigma_squared, jnp.result_type(float))
    if not bool(jnp.all((noise > 0) & jnp.isfinite(noise))):
        raise ValueError(f"sigma_squared must be positive and finite; got {sigma_squared}")
    return noise
