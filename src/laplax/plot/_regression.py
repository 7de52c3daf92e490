"""Regression in one dimension: the mean, and how far it can be trusted."""

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from ._style import OKABE_ITO, finish, on

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predictive_band(
    input: ArrayLike,
    prediction: Mapping[str, ArrayLike],
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    level: float = 0.95,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Data, predictive mean, and central bands: epistemic alone, and with the noise.

    Args:
        input: Inputs (n,) or (n, 1), in any order.
        prediction: What a predictive returned for them: `pred_mean`, `pred_std`, `total_std`.
        data: Inputs and targets to draw as points.
        level: The probability of the bands.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    x = _column(input, "input")
    fields = ("pred_mean", "pred_std", "total_std")
    mean, epistemic, total = (_column(prediction[name], name) for name in fields)
    if not 0 < level < 1:
        raise ValueError(f"level is a probability strictly between 0 and 1; got {level}")
    axes = on(ax)
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    order = np.argsort(x)
    x, mean, epistemic, total = (part[order] for part in (x, mean, epistemic, total))
    blue = OKABE_ITO["blue"]
    for std, alpha, name in ((total, 0.18, "total"), (epistemic, 0.40, "epistemic")):
        bounds = (mean - z * std, mean + z * std)
        label = f"{level:.0%} {name}"
        axes.fill_between(x, *bounds, color=blue, alpha=alpha, linewidth=0, label=label)
    axes.plot(x, mean, color=blue, label="predictive mean")
    if data is not None:
        points = [_column(part, "data") for part in data]
        axes.plot(*points, ".", color="black", markersize=3.5, label="training data")
    return finish(axes, "input", "output", legend=legend, xlim=(x[0], x[-1]))


def _column(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(
            f"a band is drawn for one input and one output; {name} has shape {array.shape}, "
            "expected (n,) or (n, 1)"
        )
    return array
