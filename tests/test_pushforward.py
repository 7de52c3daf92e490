"""Moments and samples of the output: closed forms, explicit Jacobians, chunks, coherence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from laplax import predictive
from laplax._data import as_data
from laplax._engine import loops
from laplax._engine.chunks import Chunks
from laplax._enums import Pushforward
from laplax.pushforward import _predictive, jacobian
from laplax.structures import BlockDiagonal, BlockSum, DenseJacobian

pytestmark = pytest.mark.usefixtures("quick_compilation")

PRIORS = {"scalar": 0.4, "per leaf": {"w": 0.3, "v": {"u": 2.0}}}
NOISE = 0.5
NEW = cases.random(5, cases.SIZE, seed=21)
C = jnp.asarray(1.7)
MATRIX_PRIORS = {"scalar": jnp.asarray(0.7), "vector": jnp.linspace(0.2, 2.0, cases.SIZE)}
JACOBIANS = cases.random(4, 3, cases.SIZE, seed=22)
X = cases.random(7, 2, seed=4)
ARGUMENTS = {"prior_prec": 0.6, "sigma_squared": 0.3}


def assert_close(actual, desired, rtol=1e-9):
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=rtol * np.abs(desired).max())


def within_errors(actual, desired, error):
    """Monte Carlo: no entry further off than 5 of its standard errors."""
    assert np.max(np.abs(np.asarray(actual - desired)) / np.asarray(error)) < 5


# --- conjugate Bayesian linear regression ---------------------------------------------------


@pytest.fixture(params=cases.EXACT)
def name(request):
    return request.param


@pytest.fixture(params=PRIORS)
def prior_prec(request):
    return PRIORS[request.param]


def conjugate(name, prior_prec, **options):
    case = cases.regression(prior_prec, NOISE, orthogonal=name in cases.BLOCKWISE)
    posterior_fn, _ = laplax.laplace(
        case.model_fn, case.params, case.data, loss_fn="mse", curv_type=name, **cases.EXACT[name]
    )
    prob_predictive = predictive(posterior_fn, case.model_fn, **options)(
        {"prior_prec": prior_prec, "sigma_squared": NOISE}
    )
    covariance = jnp.linalg.inv(case.precision(prior_prec, NOISE))
    mean = jnp.linalg.solve(case.precision(prior_prec, NOISE), case.features.T @ case.target)
    return prob_predictive, mean / NOISE, covariance


def test_the_linear_prediction_of_a_linear_model_is_the_closed_form(name, prior_prec):
    prob_predictive, mean, covariance = conjugate(name, prior_prec)
    prediction = prob_predictive(NEW, fields=[*prob_predictive.recipe.default_fields, "pred_cov"])
    var = jnp.einsum("np,pq,nq->n", NEW, covariance, NEW)
    expected = {
        "map": NEW @ mean,
        "pred_mean": NEW @ mean,
        "pred_var": var,
        "pred_std": jnp.sqrt(var),
        "pred_cov": var,
        "aleatoric_var": jnp.full(5, NOISE),
        "total_var": var + NOISE,
        "total_std": jnp.sqrt(var + NOISE),
    }
    assert set(prediction) == set(expected)
    for field, value in expected.items():
        assert_close(prediction[field], value)


def test_the_joint_and_the_cross_covariance_are_the_closed_form(name, prior_prec):
    prob_predictive, _, covariance = conjugate(name, prior_prec)
    joint, cross = prob_predictive.kernel(NEW), prob_predictive.kernel(NEW[:2], NEW[2:])
    assert (joint.shape, cross.shape) == ((5, 1, 5, 1), (2, 1, 3, 1))
    assert_close(joint[:, 0, :, 0], NEW @ covariance @ NEW.T)
    assert_close(cross[:, 0, :, 0], NEW[:2] @ covariance @ NEW[2:].T)
    assert prob_predictive.kernel(NEW[0], NEW).shape == (1, 1, 5, 1)


def test_the_nonlinear_prediction_of_a_linear_model_agrees_with_the_closed_form(name, prior_prec):
    count = 4000
    options = {"pushforward_type": Pushforward.NONLINEAR, "num_samples": count}
    prob_predictive, mean, covariance = conjugate(name, prior_prec, **options)
    prediction = prob_predictive(NEW)
    var = jnp.einsum("np,pq,nq->n", NEW, covariance, NEW)
    within_errors(prediction.pred_mean, NEW @ mean, jnp.sqrt(var / count))
    within_errors(prediction.pred_var, var, var * (2 / (count - 1)) ** 0.5)
    assert_close(prediction.map, NEW @ mean)
    assert_close(prediction.total_var, prediction.pred_var + NOISE)


# --- every structure against dense algebra --------------------------------------------------


@pytest.fixture(params=cases.STRUCTURES)
def structure(request):
    return cases.STRUCTURES[request.param](jnp.float64)


def dense_covariance(structure, c, prior):
    precision = c * structure.to_dense() + jnp.diag(jnp.broadcast_to(prior, (cases.SIZE,)))
    return jnp.einsum("ncp,pq,ndq->ncd", JACOBIANS, jnp.linalg.inv(precision), JACOBIANS)


def check_moments(covariance, marginal, expected):
    assert_close(covariance, expected)
    assert_close(marginal, jnp.diagonal(expected, axis1=1, axis2=2))


@pytest.mark.parametrize("prior", MATRIX_PRIORS)
def test_every_precision_pushes_jacobians_forward_like_the_dense_one(structure, prior):
    mixed = isinstance(structure, BlockDiagonal | BlockSum) and prior == "vector"
    prior = cases.PER_BLOCK if mixed else MATRIX_PRIORS[prior]
    precision = structure.precision(C, prior)
    expected = dense_covariance(structure, C, prior)
    J = DenseJacobian(JACOBIANS)
    check_moments(precision.covariance(J), precision.marginal(J), expected)


@pytest.mark.parametrize(("c", "tau"), [(0.3, 1.0), (1.0, 30.0), (40.0, 0.01)])
def test_every_projection_answers_any_scale_and_prior(structure, c, tau):
    c, tau = jnp.asarray(c), jnp.asarray(tau)
    projection = structure.project(DenseJacobian(JACOBIANS))
    expected = dense_covariance(structure, c, tau)
    check_moments(projection.covariance(c, tau), projection.marginal(c, tau), expected)


def test_the_spectral_form_is_the_same_curvature_and_stays_itself(structure):
    spectral = structure.spectral()
    assert_close(spectral.to_dense(), structure.to_dense())
    assert spectral.spectral() is spectral


def test_a_posterior_in_spectral_form_is_the_same_posterior():
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, cases.mlp(), (X, cases.TARGETS["mse"]), loss_fn="mse"
    )
    plain, spectral = posterior_fn(ARGUMENTS), posterior_fn.spectral()(ARGUMENTS)
    v = cases.random(27, seed=1)
    assert_close(spectral.cov_mv(v), plain.cov_mv(v))
    assert_close(spectral.logdet(), plain.logdet())


@pytest.mark.parametrize("name", ["low rank", "low rank with a dense scale"])
def test_a_weak_prior_in_float32_leaves_variances_inside_the_basis_accurate(name):
    structure = cases.STRUCTURES[name](jnp.float32)
    rows = jnp.einsum("ncr,pr->ncp", cases.random(4, 2, 3, dtype=jnp.float32), structure.basis)
    J = DenseJacobian(rows)
    c, tau = jnp.asarray(1e3, jnp.float32), jnp.asarray(1e-5, jnp.float32)
    eigenvalues = structure.eigenvalues.astype(jnp.float64)
    coordinates = cases.random(4, 2, 3)
    expected = jnp.sum(jnp.square(coordinates) / (1e3 * eigenvalues + 1e-5), axis=-1)
    projection, precision = structure.project(J), structure.precision(c, tau)
    for actual in (projection.marginal(c, tau), precision.marginal(J)):
        assert_close(actual, expected, rtol=1e-3)
    for cov in (projection.covariance(c, tau), precision.covariance(J)):
        assert_close(jnp.diagonal(cov, axis1=1, axis2=2), expected, rtol=1e-3)


# --- nonlinear networks ---------------------------------------------------------------------


def mlp_of_shape(shape):
    def model_fn(input, params):
        f = cases.mlp_fn(input, params)
        return f.sum(-1) if shape == () else f.reshape(*input.shape[:-1], *shape)

    return model_fn, cases.mlp((2, 4, 6 if shape == (2, 3) else 3))


@functools.cache
def fitted(shape, loss_fn, curv_type, batched):
    model_fn, params = mlp_of_shape(shape)
    target = cases.random(7, *shape, seed=8) if loss_fn == "mse" else cases.TARGETS[loss_fn]
    if shape == (2, 3) and loss_fn == "cross_entropy":  # two tokens
        target = jnp.stack([target, target[::-1]], axis=1)
    options = {"curv_type": curv_type, **cases.ESTIMATORS[curv_type]}
    posterior_fn, _ = laplax.laplace(
        model_fn, params, (X, target), loss_fn=loss_fn, vmap_over_data=not batched, **options
    )
    return posterior_fn, model_fn


def network(shape=(3,), loss_fn="mse", curv_type="full", batched=False, **options):
    """The predictive of an MLP whose output has this shape."""
    posterior_fn, model_fn = fitted(shape, loss_fn, curv_type, batched)
    arguments = ARGUMENTS if loss_fn == "mse" else {"prior_prec": 0.6}
    return predictive(posterior_fn, model_fn, **options)(arguments)


TOKENS = {"shape": (2, 3), "loss_fn": "cross_entropy"}
PUSHFORWARDS = ["linear", "nonlinear"]
# Everything that can be asked for, under every likelihood with samples of its own.
CHUNKED = {
    "regression, linear": {},
    "regression, nonlinear": {"pushforward_type": "nonlinear"},
    "tokens, sampled": {**TOKENS, "predictive_type": "mc_bridge"},
    "tokens, nonlinear": {**TOKENS, "pushforward_type": "nonlinear"},
    "binary": {"loss_fn": "binary_cross_entropy", "predictive_type": "mc_bridge"},
}


@pytest.fixture(params=CHUNKED)
def case(request):
    return {"num_samples": 6, **CHUNKED[request.param]}


def everything(prob_predictive, input=X):
    return prob_predictive(input, fields=prob_predictive.recipe.allowed_fields)


def same_fields(actual, desired):
    assert list(actual) == list(desired)
    for field in desired:
        assert_close(actual[field], desired[field])


@pytest.mark.parametrize(
    ("shape", "curv_type"), [((), "lanczos"), ((3,), "full"), ((2, 3), "diagonal")]
)
def test_linear_moments_equal_explicit_jacobians_for_outputs_of_any_shape(shape, curv_type):
    p = network(shape, curv_type=curv_type)
    flat = p.posterior.space.flatten(p.posterior.mean)

    def output(theta, x):
        return p.model.fn(x, p.posterior.space.unflatten(theta))

    J = jax.jit(jax.vmap(jax.jacobian(output), (None, 0)))(flat, X)  # (n, *out, P)
    covariance = np.asarray(jax.jit(jax.vmap(p.posterior.cov_mv))(jnp.eye(flat.size)))
    rows = np.asarray(J).reshape(7, -1, flat.size)
    assert_close(jacobian(p.model, p.posterior.mean, p.posterior.space, X), rows)
    joint = np.einsum("ncp,pq,mdq->ncmd", rows, covariance, rows)
    own = np.einsum("ncnd->ncd", joint)
    prediction = everything(p)
    assert_close(prediction.pred_mean, jax.vmap(output, (None, 0))(flat, X))
    assert_close(prediction.pred_cov, own.reshape(7, *shape, *shape))
    assert_close(prediction.pred_var, np.diagonal(own, axis1=1, axis2=2).reshape(7, *shape))
    assert_close(p(X).pred_var, prediction.pred_var)  # without the covariance
    assert_close(p.kernel(X), joint)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_nonlinear_moments_are_those_of_the_sampled_networks(shape):
    p = network(shape, pushforward_type="nonlinear", num_samples=9)
    weights = p.posterior.sample(p.key, 9)
    outputs = np.stack(
        [p.model.fn(X, jax.tree.map(lambda w, i=i: w[i], weights)) for i in range(9)]
    )
    prediction = everything(p)
    assert_close(prediction.samples, outputs)
    assert_close(prediction.pred_mean, outputs.mean(0))
    assert_close(prediction.pred_var, outputs.var(0, ddof=1))
    flat = outputs.reshape(9, 7, -1)
    expected = np.stack([np.cov(flat[:, i].T) for i in range(7)])
    assert_close(prediction.pred_cov, expected.reshape(7, *shape, *shape))


def test_a_tiny_memory_budget_gives_the_same_fields(case):
    same_fields(everything(network(**case, memory_budget=1)), everything(network(**case)))


def test_networks_too_large_to_keep_are_drawn_when_they_are_needed():
    case = {"pushforward_type": "nonlinear", "num_samples": 6}
    kept, drawn = network(**case), network(**case, memory_budget=1)
    assert jax.tree.leaves(kept.ensemble)[0].shape[0] == 6
    assert drawn.ensemble is None
    same_fields(everything(drawn), everything(kept))


@pytest.mark.parametrize("pushforward_type", PUSHFORWARDS)
def test_chunks_of_convolutions_are_driven_from_python(pushforward_type, monkeypatch):
    model_fn, params, data, loss_fn = models.MODELS["convolution"]
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn=loss_fn, curv_type="diagonal")
    options = {"pushforward_type": pushforward_type, "num_samples": 6}
    x = cases.random(7, *data[0].shape[1:], seed=5)
    whole = predictive(posterior_fn, model_fn, **options)({"prior_prec": 1.0})
    sizes = []
    part = loops._part

    def watched(owner, fn, size, *rest):
        sizes.append(size)
        return part(owner, fn, size, *rest)

    plan = _predictive.cut
    monkeypatch.setattr(
        _predictive, "cut", lambda *a, **k: dataclasses.replace(plan(*a, **k), size=3)
    )
    monkeypatch.setattr(loops, "_part", watched)
    fields = ["pred_mean", "pred_var", "samples"]
    parts = whole(x, fields)
    assert sizes == [3, 3, 1]
    monkeypatch.undo()
    same_fields(parts, whole(x, fields))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_of_any_size_cover_the_batch_in_order(size):
    for by_python in (False, True):
        del CHUNK_SIZES[:]
        jax.clear_caches()  # sizes are seen by tracing
        mapped = loops.map_over(doubled, {"x": X}, Chunks(size, by_python), None)
        np.testing.assert_array_equal(mapped["y"], 2 * X)
        assert max(CHUNK_SIZES) <= size
        parts = list(loops.map_parts(doubled, {"x": X}, Chunks(size), None))
        np.testing.assert_array_equal(np.concatenate([part["y"] for part in parts]), 2 * X)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("by_python", [False, True])
def test_sums_over_chunks_of_any_size_are_the_sum(size, by_python):
    rows = np.arange(2.0 * len(X)).reshape(len(X), 2)
    for data in (as_data((X, rows)), as_data([(X[:4], rows[:4]), (X[4:], rows[4:])])):
        total = loops.sum_over(summed, data, Chunks(size, by_python), None)
        np.testing.assert_allclose(total["target"], rows.sum(axis=0), rtol=1e-12)
        assert int(total["count"]) == len(X)


CHUNK_SIZES = []


def doubled(part, owner):
    CHUNK_SIZES.append(part["x"].shape[0])
    return {"y": 2 * part["x"]}


def summed(batch, owner):
    return {"target": batch.target.sum(axis=0), "count": jnp.asarray(batch.num_examples)}


def test_one_input_gives_the_row_of_the_batch(case):
    p = network(**case)
    batch, single = everything(p), everything(p, X[4])
    assert list(single) == list(batch)
    for field, value in single.items():
        assert_close(value, batch[field][:, 4] if field == "samples" else batch[field][4])


@pytest.mark.parametrize("pushforward_type", PUSHFORWARDS)
def test_a_model_of_batches_gives_the_same_fields(pushforward_type):
    case = {"pushforward_type": pushforward_type, "num_samples": 6}
    same_fields(everything(network(**case, batched=True)), everything(network(**case)))


@pytest.mark.parametrize("pushforward_type", PUSHFORWARDS)
def test_samples_are_the_same_functions_wherever_they_are_evaluated(pushforward_type):
    p = network(pushforward_type=pushforward_type, num_samples=5)
    together = p(X, fields=["samples"]).samples
    apart = [p(part, fields=["samples"]).samples for part in (X[:3], X[3:])]
    assert together.shape == (5, 7, 3)
    assert_close(together, jnp.concatenate(apart, axis=1))
    assert not np.allclose(together[0], together[1])


def test_samples_follow_their_key():
    first, again, other = (
        network(key=jax.random.key(seed), num_samples=3)(X, fields=["samples"]).samples
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_linear_samples_have_the_joint_covariance_of_the_kernel():
    count = 20_000
    p = network(num_samples=count)
    samples = p(X[:2], fields=["samples"]).samples.reshape(count, -1)
    cov = p.kernel(X[:2]).reshape(6, 6)
    var = jnp.diagonal(cov)
    within_errors(samples.mean(0), p(X[:2]).pred_mean.reshape(-1), jnp.sqrt(var / count))
    error = jnp.sqrt((jnp.outer(var, var) + cov**2) / (count - 1))
    within_errors(jnp.cov(samples.T), cov, error)


def test_a_narrow_output_of_wide_weights_keeps_its_dtype_in_every_field():
    def model_fn(input, params):
        return cases.mlp_fn(input, params).astype(jnp.float32)

    data = (X, cases.TARGETS["cross_entropy"])
    posterior_fn, _ = laplax.laplace(model_fn, cases.mlp(), data, loss_fn="cross_entropy")
    p = predictive(posterior_fn, model_fn, predictive_type="laplace_bridge", num_samples=4)
    dtypes = {k: v.dtype for k, v in everything(p({"prior_prec": 1.0})).items()}
    assert set(dtypes.values()) == {jnp.dtype(jnp.float32)}, dtypes
