"""Selective prediction: the error on what is predicted, if the least certain inputs are left out.

A score says how certain a prediction is; the examples of the highest scores are predicted.
Examples of equal scores cannot be told apart: their risks count as the mean of their group, so that
nothing depends on the order of the data.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._calibration_error import mean_within_ties
from ._streaming import Metric, as_real, named_metric
from ._targets import label_of


def risk_coverage_curve(risk: ArrayLike, score: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Coverage 1/N, 2/N, ..., 1, and the mean risk of the so many most certain examples.

    Args:
        risk: What goes wrong with every example, (N,): 0 or 1 for a class, a squared error.
        score: How certain every prediction is, (N,); those of the highest scores come first.

    Returns:
        Coverage and risk, (N,) each.

    >>> coverage, risk = risk_coverage_curve(jnp.array([0.0, 1.0]), jnp.array([0.9, 0.6]))
    >>> risk.tolist()
    [0.0, 0.5]
    """
    risk, score = _checked(risk, score)
    order = jnp.argsort(-score)
    share = mean_within_ties(score[order], risk[order])
    count = jnp.arange(1, risk.size + 1).astype(risk.dtype)
    return count / risk.size, jnp.cumsum(share) / count


def area_under_risk_coverage(risk: ArrayLike, score: ArrayLike) -> jax.Array:
    """The mean of the risk over all coverages 1/N, ..., 1: AURC, low if good.

    Args:
        risk: As for `risk_coverage_curve`.
        score: As for `risk_coverage_curve`.

    >>> float(area_under_risk_coverage(jnp.array([0.0, 1.0]), jnp.array([0.9, 0.6])))
    0.25
    """
    return risk_coverage_curve(risk, score)[1].mean()


def excess_area_under_risk_coverage(risk: ArrayLike, score: ArrayLike) -> jax.Array:
    """AURC minus that of the best possible order: zero if errors come last.

    Args:
        risk: As for `risk_coverage_curve`.
        score: As for `risk_coverage_curve`.

    >>> float(excess_area_under_risk_coverage(jnp.array([0.0, 1.0]), jnp.array([0.9, 0.6])))
    0.0
    """
    best = area_under_risk_coverage(risk, -as_real(risk))
    return area_under_risk_coverage(risk, score) - best


def risk_at_coverage(risk: ArrayLike, score: ArrayLike, *, coverage: float = 0.9) -> jax.Array:
    """The mean risk of the most certain examples that are at least this share of all.

    Args:
        risk: As for `risk_coverage_curve`.
        score: As for `risk_coverage_curve`.
        coverage: The share of examples that is predicted, up to 1.

    >>> float(risk_at_coverage(jnp.array([0.0, 1.0]), jnp.array([0.9, 0.6]), coverage=0.5))
    0.0
    """
    shares, risks = risk_coverage_curve(risk, score)
    # The whole numbers of a coverage such as 0.7 are not exact.
    position = jnp.searchsorted(shares, _share(coverage) * (1 - 4 * jnp.finfo(shares.dtype).eps))
    return risks[jnp.minimum(position, risks.size - 1)]


def _error_and_confidence(pred_act: ArrayLike, target: ArrayLike) -> tuple[jax.Array, jax.Array]:
    pred_act = as_real(pred_act)
    wrong = pred_act.argmax(axis=-1) != label_of(target, pred_act)
    return wrong.astype(pred_act.dtype).ravel(), pred_act.max(axis=-1).ravel()


def _squared_error_and_certainty(
    pred_mean: ArrayLike, total_std: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    pred_mean = as_real(pred_mean)
    target = jnp.asarray(target)
    if target.shape != pred_mean.shape:
        raise ValueError(
            f"targets {target.shape} do not fit predictions {pred_mean.shape}: shapes must be equal"
        )
    squared = jnp.square(pred_mean - target.astype(pred_mean.dtype))
    return squared.ravel(), -as_real(total_std).ravel()


def _aurc(values: tuple[jax.Array, jax.Array]) -> jax.Array:
    return area_under_risk_coverage(*values)


def _excess(values: tuple[jax.Array, jax.Array]) -> jax.Array:
    return excess_area_under_risk_coverage(*values)


@functools.partial(named_metric, finalise=_aurc, collect=True)
def aurc(pred_act: ArrayLike, target: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Area under the risk-coverage curve of a classification, low if good.

    The risk is an error, the score the largest class probability.

    >>> float(aurc(jnp.array([[0.9, 0.1], [0.4, 0.6]]), jnp.array([0, 0])))
    0.25
    """
    return _error_and_confidence(pred_act, target)


@functools.partial(named_metric, finalise=_excess, collect=True)
def excess_aurc(pred_act: ArrayLike, target: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`aurc` minus that of the best order for the same errors.

    >>> float(excess_aurc(jnp.array([[0.9, 0.1], [0.4, 0.6]]), jnp.array([0, 0])))
    0.0
    """
    return _error_and_confidence(pred_act, target)


@functools.partial(named_metric, finalise=_aurc, collect=True)
def regression_aurc(
    pred_mean: ArrayLike, total_std: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Area under the risk-coverage curve of a regression, low if good; by name `"aurc"`.

    The risk is the squared error of every entry, the score minus its standard deviation.

    >>> float(regression_aurc(jnp.zeros(2), jnp.array([1.0, 2.0]), jnp.array([0.0, 2.0])))
    1.0
    """
    return _squared_error_and_certainty(pred_mean, total_std, target)


@functools.partial(named_metric, finalise=_excess, collect=True)
def regression_excess_aurc(
    pred_mean: ArrayLike, total_std: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """`regression_aurc` minus that of the best order; by name `"excess_aurc"`.

    >>> float(regression_excess_aurc(jnp.zeros(2), jnp.array([1.0, 2.0]), jnp.array([0.0, 2.0])))
    0.0
    """
    return _squared_error_and_certainty(pred_mean, total_std, target)


def accuracy_at_coverage(coverage: float = 0.9) -> Metric:
    """The accuracy on the most certain examples that are this share of all, as a metric.

    Args:
        coverage: The share of examples that is predicted, up to 1.

    >>> metric = accuracy_at_coverage(0.5)
    >>> float(metric(jnp.array([[0.9, 0.1], [0.4, 0.6]]), jnp.array([0, 0])))
    1.0
    """
    _share(coverage)

    def finalise(values: tuple[jax.Array, jax.Array]) -> jax.Array:
        return 1 - risk_at_coverage(*values, coverage=coverage)

    return Metric(_error_and_confidence, finalise, collect=True)


def _share(coverage: float) -> float:
    if not 0 < coverage <= 1:
        raise ValueError(
            f"coverage is a share of the examples, above 0 and up to 1; got {coverage}"
        )
    return coverage


def _checked(risk: ArrayLike, score: ArrayLike) -> tuple[jax.Array, jax.Array]:
    risk = as_real(risk)
    score = as_real(score)
    if risk.ndim != 1 or risk.shape != score.shape or not risk.size:
        raise ValueError(
            "risk and score must hold one number per example, both of shape (N,); got "
            f"{risk.shape} and {score.shape}"
        )
    return risk, score
