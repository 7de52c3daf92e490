"""Calibration errors: how far confidence is from accuracy, bin by bin.

Confidence is the largest class probability. With equal-width bins the sums per bin stream; bins
of equal mass need the order of all examples, whose values are collected.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._streaming import Metric, as_real, named_metric
from ._targets import label_of

BLOCK = 128  # terms of one running sum: in float32 a million of them would be 1% off


def _expected_gap(bins: jax.Array) -> jax.Array:
    examples, confidence, correct = bins
    return jnp.abs(correct - confidence).sum() / examples.sum()


def _largest_gap(bins: jax.Array) -> jax.Array:
    examples, confidence, correct = bins
    gap = jnp.abs(correct - confidence) / jnp.maximum(examples, 1)
    return jnp.where(examples.sum() > 0, gap.max(), jnp.nan)


@functools.partial(named_metric, finalise=_expected_gap)
def ece(pred_act: ArrayLike, target: ArrayLike, *, num_bins: int = 15) -> jax.Array:
    """Expected calibration error, over bins (lo, hi] of equal width on [0, 1].

    >>> f"{ece(jnp.array([[0.75, 0.25], [0.75, 0.25]]), jnp.array([0, 1])):.2f}"
    '0.25'
    """
    return _equal_width_bins(pred_act, target, num_bins)


@functools.partial(named_metric, finalise=_largest_gap)
def mce(pred_act: ArrayLike, target: ArrayLike, *, num_bins: int = 15) -> jax.Array:
    """Maximum calibration error: the largest gap of a bin that is not empty.

    >>> f"{mce(jnp.array([[0.75, 0.25], [1.0, 0.0]]), jnp.array([0, 0])):.2f}"
    '0.25'
    """
    return _equal_width_bins(pred_act, target, num_bins)


def adaptive_ece(pred_act: ArrayLike, target: ArrayLike, *, num_bins: int = 15) -> jax.Array:
    """Expected calibration error over bins of equal mass.

    Examples are sorted by confidence and cut into bins whose sizes differ by at most one (the
    larger ones first). Examples of equal confidence share their accuracy, so that the result
    does not depend on the order of the data.

    >>> f"{adaptive_ece(jnp.array([[0.75, 0.25], [0.75, 0.25]]), jnp.array([0, 1])):.2f}"
    '0.25'
    """
    return adaptive_ece_metric(num_bins)(pred_act, target)


def ece_metric(num_bins: int = 15) -> Metric:
    """`ece` for another number of bins, as a streaming metric.

    >>> ece_metric(10).fields
    ('pred_act', 'target')
    """
    return ece.with_options(num_bins=_positive(num_bins))


def mce_metric(num_bins: int = 15) -> Metric:
    """`mce` for another number of bins, as a streaming metric.

    >>> mce_metric(10).fields
    ('pred_act', 'target')
    """
    return mce.with_options(num_bins=_positive(num_bins))


def adaptive_ece_metric(num_bins: int = 15) -> Metric:
    """`adaptive_ece` for another number of bins, as a streaming metric.

    >>> adaptive_ece_metric(10).collect
    True
    """
    finalise = functools.partial(_equal_mass_gap, num_bins=_positive(num_bins))
    return Metric(_confidence_and_correct, finalise, collect=True)


def _confidence_and_correct(pred_act: ArrayLike, target: ArrayLike) -> tuple[jax.Array, jax.Array]:
    pred_act = as_real(pred_act)
    correct = pred_act.argmax(axis=-1) == label_of(target, pred_act)
    return pred_act.max(axis=-1).ravel(), correct.ravel()


def _equal_width_bins(pred_act: ArrayLike, target: ArrayLike, num_bins: int) -> jax.Array:
    confidence, correct = _confidence_and_correct(pred_act, target)
    edges = jnp.asarray(np.linspace(0.0, 1.0, _positive(num_bins) + 1), confidence.dtype)
    # The first edge not below the confidence closes its bin (lo, hi]; 1 + round-off is still 1.
    index = jnp.searchsorted(edges, confidence, side="left", method="compare_all")
    index = jnp.clip(index - 1, 0, num_bins - 1)
    return _bin_sums(index, confidence, correct.astype(confidence.dtype), num_bins)


def _bin_sums(
    index: jax.Array, confidence: jax.Array, correct: jax.Array, num_bins: int
) -> jax.Array:
    """Examples, their confidences and how many of them are right, summed by bin: (3, num_bins).

    The sums run within blocks of examples, then over the blocks.
    """
    blocks = max(1, -(-index.size // BLOCK))
    place = index * blocks + jnp.arange(index.size, dtype=index.dtype) % blocks

    def add(values: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(values, place, blocks * num_bins)
        return sums.reshape(num_bins, blocks).sum(axis=1)

    return jnp.stack([add(jnp.ones_like(confidence)), add(confidence), add(correct)])


def _equal_mass_gap(values: tuple[jax.Array, jax.Array], *, num_bins: int) -> jax.Array:
    order = jnp.argsort(values[0])
    confidence = values[0][order]
    correct = mean_within_ties(confidence, values[1][order])
    quotient, rest = divmod(confidence.size, num_bins)
    sizes = quotient + (np.arange(num_bins) < rest)
    index = jnp.asarray(np.repeat(np.arange(num_bins), sizes))
    return _expected_gap(_bin_sums(index, confidence, correct, num_bins))


def mean_within_ties(ordered: jax.Array, values: jax.Array) -> jax.Array:
    """Replace `values` by their mean over each run of equal `ordered` keys; truth values count."""
    size = ordered.size
    is_new = jnp.concatenate([jnp.zeros(min(size, 1), bool), ordered[1:] != ordered[:-1]])
    run = jnp.cumsum(is_new)
    add = functools.partial(jax.ops.segment_sum, segment_ids=run, num_segments=size)
    summed = values.astype(int) if values.dtype == bool else values  # whole numbers are exact
    share = add(summed) / jnp.maximum(add(jnp.ones_like(run)), 1).astype(summed.dtype)
    return share.astype(ordered.dtype)[run]


def _positive(num_bins: int) -> int:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    return num_bins
