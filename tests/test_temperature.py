"""Prior precision and temperature together, by held-out data."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import CalibrationWarning, GradientDescent, GridSearch

pytestmark = pytest.mark.usefixtures("quick_compilation")

FITS = {
    "full": {"curv_type": "full"},
    "kfac": {"curv_type": "kfac"},
    "diagonal": {"curv_type": "diagonal"},
}
PARAMS = cases.mlp((2, 4, 3))


def in_unit(input, params):
    """Weights in another unit: the same network, with Jacobians `unit` times as large."""
    weights = jax.tree.map(lambda p: input["unit"] * p, params)
    return 3 * cases.mlp_fn(input["x"], weights)


def observe(count, seed, unit=1.0, dtype=jnp.float64):
    """Labels drawn at a third of the logits: the network is overconfident."""
    x = cases.random(count, 2, seed=seed, dtype=dtype)
    f = jax.vmap(cases.mlp_fn, (0, None))(x, jax.tree.map(lambda p: p.astype(dtype), PARAMS))
    labels = jax.random.categorical(jax.random.key(seed), f)
    return {"x": x, "unit": jnp.full(count, unit, dtype)}, labels


def weights(unit=1.0, dtype=jnp.float64):
    return jax.tree.map(lambda p: (p / unit).astype(dtype), PARAMS)


@functools.cache
def fit(name="full", unit=1.0, dtype=jnp.float64):
    train = observe(40, 3, unit, dtype)
    params = weights(unit, dtype)
    return laplax.laplace(in_unit, params, train, loss_fn="cross_entropy", **FITS[name])[0]


def calibrate(name="full", unit=1.0, dtype=jnp.float64, objective="nll", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return laplax.calibration(
            fit(name, unit, dtype),
            in_unit,
            weights(unit, dtype),
            observe(60, 5, unit, dtype) if objective == "nll" else observe(40, 3, unit, dtype),
            calibration_objective=objective,
            **options,
        )


def held_out_nll(arguments, **options):
    made = laplax.predictive(fit(), in_unit, **options)
    return made.evaluate(dict(arguments), observe(60, 5), metrics=["nll"])[0]["nll"]


# -- the default grid -----------------------------------------------------------------------------
@pytest.mark.parametrize("predictive_type", ["mean_field_0", "mean_field_2", "mc_bridge"])
def test_a_held_out_metric_chooses_the_temperature_too(predictive_type):
    options = {"predictive_type": predictive_type, "num_samples": 50}
    chosen, made = calibrate(**options)
    assert set(chosen) == {"prior_prec", "temperature"}
    values = made.trace.values
    np.testing.assert_allclose(held_out_nll(chosen, **options), values.min(), rtol=1e-9)
    # every recorded point is what a predictive at those hyperparameters has
    for i in (0, 20, 49):
        point = {name: float(x[i]) for name, x in made.trace.points.items()}
        np.testing.assert_allclose(held_out_nll(point, **options), values[i], rtol=1e-6)


def test_no_pair_of_a_fine_grid_is_better():
    found = float(calibrate()[1].trace.values.min())
    pairs = [
        {"prior_prec": tau, "temperature": t}
        for tau in np.logspace(-3, 4, 15)
        for t in np.logspace(-2, 6, 17)
    ]
    best = min(held_out_nll(pair) for pair in pairs)
    assert found < best + 1e-4


def test_a_given_grid_of_temperatures_is_a_product():
    temperatures = [0.5, 10.0, 1e6]
    search = GridSearch(grid=[0.1, 5.0, 30.0], temperatures=temperatures)
    chosen, made = calibrate(calibration_method=search)
    points = made.trace.points
    np.testing.assert_array_equal(points["temperature"], np.repeat(temperatures, 3))
    np.testing.assert_array_equal(points["prior_prec"], np.tile([0.1, 5.0, 30.0], 3))
    expected = [
        held_out_nll({"prior_prec": float(tau), "temperature": float(t)})
        for tau, t in zip(points["prior_prec"], points["temperature"], strict=True)
    ]
    np.testing.assert_allclose(made.trace.values, expected, rtol=1e-9)
    best = int(np.argmin(expected))
    assert chosen["prior_prec"] == points["prior_prec"][best]
    assert chosen["temperature"] == points["temperature"][best]


def test_temperature_and_noise_are_searched_together():
    case = cases.regression(0.8, 0.1)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    method = GridSearch(grid_size=20, temperatures=[1.0, 30.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, made = posterior_fn.calibrate(
            case.data, calibration_objective="nll", calibration_method=method
        )
    assert set(made.trace.points) == {"prior_prec", "sigma_squared", "temperature"}
    assert made.trace.values.shape == (40,)
    results, _ = posterior_fn.evaluate(chosen, case.data, metrics=["nll"])
    np.testing.assert_allclose(results["nll"], made.trace.values.min(), rtol=1e-9)


def test_a_temperature_in_prior_arguments_is_kept():
    chosen, made = calibrate(prior_arguments={"temperature": 3.0})
    assert chosen["temperature"] == 3.0
    assert list(made.trace.points) == ["prior_prec"]


@pytest.mark.parametrize("objective", ["nll", "marginal_log_likelihood"])
@pytest.mark.parametrize("method", ["grid_search", GradientDescent(num_steps=60)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", FITS)
def test_the_answer_does_not_depend_on_the_unit_of_the_weights(name, objective, method, dtype):
    if dtype == jnp.float64 and name in ("kfac", "diagonal"):
        pytest.skip("float32 is the harder case")
    answers = []
    for unit in (1.0, 1e-3, 1e3):
        chosen, made = calibrate(name, unit, dtype, objective, calibration_method=method)
        logits = made(chosen)(observe(20, 7, unit, dtype)[0]).pred_std
        answers.append((made.trace.values.min(), logits))
    for value, std in answers[1:]:
        np.testing.assert_allclose(value, answers[0][0], rtol=1e-4)
        np.testing.assert_allclose(std, answers[0][1], rtol=1e-2)


# -- what an end means ----------------------------------------------------------------------------
def test_an_underconfident_network_needs_no_weight_uncertainty():
    """Labels that the logits understate: any variance is too much."""
    x, _ = observe(60, 5)
    sure = jnp.argmax(jax.vmap(in_unit, (0, None))(x, PARAMS), axis=-1)
    with pytest.warns(CalibrationWarning, match="no weight uncertainty; the MAP is as good"):
        fit().calibrate((x, sure), calibration_objective="nll")


def test_a_curvature_that_misleads_is_said_to_be_ignored():
    """A curvature of one direction alone, in which the held-out logits are wrong."""
    x = jnp.eye(2)
    data = (jnp.tile(x[:1], (50, 1)), jnp.tile(jnp.asarray([0, 1]), 25))

    def model_fn(input, params):
        return params @ input

    params = jnp.zeros((2, 2)).at[0].set(2.0)
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="cross_entropy")
    held_out = (jnp.tile(x, (20, 1)), jnp.asarray([0, 0, 1, 1] * 10))
    with pytest.warns(CalibrationWarning, match="ignores the curvature of the data"):
        chosen, _ = posterior_fn.calibrate(held_out, calibration_objective="nll")
    posterior = posterior_fn(chosen)
    np.testing.assert_allclose(
        posterior.variance(), np.full((2, 2), 1 / chosen["prior_prec"]), rtol=0.1
    )


def test_a_prior_that_counts_for_nothing_is_said_to():
    """Without a curvature where the held-out inputs lie, only the prior's variance is of use."""
    x = jnp.eye(2)
    data = (jnp.tile(x[:1], (50, 1)), jnp.tile(jnp.asarray([0, 1]), 25))

    def model_fn(input, params):
        return params @ input

    params = jnp.zeros((2, 2)).at[0].set(jnp.asarray([1.0, 3.0]))
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="cross_entropy")
    # Not sure enough on the first input, too sure on the second.
    both = (jnp.repeat(x, 40, axis=0), jnp.asarray([0] * 40 + [0, 0, 0, 1] * 10))
    with pytest.warns(CalibrationWarning, match="the prior counts for nothing along"):
        posterior_fn.calibrate(both, calibration_objective="nll")


