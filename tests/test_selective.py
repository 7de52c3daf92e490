"""Selective prediction against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from laplax import baselines, metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(40, 2, seed=1)
PARAMS = cases.mlp((2, 4, 3))
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 3, 40))
REAL = cases.random(40, 3, seed=2)


def mean_over_orders(risk, score):
    """The mean risk at every coverage, over all orders of the examples with equal scores."""
    values = np.unique(score)[::-1]
    groups = [np.flatnonzero(score == value) for value in values]
    curves = []
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        order = [i for group in orders for i in group]
        curves.append(np.cumsum(risk[order]) / np.arange(1, len(risk) + 1))
    return np.mean(curves, axis=0)


@pytest.mark.parametrize(
    "score",
    [[0.1, 0.9, 0.5, 0.3, 0.7, 0.2], [0.5, 0.5, 0.5, 0.1, 0.9, 0.9], [1.0] * 6],
    ids=["no ties", "ties", "all equal"],
)
def test_the_curve_is_the_mean_over_all_orders_of_ties(score):
    risk = np.asarray([0.0, 1.0, 1.0, 0.25, 0.0, 3.0])
    coverage, risks = metrics.risk_coverage_curve(risk, score)
    expected = mean_over_orders(risk, np.asarray(score))
    np.testing.assert_allclose(coverage, np.arange(1, 7) / 6)
    np.testing.assert_allclose(risks, expected, rtol=1e-12)
    found = metrics.area_under_risk_coverage(risk, score)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-12)
    best = min(
        np.mean(np.cumsum(risk[list(order)]) / np.arange(1, 7))
        for order in itertools.permutations(range(6))
    )
    excess = metrics.excess_area_under_risk_coverage(risk, score)
    np.testing.assert_allclose(excess, expected.mean() - best, atol=1e-12)


def test_the_risk_at_a_coverage_is_that_of_the_smallest_share_that_reaches_it():
    rng = np.random.default_rng(3)
    risk, score = rng.random((2, 10))
    ordered = risk[np.argsort(-score)]
    for count in range(1, 11):
        found = metrics.risk_at_coverage(risk, score, coverage=count / 10)
        np.testing.assert_allclose(found, ordered[:count].mean(), rtol=1e-12)
    found = metrics.risk_at_coverage(risk, score, coverage=0.31)
    np.testing.assert_allclose(found, ordered[:4].mean(), rtol=1e-12)


def test_metrics_of_a_classification_by_name_equal_numpy():
    baseline = baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="cross_entropy")
    half = metrics.accuracy_at_coverage(0.5)
    chosen = {"aurc": "aurc", "excess_aurc": "excess_aurc", "half": half}
    chosen |= {"most": "accuracy_at_coverage"}
    results = baseline.evaluate([(X[:15], LABELS[:15]), (X[15:], LABELS[15:])], chosen)
    p = np.asarray(baseline(X).pred_act)
    wrong = (p.argmax(axis=1) != np.asarray(LABELS)).astype(float)
    ordered = wrong[np.argsort(-p.max(axis=1))]
    area = np.mean(np.cumsum(ordered) / np.arange(1, 41))
    best = np.mean(np.cumsum(np.sort(wrong)) / np.arange(1, 41))
    expected = [area, area - best, 1 - ordered[:20].mean(), 1 - ordered[:36].mean()]
    np.testing.assert_allclose(list(results.values()), expected, rtol=1e-10)


def test_metrics_of_a_regression_by_name_equal_numpy():
    noise = jnp.asarray([0.1, 0.2, 0.3])
    baseline = baselines.deep_ensemble(
        cases.mlp_fn,
        [PARAMS, jax.tree.map(lambda x: 2 * x, PARAMS)],
        loss_fn="mse",
        sigma_squared=noise,
    )
    results = baseline.evaluate((X, REAL), ["aurc", "excess_aurc"])
    prediction = baseline(X)
    squared = ((np.asarray(prediction.pred_mean) - np.asarray(REAL)) ** 2).ravel()
    ordered = squared[np.argsort(np.asarray(prediction.total_std).ravel())]
    area = np.mean(np.cumsum(ordered) / np.arange(1, 121))
    best = np.mean(np.cumsum(np.sort(squared)) / np.arange(1, 121))
    np.testing.assert_allclose(list(results.values()), [area, area - best], rtol=1e-10)


def test_float32_and_jit():
    risk = jnp.asarray([0.0, 1.0, 0.0], jnp.float32)
    score = jnp.asarray([0.5, 0.5, 0.9], jnp.float32)
    area = jax.jit(metrics.area_under_risk_coverage)(risk, score)
    assert area.dtype == jnp.float32
    np.testing.assert_allclose(area, (0 + 0.25 + 1 / 3) / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.risk_coverage_curve(np.zeros(3), np.zeros(4)), r"shape \(N,\); got \(3,"),
        (lambda: metrics.accuracy_at_coverage(90), "above 0 and up to 1; got 90"),
        (lambda: metrics.get_metric("aurc"), "'aurc' needs a task"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
