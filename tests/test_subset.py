"""Part of the network random, the rest at the MAP: every structure, every way to name it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax

PARAMS = {f"Dense_{i}": layer for i, layer in enumerate(cases.mlp())}
X, Y = cases.random(7, 2, seed=4), cases.TARGETS["mse"]
HEAD = PARAMS["Dense_1"]


def model_fn(input, params):
    return cases.mlp_fn(input, [params["Dense_0"], params["Dense_1"]])


def head_fn(input, params):
    """The same network with its first layer closed over: what a subset must equal."""
    return cases.mlp_fn(input, [PARAMS["Dense_0"], params])


def fit(name="full", subset="last_layer", fn=model_fn, params=PARAMS):
    options = {} if subset is None else {"subset": subset}
    return laplax.laplace(
        fn, params, (X, Y), loss_fn="mse", curv_type=name, **cases.ESTIMATORS[name], **options
    )


@pytest.mark.parametrize("name", cases.ESTIMATORS)
def test_the_last_layer_equals_the_model_with_the_rest_closed_over(name):
    posterior_fn, estimate = fit(name)
    head_posterior_fn, head_estimate = fit(name, None, head_fn, HEAD)
    np.testing.assert_allclose(estimate.to_dense(), head_estimate.to_dense(), atol=1e-9)
    arguments = {"prior_prec": 0.3, "sigma_squared": 0.5}
    posterior, head = posterior_fn(arguments), head_posterior_fn(arguments)
    np.testing.assert_allclose(posterior.logdet(), head.logdet(), rtol=1e-9)
    evidence = laplax.log_marginal_likelihood(posterior_fn, arguments, model_fn, PARAMS, (X, Y))
    expected = laplax.log_marginal_likelihood(head_posterior_fn, arguments, head_fn, HEAD, (X, Y))
    np.testing.assert_allclose(evidence, expected, rtol=1e-9)
    for push in ("linear", "nonlinear"):
        options = {"pushforward_type": push, "num_samples": 5}
        ours = laplax.predictive(posterior_fn, model_fn, **options)(arguments)(X)
        theirs = laplax.predictive(head_posterior_fn, head_fn, **options)(arguments)(X)
        np.testing.assert_allclose(ours.pred_var, theirs.pred_var, rtol=1e-8)


@pytest.mark.parametrize("name", cases.ESTIMATORS)
def test_parameters_outside_stay_at_the_map(name):
    posterior = fit(name)[0]({"prior_prec": 0.3})
    samples, variance = posterior.sample(jax.random.key(0), 4), posterior.variance()
    for leaf in ("w", "b"):
        fixed = jnp.broadcast_to(PARAMS["Dense_0"][leaf], samples["Dense_0"][leaf].shape)
        np.testing.assert_array_equal(samples["Dense_0"][leaf], fixed)
        assert not variance["Dense_0"][leaf].any()
        assert (variance["Dense_1"][leaf] > 0).all()


@pytest.mark.parametrize(
    "subset",
    [
        "Dense_1/*",
        re.compile(r"Dense_[1-9]"),
        lambda path: path.startswith("Dense_1"),
        {"Dense_0": False, "Dense_1": True},
        {"Dense_0": False, "Dense_1": {"w": True, "b": True}},
    ],
    ids=["glob", "regex", "predicate", "prefix", "tree"],
)
def test_every_way_to_name_a_subset_means_the_same(subset):
    expected = fit()[1].to_dense()
    np.testing.assert_array_equal(fit(subset=subset)[1].to_dense(), expected)


def test_a_subset_is_the_block_of_the_full_curvature():
    full = fit(subset=None)[1].to_dense()
    weights = fit(subset="*/w")[1].to_dense()
    # Flat order: Dense_0/b (4), Dense_0/w (8), Dense_1/b (3), Dense_1/w (12).
    where = np.concatenate([np.arange(4, 12), np.arange(15, 27)])
    np.testing.assert_allclose(weights, full[np.ix_(where, where)], atol=1e-12)


def test_priors_per_layer_apply_to_what_varies():
    posterior_fn, estimate = fit("full")
    posterior = posterior_fn({"prior_prec": {"Dense_0": 9.0, "Dense_1": {"w": 0.5, "b": 2.0}}})
    prior = jnp.concatenate([jnp.full(3, 2.0), jnp.full(12, 0.5)])
    expected = jnp.linalg.inv(estimate.to_dense() + jnp.diag(prior))
    np.testing.assert_allclose(
        jax.vmap(posterior.cov_mv)(jnp.eye(15)), expected, rtol=1e-9, atol=1e-12
    )


def test_the_coverage_report_names_what_is_fixed():
    for name in ("diagonal", "kfac"):
        rows = {leaf: how for leaf, how, _ in fit(name)[1].coverage.rows}
        assert rows["Dense_0/w"] == rows["Dense_0/b"] == "fixed"
        assert rows["Dense_1/w"] != "fixed"


def test_the_last_layer_is_found_behind_normalisation_and_attention():
    import models

    _, params, data, loss_fn = models.MODELS["convolution"]
    estimate = laplax.laplace(
        models.convolution, params, data, loss_fn=loss_fn, curv_type="diagonal", subset="last_layer"
    )[1]
    kept = [leaf for leaf, how, _ in estimate.coverage.rows if how != "fixed"]
    assert kept == ["c", "w"]


def test_an_ambiguous_last_layer_is_refused_with_its_candidates():
    def two_heads(input, params):
        return jnp.concatenate([input @ params["mean"], input @ params["scale"]])

    params = {"mean": cases.random(2, 1), "scale": cases.random(2, 2)}
    with pytest.raises(ValueError, match=r"ambiguous.*mean, scale.*subset='scale'"):
        laplax.laplace(two_heads, params, (X, Y), loss_fn="mse", subset="last_layer")


@pytest.mark.parametrize(
    ("subset", "error", "message"),
    [
        ("Dense_2/*", ValueError, r"selects no parameter; did you mean 'Dense_"),
        ("last_leyer", ValueError, r"did you mean 'last_layer'"),
        (lambda path: False, ValueError, r"selects no parameter \(leaves: Dense_0/b"),
        ({"Dense_7": True}, ValueError, r"a pytree of booleans that matches params"),
        ({"Dense_0": 1, "Dense_1": 0}, TypeError, r"must hold booleans; found int"),
    ],
)
def test_a_subset_that_means_nothing_is_refused(subset, error, message):
    with pytest.raises(error, match=message):
        fit(subset=subset)


def test_a_model_without_a_product_has_no_last_layer():
    with pytest.raises(ValueError, match=r"finds no product.*name the leaves: a"):
        laplax.laplace(
            lambda input, params: input + params["a"],
            {"a": jnp.ones(2)},
            (X, X),
            loss_fn="mse",
            subset="last_layer",
        )
