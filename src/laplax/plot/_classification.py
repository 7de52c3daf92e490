"""Class probabilities: how well they are calibrated, and where a network is sure."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..metrics import accuracy, ece_metric
from ._style import MARKERS, OKABE_ITO, color, finish, on

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability_diagram(
    pred_act: ArrayLike,
    target: ArrayLike,
    *,
    num_bins: int = 15,
    label: str = "model",
    curve: int = 0,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Accuracy over confidence in bins of equal width; on the dashed line they agree.

    The area of a point is the share of examples in its bin. Call it again on the same `ax` with
    another `curve` number to compare models.

    Args:
        pred_act: Class probabilities (n, C); for binary outputs both columns, or P(one) (n,).
        target: Labels (n,), or class probabilities.
        num_bins: Bins on [0, 1], as `laplax.metrics.ece` has them.
        label: The name in the legend, to which the expected calibration error is added.
        curve: Which colour and marker to take.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    probabilities = two_columns(pred_act)
    axes = on(ax)
    metric = ece_metric(num_bins)
    bins = metric.statistics(probabilities, _labels(target))
    error = float(metric.finalise(bins))
    bins = np.asarray(bins)
    examples, confidence, correct = bins[:, bins[0] > 0]
    x = confidence / examples
    y = correct / examples
    sizes = 15 + 300 * examples / examples.sum()
    tint = color(curve)
    marker = MARKERS[curve % len(MARKERS)]
    if "calibrated" not in axes.get_legend_handles_labels()[1]:
        axes.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1, label="calibrated")
    axes.plot(x, y, color=tint, label=f"{label} (ECE {error:.3f})", marker=marker, markersize=3)
    axes.scatter(x, y, s=sizes, color=tint, alpha=0.35, linewidth=0)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.04), aspect="equal")
    return finish(axes, "confidence", "accuracy", legend=legend, columns=1)


def confidence_histogram(
    pred_act: ArrayLike,
    target: ArrayLike | None = None,
    *,
    num_bins: int = 15,
    curve: int = 0,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Shares of examples by confidence; with targets, mean confidence beside accuracy.

    Args:
        pred_act: Class probabilities (n, C), or P(one) (n,).
        target: Labels or class probabilities; accuracy is marked if given.
        num_bins: Bins on [0, 1].
        curve: Which colour to take.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    probabilities = np.asarray(two_columns(pred_act))
    axes = on(ax)
    confidence = probabilities.max(axis=-1).ravel()
    edges = np.linspace(0, 1, num_bins + 1)
    _shares(axes, confidence, edges, color=color(curve), alpha=0.6, edgecolor="white")
    mean = confidence.mean()
    axes.axvline(mean, color="black", linestyle="-", label=f"mean confidence {mean:.3f}")
    if target is not None:
        right = float(accuracy(probabilities, _labels(target)))
        tint = OKABE_ITO["vermillion"]
        axes.axvline(right, color=tint, linestyle="--", label=f"accuracy {right:.3f}")
    axes.set(xlim=(0, 1.02), ylim=(0, None))
    return finish(axes, "confidence", "share of examples", legend=legend, columns=1, lines="y")


def entropy_histograms(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    xlabel: str = "entropy [nat]",
    num_bins: int = 25,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """A score of uncertainty, in and out of distribution, in common bins.

    Args:
        inside: One score per in-distribution example (entropy, mutual information, a deviation).
        outside: The same for out-of-distribution inputs.
        xlabel: What the score is, with its unit.
        num_bins: Bins from zero to the largest score.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    axes = on(ax)
    scores = {"in distribution": np.ravel(inside), "out of distribution": np.ravel(outside)}
    top = max(float(x.max()) for x in scores.values())
    edges = np.linspace(0, top if top > 0 else 1, num_bins + 1)
    hatches = ("", "///")  # a second cue where print has no colour
    for curve, (label, x) in enumerate(scores.items()):
        tint = color(curve)
        look = {"facecolor": tint + "55", "edgecolor": tint, "hatch": hatches[curve]}
        _shares(axes, x, edges, histtype="stepfilled", label=label, **look)
    axes.set(xlim=(0, edges[-1]), ylim=(0, None))
    return finish(axes, xlabel, "share of examples", legend=legend, lines="y")


