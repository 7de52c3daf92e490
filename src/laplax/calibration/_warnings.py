"""What a grid search says about an answer that lies at its edge."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from .._arguments import warn
from .._engine.memo import model_jit
from .._tree import PyTree
from ..evidence import determined_by_data
from ._objectives import PredictiveObjective
from ._points import CalibrationWarning, Searched

FLAT = 1e-6  # of the largest value
AS_GOOD = 1e-3  # of the MAP's value: what a variance of 1e-4 logits cannot change
IGNORED = 0.1  # parameters that the data determine, where they determine none
ALL_NOISE = 0.02  # of the noise: variances of the outputs where they do not matter
NO_UNCERTAINTY = "the best predictive has no weight uncertainty; the MAP is as good"


def warn_about_grid(
    objective: Searched,
    grid: np.ndarray,
    point: float,
    chosen: Mapping[str, PyTree],
    values: np.ndarray,
) -> None:
    """Say what it means that `chosen`, which `point` of a grid stands for, has the best value."""
    if grid.size < 3:
        return
    judged = objective.objective
    meaning = ""
    if isinstance(judged, PredictiveObjective) and judged.projection is not None:
        meaning = _meaning(judged, chosen, float(np.nanmin(values)), point == grid.max())
    if meaning:
        warn(meaning, CalibrationWarning)
    elif warn_if_flat(values, FLAT) or point not in (grid.min(), grid.max()):
        return
    elif "temperature" in chosen and _is_ratio(point, chosen) and point == grid.min():
        warn(
            "the best ratio of prior to curvature is the smallest that is tried: the prior counts "
            "for nothing along the directions that the curvature sees, and is all there is along "
            "the others",
            CalibrationWarning,
        )
    else:
        warn(
            f"the best prior precision, {float(chosen['prior_prec']):.3g}, lies at the edge of the "
            "grid; widen it: calibration_method=GridSearch(log_prior_prec_min=..., "
            "log_prior_prec_max=...)",
            CalibrationWarning,
        )


def _is_ratio(point: float, chosen: Mapping[str, PyTree]) -> bool:
    """Whether the grid had ratios of prior to curvature, not prior precisions."""
    prior_prec = float(chosen["prior_prec"])
    ratio = prior_prec * float(chosen["temperature"])
    return math.isclose(point, ratio, rel_tol=1e-3) and not math.isclose(point, prior_prec)


def _meaning(
    judged: PredictiveObjective, chosen: Mapping[str, PyTree], value: float, at_top: bool
) -> str:
    """In words, if the answer is to do without variances, or without the curvature."""
    without, determined, share = (float(x) for x in _ends(judged, chosen))
    if judged.predictive.recipe.likelihood.has_noise:
        # The noise was chosen beside the variances of the weights, so the MAP has another one.
        noise = float(chosen["sigma_squared"])
        all_noise = at_top and share <= ALL_NOISE
        return f"{NO_UNCERTAINTY} with sigma_squared={noise:.3g}" if all_noise else ""
    if without - value <= AS_GOOD * abs(without):
        return (
            f"{NO_UNCERTAINTY}: by this objective it has {without:.6g}, and the best predictive "
            f"{value:.6g}"
        )
    if determined <= IGNORED:
        return (
            "the best predictive ignores the curvature of the data: its covariance is that of the "
            f"prior, of precision {float(chosen['prior_prec']):.3g}, and the training data "
            f"determine {determined:.2g} parameters"
        )
    return ""


@model_jit
def _ends(
    judged: PredictiveObjective, chosen: Mapping[str, PyTree]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The MAP's value, how many parameters the data determine, variances in units of the noise."""
    posterior_fn = judged.predictive.posterior_fn
    arguments = posterior_fn.parse(chosen)
    noise = arguments.sigma_squared
    moments = judged.moments(arguments.likelihood_scale, arguments.precision)
    assert moments.var is not None
    share = judged.typical_variance(moments.var).astype(noise.dtype) / noise
    without = judged.value_without_variance(moments, noise)
    return without, determined_by_data(posterior_fn, arguments), share


def warn_if_flat(values: np.ndarray, tolerance: float) -> bool:
    """Say so if the objective does not tell the points of a search apart."""
    finite = values[np.isfinite(values)]
    spread = float(finite.max() - finite.min())
    flat = values.size > 2 and spread <= tolerance * float(np.abs(finite).max())
    if flat:
        warn(
            "the calibration objective is flat: it does not tell the points of the search apart "
            f"(all values within {spread:.2g} of {float(finite.min()):.6g})",
            CalibrationWarning,
        )
    return flat
