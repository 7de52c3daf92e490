"""Which figures fit the problem, and how each is put on a page."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .. import plot
from .._data import Batch
from ._energy import energy_of, two_names
from ._fit import Fitted, uncertainty
from ._panels import Picture, panels, single
from ._scores import NOISE
from ._setting import MAP_SIDE, Fields, Parts, Setting
from ._verdict import Recommendation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
CHOSEN = "#0b6aa8"
OTHER = "#8a9099"


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """What there is to draw: predictions of the MAP and of every curvature."""

    setting: Setting
    predicted_map: Parts
    fitted: list[Fitted]
    shown: Fitted | None
    verdict: Recommendation

    def predictions(self, fitted: list[Fitted]) -> dict[str, Parts]:
        """Those of the MAP and of these curvatures."""
        return {"MAP": self.predicted_map, **{x.name: x.prediction for x in fitted}}

    def compared(self) -> dict[str, Parts]:
        """Predictions of the MAP, and of the curvature that single figures show."""
        return self.predictions([] if self.shown is None else [self.shown])

    def named(self) -> dict[str, Fitted]:
        """Every curvature that fits."""
        return {x.name: x for x in self.fitted}

    def train(self) -> tuple[np.ndarray, np.ndarray]:
        """Training inputs and targets, or the first batch of a loader."""
        first = self.setting.training.data.peek()
        return np.asarray(jax.tree.leaves(first.input)[0]), np.asarray(first.target)


Paint = Callable[[Drawing, "Figure"], object]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A figure that can be drawn: its words, and the function that fills it."""

    title: str
    caption: str
    paint: Paint

    def draw(self, drawing: Drawing, folder: Path) -> Picture:
        """Save as PNG and SVG; no window, no backend and no setting of the user is touched."""
        name = self.paint.__name__
        png = folder / f"{name}.png"
        svg = folder / f"{name}.svg"
        with plot.style():
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            self.paint(drawing, figure)
            figure.savefig(png, dpi=DPI)
            figure.set_layout_engine("none")  # it is laid out already, and that takes the most time
            figure.savefig(svg, metadata={"Date": None})
        return Picture(name, self.title, self.caption, figure.get_figwidth(), png, svg)


def planned(paint: Paint) -> Plan:
    """Decorate a function that fills a figure: its documentation is the title and the caption."""
    title, _, caption = (paint.__doc__ or "").partition(".\n")
    return Plan(title, " ".join(caption.split()), paint)


def figures_for(drawing: Drawing) -> Iterator[Plan]:
    """Only what fits the problem."""
    yield decision
    setting = drawing.setting
    classification = setting.recipe.classification
    if "figure" in setting.inputs and classification:
        yield confidence_maps
    elif "figure" in setting.inputs and drawing.fitted:
        yield bands
    if classification:
        yield reliability
        yield confidences
    if setting.foreign and (classification or drawing.fitted):
        yield foreign_inputs
    if not drawing.fitted:
        return
    yield calibration_curves
    if any(_has_curvature(x) for x in drawing.fitted):
        yield spectrum
    yield layer_std
    two_vary = all(x.posterior_fn.space.size == 2 for x in drawing.fitted)
    if two_vary and isinstance(setting.training.data, Batch):
        yield energy


@planned
def decision(drawing: Drawing, figure: "Figure") -> None:
    """What decides, as a picture.

    The numbers of the first table, with bars of two standard errors. The row that was chosen is
    coloured.
    """
    table = drawing.verdict.table
    keys = {heading: key for key, heading in table.columns.items() if " " in key}
    names = [row["name"] for row in table.rows][::-1]
    colors = [CHOSEN if name == drawing.verdict.name else OTHER for name in names]

    def panel(ax: "Axes", key: str) -> None:
        estimates = [row[key] for row in table.rows][::-1]
        for place, (estimate, color) in enumerate(zip(estimates, colors, strict=True)):
            error = NOISE * estimate.standard_error
            ax.errorbar(estimate.value, place, xerr=error, fmt="o", color=color, capsize=3)
        ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4))
        ax.grid(axis="x", alpha=0.4)

    height = 0.9 + 0.28 * len(names)
    panels(figure, keys, panel, height=height, legend=False, columns=2, width=4.4)


@planned
def bands(drawing: Drawing, figure: "Figure") -> None:
    """Predictive bands.

    Training data, predictive mean and central 95% bands: epistemic uncertainty alone, and with
    the observation noise. Wide bands are cut at the frame.
    """
    inputs = drawing.setting.inputs["figure"]
    data = drawing.train()

    def panel(ax: "Axes", item: Fitted) -> None:
        fields = item.prediction["figure"]
        plot.predictive_band(inputs, fields, data=data, legend=False, ax=ax)
        ax.set(ylim=_reach(data[1], fields["pred_mean"]))

    panels(figure, drawing.named(), panel)


@planned
def confidence_maps(drawing: Drawing, figure: "Figure") -> None:
    """Where the network is sure.

    The largest class probability over the plane of inputs, the decision boundary (white) and
    the training data.
    """
    points = np.asarray(drawing.setting.inputs["figure"])
    xlim, ylim = ((float(x.min()), float(x.max())) for x in points.T)

    def panel(ax: "Axes", prediction: Parts) -> None:
        plot.confidence_map(
            lambda _: np.exp(prediction["figure"]["log_pred_act"]),
            xlim=xlim,
            ylim=ylim,
            data=drawing.train(),
            resolution=MAP_SIDE,
            colorbar=False,
            legend=False,
            ax=ax,
        )

    axes = panels(figure, drawing.predictions(drawing.fitted), panel)
    filled = axes[0].collections[0]
    figure.colorbar(filled, ax=axes, label="confidence", format="%.2f", shrink=0.8)


