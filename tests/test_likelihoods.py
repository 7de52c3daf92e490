"""Every likelihood against autodiff, scipy and Monte Carlo; a new one is covered by a `Case`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.test_util import check_grads

from laplax import FisherMC, LossFn, data_fit, laplace, log_marginal_likelihood
from laplax.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    as_likelihood,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.partial(jax.jit, static_argnums=0)
def hessian_in_f(likelihood, f, y):
    return jax.hessian(likelihood.loss)(f, y)


@functools.partial(jax.jit, static_argnums=0)
def expected_hessian(likelihood, f, y):
    """E_y of the Hessian under the model; the rule is exact for a polynomial in y."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    draws = [f[..., 0] + jnp.exp(0.5 * f[..., 1]) * node for node in nodes]
    hessians = jax.vmap(lambda draw: hessian_in_f(likelihood, f, draw))(jnp.stack(draws))
    return jnp.tensordot(weights / weights.sum(), hessians, axes=1)


def log_mean_exp(f, y):
    """A convex loss with a Hessian that is neither diagonal nor constant."""
    return jax.nn.logsumexp(f - y) + 0.5 * jnp.sum(jnp.square(f - y))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One likelihood on one example. `log_prob` is scipy's, `hessian` what H stands for."""

    name: str
    likelihood: Likelihood
    f: np.ndarray
    y: np.ndarray
    log_prob: Callable[..., float] | None = None
    hessian: Callable[..., jax.Array] = hessian_in_f
    has_samples: bool = True


rng = np.random.default_rng(0)
F = rng.normal(size=(4,))
GRID = rng.normal(size=(3, 4))
P4 = scipy.special.softmax(GRID, axis=-1)


def categorical_logpmf(f, y):
    p = scipy.special.softmax(f, axis=-1).reshape(-1, f.shape[-1])
    pairs = zip(np.reshape(y, -1), p, strict=True)
    return sum(scipy.stats.rv_discrete(values=(range(len(q)), q)).logpmf(k) for k, q in pairs)


def bernoulli_logpmf(f, y):
    return scipy.stats.bernoulli.logpmf(y.astype(int), scipy.special.expit(f)).sum()


def heteroscedastic_logpdf(f, y):
    return scipy.stats.norm.logpdf(y, f[..., 0], np.exp(0.5 * f[..., 1])).sum()


def gaussian_logpdf(f, y, s2=1.0):
    return scipy.stats.norm.logpdf(y, f, np.sqrt(s2)).sum()


def poisson_logpmf(f, y):
    return scipy.stats.poisson.logpmf(y, np.exp(f)).sum()


