"""Figures on a page: their size, their panels, their files."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (2.9, 2.5)  # inches
COLUMNS = 3
DPI = 160


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on disk."""

    name: str
    title: str
    caption: str
    width: float  # inches
    png: Path
    svg: Path


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A figure to be drawn: its size in inches, and the function that fills it."""

    name: str
    title: str
    caption: str
    size: tuple[float, float]
    paint: Callable[["Figure"], Any]


def draw(plan: Plan, folder: Path) -> Picture:
    """Draw and save as PNG and SVG; no window, no backend and no setting of the user is touched."""
    png = folder / f"{plan.name}.png"
    svg = folder / f"{plan.name}.svg"
    with plot.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=plan.size, layout="constrained")
        plan.paint(figure)
        figure.savefig(png, dpi=DPI)
        figure.set_layout_engine("none")  # it is laid out already, and that takes the most time
        figure.savefig(svg, metadata={"Date": None})
    return Picture(plan.name, plan.title, plan.caption, plan.size[0], png, svg)


def size_of(panels: int, height: float = PANEL[1]) -> tuple[float, float]:
    """The size of a figure with this many panels, in inches."""
    columns = min(COLUMNS, panels)
    width = PANEL[0] * columns + (1.2 if columns == 1 else 0)
    return width, height * math.ceil(panels / columns) + 0.5


def panels(
    figure: "Figure",
    items: Sequence[Any],
    panel: Callable[["Axes", Any], None],
    *,
    columns: int = COLUMNS,
    legend: bool = True,
) -> list["Axes"]:
    """One panel per item; a legend for all of them under the figure."""
    columns = min(columns, len(items))
    rows = math.ceil(len(items) / columns)
    grid = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for ax, item in zip(grid, items, strict=False):
        panel(ax, item)
    for ax in grid[len(items) :]:
        ax.remove()
    used = list(grid[: len(items)])
    handles, labels = used[0].get_legend_handles_labels()
    if legend and labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return used
