"""The mode of the linearised model, against scikit-learn and against dense algebra."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

import cases
import laplax
from laplax.estimators import ConvergenceWarning

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, D = 60, 4
X = cases.random(N, D, seed=1)
WEIGHT = jnp.asarray(np.random.default_rng(2).uniform(0.0, 2.0, N)).at[:5].set(0.0)


def linear(input, params):
    return input @ params["w"] + params["b"]


def start(*shape, dtype=jnp.float64):
    return {"w": cases.random(D, *shape, seed=3, dtype=dtype), "b": jnp.zeros(shape, dtype)}


def refit(params, data, loss_fn, prior_prec, curv_type="full", model_fn=linear, **options):
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn=loss_fn, curv_type=curv_type)
    arguments = {"prior_prec": prior_prec, **options}
    return laplax.glm_mode(posterior_fn, arguments, data, tolerance=1e-13), arguments


LABELS = np.asarray(
    (X @ cases.random(D, 3, seed=4) + cases.random(N, 3, seed=5)).argmax(-1), np.int32
)
NO_PENALTY = 1e-9  # of intercepts, which scikit-learn does not penalise
TAU = {"w": 1.7, "b": NO_PENALTY}


@pytest.mark.parametrize("curv_type", ["full", "diagonal", "kfac", "lanczos"])
def test_ridge_regression(curv_type):
    y = X @ cases.random(D, seed=4) + 2.0 + 0.3 * cases.random(N, seed=5)
    tau = {"w": 1.7, "b": 1e-6}
    options = {"joint_bias": False} if curv_type == "kfac" else {}
    posterior_fn, _ = laplax.laplace(
        linear, start(), (X, y), loss_fn="mse", curv_type=curv_type, **options
    )
    arguments = {"prior_prec": tau, "sigma_squared": 0.5}
    glm_fn = laplax.glm_mode(posterior_fn, arguments, (X, y), tolerance=1e-13)
    expected = Ridge(alpha=1.7 * 0.5, tol=1e-12).fit(X, y)
    np.testing.assert_allclose(glm_fn.mean["w"], expected.coef_, atol=1e-6)
    np.testing.assert_allclose(glm_fn.mean["b"], expected.intercept_, atol=1e-6)


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_multinomial_logistic_regression(weight):
    data = (X, jnp.asarray(LABELS)) if weight is None else cases.weighted(X, LABELS, weight)
    glm_fn, arguments = refit(start(3), data, "cross_entropy", 1.7)
    # The intercept as a constant feature has the penalty of a weight.
    constant = np.hstack([X, np.ones((N, 1))])
    sklearn = LogisticRegression(C=1 / 1.7, tol=1e-12, max_iter=10_000, fit_intercept=False)
    expected = sklearn.fit(constant, LABELS, sample_weight=weight).coef_.T
    np.testing.assert_allclose(glm_fn.mean["w"], expected[:-1], atol=1e-6)
    np.testing.assert_allclose(glm_fn.mean["b"], expected[-1], atol=1e-6)
    assert 0 <= glm_fn.mode_distance(arguments, data) < 1e-8
    prediction = glm_fn.predictive(predictive_type="map")(arguments)(X, ["pred_act"])["pred_act"]
    np.testing.assert_allclose(prediction, sklearn.predict_proba(constant), atol=1e-6)


def test_binary_logistic_regression():
    y = LABELS == 1
    glm_fn, _ = refit(start(), (X, jnp.asarray(y)), "binary_cross_entropy", TAU)
    sklearn = LogisticRegression(C=1 / 1.7, tol=1e-12, max_iter=10_000).fit(X, y)
    np.testing.assert_allclose(glm_fn.mean["w"], sklearn.coef_[0], atol=1e-6)
    np.testing.assert_allclose(glm_fn.mean["b"], sklearn.intercept_[0], atol=1e-6)


def test_poisson_regression():
    rate = np.exp(0.3 * np.asarray(X).sum(-1))
    y = np.random.default_rng(7).poisson(rate).astype(float)
    glm_fn, _ = refit(start(), (X, jnp.asarray(y)), "poisson", TAU)
    # Its penalty is alpha / 2 |w|^2 beside the mean of the losses.
    sklearn = PoissonRegressor(alpha=1.7 / N, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    sklearn.fit(X, y)
    np.testing.assert_allclose(glm_fn.mean["w"], sklearn.coef_, atol=1e-6)
    np.testing.assert_allclose(glm_fn.mean["b"], sklearn.intercept_, atol=1e-6)


def test_float32_reaches_the_mode_to_its_digits():
    data = (X.astype(jnp.float32), jnp.asarray(LABELS))
    params = start(3, dtype=jnp.float32)
    posterior_fn, _ = laplax.laplace(linear, params, data, loss_fn="cross_entropy")
    glm_fn = laplax.glm_mode(posterior_fn, {"prior_prec": 1.7}, data)
    expected, _ = refit(start(3), (X, jnp.asarray(LABELS)), "cross_entropy", 1.7)
    assert glm_fn.mean["w"].dtype == jnp.float32
    np.testing.assert_allclose(glm_fn.mean["w"], expected.mean["w"], atol=2e-5)


# -- a network: the tangent model ---------------------------------------------------------------
PARAMS = cases.mlp((2, 4, 3))
INPUT = cases.random(30, 2, seed=11)
NETWORK_DATA = (INPUT, jnp.asarray(np.random.default_rng(12).integers(0, 3, 30)))


def tangent(params, weights, input):
    def run(p):
        return jax.vmap(lambda x: cases.mlp_fn(x, p))(input)

    f, push = jax.linearize(run, params)
    return f + push(jax.tree.map(jnp.subtract, weights, params))


def network_mode(subset=None, prior_mean=None, temperature=1.0):
    """The mode by SciPy, on an explicit Jacobian."""
    space = laplax.posterior.ParamSpace.of(PARAMS, subset)
    theta = space.flatten(PARAMS)
    mean = jnp.zeros_like(theta) if prior_mean is None else space.flatten(prior_mean)

    def outputs(flat):
        moved = jax.tree.map(jnp.add, PARAMS, space.unflatten(flat - theta))
        return jax.vmap(lambda x: cases.mlp_fn(x, moved))(INPUT)

    f, J = np.asarray(outputs(theta)), np.asarray(jax.jacobian(outputs)(theta))

    @jax.jit
    def energy(flat):
        z = f + J @ (flat - theta)
        loss = -jnp.sum(jax.nn.log_softmax(z)[jnp.arange(30), NETWORK_DATA[1]])
        return loss / temperature + 0.5 * 0.8 * jnp.sum((flat - mean) ** 2)

    found = scipy.optimize.minimize(
        energy,
        theta,
        jac=jax.grad(energy),
        hess=jax.hessian(energy),
        method="trust-exact",
        options={"gtol": 1e-10},
    )
    moved = space.unflatten(found.x - theta)
    return jax.tree.map(jnp.add, PARAMS, moved), found.fun


def fit_network(curv_type="full", subset=None, data=NETWORK_DATA, **options):
    return laplax.laplace(
        cases.mlp_fn,
        PARAMS,
        data,
        loss_fn="cross_entropy",
        curv_type=curv_type,
        subset=subset,
        **options,
    )


@pytest.mark.parametrize("curv_type", ["full", "diagonal", "kfac", "lanczos"])
def test_the_mode_of_all_layers_does_not_depend_on_the_preconditioner(curv_type):
    posterior_fn, _ = fit_network(curv_type)
    mean = jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), PARAMS)
    arguments = {"prior_prec": 0.8, "prior_mean": mean, "temperature": 2.0}
    glm_fn = laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, tolerance=1e-13)
    expected, _ = network_mode(prior_mean=mean, temperature=2.0)
    for actual, leaf in zip(jax.tree.leaves(glm_fn.mean), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-6)


def test_every_pushforward_predicts_with_the_tangent():
    posterior_fn, _ = fit_network()
    arguments = {"prior_prec": 0.8}
    glm_fn = laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, tolerance=1e-12)
    expected = tangent(PARAMS, glm_fn.mean, INPUT)
    linear = glm_fn.predictive()(arguments)(INPUT, ["pred_mean", "pred_cov"])
    np.testing.assert_allclose(linear["pred_mean"], expected, rtol=1e-9, atol=1e-9)
    J = jax.jacobian(lambda p: jax.vmap(lambda x: cases.mlp_fn(x, p))(INPUT))(PARAMS)
    flat = jnp.concatenate([x.reshape(30, 3, -1) for x in jax.tree.leaves(J)], axis=-1)
    p = jax.nn.softmax(expected)
    H = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p)
    Lambda = jnp.einsum("ncp,ncd,ndq->pq", flat, H, flat) + 0.8 * jnp.eye(flat.shape[-1])
    cov = jnp.einsum("ncp,pq,ndq->ncd", flat, jnp.linalg.inv(Lambda), flat)
    np.testing.assert_allclose(linear["pred_cov"], cov, rtol=1e-7, atol=1e-9)
    sampled = glm_fn.predictive(pushforward_type="nonlinear", num_samples=4000)(arguments)
    error = jnp.sqrt(linear["pred_cov"].diagonal(axis1=1, axis2=2) / 4000)
    mean = sampled(INPUT, ["pred_mean"])["pred_mean"]
    assert jnp.all(jnp.abs(mean - expected) < 5 * error)


def test_evidence_at_the_mode_is_that_of_the_tangent_model():
    posterior_fn, _ = fit_network()
    arguments = {"prior_prec": 0.8}
    glm_fn = laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, tolerance=1e-13)
    evidence = glm_fn.log_marginal_likelihood(arguments, NETWORK_DATA)
    _, energy = network_mode()
    Lambda = glm_fn(arguments)
    size = glm_fn.space.size
    expected = -energy + 0.5 * size * jnp.log(0.8) - 0.5 * Lambda.logdet()
    np.testing.assert_allclose(evidence, expected, rtol=1e-9)
    assert 0 <= glm_fn.mode_distance(arguments, NETWORK_DATA) < 1e-8
    assert posterior_fn.mode_distance(arguments, NETWORK_DATA) > 0.1


def test_a_last_layer_is_refitted_as_the_network_it_is():
    posterior_fn, _ = fit_network(subset="last_layer")
    glm_fn = laplax.glm_mode(posterior_fn, {"prior_prec": 0.8}, NETWORK_DATA, tolerance=1e-13)
    assert glm_fn.model == posterior_fn.model  # linear in its last layer: no tangent
    expected, _ = network_mode(subset=[False, False, True, True])
    for actual, leaf in zip(jax.tree.leaves(glm_fn.mean), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-6)


def test_some_entries_of_leaves():
    masks = [np.ones_like(p, bool) for p in jax.tree.leaves(PARAMS)]
    masks[1][0, :] = False
    subset = jax.tree.unflatten(jax.tree.structure(PARAMS), masks)
    posterior_fn, _ = fit_network(subset=subset)
    glm_fn = laplax.glm_mode(posterior_fn, {"prior_prec": 0.8}, NETWORK_DATA, tolerance=1e-13)
    expected, _ = network_mode(subset=masks)
    for actual, leaf in zip(jax.tree.leaves(glm_fn.mean), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-6)


TAPPED = [("kfac", {"joint_bias": False}), ("diagonal", {})]


@pytest.mark.parametrize(("curv_type", "options"), TAPPED)
def test_the_tangent_is_read_by_taps_as_the_network_is(curv_type, options):
    posterior_fn, before = fit_network(curv_type, **options)
    glm_fn = laplax.glm_mode(posterior_fn, {"prior_prec": 1e8, "prior_mean": PARAMS}, NETWORK_DATA)
    _, after = laplax.laplace(
        glm_fn.model.fn,
        PARAMS,
        NETWORK_DATA,
        loss_fn="cross_entropy",
        curv_type=curv_type,
        **options,
    )
    # With a prior that holds the weights, the tangent has the curvature of the network.
    np.testing.assert_allclose(after.to_dense(), before.to_dense(), rtol=1e-9, atol=1e-12)
    assert after.coverage == before.coverage


def test_loaders_batches_and_parts_of_the_data():
    arguments = {"prior_prec": 0.8}
    whole, _ = network_mode()
    batches = [tuple(x[i : i + 8] for x in NETWORK_DATA) for i in range(0, 30, 8)]
    posterior_fn, _ = fit_network(data=batches)
    glm_fn = laplax.glm_mode(posterior_fn, arguments, batches, tolerance=1e-13)
    for actual, leaf in zip(jax.tree.leaves(glm_fn.mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-6)
    # Data that stand for twice as many, under twice the prior, have the same mode.
    part, _ = fit_network(num_total_samples=60)
    glm_fn = laplax.glm_mode(part, {"prior_prec": 1.6}, NETWORK_DATA, tolerance=1e-13)
    for actual, leaf in zip(jax.tree.leaves(glm_fn.mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(actual, leaf, atol=1e-6)


def test_the_chain_works_on_the_mode():
    posterior_fn, _ = fit_network("kfac")
    glm_fn = laplax.glm_mode(posterior_fn, {"prior_prec": 0.8}, NETWORK_DATA)
    chosen, set_prob_predictive = glm_fn.calibrate(NETWORK_DATA)
    results, _ = set_prob_predictive.evaluate(chosen, NETWORK_DATA)
    assert np.isfinite(results["nll"])
    again = laplax.glm_mode(glm_fn, {"prior_prec": 0.8}, NETWORK_DATA)
    for a, b in zip(jax.tree.leaves(again.mean), jax.tree.leaves(glm_fn.mean), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_the_curvature_is_kept_if_asked():
    posterior_fn, _ = fit_network()
    kept = laplax.glm_mode(posterior_fn, {"prior_prec": 0.8}, NETWORK_DATA, refit_curvature=False)
    assert kept.structure is posterior_fn.structure
    assert np.any(np.asarray(kept.mean[0]["w"] != PARAMS[0]["w"]))


def test_a_saved_mode_is_loaded_with_the_tangent_model(tmp_path):
    posterior_fn, _ = fit_network("kfac")
    arguments = {"prior_prec": 0.8}
    glm_fn = laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA)
    path = tmp_path / "mode.safetensors"
    laplax.save(path, glm_fn, include_params=True)
    loaded = laplax.load(path, laplax.linearise(cases.mlp_fn, PARAMS))
    fields = ["pred_mean", "pred_var"]
    expected = glm_fn.predictive()(arguments)(INPUT, fields)
    actual = loaded.predictive()(arguments)(INPUT, fields)
    for name in fields:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="outputs"):
        laplax.load(path, cases.mlp_fn)


def test_what_cannot_be_done_is_refused():
    posterior_fn, _ = fit_network()
    arguments = {"prior_prec": 0.8}
    with pytest.raises(ValueError, match="tolerance must be a positive number"):
        laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, tolerance=0)
    with pytest.raises(TypeError, match="max_steps must be a whole number"):
        laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, max_steps=1.5)
    with pytest.raises(ValueError, match="refit_curvature=False"):
        laplax.glm_mode(dataclasses.replace(posterior_fn), arguments, NETWORK_DATA)
    with pytest.raises(ValueError, match="one-shot"):
        laplax.glm_mode(posterior_fn, arguments, iter([NETWORK_DATA]))
    with pytest.warns(ConvergenceWarning, match="GLM mode is not reached"):
        laplax.glm_mode(posterior_fn, arguments, NETWORK_DATA, max_steps=1, tolerance=1e-12)
    assert pickle.loads(pickle.dumps(posterior_fn)).measurement is None


def no_derivative(input, params):
    return jnp.sqrt(jnp.abs(input @ params["w"])) + params["b"]


@pytest.mark.parametrize(
    ("model_fn", "scale", "kind"), [(no_derivative, 0.0, "NaN"), (linear, 1e200, "infinite")]
)
def test_what_is_not_finite_is_named(model_fn, scale, kind):
    """It is no reason to raise max_steps."""
    target = X[:, 0]
    posterior_fn, _ = laplax.laplace(model_fn, start(), (X, target), loss_fn="mse")
    with pytest.raises(ValueError, match=f"its loss over the data is {kind}, although the data"):
        laplax.glm_mode(posterior_fn, {"prior_prec": 1.0}, (scale * X, target))


def test_a_step_that_is_not_finite_is_named(monkeypatch):
    """As a compiler that returns wrong numbers once made it."""
    posterior_fn, _ = laplax.laplace(linear, start(), (X, X[:, 0]), loss_fn="mse")
    monkeypatch.setattr(laplax._glm, "_solve", lambda *_: jnp.full(D + 1, jnp.nan))
    with pytest.raises(ValueError, match="a product with its curvature is NaN"):
        laplax.glm_mode(posterior_fn, {"prior_prec": 1.0}, (X, X[:, 0]))
