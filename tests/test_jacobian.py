"""Variances from layer inputs and gradients equal those from whole Jacobians."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from laplax._model import Model, _equations
from laplax.pushforward import jacobian
from laplax.pushforward._moments import chunk_size
from laplax.taps import TapJacobian, trace_taps

CURVATURES = {
    "diagonal": {},
    "kfac": {},
    "kfac, separate bias": {"joint_bias": False},
    "ekfac": {"joint_bias": False},
    "block_diagonal": {},
    "block_diagonal, small": {"max_dense": 3},
}


@functools.cache
def jacobians(name, subset=None):
    model_fn, params, (x, _), _ = models.MODELS[name]
    space = posterior_fn_of(name, "diagonal", subset).space
    both = (
        TapJacobian(Model(model_fn), params, space, x),
        jacobian(Model(model_fn), params, space, x),
    )
    return both


@functools.cache
def posterior_fn_of(name, curvature, subset=None):
    model_fn, params, data, loss_fn = models.MODELS[name]
    options = {"curv_type": curvature.split(",")[0], **CURVATURES[curvature]}
    return laplax.laplace(model_fn, params, data, loss_fn=loss_fn, subset=subset, **options)[0]


def assert_equal_moments(one, other):
    scale = float(jnp.abs(other).max())
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_factors_equal_whole_jacobians(name, curvature):
    factors, whole = jacobians(name)
    posterior_fn = posterior_fn_of(name, curvature)
    precision = posterior_fn({"prior_prec": 0.7}).precision
    c, tau = jnp.asarray(1.3), jnp.asarray(0.4)
    dense = jnp.linalg.inv(posterior_fn.structure.to_dense() * c + tau * jnp.eye(precision.size))
    assert_equal_moments(precision.covariance(factors), precision.covariance(whole))
    assert_equal_moments(precision.marginal(factors), precision.marginal(whole))
    projection = posterior_fn.structure.project(factors)
    expected = jnp.einsum("ncp,pq,ndq->ncd", whole, dense, whole)
    assert_equal_moments(projection.covariance(c, tau), expected)
    assert_equal_moments(projection.marginal(c, tau), jnp.diagonal(expected, axis1=1, axis2=2))


def mlp(input, params):
    hidden = jnp.tanh(input @ params["one"]["w"] + params["one"]["b"])
    return hidden @ params["two"]["w"] + params["two"]["b"]


MLP = {
    "one": {"w": cases.random(3, 6), "b": cases.random(6)},
    "two": {"w": cases.random(6, 4), "b": cases.random(4)},
}
X = cases.random(9, 3, seed=2)


@pytest.mark.parametrize("subset", [None, "last_layer", "one/*", "*/b"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_subsets(subset, curvature):
    options = {"curv_type": curvature.split(",")[0], **CURVATURES[curvature]}
    y = jnp.arange(9) % 4
    posterior_fn, _ = laplax.laplace(
        mlp, MLP, (X, y), loss_fn="cross_entropy", subset=subset, **options
    )
    precision = posterior_fn({"prior_prec": 0.3}).precision
    factors = TapJacobian(Model(mlp), MLP, posterior_fn.space, X)
    whole = jacobian(Model(mlp), MLP, posterior_fn.space, X)
    assert_equal_moments(precision.covariance(factors), precision.covariance(whole))
    assert_equal_moments(precision.marginal(factors), precision.marginal(whole))


def test_parts_of_a_projection_join():
    posterior_fn, _ = laplax.laplace(mlp, MLP, (X, mlp(X, MLP)), loss_fn="mse", curv_type="kfac")

    def project(x):
        return posterior_fn.structure.project(TapJacobian(Model(mlp), MLP, posterior_fn.space, x))

    one = jnp.asarray(1.0)
    joined = project(X[:1]).join(
        [project(X[1:2]), project(X[2:])]
    )  # single examples are not shared
    assert_equal_moments(joined.covariance(one, one), project(X).covariance(one, one))


def test_the_last_product_has_one_gradient_for_all_examples():
    posterior_fn, _ = laplax.laplace(mlp, MLP, (X, mlp(X, MLP)), loss_fn="mse", curv_type="kfac")
    J = TapJacobian(Model(mlp), MLP, posterior_fn.space, X)
    first, last = (J.outer(group) for group in posterior_fn.structure.groups)
    assert not first.shared
    assert last.shared
    assert last.g.shape == (1, 4, 1, 1, 4)


def not_the_output(input, params):
    return jnp.tanh(input @ params["w"])


def subtracted_from(input, params):
    return params["b"] - input @ params["w"]


def spread(input, params):
    return (input @ params["w"])[None, :] + params["rows"]


def added_twice(input, params):
    z = input @ params["w"]
    return z + params["b"] + z


def test_a_product_that_flows_past_its_bias_keeps_the_bias_apart():
    params = {"w": cases.random(3, 2), "b": cases.random(2)}
    data = (X[:1], added_twice(X[:1], params))
    curv = laplax.laplace(added_twice, params, data, loss_fn="mse", curv_type="kfac")[1]
    full = laplax.laplace(added_twice, params, data, loss_fn="mse", curv_type="full")[1].to_dense()
    blocks = jax.scipy.linalg.block_diag(full[:2, :2], full[2:, 2:])  # exact for one datum
    np.testing.assert_allclose(curv.to_dense(), blocks, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("curv_type", ["diagonal", "kfac"])
@pytest.mark.parametrize("model_fn", [not_the_output, subtracted_from, spread, added_twice])
def test_a_product_that_only_looks_like_the_output_is_not_taken_for_it(model_fn, curv_type):
    params = {"w": cases.random(3, 2), "b": cases.random(2), "rows": cases.random(5, 2)}
    program = trace_taps(Model(model_fn), params, jax.ShapeDtypeStruct((3,), jnp.float64))
    assert program.output_tap is None
    data = (X, jax.vmap(model_fn, (0, None))(X, params))
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="mse", curv_type=curv_type)
    precision = posterior_fn({"prior_prec": 1.0}).precision
    factors = TapJacobian(Model(model_fn), params, posterior_fn.space, X)
    whole = jacobian(Model(model_fn), params, posterior_fn.space, X)
    assert_equal_moments(precision.covariance(factors), precision.covariance(whole))


@pytest.mark.parametrize("curv_type", ["diagonal", "kfac"])
def test_many_classes_need_neither_rows_nor_a_square_per_input(curv_type):
    """The largest intermediate of a last layer of D features and C classes is C^2 or n C."""
    n, features, classes = 64, 16, 300
    params = {"w": jnp.zeros((features, classes)), "b": jnp.zeros(classes)}
    x = cases.random(n, features)

    def model_fn(input, params):
        return jnp.tanh(input) @ params["w"] + params["b"]

    data = (x[:8], jnp.arange(8))
    posterior_fn, _ = laplax.laplace(
        model_fn, params, data, loss_fn="cross_entropy", curv_type=curv_type
    )
    predictive = laplax.predictive(posterior_fn, model_fn)({"prior_prec": 1.0})
    jaxpr = jax.make_jaxpr(lambda p, x: p(x, ["pred_var"]))(predictive, x).jaxpr
    live = jax.jit(lambda p, x: p(x, ["pred_var"])["pred_var"]).lower(predictive, x).compile()
    sizes = [math.prod(v.aval.shape) for eqn in _equations(jaxpr) for v in eqn.outvars]
    assert max(sizes) >= classes**2  # the walk sees inside
    assert live.memory_analysis().temp_size_in_bytes < 12 * 8 * (classes**2 + n * classes)
    space, input = predictive.posterior.space, x
    arguments = (predictive.recipe, predictive.posterior.precision, predictive.model)
    size = chunk_size(*arguments, params, space, input, ["pred_var"], 2**20)
    assert size > 2**20 // (classes**2 * 8)  # inputs are not counted as squares
