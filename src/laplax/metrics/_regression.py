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

from ._streaming import Mean, Metric, as_real, mean_of, mean_value


def rmse(pred_mean: ArrayLike, target: ArrayLike) -> jax.Array:
    """Root of the mean squared error.

    >>> float(rmse(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])))
    0.0
    """
    return RMSE(pred_mean, target)


def nll(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean negative log-density of the targets under N(pred_mean, total_var), per entry.

    >>> f"{nll(jnp.zeros(3), jnp.ones(3), jnp.zeros(3)):.4f}"
    '0.9189'
    """
    return NLL(pred_mean, total_var, target)


def crps(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean continuous ranked probability score of N(pred_mean, total_var), in closed form.

    In the unit of the targets; for a vanishing variance it is the mean absolute error.

    >>> f"{crps(jnp.zeros(3), jnp.ones(3), jnp.zeros(3)):.4f}"
    '0.2337'
    """
    return CRPS(pred_mean, total_var, target)


def chi_squared(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Mean squared standardised residual; 1 when the variances are right on average.

    >>> float(chi_squared(jnp.zeros(2), jnp.full(2, 4.0), jnp.array([2.0, -2.0])))
    1.0
    """
    return CHI_SQUARED(pred_mean, total_var, target)


def coverage(
    pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike, *, level: float = 0.95
) -> jax.Array:
    """Fraction of targets inside the central interval of probability `level`.

    >>> float(coverage(jnp.zeros(2), jnp.ones(2), jnp.array([0.1, 3.0])))
    0.5
    """
    return coverage_metric(level)(pred_mean, total_var, target)


def interval_width(total_var: ArrayLike, *, level: float = 0.95) -> jax.Array:
    """Mean width of the central interval of probability `level`.

    >>> f"{interval_width(jnp.ones(2)):.4f}"
    '3.9199'
    """
    return interval_width_metric(level)(total_var)


def pit(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    """Probability integral transform of every entry; uniform on [0, 1] if calibrated.

    >>> pit(jnp.zeros(2), jnp.ones(2), jnp.zeros(2)).tolist()
    [0.5, 0.5]
    """
    return PIT(pred_mean, total_var, target)


def coverage_metric(level: float = 0.95) -> Metric:
    """`coverage` at another level, as a streaming metric.

    >>> coverage_metric(0.5).fields
    ('pred_mean', 'total_var', 'target')
    """
    _quantile(level)
    return Metric(functools.partial(_inside, level=level), mean_value)


def interval_width_metric(level: float = 0.95) -> Metric:
    """`interval_width` at another level, as a streaming metric.

    >>> interval_width_metric(0.5).fields
    ('total_var',)
    """
    _quantile(level)
    return Metric(functools.partial(_width, level=level), mean_value)


# --- statistics of a batch -----------------------------------------------------------------


def _squared_error(pred_mean: ArrayLike, target: ArrayLike) -> Mean:
    return mean_of(_residual(pred_mean, target) ** 2)


def _negative_log_density(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> Mean:
    z, std = _standardised(pred_mean, total_var, target)
    return mean_of(0.5 * z**2 + jnp.log(std) + 0.5 * math.log(2 * math.pi))


def _ranked_score(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> Mean:
    z, std = _standardised(pred_mean, total_var, target)
    density = jnp.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return mean_of(std * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)))


def _squared_standardised(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> Mean:
    return mean_of(_standardised(pred_mean, total_var, target)[0] ** 2)


def _inside(
    pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike, *, level: float = 0.95
) -> Mean:
    z, _ = _standardised(pred_mean, total_var, target)
    # A residual that is not a number is neither inside nor outside: let it show.
    return mean_of(jnp.where(jnp.isnan(z), z, (jnp.abs(z) <= _quantile(level)).astype(z.dtype)))


def _width(total_var: ArrayLike, *, level: float = 0.95) -> Mean:
    return mean_of(2 * _quantile(level) * jnp.sqrt(as_real(total_var)))


def _transform(pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike) -> jax.Array:
    return ndtr(_standardised(pred_mean, total_var, target)[0])


def _root_mean(mean: Mean) -> jax.Array:
    return jnp.sqrt(mean_value(mean))


def _identity(values: jax.Array) -> jax.Array:
    return values


def _residual(pred_mean: ArrayLike, target: ArrayLike) -> jax.Array:
    pred_mean, target = as_real(pred_mean), jnp.asarray(target)
    # (N, 1) against (N,) would broadcast to (N, N) and give a wrong number without a word.
    if target.shape != pred_mean.shape:
        raise ValueError(
            f"targets {target.shape} do not fit predictions {pred_mean.shape}: shapes must be equal"
        )
    return target.astype(pred_mean.dtype) - pred_mean


def _standardised(
    pred_mean: ArrayLike, total_var: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    residual, total_var = _residual(pred_mean, target), as_real(total_var)
    if total_var.shape != residual.shape:
        raise ValueError(
            f"variances {total_var.shape} do not fit predictions {residual.shape}: shapes must "
            "be equal"
        )
    std = jnp.sqrt(total_var)
    return residual / std, std


def _quantile(level: float) -> float:
    """Half the width, in standard deviations, of the central interval of probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"level is a probability strictly between 0 and 1, got {level}")
    return statistics.NormalDist().inv_cdf((1 + level) / 2)


RMSE = Metric(_squared_error, _root_mean)
NLL = Metric(_negative_log_density, mean_value)
CRPS = Metric(_ranked_score, mean_value)
CHI_SQUARED = Metric(_squared_standardised, mean_value)
PIT = Metric(_transform, _identity, collect=True)
