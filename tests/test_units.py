"""Noise in natural units: another unit of the target changes nothing but the unit."""

import functools
import warnings

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import cases
import laplax
from laplax import CalibrationWarning, GradientDescent, GridSearch, metrics
from laplax.calibration import Method, Trace, _objectives

pytestmark = pytest.mark.usefixtures("quick_compilation")

EVIDENCE = "marginal_log_likelihood"
UNITS = (1e-6, 1e-3, 1e3, 1e6)
FITS = {
    "full": {"curv_type": "full"},
    "kfac": {"curv_type": "kfac"},
    "diagonal": {"curv_type": "diagonal"},
    "lanczos": {"curv_type": "lanczos", "rank": 8},
    "last layer": {"curv_type": "full", "subset": "last_layer"},
}
PARAMS = cases.mlp((2, 4, 1), dtype=jnp.float32)


def in_unit(input, params):
    """The unit comes with the input: one program serves all."""
    return input["unit"] * cases.mlp_fn(input["x"], params)


def observe(unit, count, seed, noise=0.1):
    x = cases.random(count, 2, seed=seed, dtype=jnp.float32)
    f = jax.vmap(cases.mlp_fn, (0, None))(x, PARAMS)
    y = f + noise * cases.random(count, 1, seed=seed + 1, dtype=jnp.float32)
    unit = jnp.asarray(unit, jnp.float32)
    return {"x": x, "unit": jnp.full(count, unit)}, unit * y


@functools.cache
def fitted(unit=1.0, name="full"):
    train = observe(unit, 30, 31)
    return laplax.laplace(in_unit, PARAMS, train, loss_fn="mse", **FITS[name])[0]


def calibrate(unit, name="full", objective=EVIDENCE, method="grid_search", **options):
    data = observe(unit, 30, 31) if objective == EVIDENCE else observe(unit, 25, 41)
    return laplax.calibration(
        fitted(unit, name),
        in_unit,
        PARAMS,
        data,
        calibration_objective=objective,
        calibration_method=method,
        **options,
    )


def quietly(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return calibrate(*args, **options)


@functools.cache
def answer(unit, name, objective, method):
    """Prior precision, noise and the ends of intervals, the latter two in units of the target."""
    chosen, made = quietly(unit, name, objective, method)
    interval = made(chosen)(observe(unit, 40, 51)[0]).interval(0.95)
    ends = np.stack([interval.lower, interval.upper]) / unit
    return float(chosen["prior_prec"]), chosen["sigma_squared"] / unit**2, ends


# -- units ----------------------------------------------------------------------------------------
SEARCHES = [
    *(("full", objective, "grid_search") for objective in (EVIDENCE, "nll", "chi_squared")),
    *(("full", objective, "gradient_descent") for objective in (EVIDENCE, "nll", "chi_squared")),
    *((name, EVIDENCE, "grid_search") for name in FITS if name != "full"),
    ("kfac", EVIDENCE, "gradient_descent"),
    ("kfac", "nll", "grid_search"),
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("name", "objective", "method"), SEARCHES)
def test_another_unit_of_the_target_changes_nothing_but_the_unit(name, objective, method, unit):
    prior_prec, noise, interval = answer(unit, name, objective, method)
    expected_prec, expected_noise, expected_interval = answer(1.0, name, objective, method)
    assert 1e-3 < expected_noise < 0.1  # the data were made with 0.01
    np.testing.assert_allclose(noise, expected_noise, rtol=0.03)
    np.testing.assert_allclose(interval, expected_interval, atol=1e-3)
    np.testing.assert_allclose(prior_prec, expected_prec, rtol=0.1)


@pytest.mark.parametrize("unit", UNITS)
def test_a_last_layer_that_carries_the_unit_finds_the_noise(unit):
    """One prior precision measures all weights, so that this is another model in every unit."""
    params = [*PARAMS[:-1], jax.tree.map(lambda p: jnp.float32(unit) * p, PARAMS[-1])]
    train, new = ((data["x"], unit * y) for data, y in (observe(1, 30, 31), observe(1, 25, 41)))
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, train, loss_fn="mse", curv_type="kfac")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, made = laplax.calibration(
            posterior_fn, cases.mlp_fn, params, new, calibration_objective="nll"
        )
    assert 3e-3 < chosen["sigma_squared"] / unit**2 < 0.03  # the data were made with 0.01
    prediction = made(chosen)(new[0])
    chi_squared = metrics.chi_squared(prediction.pred_mean, prediction.total_var, new[1])
    np.testing.assert_allclose(chi_squared, 1, rtol=1e-3)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_variances_in_a_table_know_the_unit(monkeypatch, unit):
    kept = quietly(unit, objective="nll")[1].trace
    monkeypatch.setattr(_objectives, "STORE_LIMIT", 0)
    table = quietly(unit, objective="nll")[1].trace
    np.testing.assert_allclose(table.points["sigma_squared"], kept.points["sigma_squared"], 1e-3)
    np.testing.assert_allclose(table.values, kept.values, rtol=1e-3)


