"""Figures: what is on the axes equals what was computed independently; labels are there."""

import subprocess
import sys
import types

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

import laplax
from laplax import metrics, plot
from laplax.structures import BlockDiagonal, Dense, Diagonal, LowRank

mpl.use("Agg")
import matplotlib.pyplot as plt

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet([1.0, 1.0, 0.4], 200)
LABELS = np.array([RNG.choice(3, p=p) for p in PROBABILITIES])


@pytest.fixture
def ax():
    with plot.style():
        figure, axes = plt.subplots(layout="constrained")
        yield axes
        figure.canvas.draw()
        plt.close(figure)


def labels(axes):
    return axes.get_legend_handles_labels()[1]


def test_importing_laplax_and_plot_leaves_matplotlib_alone():
    code = "import sys, laplax, laplax.plot, laplax.cli; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'laplax\[plot\]'"):
        plot.spectrum(np.ones(3))


def test_reliability_is_accuracy_over_confidence_by_bin(ax):
    assert plot.reliability_diagram(PROBABILITIES, LABELS, num_bins=10, ax=ax) is ax
    confidence, right = PROBABILITIES.max(-1), PROBABILITIES.argmax(-1) == LABELS
    index = np.ceil(confidence * 10).astype(int) - 1
    bins = [index == i for i in range(10) if (index == i).any()]
    x, y = ax.lines[1].get_data()
    np.testing.assert_allclose(x, [confidence[b].mean() for b in bins])
    np.testing.assert_allclose(y, [right[b].mean() for b in bins])
    ece = float(metrics.ece(jnp.asarray(PROBABILITIES), jnp.asarray(LABELS), num_bins=10))
    assert f"(ECE {ece:.3f})" in labels(ax)[1]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("confidence", "accuracy")


def test_reliability_of_binary_outputs_and_a_second_curve(ax):
    ones, target = RNG.uniform(size=50), RNG.uniform(size=50) < 0.5
    plot.reliability_diagram(ones, target, label="a", ax=ax)
    both = np.stack([1 - ones, ones], -1)
    plot.reliability_diagram(both, target.astype(int), label="b", curve=1, ax=ax)
    np.testing.assert_allclose(ax.lines[1].get_xydata(), ax.lines[2].get_xydata())
    assert labels(ax)[0] == "calibrated"
    assert len(labels(ax)) == 3


def test_confidence_histogram_adds_up_and_marks_accuracy(ax):
    plot.confidence_histogram(PROBABILITIES, LABELS, num_bins=5, ax=ax)
    confidence = PROBABILITIES.max(-1)
    expected = np.histogram(confidence, np.linspace(0, 1, 6))[0] / len(LABELS)
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], expected)
    assert f"mean confidence {confidence.mean():.3f}" in labels(ax)
    assert f"accuracy {(PROBABILITIES.argmax(-1) == LABELS).mean():.3f}" in labels(ax)


def test_calibration_curve_shows_the_evidence_with_its_sign_and_the_best_point(ax):
    grid = np.array([10.0, 0.1, 1.0, 100.0])
    values = np.array([4.0, 7.0, 3.0, np.inf])
    trace = types.SimpleNamespace(points={"prior_prec": grid}, values=values)
    plot.calibration_curve(trace, ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0.1, -7], [1, -3], [10, -4]])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[1.0, -3.0]])
    assert labels(ax) == ["chosen: 1"]
    assert ax.get_xscale() == "log"
    assert "log marginal likelihood" in ax.get_ylabel()


def test_calibration_curve_of_a_metric_marks_a_point_between_two(ax):
    trace = types.SimpleNamespace(
        points={"prior_prec": np.array([1.0, 100.0])}, values=np.array([2.0, 4.0])
    )
    plot.calibration_curve(trace, objective="nll", chosen=10.0, ax=ax)
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[10.0, 3.0]])
    assert ax.get_ylabel() == "nll"


def test_calibration_curve_refuses_a_prior_per_layer(ax):
    trace = types.SimpleNamespace(points={"prior_prec": np.ones((4, 2))}, values=np.ones(4))
    with pytest.raises(ValueError, match="one prior precision per point"):
        plot.calibration_curve(trace, ax=ax)


def test_bands_are_the_central_intervals(ax):
    x = np.array([[2.0], [0.0], [1.0]])
    prediction = {"pred_mean": x * 3, "pred_std": x + 1, "total_std": x + 2}
    plot.predictive_band(x, prediction, data=(x, x), ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 0], [1, 3], [2, 6]])
    total, epistemic = (c.get_paths()[0].vertices for c in ax.collections)
    for corners, extra in ((total, 2), (epistemic, 1)):
        assert corners[:, 1].max() == pytest.approx(6 + 1.959963984540054 * (2 + extra))
    assert labels(ax) == ["95% total", "95% epistemic", "predictive mean", "training data"]
    with pytest.raises(ValueError, match="one input and one output"):
        plot.predictive_band(np.ones((3, 2)), prediction, ax=ax)


