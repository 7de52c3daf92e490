"""The predictives against Monte Carlo, dense formulas in numpy, and their own limits."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.test_util import check_grads

from laplax import predictives

pytestmark = pytest.mark.usefixtures("quick_compilation")

CLASSES = (2, 3, 5, 10)
VARIANCES = (0.1, 1.0, 10.0)

BRIDGES = {
    "laplace_bridge": predictives.laplace_bridge,
    "plain_bridge": functools.partial(predictives.laplace_bridge, normalise=False),
}
LOG_BRIDGES = {
    "laplace_bridge": predictives.log_laplace_bridge,
    "plain_bridge": functools.partial(predictives.log_laplace_bridge, normalise=False),
}


def _of_covariance(fn):
    return lambda mean, cov: fn(mean, jnp.diagonal(cov, axis1=-2, axis2=-1))


MEAN_FIELDS = {
    "mean_field_0": _of_covariance(predictives.mean_field_0),
    "mean_field_1": _of_covariance(predictives.mean_field_1),
    "mean_field_2": predictives.mean_field_2,
}
LOG_MEAN_FIELDS = {
    "mean_field_0": _of_covariance(predictives.log_mean_field_0),
    "mean_field_1": _of_covariance(predictives.log_mean_field_1),
    "mean_field_2": predictives.log_mean_field_2,
}
# Compiled as one program each, for the time of the tests; one test is about compiling or not.
EAGER = MEAN_FIELDS | BRIDGES
MEAN_FIELDS = {name: jax.jit(fn) for name, fn in MEAN_FIELDS.items()}
BRIDGES = {name: jax.jit(fn) for name, fn in BRIDGES.items()}
ANALYTIC = MEAN_FIELDS | BRIDGES
LOG_ANALYTIC = {name: jax.jit(fn) for name, fn in (LOG_MEAN_FIELDS | LOG_BRIDGES).items()}
DIRICHLET = jax.jit(predictives.laplace_bridge_dirichlet, static_argnames="normalise")
SAMPLES = jax.jit(predictives.gaussian_samples, static_argnums=3)
SAMPLED = jax.jit(lambda *gaussian: predictives.mc_bridge(SAMPLES(*gaussian, 100_000)))

# Largest absolute error of a class probability in the tables of docs/predictives.md, by variance
# (0.1, 1, 10), over all C, rounded up: for correlated, then for independent logits. They are
# maxima over the 16 Gaussians of a cell, of which the test recomputes one, and no proofs.
# The bridge is a coarse approximation and these numbers say so.
ERROR_BOUNDS = {
    "mean_field_0": ((0.017, 0.071, 0.345), (0.006, 0.030, 0.068)),
    "mean_field_1": ((0.013, 0.100, 0.190), (0.008, 0.051, 0.128)),
    "mean_field_2": ((0.012, 0.116, 0.162), (0.008, 0.051, 0.128)),
    "laplace_bridge": ((0.863, 0.756, 0.812), (0.256, 0.558, 0.467)),
    "laplace_bridge, normalise=False": ((0.916, 0.768, 0.777), (0.294, 0.149, 0.364)),
}


@pytest.fixture(scope="module")
def table():
    """The script that makes the table of the docs."""
    path = pathlib.Path(__file__).parents[1] / "examples" / "predictive_errors.py"
    spec = importlib.util.spec_from_file_location("predictive_errors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gaussian(seed, num_classes, variance=1.0, batch=()):
    rng = np.random.default_rng(seed)
    mean = 2 * rng.standard_normal((*batch, num_classes))
    root = rng.standard_normal((*batch, num_classes, num_classes))
    return jnp.asarray(mean), jnp.asarray(root @ np.swapaxes(root, -1, -2)) * (
        variance / num_classes
    )


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("num_classes", CLASSES)
def test_mc_bridge_is_within_four_standard_errors_of_independent_monte_carlo(
    num_classes, variance, table
):
    cell = table.reference(num_classes, variance, 1, True)
    mean, cov, exact, reference_error = (column[0] for column in cell)
    parts = np.stack(
        [
            SAMPLED(key, jnp.asarray(mean), jnp.asarray(cov))
            for key in jax.random.split(jax.random.key(num_classes), 10)
        ]
    )
    # The parts are means of 1e5 samples each, of one variance: the reference's, times ten.
    error = np.sqrt(2) * reference_error
    assert np.all(np.abs(parts.mean(axis=0) - exact) < 4 * error)


@pytest.mark.parametrize(
    ("num_classes", "correlated"), [(2, True), (3, True), (5, True), (10, True), (5, False)]
)
def test_analytic_predictives_stay_within_their_measured_errors(num_classes, correlated, table):
    for position, variance in enumerate(VARIANCES):
        errors, _ = table.absolute_errors(num_classes, variance, 1, correlated)
        for method, (with_correlation, without) in ERROR_BOUNDS.items():
            bounds = with_correlation if correlated else without
            assert errors[method].max() < bounds[position], (method, variance)


@pytest.mark.parametrize("variance", VARIANCES)
def test_two_class_mean_field_2_is_within_two_percent_of_quadrature(variance):
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    for seed in range(20):
        mean, cov = gaussian(seed, 2, variance)
        std = np.sqrt(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1])
        logits = float(mean[0] - mean[1]) + float(std) * nodes
        exact = scipy.special.expit(logits) @ weights / weights.sum()
        assert abs(float(MEAN_FIELDS["mean_field_2"](mean, cov)[0]) - exact) < 0.02


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", ANALYTIC)
def test_probabilities_sum_to_one_and_are_not_negative(name, num_classes):
    for variance in (0.0, 0.1, 10.0):
        probs = ANALYTIC[name](*gaussian(1, num_classes, variance, batch=(4, 2)))
        assert probs.shape == (4, 2, num_classes)
        np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-12)
        assert np.all(np.asarray(probs) >= 0)


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", MEAN_FIELDS)
def test_mean_field_predictives_become_softmax_as_the_variance_vanishes(name, num_classes):
    mean, cov = gaussian(2, num_classes)
    exact = jax.nn.softmax(mean)
    errors = [np.abs(MEAN_FIELDS[name](mean, s * cov) - exact).max() for s in (1e-3, 1e-6, 1e-9)]
    assert errors[1] < 2e-3 * errors[0]  # first order in the variance
    assert errors[2] < 1e-8
    np.testing.assert_allclose(MEAN_FIELDS[name](mean, 0 * cov), exact, rtol=1e-13)


def test_plain_bridge_of_two_classes_becomes_softmax_as_an_isotropic_variance_vanishes():
    mean = jnp.array([1.3, -0.4])
    probs = BRIDGES["plain_bridge"](mean, jnp.full(2, 1e-10))
    np.testing.assert_allclose(probs, jax.nn.softmax(mean), rtol=1e-12)


@pytest.mark.parametrize("num_classes", CLASSES)
def test_plain_bridge_recovers_the_dirichlet_that_a_gaussian_comes_from(num_classes):
    """The forward bridge (Dirichlet -> Gaussian) is inverted exactly, at every concentration."""
    for concentration in (1.0, 1e3, 1e8):
        alpha = concentration * np.random.default_rng(3).uniform(0.5, 3.0, num_classes)
        mean = np.log(alpha) - np.log(alpha).mean()
        inverse = 1 / alpha
        centring = np.eye(num_classes) - 1 / num_classes
        cov = centring @ np.diag(inverse) @ centring
        found = DIRICHLET(jnp.asarray(mean), jnp.asarray(cov), normalise=False)
        np.testing.assert_allclose(found, alpha, rtol=1e-9)
        probs = BRIDGES["plain_bridge"](jnp.asarray(mean), jnp.asarray(cov))
        np.testing.assert_allclose(probs, scipy.special.softmax(mean), rtol=1e-9)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_classes", CLASSES)
def test_laplace_bridge_equals_the_dense_formula(num_classes, normalise):
    mean, cov = (np.asarray(x) for x in gaussian(4, num_classes))
    ones = np.ones(num_classes)
    total = ones @ cov @ ones
    mu = mean - cov @ ones * (ones @ mean) / total
    sigma = np.diag(cov - np.outer(cov @ ones, cov @ ones) / total)
    assert abs(mu.sum()) < 1e-10
    k = np.sqrt(num_classes / 2) / sigma.sum() if normalise else 1.0
    mu, sigma = np.sqrt(k) * mu, k * sigma
    alpha = (1 - 2 / num_classes + np.exp(mu) / num_classes**2 * np.exp(-mu).sum()) / sigma
    found = DIRICHLET(mean, cov, normalise=normalise)
    np.testing.assert_allclose(found, alpha, rtol=1e-9)
    probs = BRIDGES["laplace_bridge" if normalise else "plain_bridge"](mean, cov)
    np.testing.assert_allclose(probs, alpha / alpha.sum(), rtol=1e-9)


@pytest.mark.parametrize("name", BRIDGES)
def test_bridge_treats_variances_as_a_diagonal_covariance(name):
    mean, var = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.3, 2.0, 1.0])
    np.testing.assert_allclose(
        BRIDGES[name](mean, var), BRIDGES[name](mean, jnp.diag(var)), rtol=1e-12
    )


@pytest.mark.parametrize("name", BRIDGES)
def test_bridge_does_not_change_when_the_gaussian_sums_to_zero_already(name):
    mean, cov = gaussian(5, 5)
    row = cov.sum(axis=1)
    conditioned = mean - row * mean.sum() / row.sum(), cov - jnp.outer(row, row) / row.sum()
    np.testing.assert_allclose(BRIDGES[name](*conditioned), BRIDGES[name](mean, cov), rtol=1e-9)


def test_normalised_bridge_depends_only_on_the_mean_in_units_of_the_deviation():
    mean, cov = gaussian(6, 5)
    scaled = predictives.laplace_bridge(7.0 * mean, 49.0 * cov)
    np.testing.assert_allclose(scaled, predictives.laplace_bridge(mean, cov), rtol=1e-11)
    plain = BRIDGES["plain_bridge"](7.0 * mean, 49.0 * cov)
    assert np.abs(plain - BRIDGES["plain_bridge"](mean, cov)).max() > 1e-2


def test_normalised_bridge_becomes_the_arg_max_and_not_softmax_for_a_tiny_variance():
    probs = predictives.laplace_bridge(jnp.array([0.5, 0.0, -0.5]), jnp.full(3, 1e-6))
    np.testing.assert_allclose(probs, [1, 0, 0], atol=1e-12)


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.parametrize(
    "cov",
    [np.zeros((3, 3)), np.diag([1.0, 0.0, 0.0])],
    ids=["zero", "zero once the sum is known"],
)
def test_bridge_without_any_variance_left_is_softmax_with_finite_gradients(name, cov):
    mean = jnp.array([1.0, 0.0, -2.0])
    np.testing.assert_allclose(BRIDGES[name](mean, cov), jax.nn.softmax(mean), rtol=1e-12)
    assert np.all(np.isinf(DIRICHLET(mean, cov)))
    gradients = jax.jit(jax.jacobian(BRIDGES[name], argnums=(0, 1)))(mean, jnp.asarray(cov))
    assert all(np.all(np.isfinite(g)) for g in gradients)


@pytest.mark.parametrize("name", BRIDGES)
def test_bridge_with_one_certain_class_is_finite(name):
    probs = BRIDGES[name](jnp.array([1.0, 0.0, -2.0]), jnp.array([0.0, 1.0, 1.0]))
    assert np.all(np.isfinite(probs))
    np.testing.assert_allclose(probs.sum(), 1, rtol=1e-12)


@pytest.mark.parametrize("name", ANALYTIC)
def test_permuting_the_classes_permutes_the_probabilities(name):
    mean, cov = gaussian(7, 5)
    order = np.array([3, 0, 4, 1, 2])
    permuted = ANALYTIC[name](mean[order], cov[order][:, order])
    np.testing.assert_allclose(permuted, ANALYTIC[name](mean, cov)[order], rtol=1e-10)


@pytest.mark.parametrize("name", ["mean_field_1", "mean_field_2"])
def test_pairwise_mean_fields_ignore_a_common_shift_of_the_logits(name):
    mean, cov = gaussian(8, 5)
    np.testing.assert_allclose(
        MEAN_FIELDS[name](mean + 3.0, cov), MEAN_FIELDS[name](mean, cov), rtol=1e-12
    )


def test_mean_field_2_ignores_common_noise_and_equals_mean_field_1_for_independent_logits():
    mean, cov = gaussian(9, 5)
    np.testing.assert_allclose(
        MEAN_FIELDS["mean_field_2"](mean, cov + 5.0),
        MEAN_FIELDS["mean_field_2"](mean, cov),
        rtol=1e-10,
    )
    var = jnp.diag(cov)
    np.testing.assert_allclose(
        MEAN_FIELDS["mean_field_2"](mean, jnp.diag(var)),
        predictives.mean_field_1(mean, var),
        rtol=1e-12,
    )


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", MEAN_FIELDS)
def test_scaling_a_shared_variance_up_never_raises_the_top_probability(name, num_classes):
    mean, _ = gaussian(10, num_classes, batch=(500,))
    cov = jnp.broadcast_to(0.3 * jnp.eye(num_classes), (500, num_classes, num_classes))
    top = jnp.stack([MEAN_FIELDS[name](mean, s * cov).max(-1) for s in np.geomspace(1, 100, 15)])
    assert np.all(np.diff(top, axis=0) < 1e-14)


@pytest.mark.parametrize("name", ["mean_field_1", "mean_field_2"])
def test_scaling_any_two_class_covariance_up_never_raises_the_top_probability(name):
    mean, cov = gaussian(11, 2, batch=(1000,))
    top = jnp.stack([MEAN_FIELDS[name](mean, s * cov).max(-1) for s in np.geomspace(1, 100, 15)])
    assert np.all(np.diff(top, axis=0) < 1e-14)


def test_unequal_variances_can_raise_the_top_probability_of_mean_field_0():
    """The documented exception: a negative logit shrinks towards 0, which is upwards."""
    mean, var = jnp.array([-1.0, -5.0]), jnp.array([1.0, 0.0])
    low, high = (predictives.mean_field_0(mean, s * var)[0] for s in (1.0, 100.0))
    assert high > low + 0.005


@pytest.mark.parametrize("name", ANALYTIC)
def test_log_versions_are_the_logarithm_of_the_plain_ones(name):
    mean, cov = gaussian(12, 5)
    np.testing.assert_allclose(
        LOG_ANALYTIC[name](mean, cov), np.log(ANALYTIC[name](mean, cov)), rtol=1e-10, atol=1e-13
    )


def test_log_versions_of_sampling_probit_and_dirichlet_are_the_logarithm_of_the_plain_ones():
    mean, cov = gaussian(13, 5)
    var = jnp.diag(cov)
    samples = SAMPLES(jax.random.key(0), mean, cov, 50)
    pairs = [
        (predictives.log_mc_bridge(samples), predictives.mc_bridge(samples)),
        (predictives.log_probit(mean, var), predictives.probit(mean, var)),
        (
            predictives.log_laplace_bridge_dirichlet(mean, cov),
            predictives.laplace_bridge_dirichlet(mean, cov),
        ),
    ]
    for log_value, value in pairs:
        np.testing.assert_allclose(log_value, np.log(value), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", LOG_ANALYTIC)
def test_log_versions_are_finite_for_logits_of_ten_thousand(name):
    dtype = jnp.float32  # the harder one
    mean = jnp.array([1e4, -1e4, 0.0], dtype)

    @jax.jit
    def value_and_gradients(mean, cov):
        log_probs, pull_back = jax.vjp(LOG_ANALYTIC[name], mean, cov)
        return log_probs, pull_back(jnp.ones_like(log_probs))

    for variance in (0.0, 1e-2, 1.0, 1e2):
        log_probs, gradients = value_and_gradients(mean, variance * jnp.eye(3, dtype=dtype))
        assert log_probs.dtype == dtype
        assert np.all(np.isfinite(log_probs))
        assert np.all(np.asarray(log_probs) <= 0)
        assert log_probs[0] > -1e-3
        assert all(np.all(np.isfinite(g)) for g in gradients)


def test_log_mc_bridge_and_log_probit_are_exact_for_logits_of_ten_thousand():
    samples = jnp.array([[1e4, -1e4], [1e4, -1e4]])
    np.testing.assert_allclose(predictives.log_mc_bridge(samples), [0, -2e4], rtol=1e-14)
    log_probs = predictives.log_probit(jnp.array([-1e4, 1e4]), jnp.zeros(2))
    np.testing.assert_allclose(log_probs, [-1e4, 0], rtol=1e-14)


@pytest.mark.parametrize("variance", VARIANCES)
def test_probit_is_within_two_percent_of_quadrature_and_exact_without_variance(variance):
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    means = np.linspace(-6, 6, 25)
    exact = scipy.special.expit(means[:, None] + np.sqrt(variance) * nodes) @ weights
    probs = predictives.probit(means, np.full(25, variance))
    assert np.abs(probs - exact / weights.sum()).max() < 0.02
    np.testing.assert_allclose(
        predictives.probit(means, np.zeros(25)), scipy.special.expit(means), rtol=1e-13
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_type_that_comes_in_goes_out(dtype):
    mean, cov = (x.astype(dtype) for x in gaussian(14, 3))

    def everything(key, mean, cov):
        samples = predictives.gaussian_samples(key, mean, cov, 4)
        of_samples = [predictives.mc_bridge(samples), predictives.log_mc_bridge(samples)]
        of_cov = [fn(mean, cov) for fn in (*ANALYTIC.values(), *LOG_ANALYTIC.values(), DIRICHLET)]
        of_var = [fn(mean, jnp.diag(cov)) for fn in (predictives.probit, predictives.log_probit)]
        return [samples, *of_samples, *of_cov, *of_var]

    outputs = jax.jit(everything)(jax.random.key(1), mean, cov)
    assert {output.dtype for output in outputs} == {jnp.dtype(dtype)}
    exact = jax.jit(everything)(jax.random.key(1), *(x.astype(float) for x in (mean, cov)))
    for output, value in zip(outputs[3:], exact[3:], strict=True):
        np.testing.assert_allclose(output, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ANALYTIC)
def test_jit_and_vmap_change_nothing(name):
    mean, cov = gaussian(15, 5, batch=(4, 2))
    expected = EAGER[name](mean, cov)
    np.testing.assert_allclose(ANALYTIC[name](mean, cov), expected, rtol=1e-11)
    np.testing.assert_allclose(jax.jit(jax.vmap(EAGER[name]))(mean, cov), expected, rtol=1e-11)
    np.testing.assert_allclose(ANALYTIC[name](mean[3, 1], cov[3, 1]), expected[3, 1], rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "num_classes"), [*((name, 3) for name in LOG_ANALYTIC), ("laplace_bridge", 2)]
)
def test_gradients_agree_with_finite_differences(name, num_classes):
    mean, cov = gaussian(16, num_classes)
    check_grads(LOG_ANALYTIC[name], (mean, cov), order=1, modes=("rev",), rtol=1e-5)


def test_mean_field_2_has_its_full_one_sided_derivative_at_zero_covariance():
    mean, cov = gaussian(17, 5)
    along = jax.grad(lambda s: MEAN_FIELDS["mean_field_2"](mean, s * cov)[0])(0.0)
    step = 1e-6
    difference = MEAN_FIELDS["mean_field_2"](mean, step * cov)[0] - jax.nn.softmax(mean)[0]
    np.testing.assert_allclose(along, difference / step, rtol=1e-4)


def test_gaussian_samples_have_the_mean_and_covariance_asked_for():
    mean, cov = gaussian(18, 4)
    samples = SAMPLES(jax.random.key(2), mean, cov, 200_000)
    var = jnp.diag(cov)
    assert np.all(np.abs(samples.mean(0) - mean) < 5 * np.sqrt(var / 200_000))
    error = np.sqrt((np.outer(var, var) + np.asarray(cov) ** 2) / 200_000)
    assert np.all(np.abs(np.cov(samples.T) - cov) < 5 * error)


def test_gaussian_samples_of_a_singular_covariance_stay_in_its_range():
    direction = jnp.array([1.0, 2.0, -3.0])
    cov = jnp.outer(direction, direction)
    samples = SAMPLES(jax.random.key(3), jnp.zeros(3), cov, 1000)
    np.testing.assert_allclose(samples @ jnp.array([2.0, -1.0, 0.0]), 0, atol=1e-6)
    assert 0.8 < float((samples[:, 0]).std()) < 1.2
    at_mean = SAMPLES(jax.random.key(3), direction, 0 * cov, 2)
    np.testing.assert_array_equal(at_mean, jnp.stack([direction, direction]))


def test_gaussian_samples_survive_an_eigenvalue_that_round_off_made_negative():
    cov = jnp.ones((3, 3)) - 1e-12 * jnp.eye(3)
    assert np.linalg.eigvalsh(cov).min() < 0
    samples = SAMPLES(jax.random.key(4), jnp.zeros(3), cov, 100)
    assert np.all(np.isfinite(samples))


@pytest.mark.parametrize("repeated", [True, False])
def test_samples_are_differentiable_in_the_covariance_even_with_repeated_eigenvalues(repeated):
    mean, cov = gaussian(19, 3)
    cov = 2 * jnp.eye(3) if repeated else cov + jnp.eye(3)

    @jax.jit
    def spread(mean, root):  # a symmetric perturbation, as eigh reads one triangle only
        samples = SAMPLES(jax.random.key(5), mean, cov + root + root.T, 3)
        return predictives.mc_bridge(samples)

    check_grads(spread, (mean, jnp.zeros((3, 3))), order=1, modes=("fwd", "rev"), rtol=1e-5)


def test_batched_gaussian_samples_use_the_covariance_of_their_own_input():
    cov = jnp.stack([jnp.zeros((2, 2)), 100 * jnp.eye(2)])
    samples = SAMPLES(jax.random.key(6), jnp.zeros((2, 2)), cov, 50)
    assert samples.shape == (50, 2, 2)
    np.testing.assert_array_equal(samples[:, 0], 0)
    assert float(samples[:, 1].std()) > 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predictives.mean_field_1(jnp.zeros(3), jnp.eye(3)), "jnp.diagonal"),
        (lambda: predictives.mean_field_2(jnp.zeros(3), jnp.zeros(3)), "one more axis"),
        (lambda: predictives.laplace_bridge(jnp.zeros(3), jnp.eye(2)), "one more axis"),
        (lambda: predictives.laplace_bridge(jnp.zeros(1), jnp.ones(1)), "at least 2 classes"),
        (lambda: predictives.mc_bridge(jnp.zeros((0, 3))), "S at least 1"),
        (lambda: predictives.mc_bridge(jnp.zeros(3)), "S at least 1"),
        (
            lambda: predictives.gaussian_samples(jax.random.key(0), jnp.zeros(2), jnp.eye(2), 0),
            "num_samples must be at least 1, got 0",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_way_to_write_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()
