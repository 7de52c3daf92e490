"""The bound of the evidence from one batch, against dense algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
import laplax
from laplax.training import marglik_bound

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXAMPLES = 5
PARAMS = {
    "scale": jnp.asarray([1.0, 0.5, 2.0]),
    "one": {"w": cases.random(3, 4, seed=1), "b": cases.random(4, seed=2)},
    "two": {"w": cases.random(4, 3, seed=3), "b": cases.random(3, seed=4)},
}
X = cases.random(EXAMPLES, 3, seed=5)
Y = jnp.asarray([0, 2, 1, 2, 0])
RANDOM = {"scale": False, "one": True, "two": True}  # the input scale is learned, and not random
BY_ENTRY = np.abs(np.asarray(cases.random(3, 4, seed=6))) + 0.2
PRIORS = {
    "scalar": 0.7,
    "layer": {"scale": 1.0, "one": 0.5, "two": 2.0},
    "unit": {"scale": 1.0, "one": {"w": np.asarray([[1.0, 2, 3, 4]]), "b": 2.0}, "two": 0.3},
    "input": {
        "scale": 1.0,
        "one": {"w": np.asarray([[1.0], [2], [3]]), "b": 2.0},
        "two": {"w": 1.0, "b": np.asarray([1.0, 2, 3])},
    },
    "parameter": {"scale": 1.0, "one": {"w": BY_ENTRY, "b": 2.0}, "two": 0.3},
}


def model_fn(input, params):
    hidden = jnp.tanh((input * params["scale"]) @ params["one"]["w"] + params["one"]["b"])
    return hidden @ params["two"]["w"] + params["two"]["b"]


@jax.jit
def bound(params, prior_arguments, data):
    return marglik_bound(
        model_fn, params, data, prior_arguments, loss_fn="cross_entropy", subset=RANDOM
    )


def dense_evidence(params, precision, rows=slice(None)):
    """By explicit Jacobians and Hessians: of some examples, and the energy of the prior."""
    random = {name: params[name] for name in ("one", "two")}

    def outputs(random):
        return jax.vmap(lambda x: model_fn(x, params | random))(X[rows])

    f, y = np.asarray(outputs(random)), np.asarray(Y[rows])
    p = np.exp(f) / np.exp(f).sum(axis=1, keepdims=True)
    jacobian = jax.tree.leaves(jax.jacrev(outputs)(random))
    J = np.concatenate([np.reshape(j, (len(y), 3, -1)) for j in jacobian], axis=-1)
    spread = jax.tree.map(
        lambda t, leaf: np.broadcast_to(t, leaf.shape),
        jax.tree.broadcast(precision, params),
        params,
    )
    T = np.concatenate([np.ravel(spread[n][k]) for n in ("one", "two") for k in ("b", "w")])
    theta = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(random)])
    G = sum(j.T @ (np.diag(q) - np.outer(q, q)) @ j for j, q in zip(J, p, strict=True))
    log_p = np.sum(np.log(p[np.arange(len(y)), y]))
    bracket = log_p - 0.5 * (np.linalg.slogdet(G + np.diag(T))[1] - np.sum(np.log(T)))
    return bracket, 0.5 * np.sum(T * theta**2)


@pytest.mark.parametrize("name", PRIORS)
def test_one_batch_of_all_data_gives_the_evidence(name):
    bracket, energy = dense_evidence(PARAMS, PRIORS[name])
    arguments = {"prior_prec": jax.tree.map(jnp.asarray, PRIORS[name])}
    np.testing.assert_allclose(bound(PARAMS, arguments, (X, Y)), bracket - energy, rtol=1e-10)
    if name == "layer":
        posterior_fn, _ = laplax.laplace(
            model_fn, PARAMS, (X, Y), loss_fn="cross_entropy", subset=RANDOM
        )
        evidence = posterior_fn.log_marginal_likelihood(arguments, (X, Y))
        np.testing.assert_allclose(evidence, bracket - energy, rtol=1e-10)


def partitions(items):
    if not items:
        yield []
        return
    first, *others = items
    for rest in partitions(others):
        yield [[first], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [first, *part], *rest[i + 1 :]]


@functools.cache
def brackets():
    """Of every subset of the examples, as a mask, by the library."""
    masks = (np.arange(2**EXAMPLES)[:, None] >> np.arange(EXAMPLES)) & 1
    arguments = {"prior_prec": 0.7}

    def one(mask):
        return bound(PARAMS, arguments, cases.weighted(X, Y, mask))

    values = jax.jit(jax.vmap(one))(jnp.asarray(masks, float))
    return np.asarray(values) + dense_evidence(PARAMS, 0.7)[1]


def test_it_is_below_the_evidence_for_every_partition():
    of_subset = brackets()
    whole, _ = dense_evidence(PARAMS, 0.7)
    sums = []
    for partition in partitions(list(range(EXAMPLES))):
        sums.append(sum(of_subset[sum(2**i for i in part)] for part in partition))
        for part in partition[:1]:  # the parts themselves are those of dense algebra
            expected, _ = dense_evidence(PARAMS, 0.7, np.asarray(sorted(part)))
            found = of_subset[sum(2**i for i in part)]
            np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert len(sums) == 52
    assert np.sum(np.abs(np.asarray(sums) - whole) < 1e-9) == 1  # one batch is tight
    assert np.all(np.asarray(sums) <= whole + 1e-9)
    # Refining a partition never raises it: single examples are the loosest.
    np.testing.assert_allclose(min(sums), sum(of_subset[2**i] for i in range(EXAMPLES)))


def test_batches_at_random_are_unbiased_for_their_partition():
    """N/n times a batch, averaged over equal batches, is the bound of their partition."""
    x, y = X[:4], Y[:4]
    halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    arguments = {"prior_prec": 0.7}
    energy = dense_evidence(PARAMS, 0.7)[1]
    scaled = [
        marglik_bound(
            model_fn,
            PARAMS,
            half,
            arguments,
            loss_fn="cross_entropy",
            subset=RANDOM,
            num_total_samples=4,
        )
        for half in halves
    ]
    expected = brackets()[0b0011] + brackets()[0b1100] - energy
    np.testing.assert_allclose(np.mean(scaled), expected, rtol=1e-10)


def test_it_differentiates_in_weights_inputs_a_learned_scale_and_the_prior():
    def objective(params, x, logs):
        prior_prec = {"scale": 1.0, "one": {"w": jnp.exp(logs), "b": 2.0}, "two": logs[0, 0] + 2}
        return bound(params, {"prior_prec": prior_prec}, (x, Y))

    check_grads(objective, (PARAMS, X, jnp.zeros((3, 4))), 1, modes=["rev"], rtol=1e-6)


def test_the_slope_in_a_learned_scale_is_that_of_the_dense_evidence():
    slope = jax.grad(bound)(PARAMS, {"prior_prec": 0.7}, (X, Y))["scale"]
    for i in range(3):
        step = np.eye(3)[i] * 1e-5
        high, low = (
            dense_evidence(PARAMS | {"scale": PARAMS["scale"] + sign * step}, 0.7)[0]
            for sign in (1, -1)
        )
        np.testing.assert_allclose(slope[i], (high - low) / 2e-5, rtol=1e-6)


def test_layers_without_factors_give_the_evidence_too():
    """A convolution, a weight that is used twice, a table, and part of a leaf."""
    params = {
        "conv": cases.random(2, 1, 3, seed=1),
        "twice": cases.random(2, 2, seed=2),
        "table": cases.random(4, 2, seed=3),
    }

    def fn(input, params):
        h = jax.lax.conv_general_dilated(input["x"][None, None], params["conv"], (1,), "VALID")
        h = jnp.tanh(jnp.sum(h[0], axis=-1) @ params["twice"]) @ params["twice"]
        return jnp.tanh(h * params["table"][input["word"]])

    data = ({"x": cases.random(4, 5, seed=4), "word": jnp.asarray([1, 3, 1, 0])}, X[:4, :2])
    mask = np.asarray([[True, False], [True, True]])
    arguments = {
        "prior_prec": {"conv": 0.5, "twice": jnp.asarray([[1.0, 3.0]]), "table": 2.0},
        "prior_mean": 0.1,
        "sigma_squared": 0.3,
        "temperature": 2.0,
    }
    for subset in (None, {"conv": True, "twice": mask, "table": True}):
        posterior_fn, _ = laplax.laplace(fn, params, data, loss_fn="mse", subset=subset)
        evidence = posterior_fn.log_marginal_likelihood(arguments, data)
        found = marglik_bound(fn, params, data, arguments, loss_fn="mse", subset=subset)
        np.testing.assert_allclose(found, evidence, rtol=1e-10)


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([(X, Y)], {}, TypeError, "takes one batch"),
        ((X, Y), {"curvature": "hessian"}, ValueError, "needs rows"),
        ((X, Y), {"num_total_samples": 3}, ValueError, "must not be smaller than the number"),
        ((X, Y), {"prior_prec": {"one": 1.0}}, ValueError, "params have 'scale', which it"),
    ],
)
def test_what_has_no_bound_is_refused(data, options, error, message):
    options = {"prior_prec": 1.0} | options
    arguments = {"prior_prec": options.pop("prior_prec")}
    with pytest.raises(error, match=message):
        marglik_bound(model_fn, PARAMS, data, arguments, loss_fn="cross_entropy", **options)
