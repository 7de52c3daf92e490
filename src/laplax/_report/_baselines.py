"""The rows that every report begins with: the network as it is, and temperature scaling."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import baselines
from .._tree import PyTree
from ..likelihoods import HeteroscedasticGaussian
from ._code import baseline_code, shared_arguments
from ._setting import Setting

Model = tuple[Callable[..., jax.Array], PyTree]
Shared = dict[str, Any]  # arguments that all baselines take
HeldOut = tuple[PyTree, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A baseline with its name, what it is in a sentence, and the code that makes it."""

    name: str
    kind: str
    predictive: baselines.PointPredictive
    chosen: dict[str, float]
    code: str


def baselines_of(setting: Setting) -> list[Base]:
    """The MAP, and for classes temperature scaling, which is the last: the reference."""
    problem = setting.problem
    model = (problem["model_fn"], problem["params"])
    shared = {key: problem[key] for key in ("loss_fn", "vmap_over_data", "progress")}
    written = shared_arguments(setting.likelihood, problem["vmap_over_data"])
    held_out = (setting.inputs["calibration"], setting.targets["calibration"])
    if not setting.recipe.classification:
        return [_with_noise(setting, model, shared, written, held_out)]
    network = baselines.map_predictive(*model, held_out, **shared)
    scaled = baselines.temperature_scaling(*model, held_out, **shared)
    temperature = float(scaled.temperature)
    return [
        Base("MAP", "the network as it is", network, {}, baseline_code("map_predictive", written)),
        Base(
            "temperature scaling",
            f"temperature scaling (T = {temperature:.3g})",
            scaled,
            {"temperature": temperature},
            baseline_code("temperature_scaling", written),
        ),
    ]


def _with_noise(
    setting: Setting, model: Model, shared: Shared, written: str, held_out: HeldOut
) -> Base:
    """Of a regression: its noise is that of held-out data."""
    if isinstance(setting.likelihood, HeteroscedasticGaussian):
        network = baselines.map_predictive(*model, held_out, **shared)
        code = baseline_code("map_predictive", written)
        return Base("MAP", "the network as it is", network, {}, code)
    noise = _noise(model, shared, held_out)
    network = baselines.map_predictive(*model, held_out, **shared, sigma_squared=noise)
    code = baseline_code("map_predictive", written, f"sigma_squared={noise.tolist()}")
    return Base("MAP", "the network with the noise of held-out data", network, {}, code)


def _noise(model: Model, shared: Shared, held_out: HeldOut) -> np.ndarray:
    """The mean squared residual of every output on held-out data.

    Of a perfect fit: what the outputs cannot resolve, for a variance of zero has no likelihood.
    """
    unit = baselines.map_predictive(*model, held_out, **shared, sigma_squared=1.0)
    f = unit(held_out[0], ["pred_mean"]).pred_mean
    eps = float(jnp.finfo(f.dtype).eps)
    outputs = np.asarray(f, np.float64)
    residual = np.square(outputs - np.asarray(held_out[1], np.float64)).mean(axis=0)
    return np.maximum(residual, np.square(eps * np.abs(outputs).max()) or 1.0)
