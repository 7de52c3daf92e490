"""Which figures fit the problem, and how each is put on a page."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from .. import plot
from ._energy import energy_of, is_two_dimensional, two_names
from ._fit import Fitted, uncertainty
from ._panels import Plan, panels, size_of
from ._setting import MAP_SIDE, Arrays, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Named = tuple[str, Arrays]  # what is predicted, and by what


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """What there is to draw: predictions of the MAP and of every curvature."""

    setting: Setting
    predicted_map: Arrays
    fitted: list[Fitted]
    shown: Fitted | None

    def compared(self) -> list[Named]:
        """The MAP, and the curvature that single figures show."""
        return self._with_map([self.shown] if self.shown else [])

    def all(self) -> list[Named]:
        """The MAP and every curvature."""
        return self._with_map(self.fitted)

    def _with_map(self, fitted: list[Fitted]) -> list[Named]:
        return [("MAP", self.predicted_map), *((x.name, x.prediction) for x in fitted)]

    def train(self) -> tuple[np.ndarray, np.ndarray]:
        """Training inputs and targets, or the first batch of a loader."""
        first = self.setting.problem.first
        return np.asarray(jax.tree.leaves(first.input)[0]), np.asarray(first.target)


def figures_for(drawing: Drawing) -> Iterator[Plan]:
    """Only what fits the problem."""
    setting = drawing.setting
    if "figure" in setting.inputs and setting.classification:
        yield confidence_maps(drawing)
    elif "figure" in setting.inputs and drawing.fitted:
        yield bands(drawing)
    if setting.classification:
        yield reliability(drawing)
        yield confidences(drawing)
    if "ood" in setting.inputs and (setting.classification or drawing.fitted):
        yield foreign_inputs(drawing)
    if not drawing.fitted:
        return
    yield calibration_curves(drawing)
    if any(_has_curvature(x) for x in drawing.fitted):
        yield spectra(drawing)
    yield layers(drawing)
    if is_two_dimensional(setting, drawing.fitted):
        yield energy(drawing)


def bands(drawing: Drawing) -> Plan:
    """One panel per curvature."""
    setting = drawing.setting

    def panel(ax: "Axes", item: Fitted) -> None:
        part = setting.part(item.prediction, "figure")
        part |= {"pred_std": np.sqrt(part["pred_var"]), "total_std": np.sqrt(part["total_var"])}
        data = drawing.train()
        plot.predictive_band(setting.inputs["figure"], part, data=data, legend=False, ax=ax)
        ax.set(title=item.name, ylim=_reach(data[1], part["pred_mean"]))

    return Plan(
        "bands",
        "Predictive bands",
        "Training data, predictive mean and central 95% bands: epistemic uncertainty alone, and "
        "with the observation noise. Wide bands are cut at the frame.",
        size_of(len(drawing.fitted)),
        lambda figure: panels(figure, drawing.fitted, panel),
    )


def confidence_maps(drawing: Drawing) -> Plan:
    """One panel for the MAP, one per curvature."""
    setting = drawing.setting
    points = np.asarray(setting.inputs["figure"])
    xlim, ylim = ((float(x.min()), float(x.max())) for x in points.T)

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
        values = np.exp(setting.part(prediction, "figure")["log_pred_act"])
        plot.confidence_map(
            lambda _: values,
            xlim=xlim,
            ylim=ylim,
            data=drawing.train(),
            resolution=MAP_SIDE,
            colorbar=False,
            legend=False,
            ax=ax,
        )
        ax.set_title(name)

    def paint(figure: "Figure") -> None:
        axes = panels(figure, drawing.all(), panel)
        filled = axes[0].collections[0]
        figure.colorbar(filled, ax=axes, label="confidence", format="%.2f", shrink=0.8)

    return Plan(
        "confidence_maps",
        "Where the network is sure",
        "The largest class probability over the plane of inputs, the decision boundary (white) "
        "and the training data.",
        size_of(len(drawing.all())),
        paint,
    )


def reliability(drawing: Drawing) -> Plan:
    """The MAP and one curvature on the same axes."""
    setting = drawing.setting

    def paint(figure: "Figure") -> None:
        ax = figure.subplots()
        for curve, (name, prediction) in enumerate(drawing.compared()):
            probabilities, target = _test(setting, prediction)
            plot.reliability_diagram(probabilities, target, label=name, curve=1 - curve, ax=ax)

    return Plan(
        "reliability",
        "Reliability",
        "Accuracy over confidence on the test data, in 15 bins; the area of a point is the share "
        "of examples in its bin. Below the dashed line the network is overconfident.",
        (4.2, 4.6),
        paint,
    )


def confidences(drawing: Drawing) -> Plan:
    """The MAP and one curvature, side by side."""
    setting = drawing.setting

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
        probabilities, target = _test(setting, prediction)
        plot.confidence_histogram(probabilities, target, curve=1 - (name != "MAP"), ax=ax)
        ax.set_title(name)

    return Plan(
        "confidences",
        "Confidence",
        "How sure the predictions on the test data are. Where mean confidence lies above accuracy "
        "the network is overconfident.",
        (6.4, 3.4),
        lambda figure: panels(figure, drawing.compared(), panel, columns=2, legend=False),
    )


def foreign_inputs(drawing: Drawing) -> Plan:
    """Scores on the test data and on out-of-distribution inputs."""
    setting = drawing.setting
    compared = drawing.compared() if setting.classification else drawing.compared()[1:]
    kind = "entropy [nat]" if setting.classification else "epistemic standard deviation"

    def panel(ax: "Axes", item: Named) -> None:
        name, prediction = item
        scores = (uncertainty(setting.part(prediction, part)) for part in ("test", "ood"))
        plot.entropy_histograms(*scores, xlabel=kind, legend=False, ax=ax)
        ax.set_title(name)

    return Plan(
        "foreign_inputs",
        "Out-of-distribution inputs",
        "Uncertainty on the test data and on out-of-distribution inputs; the less they overlap, "
        "the better it reveals the latter (AUROC and FPR95 in the table).",
        (3.2 * len(compared) + (1.0 if len(compared) == 1 else 0), 3.1),
        lambda figure: panels(figure, compared, panel, columns=2),
    )


def calibration_curves(drawing: Drawing) -> Plan:
    """The objective along the prior precision, one panel per curvature."""
    objective = drawing.setting.objective_name

    def panel(ax: "Axes", item: Fitted) -> None:
        best = item.prior_arguments["prior_prec"]
        plot.calibration_curve(item.curve, objective=objective, chosen=best, ax=ax)
        ax.set_title(item.name)

    return Plan(
        "calibration_curves",
        "Choice of the prior precision",
        "The objective of the search over prior precisions; other hyperparameters are at their "
        "chosen values. The star is what was chosen.",
        size_of(len(drawing.fitted), 2.9),
        lambda figure: panels(figure, drawing.fitted, panel, legend=False),
    )


def spectra(drawing: Drawing) -> Plan:
    """The values of every curvature on the same axes."""

    def paint(figure: "Figure") -> None:
        ax = figure.subplots()
        for curve, item in enumerate(drawing.fitted):
            if _has_curvature(item):
                structure = item.posterior_fn.structure
                plot.spectrum(structure, label=item.name, curve=curve, ax=ax)

    return Plan(
        "spectrum",
        "Spectrum of the curvature",
        "Eigenvalues that each structure keeps (a diagonal one: its entries), largest first.",
        (4.6, 3.9),
        paint,
    )


def layers(drawing: Drawing) -> Plan:
    """The posterior's width, leaf by leaf."""
    shown = drawing.shown
    assert shown is not None
    leaves = len(jax.tree.leaves(shown.variances))

    def paint(figure: "Figure") -> None:
        ax = plot.layer_std(shown.variances, ax=figure.subplots())
        ax.set_title(shown.name)

    return Plan(
        "layer_std",
        "Posterior standard deviations",
        "By leaf of the parameters: the box holds the middle half, the black line is the median, "
        "the thin line spans all.",
        (4.6, 1.3 + 0.45 * leaves),
        paint,
    )


