"""Standard errors: closed forms, and the bootstrap against them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import cases
from laplax import baselines
from laplax.standard_errors import (
    bootstrap,
    evaluate_with_errors,
    mean_with_error,
    nll_per_example,
    paired_difference,
    per_example,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(80, 2, seed=1)
PARAMS = cases.mlp((2, 4, 3))
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 3, 80))
BITS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (80, 3)))
REAL = cases.random(80, 3, seed=2)
TARGETS = {"mse": REAL, "cross_entropy": LABELS, "binary_cross_entropy": BITS}


def baseline(loss_fn="cross_entropy"):
    return baselines.map_predictive(cases.mlp_fn, PARAMS, (X, TARGETS[loss_fn]), loss_fn=loss_fn)


@pytest.mark.parametrize("loss_fn", list(TARGETS))
@pytest.mark.parametrize("batches", [False, True])
def test_the_mean_of_the_nll_per_example_is_the_metric(loss_fn, batches):
    predictive, y = baseline(loss_fn), TARGETS[loss_fn]
    data = [(X[:30], y[:30]), (X[30:], y[30:])] if batches else (X, y)
    values = nll_per_example(predictive, data)
    assert values.shape == (80,)
    np.testing.assert_allclose(values.mean(), predictive.evaluate((X, y))["nll"], rtol=1e-10)


def test_any_mean_has_values_per_example():
    predictive = baseline()
    p = np.asarray(predictive(X).pred_act)
    brier = ((p - np.eye(3)[np.asarray(LABELS)]) ** 2).sum(axis=1)
    np.testing.assert_allclose(per_example(predictive, (X, LABELS), "brier"), brier, rtol=1e-10)
    with pytest.raises(ValueError, match="'ece' is not a mean over examples"):
        per_example(predictive, (X, LABELS), "ece")


def test_the_paired_difference_equals_the_t_test_of_scipy():
    a, b = np.random.default_rng(1).normal(size=(2, 50))
    estimate = paired_difference(a, b + 0.3)
    expected = scipy.stats.ttest_rel(a, b + 0.3).statistic
    np.testing.assert_allclose(estimate.value / estimate.standard_error, expected, rtol=1e-12)


def test_the_bootstrap_equals_the_known_errors_of_mean_and_median():
    values = jnp.asarray(np.random.default_rng(2).normal(size=2000))
    mean = bootstrap(values, num_resamples=1000)
    exact = mean_with_error(values).standard_error
    assert mean.value == float(values.mean())
    # A standard deviation of 1,000 draws is known to 1 / sqrt(2,000), 2.2%.
    np.testing.assert_allclose(mean.standard_error, exact, rtol=5 * 0.0224)
    ours = bootstrap(values, jnp.median, num_resamples=1000).standard_error
    scipys = scipy.stats.bootstrap(
        (np.asarray(values),), np.median, n_resamples=1000, random_state=0, vectorized=True
    ).standard_error
    np.testing.assert_allclose(ours, scipys, rtol=5 * 0.0224 * 2**0.5)


def test_the_bootstrap_draws_examples_whole_and_depends_on_the_key_alone():
    values = {"a": jnp.arange(30.0), "b": -jnp.arange(30.0)}
    same = bootstrap(values, lambda x: jnp.sum(x["a"] + x["b"]), num_resamples=20)
    assert same == (0, 0)
    draws = [
        bootstrap(values["a"], num_resamples=50, key=jax.random.key(seed)).standard_error
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_all_metrics_come_with_errors():
    predictive = baseline()
    data = (X, LABELS)
    results = evaluate_with_errors(predictive, data, num_resamples=200)
    expected = predictive.evaluate(data)
    assert list(results) == list(expected)
    values = [estimate.value for estimate in results.values()]
    np.testing.assert_allclose(values, list(expected.values()), rtol=1e-10)
    nll = mean_with_error(nll_per_example(predictive, data))
    np.testing.assert_allclose(results["nll"].standard_error, nll.standard_error, rtol=1e-10)
    by_draws = bootstrap(nll_per_example(predictive, data), num_resamples=2000).standard_error
    np.testing.assert_allclose(by_draws, nll.standard_error, rtol=5 / 4000**0.5)
    assert all(estimate.standard_error > 0 for estimate in results.values())


def test_a_metric_of_samples_is_resampled_along_its_examples():
    def spread(samples):
        return samples.std(axis=0).mean(axis=-1)

    values = evaluate_with_errors(baseline(), (X, LABELS), {"spread": spread}, num_resamples=10)
    assert values["spread"] == (0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_difference(np.zeros(3), np.zeros(4)), "the same examples twice; got 3"),
        (lambda: mean_with_error(np.zeros((3, 2))), r"one number per example, shape \(N,\)"),
        (lambda: bootstrap(jnp.zeros(1)), "at least 2 examples"),
        (lambda: bootstrap(jnp.zeros(5), num_resamples=1), "num_resamples must be at least 2"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
