"""Bayesian linear regression in closed form: posterior and evidence of every structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
import laplax

pytestmark = pytest.mark.usefixtures("quick_compilation")

PRIORS = {"scalar": 0.4, "per leaf": {"w": 0.3, "v": {"u": 2.0}}, "prefix": {"w": 1.5, "v": 0.2}}
NOISE = [0.01, 1.0, 25.0]


def fit(case, name):
    return laplax.laplace(
        case.model_fn, case.params, case.data, loss_fn="mse", curv_type=name, **cases.EXACT[name]
    )


def make(prior_prec, sigma_squared, name, **options):
    orthogonal = name in cases.BLOCKWISE
    return cases.regression(prior_prec, sigma_squared, orthogonal=orthogonal, **options)


@pytest.mark.parametrize("name", cases.EXACT)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("sigma_squared", NOISE)
def test_posterior_and_evidence_equal_the_closed_form(name, prior, sigma_squared):
    prior_prec = PRIORS[prior]
    case = make(prior_prec, sigma_squared, name)
    posterior_fn, _ = fit(case, name)
    arguments = {"prior_prec": prior_prec, "sigma_squared": sigma_squared}
    posterior = posterior_fn(arguments)
    covariance = jnp.linalg.inv(case.precision(prior_prec, sigma_squared))
    actual = jax.vmap(posterior.cov_mv)(jnp.eye(cases.SIZE))
    np.testing.assert_allclose(actual, covariance, rtol=1e-9, atol=1e-9 * covariance.max())
    evidence = laplax.log_marginal_likelihood(
        posterior_fn, arguments, case.model_fn, case.params, case.data, loss_fn="mse"
    )
    np.testing.assert_allclose(evidence, case.log_evidence(prior_prec, sigma_squared), rtol=1e-9)


@pytest.mark.parametrize("name", cases.EXACT)
def test_fewer_examples_than_parameters_are_exact_too(name):
    case = cases.regression(0.4, 0.5, examples=2)
    if name in cases.BLOCKWISE:
        case.features = jnp.eye(2, cases.SIZE) * 2.0
    posterior_fn, curv_estimate = fit(case, name)
    gram = case.features.T @ case.features
    np.testing.assert_allclose(curv_estimate.to_dense(), gram, atol=1e-9)
    posterior = posterior_fn({"prior_prec": 0.4, "sigma_squared": 0.5})
    actual = jax.vmap(posterior.cov_mv)(jnp.eye(cases.SIZE))
    expected = jnp.linalg.inv(case.precision(0.4, 0.5))
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", cases.EXACT)
@pytest.mark.parametrize("prior", PRIORS)
def test_evidence_gradients_are_right_in_every_prior_argument(name, prior):
    case = make(PRIORS[prior], 0.5, name)
    posterior_fn, _ = fit(case, name)
    data = laplax.data_fit(case.model_fn, case.params, case.data, loss_fn="mse")

    def evidence(arguments):
        return laplax.log_marginal_likelihood(posterior_fn, arguments, data=data)

    arguments = {
        "prior_prec": jax.tree.map(jnp.asarray, PRIORS[prior]),
        "sigma_squared": jnp.asarray(0.5),
        "temperature": jnp.asarray(1.2),
        "prior_mean": jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), case.params),
    }
    check_grads(evidence, (arguments,), order=1, modes=["fwd", "rev"])


def test_a_prior_mean_moves_the_evidence_as_in_closed_form():
    case = cases.regression(0.4, 0.5)
    shift = cases.random(cases.SIZE, seed=11)
    moved = cases.Regression(case.features, case.target + case.features @ shift, case.params)
    space = laplax.posterior.ParamSpace.of(case.params)
    moved.params = space.unflatten(space.flatten(case.params) + shift)
    posterior_fn, _ = fit(moved, "full")
    arguments = {"prior_prec": 0.4, "sigma_squared": 0.5, "prior_mean": space.unflatten(shift)}
    evidence = laplax.log_marginal_likelihood(
        posterior_fn, arguments, moved.model_fn, moved.params, moved.data
    )
    np.testing.assert_allclose(evidence, case.log_evidence(0.4, 0.5), rtol=1e-9)


def test_effective_parameters_count_what_the_data_determine():
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = fit(case, "full")
    values = jnp.linalg.eigvalsh(case.features.T @ case.features) / 0.5
    for name in ("full", "lanczos", "lobpcg"):
        posterior_fn, _ = fit(case, name)
        actual = laplax.effective_parameters(
            posterior_fn, {"prior_prec": 0.4, "sigma_squared": 0.5}
        )
        np.testing.assert_allclose(actual, jnp.sum(values / (values + 0.4)), rtol=1e-9)


def test_temperature_multiplies_the_noise_in_the_posterior():
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = fit(case, "full")
    tempered = posterior_fn({"prior_prec": 0.4, "sigma_squared": 0.25, "temperature": 2.0})
    plain = posterior_fn({"prior_prec": 0.4, "sigma_squared": 0.5})
    np.testing.assert_allclose(tempered.state["scale"], plain.state["scale"], rtol=1e-12)


def test_the_data_term_is_computed_once_and_gives_the_same_evidence():
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = fit(case, "full")
    arguments = {"prior_prec": 0.4, "sigma_squared": 0.5}
    data = laplax.data_fit(case.model_fn, case.params, case.data, loss_fn="mse")
    once = laplax.log_marginal_likelihood(posterior_fn, arguments, data=data)
    again = laplax.log_marginal_likelihood(
        posterior_fn, arguments, case.model_fn, case.params, case.data
    )
    np.testing.assert_allclose(once, again, rtol=1e-14)
