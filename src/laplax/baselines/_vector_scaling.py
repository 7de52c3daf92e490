"""Vector scaling: a scale and a bias for every class, by held-out NLL."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import scipy.special

from .._arguments import in_our_words
from .._data import DataLike
from .._held_out import HeldOut, by_output, held_out
from .._tree import PyTree
from ..likelihoods import Categorical
from ._newton import NoMinimumError, newton
from ._point import ModelFn, PointPredictive
from ._recipe import LossFn
from ._scaling import as_classes, class_baseline


@in_our_words
def vector_scaling(
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: LossFn = "cross_entropy",
    ridge: float = 0.0,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> PointPredictive:
    """The network with logits `scale * f + bias`, a scale and a bias per class, of lowest NLL.

    For `"binary_cross_entropy"` it is Platt scaling, for every output on its own. The NLL is
    convex; Newton's method finds its minimum to the last digits. The biases sum to zero, as softmax
    does not see their mean.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplax.laplace`.
        params: The weights.
        data: Held-out data, arrays or a loader. A weight must be a mask. There should be many more
            examples than the 2 C numbers that are chosen.
        loss_fn: `"cross_entropy"` or `"binary_cross_entropy"`.
        ridge: Adds `ridge / 2 (|scale - 1|^2 + |bias|^2)` to the mean NLL. None by default: data
            that do not determine the minimum are refused.
        vmap_over_data: Whether `model_fn` takes one example, as for `laplax.laplace`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Returns:
        The baseline, with `baseline.scale` and `baseline.bias`.

    Reference: Guo et al. (2017), On calibration of modern neural networks.
    """
    if not (np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge must be zero or positive; got {ridge}")
    baseline = class_baseline("vector scaling", model_fn, params, data, loss_fn, vmap_over_data)
    seen = held_out(baseline, baseline.checked(data, progress))
    try:
        scale, bias = _of_classes(baseline, seen, ridge)
    except NoMinimumError as error:
        raise ValueError(
            "the held-out data do not determine a scale and a bias for every class, as with a "
            f"class that never occurs or classes that are told apart without an error ({error}). "
            "Give more data, use temperature_scaling, or a penalty such as ridge=1e-3"
        ) from error
    return dataclasses.replace(baseline, scale=jnp.asarray(scale), bias=jnp.asarray(bias))


def _of_classes(
    baseline: PointPredictive, seen: HeldOut, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(baseline.recipe.likelihood, Categorical):
        return _softmax_scaling(*as_classes(baseline, seen), ridge)
    (f,), y, weight = seen
    shape = f.shape[1:]
    outputs = zip(by_output(f), by_output(y), by_output(weight), strict=True)
    pairs = [_platt_scaling(*output, ridge) for output in outputs]
    scale, bias = np.array(pairs).T
    return scale.reshape(shape), bias.reshape(shape)


def _softmax_scaling(
    f: np.ndarray, y: np.ndarray, weight: np.ndarray, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    classes = f.shape[-1]
    start = np.concatenate([np.ones(classes), np.zeros(classes)])

    def terms(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        log_p = scipy.special.log_softmax(x[:classes] * f + x[classes:], axis=-1)
        p = np.exp(log_p)
        residual = weight[:, None] * (p - y)
        gradient = np.concatenate([(residual * f).sum(axis=0), residual.sum(axis=0)])
        rows = np.concatenate([p * f, p], axis=-1)  # (events, 2 C)
        hessian = -rows.T @ (weight[:, None] * rows)
        own = np.diag(weight @ (p * f))
        hessian += np.block([[np.diag(weight @ (p * f**2)), own], [own, np.diag(weight @ p)]])
        return _penalised(-float(weight @ (y * log_p).sum(axis=-1)), gradient, hessian, x, ridge)

    found = newton(terms, start, num_flat=0 if ridge else 1)
    return found[:classes], found[classes:]


def _platt_scaling(
    f: np.ndarray, y: np.ndarray, weight: np.ndarray, ridge: float
) -> tuple[float, float]:
    if not weight.any():
        raise NoMinimumError("all of an output is masked")
    share = weight / weight.sum()
    design = np.stack([f, np.ones_like(f)], axis=-1)

    def terms(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        logit = design @ x
        p = scipy.special.expit(logit)
        value = float(share @ (np.logaddexp(0, logit) - y * logit))
        curvature = share * p * scipy.special.expit(-logit)
        hessian = design.T @ (curvature[:, None] * design)
        return _penalised(value, design.T @ (share * (p - y)), hessian, x, ridge)

    scale, bias = newton(terms, np.array([1.0, 0.0]))
    return float(scale), float(bias)


def _penalised(
    value: float, gradient: np.ndarray, hessian: np.ndarray, x: np.ndarray, ridge: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """With the penalty of scales other than one and biases other than zero."""
    half = len(x) // 2
    offset = x - np.repeat([1.0, 0.0], half)
    penalty = 0.5 * ridge * float(offset @ offset)
    return value + penalty, gradient + ridge * offset, hessian + ridge * np.eye(len(x))
