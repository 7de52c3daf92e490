"""What all figures share: the lazy import, the palette, legends that cover nothing."""

import contextlib
from collections.abc import Iterator
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito (2008): distinct under every common form of colour blindness.
OKABE_ITO = MappingProxyType(
    {
        "blue": "#0072B2",
        "vermillion": "#D55E00",
        "green": "#009E73",
        "purple": "#CC79A7",
        "orange": "#E69F00",
        "sky": "#56B4E9",
        "black": "#000000",
        "yellow": "#F0E442",
    }
)
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # distinct without colour, too
MARKERS = ("o", "^", "s", "D", "v", "P", "X")

STYLE = MappingProxyType(
    {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures look alike anywhere
        "mathtext.fontset": "dejavusans",
        "font.size": 9.0,
        "axes.titlesize": 10.0,
        "axes.labelsize": 9.0,
        "legend.fontsize": 8.0,
        "xtick.labelsize": 8.0,
        "ytick.labelsize": 8.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "lines.linewidth": 1.6,
        "legend.frameon": False,
        "svg.hashsalt": "laplax",  # the same figure, the same file
    }
)


def matplotlib() -> ModuleType:
    """matplotlib, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "figures are drawn with matplotlib, which is not installed: pip install 'laplax[plot]'"
        ) from error
    return matplotlib


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Settings under which these figures read well in print; the user's come back afterwards."""
    with matplotlib().rc_context(dict(STYLE)):
        yield


def color(index: int) -> str:
    """The colour of curve number `index`; yellow is left out, because lines in it cannot be seen.

    >>> color(0), color(7)
    ('#0072B2', '#0072B2')
    """
    return list(OKABE_ITO.values())[index % 7]


def on(ax: "Axes | None") -> "Axes":
    """Return the axes to draw on."""
    matplotlib()
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.gca()


def finish(
    ax: "Axes",
    xlabel: str,
    ylabel: str,
    *,
    legend: bool,
    columns: int = 2,
    lines: Literal["x", "y", "both"] | None = "both",
    **settings: Any,
) -> "Axes":
    """Label the axes (`settings` are those of `Axes.set`); add faint lines and a legend below."""
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if lines is not None:
        ax.grid(True, axis=lines, color="0.9", linewidth=0.6)
    labels = ax.get_legend_handles_labels()[1]
    if legend and labels:
        columns = min(columns, len(labels))
        # Under the axis label a legend covers neither data nor title; the pad is in font sizes, so
        # that it clears tick and axis labels at any height.
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.4, ncols=columns)
    return ax


def plain_log_ticks(ax: "Axes") -> None:
    """A logarithmic axis with few plain numbers: below a decade the default ones overlap."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    ax.set(xscale="log")
    low, high = ax.get_xlim()
    if high < 100 * low:
        near = high < 5 * low
        ax.xaxis.set_major_locator(MaxNLocator(5) if near else LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(FormatStrFormatter("%.3g"))
    ax.xaxis.set_minor_formatter(NullFormatter())
