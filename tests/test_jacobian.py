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
from laplax._engine.products import matrix_diagonal
from laplax._model import Model
from laplax._traced import _equations, traced
from laplax._tree import one_of
from laplax.pushforward import TapJacobian, jacobian, prediction_work
from laplax.structures import DenseJacobian, LowRank
from laplax.structures._coordinates import PositionCoordinates
from laplax.structures._dense import DensePrecision

pytestmark = pytest.mark.usefixtures("quick_compilation")

CURVATURES = {
    "diagonal": {},
    "kfac": {},
    "kfac, separate bias": {"joint_bias": False},
    "ekfac": {"joint_bias": False},
    "block_diagonal": {},
    "block_diagonal, small": {"max_dense": 3},
    "full": {},
    "lanczos": {"rank": 3},
}


def posterior_fn_of(name, curvature):
    model_fn, params, data, loss_fn = models.MODELS[name]
    options = {"curv_type": curvature.split(",")[0], **CURVATURES[curvature]}
    return laplax.laplace(model_fn, params, data, loss_fn=loss_fn, **options)[0]


@functools.partial(jax.jit, static_argnums=0)
def compiled_moments(model, posterior_fn, prior_prec, input, whole, c, tau):
    precision = posterior_fn({"prior_prec": prior_prec}).precision
    factors = TapJacobian(model, posterior_fn.mean, posterior_fn.space, input)
    whole = DenseJacobian(whole)
    projection = posterior_fn.structure.project(factors)
    return {
        "covariance": (precision.covariance(factors), precision.covariance(whole)),
        "marginal": (precision.marginal(factors), precision.marginal(whole)),
        "projected": (projection.covariance(c, tau), projection.marginal(c, tau)),
        "dense": posterior_fn.structure.to_dense(),
    }


def pushed(model, posterior_fn, prior_prec, input, whole, c, tau):
    """Moments from factors, and from whole Jacobians; one compiled call."""
    scales = jnp.asarray(c), jnp.asarray(tau)
    found = compiled_moments(model, posterior_fn, prior_prec, input, whole, *scales)
    covariance, marginal = found.pop("projected")
    whole = np.asarray(whole)
    dense = np.asarray(found.pop("dense")) * c + tau * np.eye(whole.shape[-1])
    expected = whole @ np.linalg.solve(dense, whole.mT)
    return found | {
        "projected": (covariance, expected),
        "projected marginal": (marginal, np.diagonal(expected, axis1=1, axis2=2)),
    }


@functools.cache
def whole_jacobian(name):
    """Of all parameters: the same for every curvature."""
    model_fn, params, (x, _), _ = models.MODELS[name]
    space = posterior_fn_of(name, "diagonal").space
    return jax.jit(lambda x: jacobian(Model(model_fn), params, space, x))(x)


def assert_equal_moments(one, other):
    scale = float(np.abs(np.asarray(other)).max())
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_factors_equal_whole_jacobians(name, curvature):
    model_fn, _, (x, _), _ = models.MODELS[name]
    posterior_fn = posterior_fn_of(name, curvature)
    whole = whole_jacobian(name)
    for one, other in pushed(Model(model_fn), posterior_fn, 0.7, x, whole, 1.3, 0.4).values():
        assert_equal_moments(one, other)


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

    @jax.jit
    def moments(posterior_fn):
        precision = posterior_fn({"prior_prec": 0.3}).precision
        factors = TapJacobian(Model(mlp), MLP, posterior_fn.space, X)
        whole = DenseJacobian(jacobian(Model(mlp), MLP, posterior_fn.space, X))
        return [(f(factors), f(whole)) for f in (precision.covariance, precision.marginal)]

    for one, other in moments(posterior_fn):
        assert_equal_moments(one, other)


@pytest.mark.parametrize("rows", [2, 40])
def test_a_dense_posterior_solves_for_a_few_rows_and_inverts_for_many(rows):
    x = cases.random(40, 3, seed=3)
    data = (x, jnp.arange(40) % 4)
    posterior_fn, _ = laplax.laplace(mlp, MLP, data, loss_fn="cross_entropy", curv_type="full")
    precision = posterior_fn({"prior_prec": 0.3}).precision
    assert isinstance(precision, DensePrecision)
    assert (rows * 4 > precision.size) == (rows == 40)
    whole = jacobian(Model(mlp), MLP, posterior_fn.space, x[:rows])
    moments = pushed(Model(mlp), posterior_fn, 0.3, x[:rows], whole, 1.0, 0.3)
    for value, other in moments.values():
        assert_equal_moments(value, other)
    np.testing.assert_allclose(moments["covariance"][0], moments["projected"][1], rtol=1e-9)


