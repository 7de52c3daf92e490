"""Figures on a page: their size and their panels."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 2.9  # inches
PANEL_HEIGHT = 2.5
COLUMNS = 3
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on disk."""

    name: str
    title: str
    caption: str
    width: float  # inches
    png: Path
    svg: Path


def single(figure: "Figure", width: float, height: float) -> "Axes":
    """The axes of a figure of one panel, with its size in inches."""
    figure.set_size_inches(width, height)
    return figure.subplots()


def panels(
    figure: "Figure",
    items: Mapping[str, Item],
    panel: Callable[["Axes", Item], None],
    *,
    size: tuple[float, float] | None = None,
    width: float = PANEL_WIDTH,
    height: float = PANEL_HEIGHT,
    columns: int = COLUMNS,
    legend: bool = True,
) -> list["Axes"]:
    """One panel per item, under its name; a legend for all of them under the figure."""
    columns = min(columns, len(items))
    rows = math.ceil(len(items) / columns)
    across = width * columns + (1.2 if columns == 1 else 0)
    figure.set_size_inches(size or (across, height * rows + 0.5))
    grid = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    for ax in grid[len(items) :]:
        ax.remove()
    used = grid[: len(items)]
    for ax, (name, item) in zip(used, items.items(), strict=True):
        panel(ax, item)
        ax.set_title(name)
    handles, labels = used[0].get_legend_handles_labels()
    if legend and labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return used
