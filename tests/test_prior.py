"""The Gaussian prior as an object: a density, and the penalty of a training loop."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
import laplax

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = {
    "dense": {"w": cases.random(3, 2, seed=1), "b": cases.random(2, seed=2)},
    "scale": cases.random(seed=3),
}
UNIT = np.asarray([[0.5, 3.0]])
FULL = np.abs(np.asarray(cases.random(3, 2, seed=4))) + 0.1
PRECISIONS = {
    "scalar": 0.7,
    "layer": {"dense": 0.7, "scale": 2.0},
    "leaf": {"dense": {"w": 0.7, "b": 1.5}, "scale": 2.0},
    "unit": {"dense": {"w": UNIT, "b": 1.5}, "scale": 2.0},
    "parameter": {"dense": {"w": FULL, "b": np.asarray([1.0, 4.0])}, "scale": 2.0},
}
MEAN = {"dense": {"w": 0.3, "b": np.asarray([-1.0, 1.0])}, "scale": 0.0}


def log_density(params, precision, mean):
    """By NumPy, one parameter at a time."""
    total = 0.0
    for leaves in zip(*map(jax.tree.leaves, (params, precision, mean)), strict=True):
        p, t, m = np.broadcast_arrays(*leaves)
        total += np.sum(0.5 * np.log(t / (2 * np.pi)) - 0.5 * t * (p - m) ** 2)
    return total


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("mean", [None, MEAN], ids=["zero", "mean"])
def test_the_penalty_is_minus_the_log_density(name, mean):
    arguments = {"prior_prec": PRECISIONS[name]} | ({} if mean is None else {"prior_mean": mean})
    prior = laplax.gaussian_prior(PARAMS, arguments)
    precision = jax.tree.broadcast(PRECISIONS[name], PARAMS)
    expected = log_density(PARAMS, precision, jax.tree.broadcast(mean or 0.0, PARAMS))
    np.testing.assert_allclose(prior.log_prob(PARAMS), expected, rtol=1e-12)
    np.testing.assert_allclose(prior.neg_log_prob(PARAMS), -expected, rtol=1e-12)
    flat = prior.space.flatten(PARAMS)
    np.testing.assert_allclose(prior.log_prob(flat), expected, rtol=1e-12)


def test_it_differentiates_in_parameters_and_prior_arguments():
    def penalty(params, arguments):
        return laplax.gaussian_prior(params, arguments).neg_log_prob(params)

    precision = jax.tree.map(jnp.asarray, PRECISIONS["unit"])
    arguments = {"prior_prec": precision, "prior_mean": jax.tree.map(jnp.asarray, MEAN)}
    check_grads(jax.jit(penalty), (PARAMS, arguments), 2, modes=["rev"], rtol=1e-6)


def test_a_subset_alone_has_the_prior():
    prior = laplax.gaussian_prior(PARAMS, {"prior_prec": 0.7}, subset="dense/*")
    expected = log_density(PARAMS["dense"], {"w": 0.7, "b": 0.7}, {"w": 0.0, "b": 0.0})
    np.testing.assert_allclose(prior.log_prob(PARAMS), expected, rtol=1e-12)
    assert jax.grad(prior.neg_log_prob)(PARAMS)["scale"] == 0


def test_it_is_a_pytree_that_travels():
    prior = laplax.gaussian_prior(PARAMS, {"prior_prec": PRECISIONS["unit"], "prior_mean": MEAN})
    again = pickle.loads(pickle.dumps(prior))
    assert jax.tree.structure(again) == jax.tree.structure(prior)
    assert jax.jit(lambda p: p.log_prob(PARAMS))(again) == pytest.approx(prior.log_prob(PARAMS))


def test_the_prior_of_a_fit_is_that_of_its_evidence():
    """Evidence = log-likelihood + log prior + P/2 log 2 pi - 1/2 log det of the precision."""
    case = cases.regression(0.3, 0.5)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    arguments = {"prior_prec": {"w": 0.3, "v": {"u": 2.0}}, "sigma_squared": 0.5}
    residual = np.asarray(case.target - case.features @ posterior_fn.space.flatten(case.params))
    log_likelihood = -np.sum(residual**2) - 0.5 * residual.size * np.log(np.pi)
    log_prior = posterior_fn.prior(arguments).log_prob(case.params)
    half_logdet = 0.5 * posterior_fn(arguments).logdet()
    expected = log_likelihood + log_prior + 0.5 * cases.SIZE * np.log(2 * np.pi) - half_logdet
    evidence = posterior_fn.log_marginal_likelihood(arguments, case.data)
    np.testing.assert_allclose(evidence, expected, rtol=1e-10)


def test_a_unit_prior_reaches_the_posterior():
    params = {"w": cases.random(3, 2, seed=1)}
    posterior_fn, _ = laplax.laplace(
        lambda input, params: input @ params["w"],
        params,
        (cases.random(5, 3, seed=5), cases.random(5, 2, seed=6)),
        loss_fn="mse",
    )
    by_unit = posterior_fn({"prior_prec": {"w": jnp.asarray([[0.5, 3.0]])}})
    by_entry = posterior_fn({"prior_prec": {"w": jnp.asarray([[0.5, 3.0]] * 3)}})
    np.testing.assert_array_equal(by_unit.variance()["w"], by_entry.variance()["w"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dense": {"w": PARAMS["dense"]["w"]}, "scale": 1.0}, "params have 'dense/b', which it"),
        (PARAMS | {"extra": 1.0}, "it has 'extra', which params have not"),
        (PARAMS | {"scale": jnp.ones(3)}, r"'scale' has shape \(3,\), and \(\) in params"),
        (jnp.ones(4), "params have 'dense/b', which it does not"),
    ],
)
def test_parameters_of_another_tree_name_the_first_path(params, message):
    prior = laplax.gaussian_prior(PARAMS, {"prior_prec": 1.0})
    with pytest.raises(ValueError, match=f"not the pytree that this prior is for: {message}"):
        prior.neg_log_prob(params)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"dense": 1.0}, "matches params from the top: params have 'scale', which it does not"),
        ({"dense": 1.0, "scale": 1.0, "z": 1.0}, "from the top: it has 'z', which params have not"),
        ({"dense": {"w": np.ones(2), "b": 1.0}, "scale": 1.0}, r"'dense/w' has shape \(2,\)"),
        (-1.0, "must be positive and finite"),
    ],
)
def test_a_precision_of_another_tree_names_the_first_path(precision, message):
    with pytest.raises(ValueError, match=message):
        laplax.gaussian_prior(PARAMS, {"prior_prec": precision})


def test_what_has_no_prior_here_says_where_it_has_one():
    with pytest.raises(ValueError, match=r"needs a model.*posterior_fn\.prior"):
        laplax.gaussian_prior(PARAMS, {"prior_prec": 1.0}, subset="last_layer")
    with pytest.raises(ValueError, match="'prior_precision'; did you mean 'prior_prec'"):
        laplax.gaussian_prior(PARAMS, {"prior_precision": 1.0})
