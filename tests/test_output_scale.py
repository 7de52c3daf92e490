"""Factors of the predictive variances, one for every output."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import CalibrationWarning, GradientDescent, GridSearch

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = cases.mlp((2, 4, 3))
X = cases.random(40, 2, seed=3)
LABELS = jnp.asarray(np.random.default_rng(4).integers(0, 3, 40))
NEW = cases.random(5, 2, seed=5)
SCALE = jnp.asarray([0.5, 1.0, 4.0])
ROOT = np.sqrt([0.5, 1.0, 4.0])
PRIOR = {"prior_prec": 2.0}
POSTERIOR_FN = laplax.laplace(cases.mlp_fn, PARAMS, (X, LABELS), loss_fn="cross_entropy")[0]


def predictions(scale, fields, **options):
    arguments = PRIOR if scale is None else {**PRIOR, "output_scale": scale}
    return POSTERIOR_FN.predictive(**options)(arguments)(NEW, fields)


def test_covariances_and_samples_are_scaled_from_both_sides():
    fields = ["pred_mean", "pred_var", "pred_cov", "samples"]
    plain, scaled = (predictions(s, fields, num_samples=4) for s in (None, SCALE))
    np.testing.assert_allclose(scaled.pred_mean, plain.pred_mean, rtol=1e-12)
    np.testing.assert_allclose(scaled.pred_var, plain.pred_var * ROOT**2, rtol=1e-10)
    expected = plain.pred_cov * np.outer(ROOT, ROOT)
    np.testing.assert_allclose(scaled.pred_cov, expected, rtol=1e-10)
    offsets = np.asarray(plain.samples - plain.pred_mean)
    np.testing.assert_allclose(scaled.samples - plain.pred_mean, ROOT * offsets, atol=1e-12)


def test_class_probabilities_are_those_of_the_scaled_gaussian():
    fields = ["pred_act", "pred_mean", "pred_cov"]
    found = predictions(SCALE, fields, predictive_type="mean_field_2")
    expected = laplax.predictives.mean_field_2(found.pred_mean, found.pred_cov)
    np.testing.assert_allclose(found.pred_act, expected, rtol=1e-10)


def test_one_number_is_for_all_outputs_and_sampled_networks_follow():
    options = {"pushforward_type": "nonlinear", "num_samples": 6}
    plain, scaled = (predictions(s, ["pred_mean", "pred_var"], **options) for s in (None, 3.0))
    np.testing.assert_allclose(scaled.pred_mean, plain.pred_mean, rtol=1e-10)
    np.testing.assert_allclose(scaled.pred_var, 3 * plain.pred_var, rtol=1e-10)


def test_the_joint_covariance_is_scaled():
    plain, scaled = (
        POSTERIOR_FN.predictive()({**PRIOR, **more}).kernel(NEW, X[:2])
        for more in ({}, {"output_scale": SCALE})
    )
    expected = ROOT[:, None, None] * np.asarray(plain) * ROOT
    np.testing.assert_allclose(scaled, expected, rtol=1e-10)


def test_the_noise_is_not_scaled():
    params = {"w": jnp.ones((2, 3))}

    def linear(input, params):
        return input @ params["w"]

    posterior_fn, _ = laplax.laplace(linear, params, (X, X @ params["w"]), loss_fn="mse")
    arguments = {"prior_prec": 1.0, "sigma_squared": 0.3, "output_scale": SCALE}
    found = posterior_fn.predictive()(arguments)(NEW)
    np.testing.assert_allclose(found.total_var - found.pred_var, 0.3, rtol=1e-10)


HELD_OUT = (cases.random(60, 2, seed=7), jnp.asarray([0, 1, 2] * 20))


def search(method, prior_arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return POSTERIOR_FN.calibrate(
            HELD_OUT,
            calibration_objective="nll",
            calibration_method=method,
            prior_arguments=prior_arguments,
            **options,
        )


def nll(arguments):
    made = POSTERIOR_FN.predictive()(dict(arguments))
    return laplax.judge(made, HELD_OUT, metrics=["nll"])["nll"]


def test_gradient_descent_chooses_them():
    start = {"prior_prec": 1.0, "temperature": 1.0}
    plain, _ = search(GradientDescent(num_steps=60), start)
    chosen, made = search(GradientDescent(num_steps=60), {**start, "output_scale": jnp.ones(3)})
    assert chosen["output_scale"].shape == (3,)
    np.testing.assert_allclose(nll(chosen), made.trace.values.min(), rtol=1e-9)
    assert nll(chosen) < nll(plain) - 1e-4


@pytest.mark.parametrize("grid", [None, [0.5, 3.0]])
def test_a_grid_keeps_them(grid):
    chosen, made = search(GridSearch(grid_size=4, grid=grid), {"output_scale": SCALE})
    np.testing.assert_array_equal(chosen["output_scale"], SCALE)
    np.testing.assert_allclose(nll(chosen), made.trace.values.min(), rtol=1e-9)


def test_a_file_keeps_them(tmp_path):
    arguments = {**PRIOR, "output_scale": SCALE}
    predictive = POSTERIOR_FN.predictive()(arguments)
    laplax.save(tmp_path / "a.safetensors", predictive)
    loaded = laplax.load(tmp_path / "a.safetensors", params=PARAMS, model_fn=cases.mlp_fn)
    np.testing.assert_array_equal(loaded(NEW).pred_var, predictive(NEW).pred_var)


def test_gradients_exist():
    def total(scale):
        made = POSTERIOR_FN.predictive()({**PRIOR, "output_scale": scale})
        return made(NEW, ["pred_var"])["pred_var"].sum()

    expected = predictions(None, ["pred_var"])["pred_var"].sum(axis=0)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(SCALE), expected, rtol=1e-10)


@pytest.mark.parametrize("scale", [0.0, -1.0, [1.0, float("nan"), 1.0], "one", [[1.0]]])
def test_scales_are_positive_numbers(scale):
    with pytest.raises(ValueError, match="output_scale must be"):
        POSTERIOR_FN({**PRIOR, "output_scale": scale})


def test_every_output_needs_one():
    with pytest.raises(ValueError, match="has 2 numbers; the outputs of one example have"):
        predictions(jnp.ones(2), ["pred_var"])


def test_the_evidence_does_not_choose_them():
    with pytest.raises(ValueError, match="the evidence does not see 'output_scale'"):
        POSTERIOR_FN.calibrate((X, LABELS), prior_arguments={"output_scale": SCALE})