def test_a_report_in_another_unit_has_the_same_row():
    rows = []
    for unit in (1.0, 1e-6):
        train, test = observe(unit, 30, 31), observe(unit, 25, 41)
        made = laplax.report(
            in_unit,
            PARAMS,
            train=train,
            test=test,
            loss_fn="mse",
            curvatures=["diagonal"],
            progress=False,
        )
        rows.append({row["name"]: row for row in made.metrics.rows})
    for name in ("diagonal", "MAP"):
        first, second = (row[name] for row in rows)
        np.testing.assert_allclose(second["coverage"], first["coverage"], atol=1e-6)
        np.testing.assert_allclose(second["rmse"] * 1e6, first["rmse"], rtol=1e-3)


# -- the noise of every point ---------------------------------------------------------------------
def wide(objective=EVIDENCE, method="grid_search", **options):
    """The same search in float64, whose trace is compared with closed forms."""
    params = cases.mlp((2, 4, 1))
    train, new = ((data["x"], y) for data, y in (observe(1, 30, 31), observe(1, 25, 41)))
    train, new = jax.tree.map(lambda x: x.astype(jnp.float64), (train, new))
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, train, loss_fn="mse")
    data = train if objective == EVIDENCE else new
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, made = laplax.calibration(
            posterior_fn,
            cases.mlp_fn,
            params,
            data,
            calibration_objective=objective,
            calibration_method=method,
            **options,
        )
    return posterior_fn, params, data, chosen, made


def minus_evidence(posterior_fn, params, train):
    fit = laplax.data_fit(cases.mlp_fn, params, train, loss_fn="mse")

    @jax.jit
    def at(prior_prec, sigma_squared):
        arguments = {"prior_prec": prior_prec, "sigma_squared": sigma_squared}
        return -laplax.log_marginal_likelihood(posterior_fn, arguments, data=fit)

    return at


def test_a_grid_of_ratios_finds_the_best_evidence_of_both_hyperparameters():
    posterior_fn, params, train, chosen, made = wide(method=GridSearch(grid_size=400))
    evidence = minus_evidence(posterior_fn, params, train)
    best = scipy.optimize.minimize(lambda logs: float(evidence(*np.exp(logs))), [0, -4], tol=1e-9)
    np.testing.assert_allclose(made.trace.values.min(), best.fun, atol=2e-3)
    np.testing.assert_allclose(np.log(chosen["prior_prec"]), best.x[0], atol=0.03)
    np.testing.assert_allclose(np.log(chosen["sigma_squared"]), best.x[1], atol=0.03)
    points = made.trace.points
    for i in (0, 150, 399):  # along a ratio no other noise is better
        prior_prec, noise = float(points["prior_prec"][i]), float(points["sigma_squared"][i])
        here = evidence(prior_prec, noise)
        np.testing.assert_allclose(made.trace.values[i], here, rtol=1e-9)
        assert all(here < evidence(prior_prec / t, noise * t) for t in (0.9, 1.1))