def energy(drawing: Drawing) -> Plan:
    """Two parameters: the energy itself."""
    shown = drawing.shown
    assert shown is not None

    def paint(figure: "Figure") -> None:
        plot.energy_ellipses(
            energy_of(drawing.setting, shown),
            shown.posterior_fn.space.flatten(shown.posterior_fn.mean),
            {x.name: _covariance(x) for x in drawing.fitted},
            names=two_names(shown),
            ax=figure.subplots(),
        )

    return Plan(
        "energy",
        "Energy of two parameters",
        "Contours of the negative log joint density, the MAP, and ellipses of one and two standard "
        "deviations of each posterior.",
        (4.6, 4.4),
        paint,
    )


def _has_curvature(item: Fitted) -> bool:
    return bool(plot.curvature_values(item.posterior_fn.structure).max(initial=0) > 0)


def _covariance(item: Fitted) -> np.ndarray:
    posterior = item.posterior_fn(item.prior_arguments)
    columns = jnp.eye(2, dtype=item.posterior_fn.space.dtype)
    return np.stack([np.asarray(posterior.cov_mv(column)) for column in columns], axis=-1)


def _test(setting: Setting, prediction: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Class probabilities and labels, one row per event."""
    values = np.exp(setting.part(prediction, "test")["log_pred_act"])
    target = np.asarray(setting.target("test"))
    if target.shape == values.shape:
        target = target.argmax(-1)
    return values.reshape(-1, values.shape[-1]), target.reshape(-1)


def _reach(targets: np.ndarray, mean: np.ndarray) -> tuple[float, float]:
    """A frame that shows data and mean; a band far from the data would squeeze both flat."""
    low = float(min(targets.min(), mean.min()))
    high = float(max(targets.max(), mean.max()))
    pad = 0.6 * (high - low) or 1.0
    return low - pad, high + pad
