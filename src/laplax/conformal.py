"""Split conformal prediction: intervals and sets that cover at a level, whatever the predictive.

The only assumption is that held-out and new examples are exchangeable. With the scores of n
held-out examples, the `ceil((n + 1) level)`-th smallest of them bounds the score of a new example
with probability at least `level`, and at most `level + 1 / (n + 1)` if no scores are equal. The
probability is over held-out and new data together: it holds on average, not for every input.
"""

import dataclasses
import fractions
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._arguments import check_key
from ._data import DataLike
from ._engine.linalg import entry_at
from ._enums import check_names
from ._held_out import by_output, held_out
from ._tree import PyTree, pytree, static
from .evaluation import Judged, observations
from .pushforward import Interval

SCORES = ("lac", "aps", "raps")


def conformal_quantile(scores: ArrayLike, level: float) -> float:
    """The `ceil((n + 1) level)`-th smallest of n scores.

    Args:
        scores: One number per held-out example, (n,).
        level: The probability with which a new score is at most as large.

    >>> conformal_quantile(jnp.arange(9.0), 0.9)
    8.0
    """
    array = np.sort(np.asarray(scores, np.float64))
    exact = _as_fraction(level)
    rank = math.ceil((array.size + 1) * exact)
    if rank > array.size:
        needed = math.ceil(exact / (1 - exact))
        raise ValueError(
            f"a level of {level} needs at least {needed} held-out examples (of every output); got "
            f"{array.size}. With fewer, only an infinite interval, or the set of all classes, "
            "covers at this level"
        )
    return float(array[rank - 1])


@pytree
class ConformalIntervals:
    """`intervals(input) -> Interval(lower, upper)`. A pytree: it jits."""

    prob_predictive: Judged
    factor: jax.Array  # in standard deviations, for every output
    level: float = static()

    def __call__(self, input: PyTree) -> Interval:
        """The ends of the intervals, of the shape of the outputs."""
        prediction = self.prob_predictive(input, ("pred_mean", "total_std"))
        half = self.factor.astype(prediction.total_std.dtype) * prediction.total_std
        return Interval(prediction.pred_mean - half, prediction.pred_mean + half)


def conformal_intervals(
    prob_predictive: Judged,
    data: DataLike,
    level: float = 0.9,
    progress: bool | None = None,
) -> ConformalIntervals:
    """Intervals `pred_mean -+ q total_std`, with q such that they cover at a level.

    q is the conformal quantile of `|y - pred_mean| / total_std` on held-out data, for every output
    on its own: each output is covered at the level, not all of them together.

    Args:
        prob_predictive: A predictive of a regression: what `set_prob_predictive(prior_arguments)`
            returns, or a baseline.
        data: Held-out data, which neither the weights nor the hyperparameters have seen. A weight
            must be a mask.
        level: The probability that a new target lies in its interval.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Raises:
        ValueError: If there are too few examples for the level; the message says how many are
            needed.

    Reference: Lei et al. (2018), Distribution-free predictive inference for regression.
    """
    _as_fraction(level)
    recipe = prob_predictive.recipe
    if not recipe.regression:
        raise ValueError(
            f"intervals are for regression, and this predictive has {recipe.described}. Class "
            "labels have prediction sets: conformal_sets"
        )
    checked = prob_predictive.checked(data, progress)
    (mean, std), target, weight = held_out(prob_predictive, checked, ("pred_mean", "total_std"))
    scores = np.abs(target - mean) / std
    rows = zip(by_output(scores), by_output(weight), strict=True)
    factors = [conformal_quantile(row[counts > 0], level) for row, counts in rows]
    factor = np.reshape(factors, mean.shape[1:])
    return ConformalIntervals(prob_predictive, jnp.asarray(factor), level)


@pytree
class ConformalSets:
    """`sets(input) -> truth values (n, C)`: which classes are in the set. A pytree: it jits."""

    prob_predictive: Judged
    threshold: jax.Array
    key: jax.Array
    level: float = static()
    score: str = static()
    randomised: bool = static()
    penalty: float = static()
    k_reg: int = static()

    def __call__(self, input: PyTree, key: jax.Array | None = None) -> jax.Array:
        """Which classes are in the prediction set of every input.

        Args:
            input: A batch of inputs.
            key: For randomised sets, the key of this batch. By default it is the same in every
                call.
        """
        fields = ("log_pred_act",)
        probabilities = jnp.exp(self.prob_predictive(input, fields).log_pred_act)
        draw = jax.random.fold_in(self.key, 1) if key is None else key
        scores = self.scores(probabilities, draw)
        return scores <= self.threshold.astype(scores.dtype)

    def fitted(self, data: DataLike, progress: bool | None = None) -> "ConformalSets":
        """The same sets with the threshold of held-out data."""
        checked = self.prob_predictive.checked(data, progress)
        batches = list(observations(self.prob_predictive, checked, ("log_pred_act",)))
        probabilities, target = (
            jnp.concatenate([_by_event(batch[name], classes) for batch in batches])
            for name, classes in (("pred_act", True), ("target", _has_classes(batches[0])))
        )
        scores = self.scores(probabilities, jax.random.fold_in(self.key, 0))
        of_target = entry_at(scores, _labels(target))
        threshold = conformal_quantile(of_target, self.level)
        return dataclasses.replace(self, threshold=jnp.asarray(threshold, scores.dtype))

    def scores(self, probabilities: jax.Array, key: jax.Array) -> jax.Array:
        """The score of every class, (..., C); low scores are in the set."""
        if self.score == "lac":
            return 1 - probabilities
        shape = probabilities.shape[:-1]
        share = jnp.ones(shape, probabilities.dtype)
        if self.randomised:
            share = jax.random.uniform(key, shape, probabilities.dtype)
        scores, rank = _cumulative(probabilities, share)
        if self.score == "aps":
            return scores
        above = jnp.maximum(rank - self.k_reg, 0).astype(scores.dtype)
        return scores + self.penalty * above