@pytest.mark.parametrize("method", [GridSearch(grid=[0.01, 1.0, 50.0]), GridSearch(-2, 2, 3)])
def test_a_grid_of_prior_precisions_stays_and_takes_the_best_noise_of_each(method):
    posterior_fn, params, train, _, made = wide(method=method)
    points = made.trace.points
    given = [0.01, 1.0, 50.0] if method.grid is not None else [0.01, 1.0, 100.0]
    np.testing.assert_allclose(points["prior_prec"], given, rtol=1e-12)
    evidence = minus_evidence(posterior_fn, params, train)
    for t, noise, value in zip(given, points["sigma_squared"], made.trace.values, strict=True):
        best = scipy.optimize.minimize_scalar(
            lambda log, t=t: float(evidence(t, np.exp(log))), bounds=(-12, 3), method="bounded"
        )
        np.testing.assert_allclose(value, best.fun, atol=1e-7)
        np.testing.assert_allclose(np.log(noise), best.x, atol=1e-3)


@pytest.mark.parametrize("method", ["grid_search", GridSearch(grid=[1.0, 10.0, 300.0])])
@pytest.mark.parametrize("objective", ["nll", "chi_squared"])
def test_held_out_residuals_are_one_on_average_at_every_point(objective, method):
    *_, (x, y), chosen, made = wide(objective, method)
    points = made.trace.points
    for i in range(0, len(made.trace.values), 7):
        prediction = made(jax.tree.map(lambda p, i=i: p[i], points))(x)
        scores = [
            f(prediction.pred_mean, prediction.total_var, y)
            for f in (metrics.chi_squared, metrics.nll)
        ]
        np.testing.assert_allclose(scores, [1.0, made.trace.values[i]], rtol=1e-6)
    best = int(jnp.argmin(made.trace.values))
    assert chosen["sigma_squared"] == points["sigma_squared"][best]


def test_held_out_residuals_of_sampled_networks_are_one_on_average():
    options = {"pushforward_type": "nonlinear", "num_samples": 8}
    method = GridSearch(grid_size=6)
    *_, (x, y), _, made = wide("nll", method, **options)
    for i in range(6):
        prediction = made(jax.tree.map(lambda p, i=i: p[i], made.trace.points))(x)
        chi_squared = metrics.chi_squared(prediction.pred_mean, prediction.total_var, y)
        np.testing.assert_allclose(chi_squared, 1.0, rtol=1e-2)


def test_a_temperature_that_is_kept_counts():
    posterior_fn, params, train, _, made = wide(prior_arguments={"temperature": 3.0})
    fit = laplax.data_fit(cases.mlp_fn, params, train, loss_fn="mse")
    for i in (0, 25, 49):
        arguments = {**jax.tree.map(lambda p, i=i: p[i], made.trace.points), "temperature": 3.0}

        def along(log, arguments=arguments):
            moved = {
                **arguments,
                "prior_prec": arguments["prior_prec"] / jnp.exp(log),
                "sigma_squared": arguments["sigma_squared"] * jnp.exp(log),
            }
            return laplax.log_marginal_likelihood(posterior_fn, moved, data=fit)

        value, slope = jax.value_and_grad(along)(0.0)
        np.testing.assert_allclose(-value, made.trace.values[i], rtol=1e-9)
        np.testing.assert_allclose(slope, 0, atol=1e-9)


# -- where a search starts ------------------------------------------------------------------------
class Start(Method):
    def search(self, objective, initial, progress):
        return initial, Trace({"prior_prec": jnp.ones(1)}, objective(initial)[None])


def test_a_search_starts_at_the_residuals_and_the_size_of_weights_or_outputs():
    _, params, (x, y), start, _ = wide(method=Start())
    flat = jax.flatten_util.ravel_pytree(params)[0]
    residual = np.mean(np.square(jax.vmap(cases.mlp_fn, (0, None))(x, params) - y))
    np.testing.assert_allclose(start["sigma_squared"], residual, rtol=1e-9)
    np.testing.assert_allclose(start["prior_prec"], flat.size / (flat @ flat), rtol=1e-9)
    _, params, (x, y), start, _ = wide("nll", Start())
    J = jax.vmap(jax.jacobian(cases.mlp_fn, argnums=1), (0, None))(x, params)
    size = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(J)) / len(y)
    residual = np.mean(np.square(jax.vmap(cases.mlp_fn, (0, None))(x, params) - y))
    np.testing.assert_allclose(start["sigma_squared"], residual, rtol=1e-9)
    np.testing.assert_allclose(start["prior_prec"], size / residual, rtol=1e-9)


