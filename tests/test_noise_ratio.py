"""A noise variance for every output: ratios that the fit knows, times `sigma_squared`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import CalibrationWarning
from laplax.likelihoods import Gaussian

pytestmark = pytest.mark.usefixtures("quick_compilation")

RATIO = (0.25, 4.0)
X = cases.random(9, 3, seed=3)
Y = cases.random(9, 2, seed=4)
PARAMS = {"w": cases.random(3, 2, seed=5)}
ARGUMENTS = {"prior_prec": 0.7, "sigma_squared": 0.3, "temperature": 2.0}


def linear(input, params):
    return input @ params["w"]


def fit(curv_type="full", **options):
    likelihood = Gaussian(noise_ratio=RATIO)
    return laplax.laplace(
        linear, PARAMS, (X, Y), loss_fn=likelihood, curv_type=curv_type, **options
    )[0]


def dense():
    """G by hand: outputs are independent, each with its own ratio."""
    gram = np.asarray(X.T @ X)
    return sum(np.kron(gram, np.diag(np.eye(2)[o])) / RATIO[o] for o in range(2))


# -- against dense algebra ------------------------------------------------------------------------
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_curvature_divides_every_output_by_its_ratio(curvature):
    np.testing.assert_allclose(
        fit(curvature=curvature).structure.to_dense(), dense(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("curv_type", ["kfac", "diagonal"])
def test_every_structure_sees_the_ratios(curv_type):
    expected = np.diag(dense())
    np.testing.assert_allclose(fit(curv_type).structure.diagonal(), expected, rtol=1e-10)


def test_the_evidence_is_the_exact_one():
    """Weights at the mode, where the evidence of a linear model is that of the data's Gaussian."""
    tau, noise = 0.7, 0.3
    w = np.stack(
        [
            np.linalg.solve(X.T @ X / (noise * r) + tau * np.eye(3), X.T @ Y[:, o] / (noise * r))
            for o, r in enumerate(RATIO)
        ],
        axis=1,
    )
    params = {"w": jnp.asarray(w)}
    posterior_fn, _ = laplax.laplace(
        linear, params, (X, Y), loss_fn=Gaussian(noise_ratio=RATIO), curv_type="full"
    )
    arguments = {"prior_prec": tau, "sigma_squared": noise}
    found = posterior_fn.log_marginal_likelihood(arguments, (X, Y))
    expected = 0.0
    for o, ratio in enumerate(RATIO):
        cov = np.asarray(X @ X.T) / tau + noise * ratio * np.eye(9)
        y = np.asarray(Y[:, o])
        logdet = np.linalg.slogdet(2 * np.pi * cov)[1]
        expected -= 0.5 * (y @ np.linalg.solve(cov, y) + logdet)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_predictions_add_the_noise_of_their_output():
    prediction = fit().predictive()(ARGUMENTS)(X)
    cov = np.linalg.inv(dense() / 0.6 + 0.7 * np.eye(6))
    for n in range(9):
        J = np.kron(np.asarray(X[n]), np.eye(2))
        np.testing.assert_allclose(prediction.pred_var[n], np.diag(J @ cov @ J.T), rtol=1e-10)
    noise = np.broadcast_to(0.3 * np.asarray(RATIO), (9, 2))
    np.testing.assert_allclose(prediction.aleatoric_var, noise, rtol=1e-12)
    total = prediction.pred_var + noise
    np.testing.assert_allclose(prediction.total_var, total, rtol=1e-12)


def test_ratios_of_one_are_no_ratios():
    same = laplax.laplace(linear, PARAMS, (X, Y), loss_fn="mse", curv_type="full")[0]
    ones = laplax.laplace(linear, PARAMS, (X, Y), loss_fn=Gaussian((1, 1)), curv_type="full")[0]
    first, second = (p.log_marginal_likelihood(ARGUMENTS, (X, Y)) for p in (same, ones))
    np.testing.assert_allclose(first, second, rtol=1e-12)


