"""Temperature scaling: class probabilities of held-out data, and one number."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import scipy.special

from .._arguments import in_our_words, warn
from .._data import DataLike
from .._held_out import HeldOut, held_out
from .._tree import PyTree
from ..likelihoods import Bernoulli, Categorical
from ._newton import root_of_increasing
from ._point import ModelFn, PointPredictive, unit_predictive
from ._recipe import LossFn

NO_CURVATURE = 1e-12  # of a margin, relative to the spread of the logits: none at all


@in_our_words
def temperature_scaling(
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: LossFn = "cross_entropy",
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> PointPredictive:
    """The network with its logits divided by the temperature of lowest NLL on held-out data.

    The NLL is convex in 1 / T; Newton's method finds its minimum to the last digits. Two cases have
    no minimum inside, and warn: if every example is classified correctly, the NLL falls for ever as
    T goes to 0, and T stays 1; if the logits are of no use, T is infinite, and all classes are
    equally probable.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplax.laplace`.
        params: The weights.
        data: Held-out data, arrays or a loader. A weight must be a mask.
        loss_fn: `"cross_entropy"` or `"binary_cross_entropy"`.
        vmap_over_data: Whether `model_fn` takes one example, as for `laplax.laplace`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Returns:
        The baseline; its temperature is `baseline.temperature`.

    Reference: Guo et al. (2017), On calibration of modern neural networks.

    Example:
        >>> import jax.numpy as jnp
        >>> model_fn = lambda input, params: params["a"] * input
        >>> logits = jnp.asarray([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
        >>> baseline = temperature_scaling(
        ...     model_fn, {"a": jnp.asarray(1.0)}, (logits, jnp.asarray([0, 0, 0, 1]))
        ... )
        >>> f"{baseline.temperature:.4f}"  # 4 / log 3: three of four are right
        '3.6410'
    """
    baseline = class_baseline(
        "temperature scaling", model_fn, params, data, loss_fn, vmap_over_data
    )
    seen = held_out(baseline, baseline.checked(data, progress))
    logits, target, weight = as_classes(baseline, seen)
    scale = jnp.asarray(inverse_temperature(logits, target, weight))
    return dataclasses.replace(baseline, scale=scale)


def class_baseline(
    name: str,
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike,
    loss_fn: LossFn,
    vmap_over_data: bool,
) -> PointPredictive:
    """The network as it is; one without class probabilities is refused."""
    baseline = unit_predictive(name, model_fn, params, data, loss_fn, vmap_over_data)
    if not baseline.recipe.classification:
        raise ValueError(
            f"{name} is for class probabilities, loss_fn='cross_entropy' or "
            f"'binary_cross_entropy'; got {baseline.recipe.likelihood.name!r}. For regression, "
            "map_predictive(..., data) chooses the noise"
        )
    return baseline


def as_classes(
    baseline: PointPredictive, seen: HeldOut
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits (events, C), target probabilities (events, C) and weights; binary has two classes."""
    (f,), y, weight = seen
    if isinstance(baseline.recipe.likelihood, Categorical):
        logits = f.reshape(-1, f.shape[-1])
        labels = y.ndim < f.ndim
        target = np.eye(f.shape[-1])[y.reshape(-1)] if labels else y.reshape(logits.shape)
    else:
        assert isinstance(baseline.recipe.likelihood, Bernoulli)
        ones = y.reshape(-1).astype(np.float64)
        logits = np.stack([np.zeros(f.size), f.reshape(-1)], axis=-1)
        target = np.stack([1 - ones, ones], axis=-1)
    weight = weight.reshape(-1)
    return logits, target.astype(np.float64), weight / weight.sum()


def inverse_temperature(logits: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    """1 / T of lowest NLL, the minimum of a convex function; 1 or 0 with a warning."""
    centred = logits - logits.max(axis=-1, keepdims=True)
    of_target = (centred * target).sum(axis=-1)
    spread = float(weight @ centred.std(axis=-1))

    def slope(b: float) -> tuple[float, float]:
        p = scipy.special.softmax(b * centred, axis=-1)
        mean = (p * centred).sum(axis=-1)
        variance = (p * centred**2).sum(axis=-1) - mean**2
        return float(weight @ (mean - of_target)), float(weight @ variance)

    if slope(0.0)[0] >= 0:
        warn(
            "the logits do not tell the classes of the held-out data: the NLL is lowest where all "
            "classes are equally probable. The temperature is infinite"
        )
        return 0.0
    if -float(weight @ of_target) <= NO_CURVATURE * spread:
        warn(
            "every held-out example is classified correctly, so that the NLL falls for ever as the "
            "temperature goes to 0. The temperature stays 1; give more held-out data"
        )
        return 1.0
    high = 1 / spread
    while slope(high)[0] < 0:
        high = 2 * high
    return root_of_increasing(slope, 0.0, high)