ZEROS_AND_ONES = np.array([0.0, 1.0, 1.0, 0.0])
COUNTS = np.array([0.0, 3.0, 1.0, 7.0])
PAIRS = GRID.reshape(6, 2)
CASES = [
    Case("mse", Gaussian(), F, F[::-1], gaussian_logpdf),
    Case("mse of a scalar", Gaussian(), F[0], F[1], gaussian_logpdf),
    Case("labels", Categorical(), F, np.array(2), categorical_logpmf),
    Case("labels of tokens", Categorical(), GRID, np.array([0, 3, 1]), categorical_logpmf),
    Case("probabilities", Categorical(), F, P4[0]),
    Case("binary", Bernoulli(), F, ZEROS_AND_ONES, bernoulli_logpmf),
    Case("one logit", Bernoulli(), F[0], ZEROS_AND_ONES[1], bernoulli_logpmf),
    Case("poisson of a grid", Poisson(), F.reshape(2, 2), COUNTS.reshape(2, 2), poisson_logpmf),
    Case(
        "heteroscedastic",
        HeteroscedasticGaussian(),
        PAIRS,
        PAIRS[::-1, 0],
        heteroscedastic_logpdf,
        expected_hessian,
    ),
    Case("callable", Custom(log_mean_exp), GRID, GRID[::-1], has_samples=False),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
NORMALISED = [case for case in CASES if case.log_prob is not None]
SAMPLED = [case for case in CASES if case.has_samples]


def arrays(case, dtype=np.float64):
    """Output and target in `dtype`; labels stay integers."""
    y = np.asarray(case.y)
    return jnp.asarray(case.f, dtype), jnp.asarray(y if y.dtype.kind == "i" else y.astype(dtype))


@functools.cache
def dense_hessian(case):
    f, y = arrays(case)
    return case.hessian(case.likelihood, f, y).reshape(f.size, f.size)


def test_every_named_likelihood_is_listed_above():
    listed = {type(case.likelihood) for case in CASES}
    assert {type(as_likelihood(name)) for name in LossFn} | {Custom} == listed


@every_case
def test_the_factor_times_its_transpose_is_the_hessian(case):
    f, y = arrays(case)
    factor = jax.jit(case.likelihood.hessian_factor)(f, y)
    assert factor.shape[:-1] == f.shape
    flat = factor.reshape(f.size, -1)
    np.testing.assert_allclose(flat @ flat.T, dense_hessian(case), rtol=1e-9, atol=1e-10)


@every_case
def test_the_hessian_product_and_its_default_equal_the_dense_one(case):
    f, y = arrays(case)
    v = jax.random.normal(jax.random.key(1), f.shape)
    dense = (dense_hessian(case) @ v.reshape(-1)).reshape(f.shape)
    from_the_factor = functools.partial(Likelihood.hessian_mv, case.likelihood)
    for hessian_mv in (case.likelihood.hessian_mv, from_the_factor):
        product = jax.jit(hessian_mv)(f, y, v)
        assert product.shape == f.shape
        np.testing.assert_allclose(product, dense, rtol=1e-9, atol=1e-10)


@every_case
def test_the_gradient_of_the_loss_passes_check_grads(case):
    f, y = arrays(case)
    loss = jax.jit(lambda z: case.likelihood.loss(z, y))
    check_grads(loss, (f,), order=1, modes=["fwd", "rev"])


@functools.cache
def draw(case, num_draws):
    f, _ = arrays(case)
    keys = jax.random.split(jax.random.key(3), num_draws)
    return jax.jit(jax.vmap(lambda key: case.likelihood.sample(key, f)))(keys)


def gradients_at_draws(case, num_draws):
    f, _ = arrays(case)
    draws = draw(case, num_draws)
    grads = jax.jit(jax.vmap(jax.grad(case.likelihood.loss), in_axes=(None, 0)))(f, draws)
    return grads.reshape(num_draws, f.size)


def assert_mean_within_5_standard_errors(draws, expected):
    error = np.std(draws, axis=0, ddof=1) / len(draws) ** 0.5
    assert np.all(np.abs(np.mean(draws, axis=0) - expected) <= 5 * error + 1e-12)


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_the_fisher_of_drawn_targets_is_the_hessian_in_expectation(case):
    grads = np.asarray(gradients_at_draws(case, 5_000))
    outer = grads[:, :, None] * grads[:, None, :]
    assert_mean_within_5_standard_errors(outer, dense_hessian(case))
    assert_mean_within_5_standard_errors(grads, np.zeros(grads.shape[1]))


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_the_mean_of_drawn_targets_is_the_link(case):
    f, _ = arrays(case)
    draws = draw(case, 5_000)
    if isinstance(case.likelihood, Categorical):
        draws = jax.nn.one_hot(draws, f.shape[-1])
    assert_mean_within_5_standard_errors(np.asarray(draws), case.likelihood.link(f))


def test_the_columns_of_the_monte_carlo_factor_carry_one_over_the_root_of_their_number():
    case = next(case for case in CASES if case.name == "labels")
    f, y = arrays(case)
    curvature = FisherMC(key=jax.random.key(0), mc_samples=5_000)
    factor = curvature.factor(case.likelihood, f, y, jnp.asarray(0))
    terms = 5_000 * np.einsum("ik,jk->kij", factor, factor)
    assert_mean_within_5_standard_errors(terms, dense_hessian(case))


@pytest.mark.parametrize("case", NORMALISED, ids=lambda case: case.name)
def test_the_log_probability_is_that_of_scipy(case):
    f, y = arrays(case)
    expected = case.log_prob(np.asarray(f), np.asarray(y))
    np.testing.assert_allclose(case.likelihood.log_prob(f, y), expected, rtol=1e-9)


@pytest.mark.parametrize("sigma_squared", [0.01, 1.0, 25.0])
def test_the_gaussian_log_probability_reads_sigma_squared(sigma_squared):
    expected = gaussian_logpdf(GRID, GRID[::-1], sigma_squared)
    got = Gaussian().log_prob(jnp.asarray(GRID), jnp.asarray(GRID[::-1]), sigma_squared)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_one_hot_probabilities_agree_with_labels():
    labels = jnp.asarray([0, 3, 1])
    f = jnp.asarray(GRID)
    one_hot = jax.nn.one_hot(labels, 4)
    np.testing.assert_allclose(
        Categorical().loss(f, one_hot), Categorical().loss(f, labels), rtol=1e-12
    )


def test_a_callable_loss_is_its_own_log_probability_without_a_constant():
    f, y = jnp.asarray(F), jnp.asarray(F[::-1])
    np.testing.assert_allclose(Custom(log_mean_exp).log_prob(f, y), -log_mean_exp(f, y))


@every_case
def test_a_weight_multiplies_the_loss_and_the_log_likelihood(case):
    f, y = arrays(case)
    shape = case.likelihood.batch_shape(f.shape)
    for weight_shape in {(), shape[:1], shape}:
        weight = jax.random.uniform(jax.random.key(2), weight_shape)
        events = case.likelihood.event_loss(f, y)
        full = weight.reshape(weight_shape + (1,) * (len(shape) - len(weight_shape)))
        expected = np.sum(np.asarray(events) * np.asarray(full))
        np.testing.assert_allclose(case.likelihood.loss(f, y, weight), expected, rtol=1e-12)
    twice = case.likelihood.data_fit(f, y, jnp.asarray(2.0))
    once = case.likelihood.log_prob(f, y)
    np.testing.assert_allclose(case.likelihood.log_likelihood(twice), 2 * once, rtol=1e-12)


@every_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_that_goes_in_comes_out(case, dtype):
    f, y = arrays(case, dtype)
    likelihood = case.likelihood
    weight = jnp.asarray(0.5, np.float32)  # of its own dtype: it must not widen the loss
    calls = [
        (likelihood.loss, f, y),
        (likelihood.loss, f, y, weight),
        (likelihood.log_prob, f, y),
        (likelihood.hessian_factor, f, y),
        (likelihood.hessian_mv, f, y, f),
        (likelihood.link, f),
        (jax.grad(likelihood.loss), f, y),
        (likelihood.data_fit, f, y, weight),
    ]
    if case.has_samples and not isinstance(likelihood, Categorical):  # which draws labels
        calls.append((likelihood.sample, jax.random.key(0), f))
    dtypes = {x.dtype for call in calls for x in jax.tree.leaves(jax.eval_shape(*call))}
    assert dtypes == {np.dtype(dtype)}


@every_case
def test_a_likelihood_compiles_and_maps_over_examples(case):
    f, y = arrays(case)
    fs, ys = jnp.stack([f, f + 0.5]), jnp.stack([y, y])
    likelihood = case.likelihood

    def everything(f, y):
        factor = likelihood.hessian_factor(f, y)
        columns = factor.reshape(f.size, -1)  # eigenvectors have no sign of their own
        return likelihood.loss(f, y), likelihood.log_prob(f, y), columns @ columns.T

    mapped = jax.jit(jax.vmap(everything))(fs, ys)
    single = [jax.jit(everything)(z, y) for z in fs]
    for got, expected in zip(mapped, zip(*single, strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(expected), rtol=1e-9, atol=1e-12)


def test_large_outputs_keep_their_curvature_finite():
    f = jnp.asarray([-800.0, 0.0, 800.0])
    for likelihood, y in ((Categorical(), jnp.asarray(0)), (Bernoulli(), jnp.zeros(3))):
        assert bool(jnp.isfinite(likelihood.loss(f, y)))
        assert bool(jnp.isfinite(likelihood.hessian_factor(f, y)).all())


@pytest.mark.parametrize("member", list(LossFn), ids=str)
def test_the_enum_the_string_and_the_object_name_the_same_likelihood(member):
    likelihood = as_likelihood(member)
    assert as_likelihood(str(member)) == likelihood
    assert as_likelihood(likelihood) == likelihood  # a copy
    assert likelihood.name == member.value


def test_laplace_takes_the_enum_the_string_the_object_and_a_callable():
    x, y = jnp.asarray(GRID), jnp.asarray(GRID[:, 0])

    def model_fn(input, params):
        return jnp.tanh(input @ params)

    def half_square(f, y):
        return 0.5 * jnp.square(f - y)

    forms = [LossFn.MSE, "mse", Gaussian(), half_square, Custom(half_square)]
    dense = [
        laplace(model_fn, jnp.asarray(F), (x, y), loss_fn=form)[1].to_dense() for form in forms
    ]
    losses = [data_fit(model_fn, jnp.asarray(F), (x, y), loss_fn=form).loss for form in forms]
    for other, loss in zip(dense[1:], losses[1:], strict=True):
        np.testing.assert_allclose(other, dense[0], rtol=1e-9)
        np.testing.assert_allclose(loss, losses[0], rtol=1e-9)
    assert float(jnp.linalg.norm(dense[0])) > 0.1


def test_a_clipped_callable_drops_the_negative_part_of_its_hessian():
    matrix = jnp.asarray([[2.0, 1.0], [1.0, -3.0]])
    likelihood = Custom(lambda f, y: 0.5 * f @ matrix @ f - y @ f, indefinite="clip")
    f = jnp.asarray([0.3, -0.2])
    factor = likelihood.hessian_factor(f, f)
    values, vectors = np.linalg.eigh(matrix)
    expected = (vectors * np.maximum(values, 0)) @ vectors.T
    np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-9)
    refused = Custom(likelihood.fn).hessian_factor(f, f)
    assert bool(jnp.isnan(refused).any())  # inside jit the failure travels as NaN


class Scaled(Gaussian):
    """A likelihood as users write one: a plain class with an attribute."""

    def __init__(self, factor):
        self.factor = factor

    def event_loss(self, f, y):
        return self.factor * super().event_loss(f, y)

    def event_factor(self, f, y):
        return jnp.sqrt(self.factor) * super().event_factor(f, y)

    def hessian_mv(self, f, y, v):
        return self.factor * v


@pytest.mark.parametrize("make", [float, jnp.asarray], ids=["numbers", "arrays"])
@pytest.mark.parametrize("curv_type", ["full", "diagonal", "lanczos"])
def test_two_likelihoods_of_one_class_are_told_apart(make, curv_type):
    x, y = jnp.asarray(GRID), jnp.asarray(GRID[:, 0])

    def model_fn(input, params):
        return jnp.tanh(input @ params)

    def answers(likelihood):
        options = {"loss_fn": likelihood, "curv_type": curv_type}
        posterior_fn, estimate = laplace(model_fn, jnp.asarray(F), (x, y), **options)
        given = (posterior_fn, {"prior_prec": 1.0}, model_fn, jnp.asarray(F), (x, y))
        return estimate.diagonal(), log_marginal_likelihood(*given)

    one, hundred = Scaled(make(1.0)), Scaled(make(100.0))
    assert one != hundred
    first, second, plain = answers(one), answers(hundred), answers(Gaussian())
    np.testing.assert_allclose(first[0], plain[0], rtol=1e-9)
    np.testing.assert_allclose(first[1], plain[1], rtol=1e-9)
    np.testing.assert_allclose(second[0], 100 * plain[0], rtol=1e-6)
    assert second[1] < first[1] - 1


def test_equal_likelihoods_are_equal():
    assert Scaled(2.0) == Scaled(2.0)
    assert hash(Scaled(2.0)) == hash(Scaled(2.0))
    assert Scaled(2.0) != Gaussian()
    assert Gaussian() == Gaussian()
    loss = lambda f, y: jnp.square(f - y)  # noqa: E731
    assert Custom(loss) == Custom(loss) != Custom(loss, indefinite="clip")