def test_confidence_map_asks_for_the_plane_and_draws_the_boundary(ax):
    asked = []

    def probabilities(points):
        asked.append(points)
        return 1 / (1 + np.exp(-points[:, 0]))  # P(one): the boundary is x = 0

    data = (np.array([[-1.0, 0.0], [1.0, 0.5]]), np.array([0, 1]))
    plot.confidence_map(probabilities, xlim=(-2, 2), ylim=(0, 1), data=data, resolution=21, ax=ax)
    assert asked[0].shape == (441, 2)
    boundary = ax.collections[1].get_paths()[0].vertices
    np.testing.assert_allclose(boundary[:, 0], 0, atol=1e-9)
    assert labels(ax) == ["class 0", "class 1"]
    assert ax.figure.axes[1].get_ylabel() == "confidence"


@pytest.mark.parametrize("kind", ["dense", "diagonal", "low rank", "blocks"])
def test_spectrum_is_that_of_the_matrix(kind, ax):
    root = RNG.normal(size=(6, 6))
    basis = np.linalg.qr(root)[0][:, :2]
    model = lambda input, params: input @ params["w"] + params["b"]  # noqa: E731
    params = {"w": jnp.asarray(RNG.normal(size=(3, 2))), "b": jnp.zeros(2)}
    data = (jnp.asarray(RNG.normal(size=(9, 3))), jnp.asarray(RNG.normal(size=(9, 2))))
    structure = {
        "dense": lambda: Dense(jnp.asarray(root @ root.T)),
        "diagonal": lambda: Diagonal(jnp.asarray(np.diag(root @ root.T))),
        "low rank": lambda: LowRank(jnp.asarray(basis), jnp.asarray([3.0, 1.0])),
        "blocks": lambda: laplax.laplace(model, params, data, loss_fn="mse", curv_type="kfac")[1],
    }[kind]()
    plot.spectrum(structure, threshold=0.5, ax=ax)
    truth = np.linalg.eigvalsh(np.asarray(structure.to_dense()))[::-1]
    if kind == "blocks":
        assert isinstance(structure.structure, BlockDiagonal)
    shown = ax.lines[0].get_ydata()
    np.testing.assert_allclose(shown, truth[: len(shown)], rtol=1e-8)
    np.testing.assert_allclose(truth[len(shown) :], 0, atol=1e-12)
    assert ax.get_yscale() == "log"


def test_spectrum_counts_zeros_and_refuses_nothing_but_zeros(ax):
    plot.spectrum(np.array([0.0, 2.0, 0.0, 1.0]), label="mine", ax=ax)
    assert labels(ax) == ["mine (2 at zero)"]
    with pytest.raises(ValueError, match="no positive value"):
        plot.spectrum(np.zeros(3), ax=ax)


def test_entropy_histograms_share_their_bins_and_add_up_to_one(ax):
    plot.entropy_histograms([0.1, 0.1, 0.2], [0.7, 0.7], num_bins=7, ax=ax)
    known, foreign = (np.unique(p.get_xy()[:, 0]) for p in ax.patches)
    np.testing.assert_allclose(known, foreign)
    np.testing.assert_allclose(known, np.linspace(0, 0.7, 8))
    assert labels(ax) == ["in distribution", "out of distribution"]
    assert ax.get_xlabel() == "entropy [nat]"
    assert ax.get_ylim()[1] >= max(p.get_xy()[:, 1].max() for p in ax.patches)


def test_layers_have_their_quartiles_and_fixed_ones_are_named(ax):
    variances = {"a": jnp.asarray([1.0, 4.0, 9.0, 16.0, 25.0]), "b": jnp.zeros(3)}
    plot.layer_std(variances, ax=ax)
    box = ax.patches[0]
    assert (box.get_x(), box.get_x() + box.get_width()) == (2.0, 4.0)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a\n(5)", "b\n(fixed)"]


def test_ellipses_lie_at_one_and_two_standard_deviations(ax):
    mean, covariance = np.array([1.0, -1.0]), np.array([[2.0, 0.6], [0.6, 0.5]])
    precision = np.linalg.inv(covariance)

    def energy(points):
        return 0.5 * np.einsum("ni,ij,nj->n", points - mean, precision, points - mean)

    both = {"full": covariance, "diagonal": np.diag(1 / np.diag(precision))}
    plot.energy_ellipses(energy, mean, both, names=("a", "b"), ax=ax)
    for line, sigma in zip(ax.lines[:2], (1, 2), strict=True):
        offset = line.get_xydata() - mean
        np.testing.assert_allclose(np.einsum("ni,ij,nj->n", offset, precision, offset), sigma**2)
    assert labels(ax) == ["full, 1 and 2 sd", "diagonal, 1 and 2 sd", "MAP"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("a", "b")
    with pytest.raises(ValueError, match="two parameters"):
        plot.energy_ellipses(energy, np.zeros(3), covariance, ax=ax)
    with pytest.raises(ValueError, match="one number per point"):
        plot.energy_ellipses(lambda points: points, mean, covariance, ax=ax)


def test_without_axes_the_current_ones_are_taken():
    with plot.style():
        axes = plot.spectrum(np.array([2.0, 1.0]))
        assert axes is plt.gca()
        assert axes.xaxis.label.get_fontname() == "DejaVu Sans"
    plt.close("all")
