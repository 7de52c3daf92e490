"""Observation noise that held-out data ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax.typing import ArrayLike

from .._data import Data
from .._held_out import by_output, held_out
from ..evaluation import Judged

DECADES = 8  # below the largest residual: less noise changes no prediction that counts
GRID = 200
TOLERANCE = {"xatol": 1e-10}


def residual_variance(predictive: Judged, data: Data) -> jax.Array:
    """The mean squared residual of every output: the noise of lowest NLL if nothing else varies."""
    (f,), y, weight = held_out(predictive, data)
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


def held_out_noise(predictive: Judged, data: Data) -> jax.Array:
    """The noise of lowest NLL for every output, beside the variance that the prediction has.

    `sum_n log(v_n + s) + r_n^2 / (v_n + s)` falls up to the smallest and rises from the largest
    `r_n^2 - v_n` on, so that its minimum lies between; it is found on a grid, then refined.
    """
    (f, variance), y, weight = held_out(predictive, data, ("pred_mean", "pred_var"))
    noise = [
        _noise_of_output(v[w > 0], r[w > 0] ** 2)
        for v, r, w in zip(*(by_output(x) for x in (variance, f - y, weight)), strict=True)
    ]
    return jnp.asarray(np.reshape(noise, f.shape[1:]))


def _noise_of_output(variance: np.ndarray, squared: np.ndarray) -> float:
    if not squared.size or not np.any(squared > variance):
        raise ValueError(
            "the members of the ensemble differ by more than the residuals of an output on these "
            "data, or all of it is masked: they ask for no noise. Give sigma_squared"
        )

    def nll(log_noise: float) -> float:
        total = variance + np.exp(log_noise)
        return float(np.mean(np.log(total) + squared / total))

    highest = np.log((squared - variance).max())
    grid = np.linspace(highest - DECADES * np.log(10), highest, GRID)
    best = int(np.argmin([nll(x) for x in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    found = scipy.optimize.minimize_scalar(nll, bounds=around, method="bounded", options=TOLERANCE)
    return float(np.exp(found.x))
