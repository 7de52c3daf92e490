"""Targets of a classification: integer labels, or class probabilities; checked once, here."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._engine.linalg import entry_at


def label_of(target: ArrayLike, pred: jax.Array) -> jax.Array:
    """The target's class as an index, in the integer type that arg max has."""
    target, is_label = _checked(target, pred)
    index = target if is_label else target.argmax(axis=-1)
    return index.astype(pred.argmax(axis=-1).dtype)


def one_hot_of(target: ArrayLike, pred: jax.Array) -> jax.Array:
    """The target as class probabilities of the type of the predictions."""
    target, is_label = _checked(target, pred)
    if is_label:
        return jax.nn.one_hot(target, pred.shape[-1], dtype=pred.dtype)
    return target.astype(pred.dtype)


def log_prob_of(target: ArrayLike, log_pred: jax.Array) -> jax.Array:
    """The target's log-probability (its expectation, for probability targets)."""
    target, is_label = _checked(target, log_pred)
    if is_label:
        return entry_at(log_pred, target)
    weight = target.astype(log_pred.dtype)
    # A class that cannot occur adds nothing, even at a predicted log-probability of -inf.
    possible = weight != 0
    return jnp.where(possible, weight * jnp.where(possible, log_pred, 0), 0).sum(axis=-1)


def _checked(target: ArrayLike, pred: jax.Array) -> tuple[jax.Array, bool]:
    target = jnp.asarray(target)
    if pred.ndim >= 1 and target.shape == pred.shape:
        return target, False
    if pred.ndim == 0 or target.shape != pred.shape[:-1]:
        raise ValueError(
            f"targets {target.shape} do not fit class probabilities {pred.shape}: give integer "
            f"labels {pred.shape[:-1]} or class probabilities {pred.shape}"
        )
    if not jnp.issubdtype(target.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {target.dtype}; use target.astype(int)")
    _check_range(target, pred.shape[-1])
    return target, True


def _check_range(label: jax.Array, num_classes: int) -> None:
    """Refuse a label that is no class, when its value is known (not under jit)."""
    if isinstance(label, jax.core.Tracer) or label.size == 0:
        return
    values = np.asarray(label)
    low = int(values.min())
    high = int(values.max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels must be from 0 to {num_classes - 1} for {num_classes} classes, "
            f"got values from {low} to {high}"
        )