def _shares(axes: "Axes", values: np.ndarray, edges: np.ndarray, **look: Any) -> None:
    """A histogram whose bars add up to one."""
    weights = np.full(values.size, 1 / values.size)
    axes.hist(values, edges.tolist(), weights=weights, **look)


def confidence_map(
    probabilities: Callable[[np.ndarray], ArrayLike],
    *,
    xlim: tuple[float, float],
    ylim: tuple[float, float],
    data: tuple[ArrayLike, ArrayLike] | None = None,
    resolution: int = 100,
    colorbar: bool = True,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """The largest class probability over a plane of inputs, and the decision boundary in it.

    Args:
        probabilities: A function from points (n, 2) to class probabilities (n, C), or to P(one)
            (n,); for example `lambda x: prob_predictive(x).pred_act`.
        xlim: The range of the first input.
        ylim: The range of the second input.
        data: Inputs (n, 2) and labels (n,), drawn as points.
        resolution: Points along each side; `map_points` has them in the order they are asked.
        colorbar: Whether to add the scale.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    axes = on(ax)
    points = map_points(xlim, ylim, resolution)
    values = np.asarray(two_columns(probabilities(points)))
    classes = values.shape[-1]
    planes = values.reshape(resolution, resolution, classes)
    x, y = points.T.reshape(2, resolution, resolution)
    levels = np.linspace(1 / classes, 1, 11)
    # A probability of one plus round-off is still in the last level.
    shown = axes.contourf(x, y, np.clip(planes.max(-1), levels[0], 1), levels, cmap="bone")
    for k in range(classes if classes > 2 else 1):  # two classes share one boundary
        others = np.delete(planes, k, axis=-1).max(-1)
        gap = planes[..., k] - others
        if gap.min() < 0 < gap.max():
            axes.contour(x, y, gap, [0], colors="white", linewidths=1.4)
    if data is not None:
        _labelled_points(axes, np.asarray(data[0]), np.asarray(data[1]))
    if colorbar:
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(shown, ax=axes, label="confidence", format="%.2f")
    return finish(axes, "input 1", "input 2", legend=legend, lines=None, xlim=xlim, ylim=ylim)


def map_points(xlim: tuple[float, float], ylim: tuple[float, float], resolution: int) -> np.ndarray:
    """The points (resolution^2, 2) at which `confidence_map` asks for probabilities."""
    x, y = np.meshgrid(np.linspace(*xlim, resolution), np.linspace(*ylim, resolution))
    return np.stack([x.ravel(), y.ravel()], axis=-1)


def _labelled_points(axes: "Axes", x: np.ndarray, labels: np.ndarray) -> None:
    labels = labels.argmax(-1) if labels.ndim == 2 else labels.astype(int)
    tints = [OKABE_ITO[name] for name in ("orange", "sky", "vermillion", "green", "purple")]
    for i, k in enumerate(np.unique(labels)):
        axes.scatter(
            x[labels == k, 0],
            x[labels == k, 1],
            s=14,
            color=tints[i % len(tints)],
            marker=MARKERS[i % len(MARKERS)],
            edgecolor="black",
            linewidth=0.5,
            label=f"class {k}",
        )


def two_columns(pred_act: ArrayLike) -> jax.Array:
    """Class probabilities on the last axis, also from P(one) of binary outputs."""
    probabilities = jnp.asarray(pred_act)
    if probabilities.ndim == 1:
        return jnp.stack([1 - probabilities, probabilities], axis=-1)
    return probabilities


def _labels(target: ArrayLike) -> jax.Array:
    labels = jnp.asarray(target)
    return labels.astype(int) if labels.dtype == bool or labels.ndim == 1 else labels
