"""Metrics of classification, from class probabilities over the last axis.

Targets are integer labels of the shape of the batch, or class probabilities of the shape of the
predictions; where a single class is needed, the latter count as their arg max. The NLL is the
log-probability of the label, never a density of the logits.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jax.typing import ArrayLike

from ._streaming import Metric, as_real, mean_metric
from ._targets import label_of, log_prob_of, one_hot_of


@mean_metric
def accuracy(pred_act: ArrayLike, target: ArrayLike) -> jax.Array:
    """Fraction of examples whose most probable class is the target's; ties go to the first class.

    >>> float(accuracy(jnp.array([[0.9, 0.1], [0.2, 0.8]]), jnp.array([0, 0])))
    0.5
    """
    pred_act = as_real(pred_act)
    return (pred_act.argmax(axis=-1) == label_of(target, pred_act)).astype(pred_act.dtype)


@mean_metric
def top_k_accuracy(pred_act: ArrayLike, target: ArrayLike, *, k: int = 5) -> jax.Array:
    """Fraction of examples whose target is among the k most probable classes.

    >>> float(top_k_accuracy(jnp.array([[0.5, 0.3, 0.2]]), jnp.array([1]), k=2))
    1.0
    """
    pred_act = as_real(pred_act)
    if not 1 <= k <= pred_act.shape[-1]:
        raise ValueError(
            f"k must be from 1 to the {pred_act.shape[-1]} classes, got {k}; another one is "
            "top_k_accuracy_metric(k)"
        )
    top = jax.lax.top_k(pred_act, k)[1]
    hit = (top == label_of(target, pred_act).astype(top.dtype)[..., None]).any(axis=-1)
    return hit.astype(pred_act.dtype)


@mean_metric
def nll_from_log_probs(log_pred_act: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean negative log-probability of the target; finite wherever the logarithms are.

    For probability targets it is the cross-entropy -sum_c y_c log p_c.

    >>> f"{nll_from_log_probs(jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([1])):.4f}"
    '0.6931'
    """
    return -log_prob_of(target, as_real(log_pred_act))


@mean_metric
def cross_entropy(pred_act: ArrayLike, target: ArrayLike) -> jax.Array:
    """`nll_from_log_probs` of probabilities; infinite where one underflowed to 0.

    >>> f"{cross_entropy(jnp.array([[0.5, 0.5]]), jnp.array([1])):.4f}"
    '0.6931'
    """
    return -log_prob_of(target, jnp.log(as_real(pred_act)))


@mean_metric
def brier(pred_act: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean over examples of sum_c (p_c - y_c)^2, between 0 and 2.

    >>> float(brier(jnp.array([[0.5, 0.5]]), jnp.array([1])))
    0.5
    """
    pred_act = as_real(pred_act)
    return ((pred_act - one_hot_of(target, pred_act)) ** 2).sum(axis=-1)


@mean_metric
def entropy(pred_act: ArrayLike) -> jax.Array:
    """Mean entropy of the class probabilities, in nats.

    >>> f"{entropy(jnp.array([[0.5, 0.5], [1.0, 0.0]])):.4f}"
    '0.3466'
    """
    return entropy_per_example(pred_act)


def entropy_per_example(pred_act: ArrayLike) -> jax.Array:
    """Entropy -sum_c p_c log p_c of every example (a score for `auroc`), in nats.

    >>> [f"{v:.4f}" for v in entropy_per_example(jnp.array([[0.5, 0.5], [1.0, 0.0]]))]
    ['0.6931', '0.0000']
    """
    return entr(as_real(pred_act)).sum(axis=-1)


@mean_metric
def mutual_information(samples: ArrayLike) -> jax.Array:
    """Mean mutual information of label and function, from samples of the logits.

    >>> f"{mutual_information(jnp.array([[[1e3, 0.0]], [[0.0, 1e3]]])):.4f}"
    '0.6931'
    """
    return mutual_information_per_example(samples)


def mutual_information_per_example(samples: ArrayLike) -> jax.Array:
    """H(mean of softmax) - mean of H(softmax) of every example: the epistemic part, in nats.

    Args:
        samples: Logits (S, ..., C), samples first.

    >>> mutual_information_per_example(jnp.zeros((4, 2, 3))).shape
    (2,)
    """
    samples = as_real(samples)
    if samples.ndim < 2 or samples.shape[0] < 1:
        raise ValueError(f"samples must be (S, ..., C) with S at least 1, got {samples.shape}")
    probs = jax.nn.softmax(samples, axis=-1)
    total = entropy_per_example(probs.mean(axis=0))
    aleatoric = entropy_per_example(probs).mean(axis=0)
    return jnp.maximum(total - aleatoric, 0)  # rounding can fall below zero


def top_k_accuracy_metric(k: int = 5) -> Metric:
    """`top_k_accuracy` for another k, as a streaming metric.

    >>> top_k_accuracy_metric(3).fields
    ('pred_act', 'target')
    """
    return top_k_accuracy.with_options(k=k)
