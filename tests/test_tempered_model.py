"""A temperature of the logits beside the posterior."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import CalibrationWarning, GridSearch, baselines

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = cases.mlp((2, 4, 3))
X = cases.random(40, 2, seed=3)


def logits(x):
    return jax.vmap(cases.mlp_fn, (0, None))(x, PARAMS)


def labels(x, seed):
    """Drawn at four times the logits: the network is not sure enough."""
    return jax.random.categorical(jax.random.key(seed), 4 * logits(x))


def nll_of(temperature):
    """The lowest held-out NLL of a posterior at this temperature of the logits."""
    model_fn = laplax.tempered_model(cases.mlp_fn, temperature)
    posterior_fn, _ = laplax.laplace(model_fn, PARAMS, (X, labels(X, 1)), loss_fn="cross_entropy")
    new = cases.random(200, 2, seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        _, made = posterior_fn.calibrate(
            (new, labels(new, 2)),
            calibration_objective="nll",
            calibration_method=GridSearch(grid_size=8),
        )
    return float(made.trace.values.min())


def test_outputs_and_curvature_are_those_of_the_divided_network():
    model_fn = laplax.tempered_model(cases.mlp_fn, 2.0)
    data = (X, labels(X, 1))
    first, second = (
        laplax.laplace(fn, PARAMS, data, loss_fn="cross_entropy")[0]({"prior_prec": 1.0})
        for fn in (model_fn, lambda input, params: cases.mlp_fn(input, params) / 2.0)
    )
    np.testing.assert_allclose(model_fn(X[0], PARAMS), logits(X)[0] / 2)
    variances = [jax.tree.leaves(posterior.variance()) for posterior in (first, second)]
    for ours, theirs in zip(*variances, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_equal_temperatures_are_one_model():
    assert laplax.tempered_model(cases.mlp_fn, 2) == laplax.tempered_model(cases.mlp_fn, 2.0)
    assert laplax.tempered_model(cases.mlp_fn, 2.0) != laplax.tempered_model(cases.mlp_fn, 3.0)


def test_held_out_data_prefer_it_to_temperature_scaling_and_to_the_posterior_alone():
    new = cases.random(200, 2, seed=5)
    held_out = (new, labels(new, 2))
    scaled = baselines.temperature_scaling(cases.mlp_fn, PARAMS, held_out)
    best = laplax.judge(scaled, held_out, metrics=["nll"])["nll"]
    temperature = float(scaled.temperature)
    assert temperature < 0.5
    both = min(nll_of(temperature), nll_of(0.8 * temperature))
    assert both < best + 1e-6
    assert both < nll_of(1.0) - 0.01


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), True, jnp.asarray(1.0)])
def test_a_temperature_is_a_positive_number(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        laplax.tempered_model(cases.mlp_fn, temperature)
