"""The network cut before its last layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import last_layer_features

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = {
    "one": {"w": cases.random(3, 5), "b": cases.random(5)},
    "two": {"w": cases.random(5, 4), "b": cases.random(4)},
}
X, Y = cases.random(10, 3), jnp.arange(10) % 4


@jax.jit
def model_fn(input, params):
    hidden = jnp.tanh(input @ params["one"]["w"] + params["one"]["b"])
    return 2 * (hidden @ params["two"]["w"] + params["two"]["b"])


def batched(input, params):
    assert input.ndim == 2
    return model_fn(input, params)


LOADER = [{"input": X[:4], "target": Y[:4]}, {"input": X[4:], "target": Y[4:]}]


@pytest.mark.parametrize(
    ("fn", "data", "options"),
    [
        (model_fn, (X, Y), {}),
        (model_fn, (X, Y), {"memory_budget": 1}),
        (model_fn, LOADER, {}),
        (batched, (X, Y), {"vmap_over_data": False}),
    ],
)
def test_features_are_the_input_of_the_last_layer(fn, data, options):
    head_fn, features = last_layer_features(fn, PARAMS, data, **options)
    expected = jnp.tanh(X @ PARAMS["one"]["w"] + PARAMS["one"]["b"])
    np.testing.assert_allclose(features["input"].reshape(10, 5), expected, rtol=1e-12)
    np.testing.assert_array_equal(features["target"], Y)
    out = jax.jit(jax.vmap(head_fn, (0, None)))(features["input"], PARAMS)
    np.testing.assert_allclose(out.reshape(10, 4), model_fn(X, PARAMS), rtol=1e-12)


@pytest.mark.parametrize("curv_type", ["full", "kfac", "diagonal"])
def test_posterior_evidence_and_predictions_are_those_of_the_network(curv_type):
    weighted = cases.weighted(X, Y, jnp.linspace(0, 2, 10))
    head_fn, features = last_layer_features(model_fn, PARAMS, weighted)
    options = {"loss_fn": "cross_entropy", "curv_type": curv_type, "subset": "last_layer"}
    prior = {"prior_prec": 0.3}
    whole, _ = laplax.laplace(model_fn, PARAMS, weighted, **options)
    cut, _ = laplax.laplace(head_fn, PARAMS, features, **options)
    evidence = [
        laplax.log_marginal_likelihood(
            whole, prior, data=weighted, model_fn=model_fn, params=PARAMS
        ),
        laplax.log_marginal_likelihood(cut, prior, data=features, model_fn=head_fn, params=PARAMS),
    ]
    np.testing.assert_allclose(*evidence, rtol=1e-10)
    expected = laplax.predictive(whole, model_fn)(prior)(X)
    given = laplax.predictive(cut, head_fn)(prior)(features["input"])
    np.testing.assert_allclose(given.pred_var, expected.pred_var, rtol=1e-9)
    np.testing.assert_allclose(given.pred_act, expected.pred_act, rtol=1e-9)


def test_the_backbone_is_not_run_again():
    head_fn, features = last_layer_features(model_fn, PARAMS, (X, Y))
    compiled = jax.jit(head_fn).lower(features["input"][0], PARAMS).compile().as_text()
    assert "tanh" not in compiled
    assert "tanh" in jax.jit(model_fn).lower(X[0], PARAMS).compile().as_text()


def residual(input, params):
    return input[:2] + jnp.tanh(input * params["one"]) @ params["two"]


def recurrent(input, params):
    return jnp.tanh(input @ params["w"]) @ params["w"]


def test_networks_that_cannot_be_cut_are_refused():
    params = {"one": cases.random(3), "two": cases.random(3, 2)}
    with pytest.raises(ValueError, match=r"not only through the last layer \('two'\).*residual"):
        last_layer_features(residual, params, (X, X[:, :2]))
    with pytest.raises(ValueError, match=r"'w' is used 2 times.*subset='last_layer'"):
        last_layer_features(recurrent, {"w": cases.random(3, 3)}, (X, X))
