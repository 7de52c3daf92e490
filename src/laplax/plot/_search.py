"""The record of a search over hyperparameters."""

from typing import TYPE_CHECKING

import numpy as np

from ..calibration import EVIDENCE, Trace
from ._style import OKABE_ITO, color, finish, on

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def calibration_curve(
    trace: Trace,
    *,
    objective: str = EVIDENCE,
    chosen: float | None = None,
    curve: int = 0,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """The objective over the prior precision, with the chosen point marked.

    Far from the best point an objective can be larger by orders of magnitude; what lies beyond
    three times the middle distance from it is cut at the frame.

    Args:
        trace: `set_prob_predictive.trace`, from `laplax.calibration`. A grid is drawn as a curve;
            a descent, which changes other hyperparameters too, as its path.
        objective: What was searched: the evidence is drawn with its own sign (a trace holds what
            was minimised), anything else as it is and under this name.
        chosen: The prior precision to mark; by default the best point of the trace.
        curve: Which colour to take.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    x = np.asarray(trace.points["prior_prec"])
    values = np.asarray(trace.values)
    evidence = objective == EVIDENCE
    if x.ndim != 1:
        raise ValueError(
            "a calibration curve needs one prior precision per point of the search; this trace "
            f"has the shape {x.shape}. Draw trace.values over the steps instead"
        )
    axes = on(ax)
    if set(trace.points) == {"prior_prec"}:  # a grid, in whatever order it was given
        order = np.argsort(x)
        x = x[order]
        values = values[order]
    y = -values if evidence else values
    finite = np.isfinite(y)
    best = int(np.argmin(np.where(finite, values, np.inf)))
    mark = float(x[best]) if chosen is None else float(chosen)
    # The mark lies on the curve, also between two points of a grid.
    height = y[best] if chosen is None else np.interp(np.log(mark), np.log(x[finite]), y[finite])
    axes.plot(x[finite], y[finite], color=color(curve))
    tint = OKABE_ITO["vermillion"]
    axes.plot([mark], [height], "*", markersize=11, color=tint, label=f"chosen: {mark:.3g}")
    name = "log marginal likelihood [nat]" if evidence else objective.replace("_", " ")
    frame = _frame(y[finite], float(y[best]))
    return finish(axes, "prior precision", name, legend=legend, xscale="log", ylim=frame)


def _frame(y: np.ndarray, best: float) -> tuple[float, float]:
    reach = 3 * float(np.median(np.abs(y - best))) or 1.0
    low = max(float(y.min()), best - reach)
    high = min(float(y.max()), best + reach)
    pad = 0.08 * (high - low) or 1.0
    return low - pad, high + pad