def conformal_sets(
    prob_predictive: Judged,
    data: DataLike,
    level: float = 0.9,
    score: str = "lac",
    *,
    randomised: bool = False,
    penalty: float = 0.01,
    k_reg: int = 5,
    key: jax.Array | None = None,
    progress: bool | None = None,
) -> ConformalSets:
    """Sets of classes that hold the true one at a level.

    A class is in the set if its score is at most the conformal quantile of the scores of the true
    classes on held-out data. With p sorted in descending order, and a class c of rank r:

    - `"lac"`: `1 - p_c`. The smallest sets on average; a set can be empty.
    - `"aps"`: the probability of all classes above c, plus p_c. Larger sets for inputs that are
      hard. Randomised, p_c is multiplied by a uniform number: smaller sets, one of which can be
      empty.
    - `"raps"`: that of `"aps"`, plus `penalty max(r - k_reg, 0)`: no long tails of unlikely
      classes.

    Binary outputs have two classes, zero and one, on the last axis.

    Args:
        prob_predictive: A predictive of class probabilities: what
            `set_prob_predictive(prior_arguments)` returns, or a baseline.
        data: Held-out data with labels, which neither the weights nor the hyperparameters have
            seen. A weight must be a mask.
        level: The probability that a set holds the true class.
        score: `"lac"`, `"aps"` or `"raps"`.
        randomised: Whether the scores of `"aps"` and `"raps"` are randomised.
        penalty: The lambda of `"raps"`.
        k_reg: The rank up to which `"raps"` has no penalty.
        key: The key of randomised scores; by default `jax.random.key(0)`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Raises:
        ValueError: If there are too few examples for the level; the message says how many are
            needed.

    References: Sadinle et al. (2019) for LAC, Romano et al. (2020) for APS, Angelopoulos et al.
    (2021) for RAPS.
    """
    _as_fraction(level)
    check_names([score], SCORES, "score")
    if penalty < 0 or k_reg < 0:
        raise ValueError(f"penalty and k_reg must not be negative; got {penalty} and {k_reg}")
    key = jax.random.key(0) if key is None else key
    check_key(key)
    recipe = prob_predictive.recipe
    if not recipe.classification:
        raise ValueError(
            f"prediction sets are for classes, and this predictive has {recipe.described}. For "
            "regression there is conformal_intervals"
        )
    sets = ConformalSets(
        prob_predictive=prob_predictive,
        threshold=jnp.zeros(()),
        key=key,
        level=level,
        score=score,
        randomised=randomised,
        penalty=penalty,
        k_reg=k_reg,
    )
    return sets.fitted(data, progress)


def _as_fraction(level: float) -> fractions.Fraction:
    """The number that was written: 0.55 x 100 is 55, and not a little more."""
    if not 0 < level < 1:
        raise ValueError(f"level is a probability strictly between 0 and 1, got {level}")
    return fractions.Fraction(repr(float(level)))


def _cumulative(probabilities: jax.Array, share: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability above every class plus a share of its own, and its rank from one on.

    As one minus the probability below: that of the last class is exactly one in every row, and
    rounding breaks no tie.
    """
    order = jnp.argsort(-probabilities, axis=-1)
    ordered = jnp.take_along_axis(probabilities, order, axis=-1)
    from_here = jnp.cumsum(ordered[..., ::-1], axis=-1)[..., ::-1]
    below = jnp.concatenate([from_here[..., 1:], jnp.zeros_like(ordered[..., :1])], axis=-1)
    scores = 1 - below - (1 - share[..., None]) * ordered
    place = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(scores, place, axis=-1), place + 1


def _by_event(values: jax.Array, classes: bool) -> jax.Array:
    """Events on one axis: (events, C), or (events,)."""
    return values.reshape(-1, values.shape[-1]) if classes else values.reshape(-1)


def _has_classes(batch: Mapping[str, jax.Array]) -> bool:
    return batch["target"].ndim == batch["pred_act"].ndim


def _labels(target: jax.Array) -> jax.Array:
    if target.ndim == 1:
        return target
    if not bool(jnp.all(target.max(axis=-1) == 1)):
        raise ValueError(
            "prediction sets hold one true class, and the targets are probabilities; give labels: "
            "target.argmax(-1)"
        )
    return target.argmax(axis=-1)
