"""How well a score tells out-of-distribution inputs from in-distribution ones.

A larger score means "more likely out": entropy, mutual information or a predictive variance fit
as they are, a confidence with its sign changed. Out-of-distribution is the positive class.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._streaming import as_real, collected_metric


@collected_metric
def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """Area under the ROC curve: P(score_out > score_in) + P(score_out = score_in) / 2, exactly.

    >>> float(auroc(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0])))
    0.875
    """
    inside, outside = _scores(scores_in, scores_out)
    inside = jnp.sort(inside)
    # Ranks of the positives among the negatives; a tie counts half, from either side. Fractions
    # are averaged instead of counts, whose product would overflow 32-bit integers.
    below = jnp.searchsorted(inside, outside, side="left").astype(inside.dtype)
    up_to = jnp.searchsorted(inside, outside, side="right").astype(inside.dtype)
    return _unless_nan(((below + up_to) / (2 * inside.size)).mean(), inside, outside)


@collected_metric
def fpr95(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """False positive rate at the highest threshold that finds 95% of the positives (out).

    >>> float(fpr95(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0])))
    0.5
    """
    inside, outside = _scores(scores_in, scores_out)
    positives = -(-19 * outside.size // 20)  # the smallest number that is at least 95%
    threshold = jnp.sort(outside)[outside.size - positives]
    return _unless_nan((inside >= threshold).astype(inside.dtype).mean(), inside, outside)


def _scores(scores_in: ArrayLike, scores_out: ArrayLike) -> tuple[jax.Array, jax.Array]:
    inside = as_real(scores_in).ravel()
    outside = as_real(scores_out).ravel()
    if inside.size == 0 or outside.size == 0:
        raise ValueError("scores_in and scores_out must both have at least one entry")
    return inside, outside


def _unless_nan(value: jax.Array, *scores: jax.Array) -> jax.Array:
    """A score that is not a number has no rank: the result is not a number either."""
    return jnp.where(jnp.isnan(jnp.concatenate(scores)).any(), jnp.nan, value)