def test_noise_alone_is_said_to_be_as_good():
    case = cases.regression(0.8, 0.1)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    f = jax.vmap(case.model_fn, (0, None))(case.data[0], case.params)
    sign = jnp.where(jnp.arange(f.size) % 2, 0.1, -0.1).reshape(f.shape)
    with pytest.warns(CalibrationWarning, match="the MAP is as good with sigma_squared=0.00991"):
        posterior_fn.calibrate((case.data[0], f + sign), calibration_objective="nll")


# -- bad input ------------------------------------------------------------------------------------
def test_the_evidence_refuses_temperatures():
    with pytest.raises(ValueError, match="the evidence cannot choose a temperature"):
        calibrate(
            objective="marginal_log_likelihood",
            calibration_method=GridSearch(temperatures=[1.0, 2.0]),
        )


def test_a_temperature_is_not_both_kept_and_chosen():
    method = GridSearch(temperatures=[1.0, 2.0])
    with pytest.raises(ValueError, match="leave one of them out"):
        calibrate(calibration_method=method, prior_arguments={"temperature": 3.0})


@pytest.mark.parametrize("given", [[], [[1.0]], [0.0], [-1.0], [float("inf")]])
def test_temperatures_are_positive_numbers(given):
    with pytest.raises(ValueError, match="temperatures must"):
        GridSearch(temperatures=given)
