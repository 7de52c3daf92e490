"""Two parameters: the energy that is approximated, and the Gaussians that approximate it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from ._classification import map_points
from ._style import LINES, OKABE_ITO, color, finish, on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Limits = tuple[float, float]


def energy_ellipses(
    energy: Callable[[np.ndarray], ArrayLike],
    mean: ArrayLike,
    covariances: ArrayLike | Mapping[str, ArrayLike],
    *,
    names: Sequence[str] = ("parameter 1", "parameter 2"),
    xlim: Limits | None = None,
    ylim: Limits | None = None,
    levels: int = 12,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Energy contours, the MAP, and ellipses of one and two standard deviations (Figure 1).

    Args:
        energy: A function from parameters (n, 2) to energies (n,), up to a constant.
        mean: The MAP, shape (2,).
        covariances: A posterior covariance (2, 2), or several by name.
        names: What the axes are called.
        xlim: The range of the first parameter; by default three deviations of the widest.
        ylim: The range of the second parameter.
        levels: How many contour lines.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    axes = on(ax)
    centre = np.asarray(mean)
    if not isinstance(covariances, Mapping):
        covariances = {"posterior": covariances}
    named = {label: _checked(centre, np.asarray(cov)) for label, cov in covariances.items()}
    reach = 3 * np.max([np.sqrt(np.diagonal(cov)) for cov in named.values()], axis=0)
    low = centre - reach
    high = centre + reach
    xlim = xlim or (float(low[0]), float(high[0]))
    ylim = ylim or (float(low[1]), float(high[1]))
    energy_contours(energy, xlim=xlim, ylim=ylim, levels=levels, ax=axes)
    for i, (label, cov) in enumerate(named.items()):
        covariance_ellipses(centre, cov, label=label, curve=i, ax=axes)
    axes.plot(*centre, "X", color="black", markersize=8, markeredgecolor="white", label="MAP")
    return finish(axes, *names, legend=legend, columns=3, lines=None, xlim=xlim, ylim=ylim)


def energy_contours(
    energy: Callable[[np.ndarray], ArrayLike],
    *,
    xlim: Limits,
    ylim: Limits,
    levels: int = 12,
    resolution: int = 121,
    ax: "Axes | None" = None,
) -> "Axes":
    """Contours of an energy over two parameters, above its smallest value.

    Levels are quantiles over the plane, so that a steep corner does not use them up.
    """
    axes = on(ax)
    from matplotlib.colors import BoundaryNorm

    points = map_points(xlim, ylim, resolution)
    x, y = points.T.reshape(2, resolution, resolution)
    values = np.asarray(energy(points))
    if values.shape != (x.size,):
        raise ValueError(
            f"energy must return one number per point: shape ({x.size},); got {values.shape}"
        )
    above = (values - np.nanmin(values)).reshape(x.shape)
    heights = np.unique(np.nanquantile(above, np.linspace(0, 1, levels + 1)))
    shades = BoundaryNorm(heights, 256)  # one step of grey per level, however high it is
    axes.contourf(x, y, above, heights, cmap="Greys", norm=shades, alpha=0.45)
    axes.contour(x, y, above, heights, colors=OKABE_ITO["black"], linewidths=0.4, alpha=0.6)
    return axes


def covariance_ellipses(
    mean: ArrayLike,
    covariance: ArrayLike,
    *,
    label: str = "posterior",
    curve: int = 0,
    sigmas: tuple[float, ...] = (1.0, 2.0),
    ax: "Axes | None" = None,
) -> "Axes":
    """The curves at `sigmas` standard deviations (Mahalanobis distance) of a Gaussian."""
    axes = on(ax)
    centre = np.asarray(mean)
    root = np.linalg.cholesky(_checked(centre, np.asarray(covariance)))
    turn = np.linspace(0, 2 * np.pi, 181)
    circle = np.stack([np.cos(turn), np.sin(turn)])
    which = " and ".join(f"{s:g}" for s in sigmas)
    for i, s in enumerate(sigmas):
        axes.plot(
            *(centre[:, None] + s * root @ circle),
            linestyle=LINES[curve % len(LINES)],
            linewidth=2.0 - 0.6 * i,
            color=color(curve),
            label=f"{label}, {which} sd" if i == 0 else "_",
        )
    return axes


def _checked(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    if mean.shape != (2,) or covariance.shape != (2, 2):
        raise ValueError(
            "ellipses are for two parameters: mean (2,) and covariance (2, 2); got "
            f"{mean.shape} and {covariance.shape}"
        )
    return covariance