def test_what_is_given_is_where_it_starts():
    given = {"prior_prec": 0.3, "sigma_squared": 0.02}
    *_, start, _ = wide(method=Start(), prior_arguments=given)
    assert start == given
    *_, start, _ = wide(method=Start(), prior_arguments={"prior_prec": [0.3, 0.4]})
    assert start["prior_prec"] == [0.3, 0.4]


@pytest.mark.parametrize("objective", [EVIDENCE, "nll"])
@pytest.mark.parametrize("method", ["grid_search", GradientDescent(num_steps=5)])
@pytest.mark.parametrize("weights", ["trained", "zero"])
def test_a_perfect_fit_and_weights_of_zero_have_a_start(objective, method, weights):
    params = PARAMS if weights == "trained" else jax.tree.map(jnp.zeros_like, PARAMS)
    x = cases.random(12, 2, seed=3, dtype=jnp.float32)
    y = jax.vmap(cases.mlp_fn, (0, None))(x, params)
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, (x, y), loss_fn="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, _ = laplax.calibration(
            posterior_fn,
            cases.mlp_fn,
            params,
            (x, y),
            calibration_objective=objective,
            calibration_method=method,
        )
    assert 0 < chosen["sigma_squared"] < np.inf
    assert 0 < chosen["prior_prec"] < np.inf


# -- contradictions -------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("objective", [EVIDENCE, "nll"])
def test_a_noise_that_contradicts_the_residuals_warns(objective, unit):
    """The residuals have a variance of 0.01: one is too much, one in other units is anything."""
    options = {"objective": objective, "method": GridSearch(grid=[0.1, 1.0])}
    with pytest.warns(CalibrationWarning, match="sigma_squared=1 contradicts the residuals: they"):
        calibrate(unit, prior_arguments={"sigma_squared": 1.0}, **options)


@pytest.mark.parametrize("noise", [0.004, 0.01, 0.03])
@pytest.mark.parametrize("objective", [EVIDENCE, "nll"])
def test_a_noise_near_the_residuals_does_not_warn(objective, noise):
    grid = GridSearch(grid=[0.1, 1.0])
    chosen, _ = calibrate(
        1.0, objective=objective, method=grid, prior_arguments={"sigma_squared": noise}
    )
    assert chosen["sigma_squared"] == jnp.float32(noise)


def test_an_overfitted_network_is_no_contradiction():
    """Seventeen parameters and twenty residuals: what is left is far below the noise."""
    x = cases.random(20, 3, seed=3)
    features = jnp.concatenate([jnp.ones((20, 1)), x, x**2, jnp.sin(3 * x), jnp.cos(3 * x)], axis=1)
    features = jnp.concatenate([features, x[:, :1] * x[:, 1:], x**3], axis=1)
    y = cases.random(20, seed=4)
    weights = jnp.linalg.lstsq(features, y)[0]
    posterior_fn, _ = laplax.laplace(
        lambda input, params: input @ params, weights, (features, y), loss_fn="mse"
    )
    residual = float(jnp.mean(jnp.square(features @ weights - y)))
    noise = 20 * residual
    assert residual < noise / 10
    laplax.calibration(
        posterior_fn,
        lambda input, params: input @ params,
        weights,
        (features, y),
        calibration_method=GridSearch(grid=[1e-6, 1e-5]),
        prior_arguments={"sigma_squared": noise},
    )


# -- the error that follows -----------------------------------------------------------------------
def test_a_precision_that_is_lost_names_the_noise():
    posterior_fn = fitted(1e6, "full")
    message = r"G / \(sigma_squared \* temperature\).*in float32.*sigma_squared is 1: is it a var"
    with pytest.raises(ValueError, match=message):
        posterior_fn({"prior_prec": 1e-3})
    posterior_fn({"prior_prec": 1e-3, "sigma_squared": 1e10})


def test_a_precision_that_is_lost_without_noise_names_the_prior():
    x = 1e6 * cases.random(40, 2, seed=3, dtype=jnp.float32)
    params = cases.mlp((2, 2), dtype=jnp.float32)
    data = (x, jnp.zeros(40, int))
    params = jax.tree.map(lambda p: 1e-6 * p, params)
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, data, loss_fn="cross_entropy")
    with pytest.raises(ValueError, match=r"G / temperature.*loses the latter. Raise prior_prec"):
        posterior_fn({"prior_prec": 1e-6})
