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
from ._setting import MAP_SIDE, Parts, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Named = tuple[str, Parts]  # what is predicted, and by what
DPI = 160


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """What there is to draw: predictions of the MAP and of every curvature."""

    setting: Setting
    predicted_map: Parts
    fitted: list[Fitted]
    shown: Fitted | None

    def with_map(self, *fitted: Fitted) -> list[Named]:
        """The predictions of the MAP and of these curvatures."""
        return [("MAP", self.predicted_map), *((x.name, x.prediction) for x in fitted)]

    def compared(self) -> list[Named]:
        """The MAP, and the curvature that single figures show."""
        return self.with_map(self.shown) if self.shown else self.with_map()

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


def described(title: str, caption: str) -> Callable[[Paint], Plan]:
    """Decorate a function that fills a figure."""
    return lambda paint: Plan(title, caption, paint)


def figures_for(drawing: Drawing) -> Iterator[Plan]:
    """Only what fits the problem."""
    setting = drawing.setting
    classification = setting.recipe.classification
    if "figure" in setting.inputs and classification:
        yield confidence_maps
    elif "figure" in setting.inputs and drawing.fitted:
        yield bands
    if classification:
        yield reliability
        yield confidences
    if "ood" in setting.inputs and (classification or drawing.fitted):
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


@described(
    "Predictive bands",
    "Training data, predictive mean and central 95% bands: epistemic uncertainty alone, and "
    "with the observation noise. Wide bands are cut at the frame.",
)
def bands(drawing: Drawing, figure: "Figure") -> None:
    """One panel per curvature."""
    data = drawing.train()

    def panel(ax: "Axes", item: Fitted) -> None:
        fields = item.prediction["figure"]
        stds = {name: np.sqrt(fields[f"{name[:-3]}var"]) for name in ("pred_std", "total_std")}
        inputs = drawing.setting.inputs["figure"]
        plot.predictive_band(inputs, {**fields, **stds}, data=data, legend=False, ax=ax)
        ax.set(title=item.name, ylim=_reach(data[1], fields["pred_mean"]))

    panels(figure, drawing.fitted, panel)


@described(
    "Where the network is sure",
    "The largest class probability over the plane of inputs, the decision boundary (white) "
    "and the training data.",
)
def confidence_maps(drawing: Drawing, figure: "Figure") -> None:
    """One panel for the MAP, one per curvature."""
    points = np.asarray(drawing.setting.inputs["figure"])
    xlim, ylim = ((float(x.min()), float(x.max())) for x in points.T)

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
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
        ax.set_title(name)

    axes = panels(figure, drawing.with_map(*drawing.fitted), panel)
    filled = axes[0].collections[0]
    figure.colorbar(filled, ax=axes, label="confidence", format="%.2f", shrink=0.8)


@described(
    "Reliability",
    "Accuracy over confidence on the test data, in 15 bins; the area of a point is the share "
    "of examples in its bin. Below the dashed line the network is overconfident.",
)
def reliability(drawing: Drawing, figure: "Figure") -> None:
    """The MAP and one curvature on the same axes."""
    ax = single(figure, 4.2, 4.6)
    for curve, (name, prediction) in enumerate(drawing.compared()):
        test = prediction["test"]
        plot.reliability_diagram(
            test["pred_act"], test["target"], label=name, curve=1 - curve, ax=ax
        )


@described(
    "Confidence",
    "How sure the predictions on the test data are. Where mean confidence lies above accuracy "
    "the network is overconfident.",
)
def confidences(drawing: Drawing, figure: "Figure") -> None:
    """The MAP and one curvature, side by side."""

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
        test = prediction["test"]
        curve = 1 if name == "MAP" else 0
        plot.confidence_histogram(test["pred_act"], test["target"], curve=curve, ax=ax)
        ax.set_title(name)

    panels(figure, drawing.compared(), panel, size=(6.4, 3.4), columns=2, legend=False)


@described(
    "Out-of-distribution inputs",
    "Uncertainty on the test data and on out-of-distribution inputs; the less they overlap, "
    "the better it reveals the latter (AUROC and FPR95 in the table).",
)
def foreign_inputs(drawing: Drawing, figure: "Figure") -> None:
    """Scores on the test data and on out-of-distribution inputs."""
    compared = drawing.compared()
    kind = "entropy [nat]"
    if drawing.setting.recipe.regression:
        compared = compared[1:]  # the MAP has no uncertainty
        kind = "epistemic standard deviation"

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
        scores = (uncertainty(prediction[part]) for part in ("test", "ood"))
        plot.entropy_histograms(*scores, xlabel=kind, legend=False, ax=ax)
        ax.set_title(name)

    width = 4.2 if len(compared) == 1 else 3.2 * len(compared)
    panels(figure, compared, panel, size=(width, 3.1), columns=2)


@described(
    "Choice of the prior precision",
    "The objective of the search over prior precisions; other hyperparameters are at their "
    "chosen values. The star is what was chosen.",
)
def calibration_curves(drawing: Drawing, figure: "Figure") -> None:
    """The objective along the prior precision, one panel per curvature."""
    objective = drawing.setting.objective_name

    def panel(ax: "Axes", item: Fitted) -> None:
        best = item.prior_arguments["prior_prec"]
        plot.calibration_curve(item.curve, objective=objective, chosen=best, ax=ax)
        ax.set_title(item.name)

    panels(figure, drawing.fitted, panel, height=2.9, legend=False)


@described(
    "Spectrum of the curvature",
    "Eigenvalues that each structure keeps (a diagonal one: its entries), largest first.",
)
def spectrum(drawing: Drawing, figure: "Figure") -> None:
    """The values of every curvature on the same axes."""
    ax = single(figure, 4.6, 3.9)
    for curve, item in enumerate(drawing.fitted):
        if _has_curvature(item):
            plot.spectrum(item.posterior_fn.structure, label=item.name, curve=curve, ax=ax)


@described(
    "Posterior standard deviations",
    "By leaf of the parameters: the box holds the middle half, the black line is the median, "
    "the thin line spans all.",
)
def layer_std(drawing: Drawing, figure: "Figure") -> None:
    """The posterior's width, leaf by leaf."""
    assert drawing.shown is not None
    variances = drawing.shown.variances
    ax = single(figure, 4.6, 1.3 + 0.45 * len(jax.tree.leaves(variances)))
    plot.layer_std(variances, ax=ax)
    ax.set_title(drawing.shown.name)


@described(
    "Energy of two parameters",
    "Contours of the negative log joint density, the MAP, and ellipses of one and two standard "
    "deviations of each posterior.",
)
def energy(drawing: Drawing, figure: "Figure") -> None:
    """Two parameters: the energy itself."""
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