@planned
def reliability(drawing: Drawing, figure: "Figure") -> None:
    """Reliability.

    Accuracy over confidence on the test data, in 15 bins; the area of a point is the share of
    examples in its bin. Below the dashed line the network is overconfident.
    """
    ax = single(figure, 4.2, 4.6)
    for curve, (name, prediction) in enumerate(drawing.compared().items()):
        test = prediction["test"]
        plot.reliability_diagram(
            test["pred_act"], test["target"], label=name, curve=1 - curve, ax=ax
        )


@planned
def confidences(drawing: Drawing, figure: "Figure") -> None:
    """Confidence.

    How sure the predictions on the test data are. Where mean confidence lies above accuracy
    the network is overconfident.
    """

    def panel(ax: "Axes", prediction: Parts) -> None:
        test = prediction["test"]
        curve = 1 if prediction is drawing.predicted_map else 0
        plot.confidence_histogram(test["pred_act"], test["target"], curve=curve, ax=ax)

    panels(figure, drawing.compared(), panel, size=(6.4, 3.4), columns=2, legend=False)


@planned
def foreign_inputs(drawing: Drawing, figure: "Figure") -> None:
    """Out-of-distribution inputs.

    Uncertainty on the test data and on out-of-distribution inputs; the less they overlap, the
    better it reveals the latter (AUROC and FPR95 in the table).
    """
    compared = drawing.compared()
    kind = "entropy [nat]"
    if drawing.setting.recipe.regression:
        del compared["MAP"]  # it has no uncertainty
        kind = "epistemic standard deviation"
    several = len(drawing.setting.foreign) > 1
    pairs = {
        f"{name}: {part}" if several else name: (prediction["test"], prediction[part])
        for part in drawing.setting.foreign
        for name, prediction in compared.items()
    }

    def panel(ax: "Axes", pair: tuple[Fields, Fields]) -> None:
        plot.entropy_histograms(*map(uncertainty, pair), xlabel=kind, legend=False, ax=ax)

    columns = len(compared)
    width = 4.2 if columns == 1 else 3.2 * columns
    height = 3.1 * len(drawing.setting.foreign)
    panels(figure, pairs, panel, size=(width, height), columns=columns)


@planned
def calibration_curves(drawing: Drawing, figure: "Figure") -> None:
    """Choice of the prior precision.

    The objective of the search over prior precisions; other hyperparameters are at their
    chosen values. The star is what was chosen.
    """
    objective = drawing.setting.objective_name

    def panel(ax: "Axes", item: Fitted) -> None:
        best = item.prior_arguments["prior_prec"]
        plot.calibration_curve(item.curve, objective=objective, chosen=best, ax=ax)

    panels(figure, drawing.named(), panel, height=2.9, legend=False)


@planned
def spectrum(drawing: Drawing, figure: "Figure") -> None:
    """Spectrum of the curvature.

    Eigenvalues that each structure keeps (a diagonal one: its entries), largest first.
    """
    ax = single(figure, 4.6, 3.9)
    for curve, item in enumerate(drawing.fitted):
        if _has_curvature(item):
            plot.spectrum(item.posterior_fn.structure, label=item.name, curve=curve, ax=ax)


@planned
def layer_std(drawing: Drawing, figure: "Figure") -> None:
    """Posterior standard deviations.

    By leaf of the parameters: the box holds the middle half, the black line is the median, the
    thin line spans all.
    """
    assert drawing.shown is not None
    variances = drawing.shown.variances
    ax = single(figure, 4.6, 1.3 + 0.45 * len(jax.tree.leaves(variances)))
    plot.layer_std(variances, ax=ax)
    ax.set_title(drawing.shown.name)


@planned
def energy(drawing: Drawing, figure: "Figure") -> None:
    """Energy of two parameters.

    Contours of the negative log joint density, the MAP, and ellipses of one and two standard
    deviations of each posterior.
    """
    shown = drawing.shown
    assert shown is not None
    plot.energy_ellipses(
        energy_of(drawing.setting, shown),
        shown.posterior_fn.space.flatten(shown.posterior_fn.mean),
        {x.name: _covariance(x) for x in drawing.fitted},
        names=two_names(shown),
        ax=single(figure, 4.6, 4.4),
    )


def _has_curvature(item: Fitted) -> bool:
    return bool(plot.curvature_values(item.posterior_fn.structure).max(initial=0) > 0)


def _covariance(item: Fitted) -> np.ndarray:
    posterior = item.posterior_fn(item.prior_arguments)
    return np.asarray(jax.vmap(posterior.cov_mv)(jnp.eye(2, dtype=posterior.space.dtype)))


def _reach(targets: np.ndarray, mean: jax.Array) -> tuple[float, float]:
    """A frame that shows data and mean; a band far from the data would squeeze both flat."""
    low = float(min(targets.min(), mean.min()))
    high = float(max(targets.max(), mean.max()))
    pad = 0.6 * (high - low) or 1.0
    return low - pad, high + pad