@pytest.mark.parametrize("prior", [1.0, 1e-10])
@pytest.mark.parametrize("inside", [True, False])
def test_what_lies_outside_of_a_basis(inside, prior):
    """Little of J is outside where the data were: a difference of squares would be noise there."""
    y = jnp.zeros(9, int)
    curvature = laplax.laplace(mlp, MLP, (X, y), loss_fn="cross_entropy", curv_type="full")[1]
    values, vectors = jnp.linalg.eigh(curvature.to_dense())
    rank = int(jnp.sum(values > 1e-12 * values[-1]))
    structure = LowRank(vectors[:, -rank:], values[-rank:])
    assert rank < structure.size
    # Every row of the factor of G lies in its span; a random row does not.
    whole = (vectors[:, -rank:] * jnp.sqrt(values[-rank:])).T[None]
    whole = whole if inside else cases.random(1, rank, structure.size, seed=4)
    one = jnp.asarray(1.0)
    found = structure.project(DenseJacobian(whole)).marginal(one, prior * one)
    rest = whole - whole @ vectors[:, -rank:] @ vectors[:, -rank:].T
    within = jnp.square(whole @ vectors[:, -rank:]) @ (1 / (values[-rank:] + prior))
    expected = within + jnp.sum(jnp.square(rest), axis=-1) / prior
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_rest_of_factors_is_that_of_rows():
    """Training data again: nearly all of J is inside, so the rest is formed row by row."""
    posterior_fn, _ = laplax.laplace(
        mlp, MLP, (X[:3], mlp(X[:3], MLP)), loss_fn="mse", curv_type="full"
    )
    assert isinstance(posterior_fn.structure, LowRank)
    whole = jacobian(Model(mlp), MLP, posterior_fn.space, X[:3])
    moments = pushed(Model(mlp), posterior_fn, 1e-8, X[:3], whole, 1.0, 1e-8)
    for name in ("projected", "projected marginal"):
        np.testing.assert_allclose(*moments[name], rtol=1e-6, atol=1e-9)


def test_parts_of_a_projection_join():
    posterior_fn, _ = laplax.laplace(mlp, MLP, (X, mlp(X, MLP)), loss_fn="mse", curv_type="kfac")

    @jax.jit
    def covariances(posterior_fn, one):
        def project(x):
            J = TapJacobian(Model(mlp), MLP, posterior_fn.space, x)
            return posterior_fn.structure.project(J)

        # Single examples are not shared.
        joined = project(X[:1]).join([project(X[1:2]), project(X[2:])])
        return joined.covariance(one, one), project(X).covariance(one, one)

    assert_equal_moments(*covariances(posterior_fn, jnp.asarray(1.0)))


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
    program = traced(Model(model_fn), params, jax.ShapeDtypeStruct((3,), jnp.float64)).program
    assert program.output_tap is None
    data = (X, jax.vmap(model_fn, (0, None))(X, params))
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="mse", curv_type=curv_type)

    @jax.jit
    def covariances(posterior_fn):
        precision = posterior_fn({"prior_prec": 1.0}).precision
        factors = TapJacobian(Model(model_fn), params, posterior_fn.space, X)
        whole = DenseJacobian(jacobian(Model(model_fn), params, posterior_fn.space, X))
        return precision.covariance(factors), precision.covariance(whole)

    assert_equal_moments(*covariances(posterior_fn))


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
    known = traced(predictive.model, params, one_of(x))
    posterior = predictive.posterior
    arguments = (predictive.recipe, posterior.precision, known, posterior.space)
    work = prediction_work(*arguments, ["pred_var"])
    assert work.bytes_per_example < classes**2 * 8  # inputs are not counted as squares


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # one example at a time, or all at once
@pytest.mark.parametrize("shared", [True, False])
def test_a_weight_at_several_positions_equals_its_rows(monkeypatch, backend, shared):
    n, outputs, groups, positions, shape = 5, 3, 2, 7, (2, 4, 6)
    a = cases.random(n, groups, positions, shape[1])
    g = cases.random(1 if shared else n, outputs, groups, positions, shape[2], seed=1)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for to_matrix in (None, lambda d: d.reshape(shape[::-1]).transpose(2, 1, 0)):
        given = PositionCoordinates(a, g, to_matrix, shared)
        d = jnp.square(cases.random(math.prod(shape), seed=2))
        wide = np.broadcast_to(g, (n, *g.shape[1:]))
        whole = np.einsum("nbti,ncbto->ncbio", np.asarray(a), wide)
        weights = np.asarray(d)
        weights = weights.reshape(shape) if to_matrix is None else to_matrix(weights)
        expected = np.einsum("ncbio,bio,ndbio->ncd", whole, weights, whole)
        diagonals = np.diagonal(expected, axis1=1, axis2=2)
        for same in (given, given.kept()):
            np.testing.assert_allclose(same.covariance(d), expected, rtol=1e-10)
            np.testing.assert_allclose(same.marginal(d), diagonals, rtol=1e-10)
        columns, inner = cases.random(d.size, 2, seed=3), cases.random(n, outputs, 2, seed=4)
        rows = given.kept()
        np.testing.assert_allclose(given.matmul(columns), rows.matmul(columns), rtol=1e-10)
        outside = rows.rest(columns, inner)
        np.testing.assert_allclose(given.rest(columns, inner), outside, rtol=1e-10)
        two = given.join([given])
        np.testing.assert_allclose(two.marginal(d), np.concatenate([diagonals] * 2), rtol=1e-10)
    if not shared:
        expected = np.sum(np.square(whole), axis=(0, 1))
        np.testing.assert_allclose(matrix_diagonal(a, g), expected, rtol=1e-10)
