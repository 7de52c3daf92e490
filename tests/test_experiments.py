"""The paper's experiments: their machinery on small data, and what bad files are told."""

import argparse
import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _cifar10, figure1, table1, table2
from laplax import GradientDescent, GridSearch

pytestmark = pytest.mark.usefixtures("quick_compilation")


def arguments(**given):
    return argparse.Namespace(**{"seed": 0, "progress": False, **given})


# -- figure 1 -------------------------------------------------------------------------------------
def test_figure1_posterior_against_dense_algebra():
    t1, t2 = figure1.MAP["theta1"], figure1.MAP["theta2"]
    # relu is off at x = -1, on at x = 1, where f = t2 (t1 - 1).
    J = np.array([[t2, t1 - 1], [0.0, 0.0]])
    wanted = np.linalg.inv(J.T @ J + figure1.PRIOR_PREC * np.eye(2))
    np.testing.assert_allclose(figure1.posterior_covariance(), wanted, rtol=1e-10)


def test_figure1_energy_is_nearly_smallest_at_the_weights_of_the_listing():
    theta = jnp.array([list(figure1.MAP.values())])
    gradient = jax.grad(lambda t: figure1.energy(t)[0])(theta)
    # The printed weights are not quite stationary: the gradient there is (0.0010, 0.0007).
    np.testing.assert_allclose(gradient, [[0.00103264, 0.00070999]], atol=1e-7)
    t1, t2 = theta[0]
    fit = 0.5 * ((t2 * (t1 - 1) - 1) ** 2 + 1)
    prior = 0.5 * figure1.PRIOR_PREC * (t1**2 + t2**2)
    np.testing.assert_allclose(figure1.energy(theta)[0], fit + prior, rtol=1e-12)


def test_figure1_draws_ellipses_at_one_and_two_deviations():
    pytest.importorskip("matplotlib")
    covariance = figure1.posterior_covariance()
    ax = figure1.draw(covariance).axes[0]
    curves = [np.stack(line.get_data(), axis=-1) for line in ax.lines]
    ellipses = [curve - list(figure1.MAP.values()) for curve in curves if len(curve) > 2]
    distances = [np.sqrt(np.sum(e @ np.linalg.inv(covariance) * e, axis=1)) for e in ellipses]
    np.testing.assert_allclose(distances[0], 1, rtol=1e-10)
    np.testing.assert_allclose(distances[1], 2, rtol=1e-10)


