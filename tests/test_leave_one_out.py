"""Leave-one-out without refits, against refits."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import CalibrationWarning, GradientDescent, GridSearch

pytestmark = pytest.mark.usefixtures("quick_compilation")

COUNT = 12
X = cases.random(COUNT, 2, seed=3)
PARAMS = {"w": 0.3 * cases.random(3, 2, seed=4)}  # far from the mode of any prior
LABELS = jnp.asarray([0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
TARGETS = {"mse": cases.random(COUNT, 2, seed=5), "cross_entropy": LABELS}


def features(x):
    return jnp.asarray([1.0, x[0], x[1]])


def linear(input, params):
    return features(input) @ params["w"]


def fit(loss_fn, **options):
    return laplax.laplace(linear, PARAMS, (X, TARGETS[loss_fn]), loss_fn=loss_fn, **options)[0]


def design(x):
    """The Jacobian of the two outputs in the flat weights, by hand."""
    return np.kron(np.asarray(features(x)), np.eye(2))


def refits(loss_fn, prior_prec, noise=1.0, temperature=1.0, mean=0.0):
    """The NLL of every example under the exact posterior of the quadratic model of the others."""
    theta = np.asarray(PARAMS["w"]).ravel()
    rows = [design(x) for x in X]
    c = 1 / (noise * temperature)
    errors, hessians = zip(
        *(terms(loss_fn, J @ theta, y) for J, y in zip(rows, TARGETS[loss_fn], strict=True)),
        strict=True,
    )
    values = []
    for i in range(COUNT):
        others = [j for j in range(COUNT) if j != i]
        prec = prior_prec * np.eye(6) + c * sum(rows[j].T @ hessians[j] @ rows[j] for j in others)
        slope = prior_prec * (theta - mean) + c * sum(rows[j].T @ errors[j] for j in others)
        f = rows[i] @ (theta - np.linalg.solve(prec, slope))
        cov = rows[i] @ np.linalg.inv(prec) @ rows[i].T
        values.append(nll(loss_fn, f, np.diag(cov), TARGETS[loss_fn][i], noise))
    return np.mean(values)


def terms(loss_fn, f, y):
    if loss_fn == "mse":
        return f - np.asarray(y), np.eye(2)
    p = np.exp(f) / np.sum(np.exp(f))
    return p - np.eye(2)[int(y)], np.diag(p) - np.outer(p, p)


def nll(loss_fn, f, var, y, noise):
    if loss_fn == "mse":
        total = var + noise
        squares = (f - np.asarray(y)) ** 2 / total
        return 0.5 * np.mean(squares + np.log(2 * np.pi * total))
    scaled = f / np.sqrt(1 + np.pi / 8 * var)  # mean_field_0
    return np.log(np.sum(np.exp(scaled))) - scaled[int(y)]


def searched(loss_fn, method, posterior_fn=None, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return (posterior_fn or fit(loss_fn)).calibrate(
            (X, TARGETS[loss_fn]),
            calibration_objective="leave_one_out",
            calibration_method=method,
            prior_arguments=arguments or None,
        )


# -- against refits -------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_fn", TARGETS)
@pytest.mark.parametrize("temperature", [1.0, 7.0])
def test_a_grid_equals_refits(loss_fn, temperature):
    grid = [0.03, 1.0, 40.0]
    fixed = {"temperature": temperature}
    noise = {"sigma_squared": 0.3} if loss_fn == "mse" else {}
    _, made = searched(loss_fn, GridSearch(grid=grid), **fixed, **noise)
    expected = [refits(loss_fn, tau, noise.get("sigma_squared", 1.0), temperature) for tau in grid]
    np.testing.assert_allclose(made.trace.values, expected, rtol=1e-9)


def test_means_and_variances_equal_least_squares_without_the_example():
    """The predictive that is judged, and not its score alone."""
    tau, noise = 0.7, 0.2
    seen = {}

    class Look(laplax.GridSearch):
        def search(self, objective, initial, progress):
            c = jnp.asarray(1 / noise)
            seen["moments"] = objective.objective.moments(c, jnp.asarray(tau))
            return super().search(objective, initial, progress)

    searched("mse", Look(grid=[tau]), sigma_squared=noise)
    A = np.stack([np.asarray(features(x)) for x in X])
    for i in range(COUNT):
        others = np.delete(np.arange(COUNT), i)
        prec = A[others].T @ A[others] / noise + tau * np.eye(3)
        w = np.linalg.solve(prec, A[others].T @ np.asarray(TARGETS["mse"])[others] / noise)
        np.testing.assert_allclose(seen["moments"].mean[i], A[i] @ w, rtol=1e-9, atol=1e-12)
        var = A[i] @ np.linalg.solve(prec, A[i])
        np.testing.assert_allclose(seen["moments"].cov[i], var * np.eye(2), rtol=1e-9, atol=1e-12)


def test_a_prior_mean_moves_the_mode():
    arguments = {"sigma_squared": 0.3, "prior_mean": {"w": 0.4 * jnp.ones((3, 2))}}
    _, made = searched("mse", GridSearch(grid=[2.0, 9.0]), **arguments)
    expected = [refits("mse", tau, 0.3, mean=0.4) for tau in (2.0, 9.0)]
    np.testing.assert_allclose(made.trace.values, expected, rtol=1e-9)


def test_a_prior_for_every_weight_takes_the_same_values():
    start = {"prior_prec": {"w": 1.3 * jnp.ones((3, 2))}, "sigma_squared": 0.3}
    _, made = searched("mse", GradientDescent(num_steps=1), **start)
    np.testing.assert_allclose(made.trace.values[0], refits("mse", 1.3, 0.3), rtol=1e-9)


# -- searches -------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [GridSearch(grid_size=80), GradientDescent(num_steps=300)])
def test_the_default_search_finds_the_best_refit(method):
    chosen, made = searched("mse", method)
    found = {name: float(x) for name, x in chosen.items()}
    value = refits("mse", found["prior_prec"], found["sigma_squared"])
    np.testing.assert_allclose(made.trace.values.min(), value, rtol=1e-9)
    pairs = [(t, s) for t in np.logspace(-3, 3, 25) for s in np.logspace(-2, 1, 25)]
    assert value < min(refits("mse", t, s) for t, s in pairs) + 1e-3


def test_the_default_search_of_a_classifier_chooses_the_temperature():
    chosen, made = searched("cross_entropy", GridSearch(grid_size=20))
    value = refits("cross_entropy", chosen["prior_prec"], 1.0, chosen["temperature"])
    np.testing.assert_allclose(made.trace.values.min(), value, rtol=1e-8)


@pytest.mark.parametrize("curv_type", ["full", "kfac", "diagonal"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_network_has_a_finite_choice(curv_type, dtype):
    params = cases.mlp((2, 4, 1), dtype=dtype)
    x = cases.random(30, 2, seed=7, dtype=dtype)
    y = jax.vmap(cases.mlp_fn, (0, None))(x, params)
    y = y + 0.1 * cases.random(30, 1, seed=8, dtype=dtype)
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, params, (x, y), loss_fn="mse", curv_type=curv_type
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, made = posterior_fn.calibrate((x, y), calibration_objective="leave_one_out")
    assert 3e-3 < chosen["sigma_squared"] < 0.03  # the data were made with 0.01
    assert made(chosen)(x).pred_mean.dtype == dtype


def test_a_mask_leaves_examples_out_of_everything():
    weight = jnp.where(jnp.arange(COUNT) < 9, 1.0, 0.0)
    data = {"input": X, "target": TARGETS["mse"], "weight": weight}
    few = (X[:9], TARGETS["mse"][:9])
    values = []
    for given in (data, few):
        posterior_fn, _ = laplax.laplace(linear, PARAMS, given, loss_fn="mse")
        _, made = posterior_fn.calibrate(
            given,
            calibration_objective="leave_one_out",
            calibration_method=GridSearch(grid=[0.5, 3.0]),
            prior_arguments={"sigma_squared": 0.5},
        )
        values.append(made.trace.values)
    np.testing.assert_allclose(*values, rtol=1e-12)


# -- other objectives by name ---------------------------------------------------------------------
@pytest.mark.parametrize("name", ["nll", "chi_squared", "crps"])
def test_regression_objectives_have_a_name(name):
    posterior_fn = fit("mse")
    held_out = (cases.random(20, 2, seed=9), cases.random(20, 2, seed=10))
    method = GridSearch(grid=[0.5, 3.0])
    chosen, made = posterior_fn.calibrate(
        held_out,
        calibration_objective=name,
        calibration_method=method,
        prior_arguments={"sigma_squared": 0.5},
    )
    scores = [
        posterior_fn.evaluate({"prior_prec": t, "sigma_squared": 0.5}, held_out, metrics=[name])[0]
        for t in (0.5, 3.0)
    ]
    expected = [score[name] for score in scores]
    expected = np.abs(np.asarray(expected) - 1) if name == "chi_squared" else expected
    np.testing.assert_allclose(made.trace.values, expected, rtol=1e-9)
    assert chosen["prior_prec"] == [0.5, 3.0][int(np.argmin(expected))]


# -- bad input ------------------------------------------------------------------------------------
def test_sampled_networks_are_refused():
    made = fit("mse").predictive(pushforward_type="nonlinear", num_samples=3)
    with pytest.raises(ValueError, match="needs pushforward_type='linear'"):
        made.calibrate((X, TARGETS["mse"]), calibration_objective="leave_one_out")


def test_other_data_than_those_of_the_fit_warn():
    with pytest.warns(laplax.InputWarning, match="training data, as leave-one-out is"):
        fit("mse").calibrate(
            (X, TARGETS["mse"] + 1),
            calibration_objective="leave_one_out",
            calibration_method=GridSearch(grid=[1.0]),
        )


def test_a_classifier_has_no_crps():
    with pytest.raises(ValueError, match="crps"):
        fit("cross_entropy").calibrate((X, LABELS), calibration_objective="crps")
