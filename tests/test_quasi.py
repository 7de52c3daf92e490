"""Integrals over Gaussian logits at scrambled Sobol points."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from laplax import predictives
from laplax._engine.linalg import semidefinite_cholesky
from laplax._engine.points import normal_points
from laplax.metrics import mutual_information_per_example

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
BRIDGE = jax.jit(predictives.quasi_bridge, static_argnums=3)


def gaussian(classes, variance=1.0, seed=0):
    rng = np.random.default_rng([classes, seed])
    root = rng.standard_normal((classes, classes))
    cov = root @ root.T
    return 2 * rng.standard_normal(classes), cov * (variance * classes / np.trace(cov))


def monte_carlo(mean, cov, num_samples=1_000_000):
    """E[softmax(z)] and its standard error, in NumPy."""
    rng = np.random.default_rng(mean.size)
    root = np.linalg.cholesky(cov)
    total = np.zeros_like(mean)
    squares = np.zeros_like(mean)
    for _ in range(num_samples // 20_000):
        z = mean + rng.standard_normal((20_000, mean.size)) @ root.T
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        total += p.sum(axis=0)
        squares += (p**2).sum(axis=0)
    average = total / num_samples
    return average, np.sqrt(np.maximum(squares / num_samples - average**2, 0) / num_samples)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_512_points_are_within_a_thousandth_of_a_million_draws(classes):
    mean, cov = gaussian(classes, 0.5)
    exact, noise = monte_carlo(mean, cov)
    error = np.abs(np.asarray(BRIDGE(KEY, jnp.asarray(mean), jnp.asarray(cov), 512)) - exact)
    assert np.all(error < 1e-3 + 5 * noise)
    assert error.mean() < 1e-3


@pytest.mark.parametrize("variance", [0.1, 1.0, 10.0])
def test_two_classes_match_adaptive_quadrature(variance):
    def integrand(x):
        return stats.norm.pdf(x) / (1 + np.exp(-(1.5 + np.sqrt(variance) * x)))

    exact = quad(integrand, -12, 12, epsabs=1e-12)[0]
    cov = variance * np.asarray([[1.0, 0.0], [0.0, 0.0]]) + 3.0
    found = BRIDGE(KEY, jnp.asarray([1.5, 0.0]), jnp.asarray(cov), 512)
    np.testing.assert_allclose(found, [exact, 1 - exact], atol=5e-4)


def test_a_common_shift_of_the_logits_changes_nothing():
    mean, cov = map(jnp.asarray, gaussian(6))
    plain = BRIDGE(KEY, mean, cov, 64)
    np.testing.assert_allclose(BRIDGE(KEY, mean, cov + 7.0, 64), plain, atol=1e-12)
    np.testing.assert_allclose(BRIDGE(KEY, mean + 40.0, cov, 64), plain, atol=1e-12)


def test_probabilities_are_the_mean_of_softmax_at_the_points():
    mean, cov = gaussian(4)
    points = np.asarray(normal_points(KEY, 32, 3, jnp.dtype("float64")))
    basis = np.linalg.qr(np.column_stack([np.ones(4), np.eye(4)[:, :3]]))[0][:, 1:]
    helmert = predictives._contrasts((4,))
    np.testing.assert_allclose(helmert.T @ helmert, np.eye(3), atol=1e-14)
    np.testing.assert_allclose(helmert @ helmert.T, basis @ basis.T, atol=1e-14)
    z = mean + points @ (helmert @ np.linalg.cholesky(helmert.T @ cov @ helmert)).T
    expected = predictives.log_mc_bridge(jnp.asarray(z))
    found = predictives.log_quasi_bridge(KEY, jnp.asarray(mean), jnp.asarray(cov), 32)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_points_have_the_moments_of_the_gaussian_and_depend_on_the_key():
    points = np.asarray(normal_points(KEY, 4096, 5, jnp.dtype("float64")))
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=2e-3)
    np.testing.assert_allclose(np.cov(points.T), np.eye(5), atol=2e-2)
    for column in points.T:  # one point in each of 4,096 slices of equal probability
        slices = np.floor(stats.norm.cdf(column) * 4096 - 1e-9)
        assert len(set(slices.astype(int))) >= 4090
    other = np.asarray(normal_points(jax.random.key(4), 4096, 5, jnp.dtype("float64")))
    assert np.abs(points - other).max() > 0.1


def test_points_are_unbiased_over_keys():
    mean, cov = gaussian(3, 4.0)
    keys = jax.random.split(jax.random.key(0), 400)
    over_keys = jax.jit(
        jax.vmap(lambda key: predictives.quasi_bridge(key, jnp.asarray(mean), jnp.asarray(cov), 8))
    )
    found = np.asarray(over_keys(keys))
    exact, noise = monte_carlo(mean, cov)
    error = np.sqrt(found.var(axis=0) / 400 + noise**2)
    assert np.all(np.abs(found.mean(axis=0) - exact) < 5 * error)


def test_a_traced_key_has_the_points_of_a_concrete_one():
    mean, cov = map(jnp.asarray, gaussian(3))
    eager = predictives.quasi_bridge(KEY, mean, cov, 16)
    np.testing.assert_allclose(BRIDGE(KEY, mean, cov, 16), eager, rtol=1e-12)
    batched = jax.vmap(lambda key: predictives.quasi_bridge(key, mean, cov, 16))(KEY[None])
    np.testing.assert_allclose(batched[0], eager, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 100, 513])
def test_numbers_that_are_no_power_of_two_work_without_a_warning(count):
    mean, cov = map(jnp.asarray, gaussian(3, 0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = predictives.quasi_bridge(KEY, mean, cov, count)
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-12)
    np.testing.assert_allclose(found, jax.nn.softmax(mean), atol=0.1)


def test_gradients_match_differences_and_are_finite_where_eigenvalues_meet():
    mean, cov = map(jnp.asarray, gaussian(5))

    @jax.jit
    def first(scale, matrix):
        return predictives.log_quasi_bridge(KEY, mean, scale * matrix, 64)[0]

    slope = jax.jit(jax.grad(first))
    for matrix in (cov, jnp.eye(5)):
        difference = (first(1.0001, matrix) - first(0.9999, matrix)) / 2e-4
        np.testing.assert_allclose(slope(1.0, matrix), difference, rtol=1e-5)
    for singular in (jnp.ones((5, 5)), jnp.zeros((5, 5)), jnp.diag(jnp.asarray([1.0, 0, 0, 0, 0]))):
        assert np.isfinite(slope(1.0, singular))
    by_cov = jax.jit(jax.grad(lambda c: first(1.0, c)))
    assert np.all(np.isfinite(by_cov(jnp.eye(5))))


def test_log_probabilities_are_finite_where_probabilities_underflow():
    mean = jnp.asarray([0.0, 1e4, -1e4], jnp.float32)
    found = predictives.log_quasi_bridge(KEY, mean, jnp.eye(3, dtype=jnp.float32), 16)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [-1e4, 0, -2e4], rtol=1e-3)
    wide = 1e6 * jnp.eye(3, dtype=jnp.float32)
    assert np.all(np.isfinite(predictives.log_quasi_bridge(KEY, mean, wide, 16)))


def test_mutual_information_is_that_of_the_samples():
    mean, cov = map(jnp.asarray, gaussian(4))
    many = predictives.gaussian_samples(jax.random.key(1), mean, cov, 200_000)
    expected = mutual_information_per_example(many)
    found = predictives.quasi_mutual_information(KEY, mean, cov, 1024)
    np.testing.assert_allclose(found, expected, atol=3e-3)


def test_quasi_samples_have_the_mean_and_covariance_asked_for():
    mean, cov = gaussian(3)
    both = predictives.quasi_samples(
        KEY, jnp.asarray([mean, -mean]), jnp.asarray([cov, 2 * cov]), 4096
    )
    assert both.shape == (4096, 2, 3)
    np.testing.assert_allclose(both.mean(axis=0), [mean, -mean], atol=5e-3)
    np.testing.assert_allclose(np.cov(both[:, 1].T), 2 * cov, atol=3e-2)


@pytest.mark.parametrize("rank", [0, 1, 3, 4])
def test_semidefinite_cholesky_is_a_root_of_every_rank(rank):
    rows = np.random.default_rng(rank).standard_normal((4, rank))
    matrix = rows @ rows.T
    size = matrix.diagonal().max()
    factor = np.asarray(semidefinite_cholesky(jnp.asarray(matrix), jnp.asarray(size)))
    np.testing.assert_allclose(factor, np.tril(factor))
    np.testing.assert_allclose(factor @ factor.T, matrix, atol=1e-12)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="number of points must be at least 1"):
        predictives.quasi_bridge(KEY, jnp.zeros(2), jnp.eye(2), 0)
    with pytest.raises(ValueError, match="one more axis"):
        predictives.quasi_samples(KEY, jnp.zeros(2), jnp.zeros(2), 4)
    with pytest.raises(ValueError, match="one more axis"):
        predictives.quasi_bridge(KEY, jnp.asarray(0.0), jnp.eye(1), 4)