def test_figure1_writes_both_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert figure1.run(arguments(out=tmp_path / "new")) == 0
    assert (tmp_path / "new" / "figure1.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "new" / "figure1.svg").read_text()
    assert "theta2 = 1.0420" in capsys.readouterr().out


# -- table 1 --------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [False, True])
def test_table1_is_in_float64_and_leaves_no_trace_of_it(monkeypatch, tmp_path, capsys, before):
    seen = []

    def one_seed(seed, progress):
        seen.append((seed, jnp.zeros(()).dtype))
        return np.full((2, len(table1.ROWS), len(table1.COLUMNS)), seed + 0.5), []

    monkeypatch.setattr(table1, "one_seed", one_seed)
    with jax.enable_x64(before):
        assert table1.run(arguments(out=tmp_path, seeds=3, seed=4)) == 0
        assert jnp.zeros(()).dtype == (jnp.float64 if before else jnp.float32)
    assert seen == [(seed, jnp.float64) for seed in (4, 5, 6)]
    out = capsys.readouterr().out
    assert "median over 3 seeds" in out
    assert "5.5000" in out
    assert "32 of 32 cells are finite" in out


def test_table1_calibrates_and_judges_a_cell(monkeypatch):
    monkeypatch.setattr(table1, "HIDDEN", 4)
    keys = jax.random.split(jax.random.key(0), 3)
    data, held_out = table1.two_intervals(keys[0], 12), table1.two_intervals(keys[1], 8)
    params = table1.init_params(keys[2])
    rows = list(table1.approximations(params, data))
    assert [name for name, *_ in rows] == list(table1.ROWS)
    _, model, free, posterior_fn = rows[0]
    column = ("LML", "GS", "L")
    nll = table1.cell(posterior_fn, model, free, column, data, held_out, [held_out, data], 0.1)
    assert len(nll) == 2
    assert np.isfinite(nll).all()


def test_table1_needs_a_seed(tmp_path):
    with pytest.raises(ValueError, match="--seeds must be at least 1; got 0"):
        table1.run(arguments(out=tmp_path, seeds=0))


# -- table 2 --------------------------------------------------------------------------------------
def images(count, seed):
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    shade = 20 * labels[:, None, None, None]
    return rng.integers(0, 60, (count, 32, 32, 3)).astype(np.uint8) + shade.astype(np.uint8), labels


def cifar_like(path, **changes):
    (x, y), (x_test, y_test) = images(50, 0), images(20, 1)
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.fixture
def quick(monkeypatch):
    """A small network, one row on images and one on features, short searches."""
    monkeypatch.setattr(_cifar10, "CHANNELS", (2, 2, 3))
    monkeypatch.setattr(table2, "EPOCHS", 2)
    monkeypatch.setattr(table2, "BATCH_SIZE", 20)
    methods = {"GS": GridSearch(0.0, 2.0, grid_size=4), "GD": GradientDescent(num_steps=2)}
    monkeypatch.setattr(table2, "METHODS", methods)
    names = ("Lanczos", "KFAC (last layer)")
    rows = {name: table2.ROWS[name] for name in names}
    lanczos = table2.Row({"curv_type": "lanczos", "rank": 3}, {"GS": 0.0166}, images=30)
    monkeypatch.setattr(table2, "ROWS", {**rows, "Lanczos": lanczos})


@pytest.mark.usefixtures("quick")
def test_table2_end_to_end(tmp_path, capsys):
    out = tmp_path / "out"
    path = cifar_like(tmp_path / "data.npz")
    assert table2.run(arguments(data=path, out=out, small=False, seeds=1, seed=3)) == 0
    shown = capsys.readouterr().out
    assert "lowest validation ECE" in shown
    lines = list(csv.DictReader((out / "table2.csv").read_text().splitlines()))
    kinds = [(line["row"], line["method"]) for line in lines]
    assert kinds[0] == ("MAP", "")
    assert kinds[1:] == [(r, m) for r in ("Lanczos", "KFAC (last layer)") for m in ("GS", "GD")]
    for line in lines:
        assert line["seed"] == "3"
        assert 0 <= float(line["ece"]) <= 1
        assert float(line["nll"]) > 0


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore::laplax.CalibrationWarning")  # four points have two edges
def test_table2_searches_what_calibration_searches(tmp_path):
    """One pass over the validation images for all searches gives the values of the front door."""
    import laplax

    arrays = _cifar10.load(cifar_like(tmp_path / "data.npz"))
    train, valid, test = _cifar10.split(arrays, 10, 0)
    params = _cifar10.init_params(0)
    network = table2.Network(_cifar10.model_fn, params, train, valid, test)
    posterior_fn = table2.fit(table2.Row({"curv_type": "diagonal"}, {}), network, False)
    objective = table2.validation_ece(posterior_fn, network)
    for name in table2.PREDICTIVES:
        found = table2.search(table2.with_predictive(objective, name), "GS", False)
        chosen, made = laplax.calibration(
            posterior_fn,
            network.model_fn,
            params,
            valid,
            calibration_objective="ece",
            calibration_method=table2.METHODS["GS"],
            predictive_type=name,
        )
        results, _ = laplax.evaluation(
            posterior_fn,
            network.model_fn,
            params,
            chosen,
            valid,
            metrics=["accuracy"],
            predictive_type=name,
        )
        assert found["prior_prec"] == float(chosen["prior_prec"])
        np.testing.assert_allclose(found["valid_ece"], made.trace.values.min(), rtol=1e-6)
        np.testing.assert_allclose(found["valid_accuracy"], results["accuracy"], rtol=1e-6)


def test_table2_predictive_keeps_the_accuracy(monkeypatch):
    found = {
        "mean_field_0": {"prior_prec": 1.0, "valid_ece": 0.01, "valid_accuracy": 0.60},
        "mean_field_1": {"prior_prec": 2.0, "valid_ece": 0.02, "valid_accuracy": 0.64},
    }
    monkeypatch.setattr(table2, "with_predictive", lambda objective, name: name)
    monkeypatch.setattr(table2, "search", lambda name, method, progress: found[name])
    for map_accuracy, wanted in ((0.64, "mean_field_1"), (0.602, "mean_field_0")):
        assert table2.choose_predictive(None, map_accuracy, False)[0] == wanted
    assert table2.choose_predictive(None, 0.7, False)[0] == "mean_field_1"  # neither does


def test_table2_splits_are_apart_and_depend_on_the_seed(tmp_path):
    arrays = _cifar10.load(cifar_like(tmp_path / "data.npz"))
    train, valid, test = _cifar10.split(arrays, 10, 0)
    assert [len(part["target"]) for part in (train, valid, test)] == [40, 10, 20]
    both = np.concatenate([train["input"], valid["input"]]).reshape(50, -1)
    assert len(np.unique(both, axis=0)) == 50
    other = _cifar10.split(arrays, 10, 1)[1]
    assert not np.array_equal(valid["input"], other["input"])


def test_the_network_of_table2_has_the_size_that_is_written():
    params = _cifar10.init_params(0)
    sizes = {name: sum(x.size for x in jax.tree.leaves(layer)) for name, layer in params.items()}
    assert (sum(sizes.values()), sizes["last"]) == (26_154, 2_570)
    assert "26,154 parameters, 2,570 of them in the last layer" in table2.__doc__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "there is no array 'y_test' in it"),
        ({"x_train": np.zeros((5, 32, 32, 3))}, "x_train must be uint8 images of shape"),
        ({"x_test": np.zeros((5, 3, 32, 32), np.uint8)}, r"it is uint8 \(5, 3, 32, 32\)"),
        ({"y_train": np.zeros(7, np.uint8)}, "y_train must be 50 whole numbers, one for each"),
        ({"y_train": np.full(50, 10)}, "y_train must hold labels from 0 to 9"),
    ],
)
def test_table2_bad_data(tmp_path, changes, message):
    path = cifar_like(tmp_path / "data.npz", **changes)
    with pytest.raises(ValueError, match=message):
        table2.run(arguments(data=path, out=tmp_path / "out", small=False, seeds=1))
    assert not (tmp_path / "out").exists()


def test_table2_file_that_is_none(tmp_path):
    options = {"out": tmp_path / "out", "small": False, "seeds": 1}
    with pytest.raises(FileNotFoundError, match=r"there is no such file; it must be an \.npz"):
        table2.run(arguments(data=pathlib.Path("no.npz"), **options))
    text, single = tmp_path / "text.npz", tmp_path / "single.npy"
    text.write_text("not an archive")
    np.save(single, np.zeros(3))
    for path in (text, single):
        with pytest.raises(ValueError, match=r"not an \.npz file; it must be"):
            table2.run(arguments(data=path, **options))


def test_table2_needs_a_seed(tmp_path):
    with pytest.raises(ValueError, match="--seeds must be at least 1; got 0"):
        table2.run(arguments(data=tmp_path, out=tmp_path, small=False, seeds=0))