def test_draws_have_the_variance_of_their_output():
    f = jnp.zeros((20_000, 2))
    draws = Gaussian(noise_ratio=RATIO).sample(jax.random.key(0), f)
    error = np.asarray(RATIO) * np.sqrt(2 / 20_000)
    assert np.all(np.abs(np.var(draws, axis=0) - np.asarray(RATIO)) < 5 * error)


# -- residuals ------------------------------------------------------------------------------------
def test_residual_variances_are_those_of_numpy():
    found = laplax.residual_variance(linear, PARAMS, (X, Y))
    np.testing.assert_allclose(found, np.mean(np.square(X @ PARAMS["w"] - Y), axis=0), rtol=1e-12)
    weight = jnp.arange(9.0)
    data = {"input": X, "target": Y, "weight": weight}
    expected = np.average(np.square(X @ PARAMS["w"] - Y), axis=0, weights=weight)
    np.testing.assert_allclose(laplax.residual_variance(linear, PARAMS, data), expected, rtol=1e-12)


def test_a_single_output_has_one_residual_variance():
    found = laplax.residual_variance(lambda input, params: input @ params, X[0], (X, Y[:, 0]))
    np.testing.assert_allclose(found, np.mean(np.square(X @ X[0] - Y[:, 0])), rtol=1e-12)


# -- units ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("curv_type", ["full", "kfac", "diagonal"])
@pytest.mark.parametrize("objective", ["marginal_log_likelihood", "nll", "leave_one_out"])
def test_outputs_in_units_side_by_side_have_intervals_in_their_units(objective, curv_type, dtype):
    params = cases.mlp((2, 4, 2), dtype=dtype)
    x = cases.random(30, 2, seed=7, dtype=dtype)
    noise = 0.1 * cases.random(30, 2, seed=8, dtype=dtype)

    def intervals(units):
        units = jnp.asarray(units, dtype)

        def model_fn(input, params):
            return units * cases.mlp_fn(input, params)

        data = (x, jax.vmap(model_fn, (0, None))(x, params) + units * noise)
        ratio = laplax.residual_variance(model_fn, params, data)
        posterior_fn, _ = laplax.laplace(
            model_fn, params, data, loss_fn=Gaussian(noise_ratio=ratio), curv_type=curv_type
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            chosen, made = posterior_fn.calibrate(data, calibration_objective=objective)
        return made(chosen)(x).total_std / units

    np.testing.assert_allclose(intervals([1e-6, 1e6]), intervals([1.0, 1.0]), rtol=1e-3)


# -- files and bad input --------------------------------------------------------------------------
def test_a_file_keeps_the_ratios(tmp_path):
    posterior_fn = fit()
    path = tmp_path / "posterior.safetensors"
    laplax.save(path, posterior_fn)
    again = laplax.load(path, linear, PARAMS)
    assert again.likelihood == Gaussian(noise_ratio=RATIO)
    before, after = (p.predictive()(ARGUMENTS)(X).total_var for p in (posterior_fn, again))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("ratio", [(1.0, -1.0), (0.0, 1.0), (1.0, float("nan")), 2.0])
def test_ratios_are_positive_numbers(ratio):
    with pytest.raises(ValueError, match="noise_ratio must be a list of positive"):
        Gaussian(noise_ratio=ratio)


def test_every_output_needs_a_ratio():
    with pytest.raises(ValueError, match="noise_ratio has 3 numbers"):
        laplax.laplace(linear, PARAMS, (X, Y), loss_fn=Gaussian(noise_ratio=(1, 2, 3)))


def test_ratios_are_part_of_what_a_likelihood_is():
    assert repr(Gaussian()) == "Gaussian()"
    assert Gaussian((1, 2)) == Gaussian(noise_ratio=jnp.asarray([1.0, 2.0]))
    assert Gaussian((1, 2)) != Gaussian()
