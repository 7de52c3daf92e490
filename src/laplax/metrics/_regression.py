"""Metrics of regression. Densities and intervals use the total variance, epistemic + aleatoric.

Every metric is a mean over all entries of the targets (examples and outputs alike), but for
`pit`, which gives one value per entry.
"""

import functools
import math
import statistics

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jax.typing import ArrayLike

from ._streaming import Mean, Metric, as_real, collected_metric, mean_metric, mean_value


def _root_mean(mean: Mean) -> jax.Array:
    return jnp.sqrt(mean_value(mean))


@functools.partial(mean_metric, finalise=_root_mean)
def rmse(pred_mean: ArrayLike, target: ArrayLike) -> jax.Array:
    """Root of the mean squared error.

    >>> float(rmse(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])))
    0.0
    """
    return _residual(pred_mean, target) ** 2


@mean_metric
def nll(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean negative log-density of the targets under N(pred_mean, total_var), per entry.

    >>> f"{nll(jnp.zeros(3), jnp.ones(3), jnp.zeros(3)):.4f}"
    '0.9189'
    """
    z, std = _standardised(pred_mean, total_var, target)
    return 0.5 * z**2 + jnp.log(std) + 0.5 * math.log(2 * math.pi)


@mean_metric
def crps(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean continuous ranked probability score of N(pred_mean, total_var), in closed form.

    In the unit of the targets; for a vanishing variance it is the mean absolute error.

    >>> f"{crps(jnp.zeros(3), jnp.ones(3), jnp.zeros(3)):.4f}"
    '0.2337'
    """
    z, std = _standardised(pred_mean, total_var, target)
    density = jnp.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return std * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))


@mean_metric
def chi_squared(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean squared standardised residual; 1 when the variances are right on average.

    >>> float(chi_squared(jnp.zeros(2), jnp.full(2, 4.0), jnp.array([2.0, -2.0])))
    1.0
    """
    return _standardised(pred_mean, total_var, target)[0] ** 2


@mean_metric
def coverage(
    pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike, *, level: float = 0.95
) -> jax.Array:
    """Fraction of targets inside the central interval of probability `level`.

    >>> float(coverage(jnp.zeros(2), jnp.ones(2), jnp.array([0.1, 3.0])))
    0.5
    """
    z, _ = _standardised(pred_mean, total_var, target)
    inside = (jnp.abs(z) <= central_quantile(level)).astype(z.dtype)
    # A residual that is not a number is neither inside nor outside: let it show.
    return jnp.where(jnp.isnan(z), z, inside)


@mean_metric
def interval_width(total_var: ArrayLike, *, level: float = 0.95) -> jax.Array:
    """Mean width of the central interval of probability `level`.

    >>> f"{interval_width(jnp.ones(2)):.4f}"
    '3.9199'
    """
    return 2 * central_quantile(level) * jnp.sqrt(as_real(total_var))


@collected_metric
def pit(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Probability integral transform of every entry; uniform on [0, 1] if calibrated.

    >>> pit(jnp.zeros(2), jnp.ones(2), jnp.zeros(2)).tolist()
    [0.5, 0.5]
    """
    return ndtr(_standardised(pred_mean, total_var, target)[0])


def coverage_metric(level: float = 0.95) -> Metric:
    """`coverage` at another level, as a streaming metric.

    >>> coverage_metric(0.5).fields
    ('pred_mean', 'total_var', 'target')
    """
    central_quantile(level)  # a wrong level is an error now
    return coverage.with_options(level=level)


def interval_width_metric(level: float = 0.95) -> Metric:
    """`interval_width` at another level, as a streaming metric.

    >>> interval_width_metric(0.5).fields
    ('total_var',)
    """
    central_quantile(level)
    return interval_width.with_options(level=level)


def _residual(pred_mean: ArrayLike, target: ArrayLike) -> jax.Array:
    pred_mean = as_real(pred_mean)
    target = jnp.asarray(target)
    # (N, 1) against (N,) would broadcast to (N, N) and give a wrong number without a word.
    if target.shape != pred_mean.shape:
        raise ValueError(
            f"targets {target.shape} do not fit predictions {pred_mean.shape}: shapes must be equal"
        )
    return target.astype(pred_mean.dtype) - pred_mean


def _standardised(
    pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The residuals in standard deviations, and the standard deviations."""
    residual = _residual(pred_mean, target)
    total_var = as_real(total_var)
    if total_var.shape != residual.shape:
        raise ValueError(
            f"variances {total_var.shape} do not fit predictions {residual.shape}: shapes must "
            "be equal"
        )
    std = jnp.sqrt(total_var)
    return residual / std, std


def central_quantile(level: float) -> float:
    """Half the width, in standard deviations, of the central interval of probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"level is a probability strictly between 0 and 1, got {level}")
    return statistics.NormalDist().inv_cdf((1 + level) / 2)
