"""KFAC, EKFAC and exact blocks: where theory says they are exact, and what they report."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from cases import random
from laplax._engine import linalg
from laplax._engine.linalg import eigh_on_host

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = (4, 12, 2, 8)  # b, w of the first layer, then of the second, in flat order
EDGES = np.cumsum([0, *SIZES])
JOINT = [(EDGES[0], EDGES[2]), (EDGES[2], EDGES[4])]
SEPARATE = list(itertools.pairwise(EDGES))
PARAMS = {
    "one": {"w": random(3, 4), "b": random(4)},
    "two": {"w": random(4, 2, seed=1), "b": random(2)},
}
X, Y = random(9, 3, seed=2), random(9, 2, seed=3)


def deep_linear(input, params):
    hidden = input @ params["one"]["w"] + params["one"]["b"]
    return hidden @ params["two"]["w"] + params["two"]["b"]


def tanh_net(input, params):
    hidden = jnp.tanh(input @ params["one"]["w"] + params["one"]["b"])
    return hidden @ params["two"]["w"] + params["two"]["b"]


def shared_linear(input, params):
    """One weight at every position of the input, the outputs kept apart."""
    return input @ params["w"] + params["b"]


def averaged_linear(input, params):
    """One weight at every position, the outputs averaged."""
    return (input @ params["w"] + params["b"]).mean(0)


def fit(model_fn, params, data, curv_type, loss_fn="mse", **options):
    return laplax.laplace(model_fn, params, data, loss_fn=loss_fn, curv_type=curv_type, **options)


def dense(*args, **options):
    return fit(*args, **options)[1].to_dense()


def assert_blocks_equal(actual, expected, blocks):
    for start, stop in blocks:
        block = (slice(start, stop), slice(start, stop))
        np.testing.assert_allclose(actual[block], expected[block], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
@pytest.mark.parametrize("joint_bias", [True, False])
def test_kfac_is_exact_for_a_deep_linear_net_with_mse(curv_type, joint_bias):
    actual = dense(deep_linear, PARAMS, (X, Y), curv_type, joint_bias=joint_bias)
    expected = dense(deep_linear, PARAMS, (X, Y), "full")
    assert_blocks_equal(actual, expected, JOINT if joint_bias else SEPARATE)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
@pytest.mark.parametrize("joint_bias", [True, False])
@pytest.mark.parametrize("loss_fn", ["mse", "poisson"])
def test_kfac_is_exact_for_one_datum(curv_type, joint_bias, loss_fn):
    data = (X[:1], jnp.abs(Y[:1]))
    actual = dense(tanh_net, PARAMS, data, curv_type, loss_fn, joint_bias=joint_bias)
    expected = dense(tanh_net, PARAMS, data, "full", loss_fn)
    assert_blocks_equal(actual, expected, JOINT if joint_bias else SEPARATE)


@pytest.mark.parametrize(
    ("model_fn", "approx", "target"),
    [(shared_linear, "expand", (6, 5, 2)), (averaged_linear, "reduce", (6, 2))],
)
def test_expand_and_reduce_are_exact_in_their_own_settings(model_fn, approx, target):
    params = {"b": random(2), "w": random(3, 2, seed=1)}
    data = (random(6, 5, 3, seed=4), random(*target, seed=5))
    actual = dense(model_fn, params, data, "kfac", approx=approx)
    np.testing.assert_allclose(actual, dense(model_fn, params, data, "full"), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("padding", [0.0, 5.0])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_a_masked_token_is_a_token_that_is_not_there(curv_type, approx, padding):
    params = {"b": random(2), "w": random(3, 2, seed=1)}
    x, y = random(6, 5, 3, seed=4), random(6, 5, 2, seed=5)
    mask = jnp.arange(5) < 2
    padded = jnp.where(mask[:, None], x, padding)
    options = {"approx": approx, "batch_size": 4}
    masked = cases.weighted(padded, y, jnp.broadcast_to(mask, (6, 5)))
    actual = dense(shared_linear, params, masked, curv_type, **options)
    expected = dense(shared_linear, params, (x[:, :2], y[:, :2]), curv_type, **options)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_a_weight_is_an_example_taken_that_often(curv_type, approx, scale):
    times = np.asarray([1, 3, 0, 2, 1, 4])
    params = {"b": random(2), "w": random(3, 2, seed=1)}
    x, y = random(6, 5, 3, seed=4), random(6, 5, 2, seed=5)
    options = {"approx": approx, "batch_size": 4}
    repeated = (jnp.repeat(x, times, axis=0), jnp.repeat(y, times, axis=0))
    expected = scale * dense(shared_linear, params, repeated, curv_type, **options)
    for weight in (times, np.repeat(times[:, None], 5, axis=1)):  # an example's, its tokens'
        data = cases.weighted(x, y, jnp.asarray(scale * weight))
        actual = dense(shared_linear, params, data, curv_type, **options)
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_kfac_is_exact_for_a_deep_linear_net_with_weights(curv_type):
    data = cases.weighted(X, Y, jnp.linspace(0.1, 3.0, 9))
    expected = dense(deep_linear, PARAMS, data, "full")
    assert_blocks_equal(dense(deep_linear, PARAMS, data, curv_type), expected, JOINT)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_expand_is_exact_with_a_weight_for_every_token(curv_type):
    params = {"b": random(2), "w": random(3, 2, seed=1)}
    weight = jnp.abs(random(6, 5, seed=6)).at[2].set(0.0).at[3, 1].set(0.0)
    data = cases.weighted(random(6, 5, 3, seed=4), random(6, 5, 2, seed=5), weight)
    actual = dense(shared_linear, params, data, curv_type, batch_size=4)
    expected = dense(shared_linear, params, data, "full")
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_weights_of_outputs_are_not_taken_for_weights_of_positions(curv_type):
    """Four positions, summed, and four outputs: their order is nothing to the first weight."""

    def pooled(input, params):
        return jnp.tanh(input @ params["w"]).sum(0) @ params["v"]

    v, w, x = random(5, 4), random(3, 5, seed=1), random(6, 4, 3, seed=2)
    weight, found = jnp.broadcast_to(jnp.asarray([5.0, 1.0, 2.0, 1.0]), (6, 4)), []
    for order in (jnp.arange(4), jnp.asarray([2, 3, 1, 0])):
        data = cases.weighted(x, jnp.zeros((6, 4)), weight[:, order])
        found.append(dense(pooled, {"v": v[:, order], "w": w}, data, curv_type)[20:, 20:])
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-11)


def test_lengths_may_differ_from_example_to_example():
    """Expand over all tokens that there are: as many examples of one token each."""
    params = {"b": random(2), "w": random(3, 2, seed=1)}
    x, y = random(6, 5, 3, seed=4), random(6, 5, 2, seed=5)
    mask = jnp.arange(5) < jnp.asarray([1, 2, 5, 0, 3, 1])[:, None]
    actual = dense(shared_linear, params, cases.weighted(x, y, mask), "kfac")
    apart = (x[mask][:, None], y[mask][:, None])
    expected = dense(shared_linear, params, apart, "kfac")
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_a_masked_token_that_others_see_counts():
    w, x = random(3, 2, seed=1), random(6, 5, 3, seed=4)

    def mixed(input, params):
        hidden = input @ params
        return hidden + hidden.mean(0)

    mask = jnp.arange(5) < 2
    data = cases.weighted(x, random(6, 5, 2, seed=5), jnp.broadcast_to(mask, (6, 5)))
    mixing = (jnp.eye(5) + 1 / 5)[:2]  # d out_s / d hidden_t for the tokens s that are judged
    inputs = jnp.einsum("nti,ntj->ij", x, x) / (6 * 5)
    outputs = 6 * jnp.sum(mixing**2) * jnp.eye(2)
    expected = jnp.kron(inputs, outputs)
    np.testing.assert_allclose(dense(mixed, w, data, "kfac"), expected, rtol=1e-9, atol=1e-11)


def test_ekfac_has_the_exact_second_moments_in_its_eigenbasis():
    _, estimate = fit(tanh_net, PARAMS, (X, Y), "ekfac")
    full = dense(tanh_net, PARAMS, (X, Y), "full")
    structure, eye = estimate.structure, jnp.eye(full.shape[0])
    for block, group in zip(structure.blocks, structure.groups, strict=True):
        where = np.concatenate([np.arange(start, start + size) for start, size in group])
        basis = block.unrotate(jnp.eye(len(where)))
        np.testing.assert_allclose(basis @ basis.T, eye[: len(where), : len(where)], atol=1e-12)
        exact = jnp.diagonal(basis.T @ full[np.ix_(where, where)] @ basis)
        np.testing.assert_allclose(block.values.reshape(-1), exact, rtol=1e-9, atol=1e-12)


def test_ekfac_is_at_least_as_close_to_the_exact_blocks_as_kfac():
    full = dense(tanh_net, PARAMS, (X, Y), "full")
    errors = {
        name: sum(
            float(jnp.linalg.norm((dense(tanh_net, PARAMS, (X, Y), name) - full)[a:b, a:b]))
            for a, b in JOINT
        )
        for name in ("kfac", "ekfac")
    }
    assert errors["ekfac"] < errors["kfac"]


@pytest.mark.parametrize("name", models.MODELS)
def test_block_diagonal_equals_the_blocks_of_the_full_curvature(name):
    model_fn, params, data, loss_fn = models.MODELS[name]
    actual = dense(model_fn, params, data, "block_diagonal", loss_fn)
    edges = np.cumsum([0, *(leaf.size for leaf in jax.tree.leaves(params))])
    expected = dense(model_fn, params, data, "full", loss_fn)
    assert_blocks_equal(actual, expected, list(itertools.pairwise(edges)))


def test_a_leaf_too_large_for_a_block_keeps_its_exact_diagonal():
    model_fn, params, data, loss_fn = models.MODELS["transformer"]
    estimate = fit(model_fn, params, data, "kfac", loss_fn, max_dense=10)[1]
    rows = {name: how for name, how, _ in estimate.coverage.rows}
    assert rows["embedding"] == "exact diagonal"
    assert rows["gain"] == "exact dense block"
    assert rows["q"] == "Kronecker (expand)"
    exact = fit(model_fn, params, data, "diagonal", loss_fn)[1].diagonal()[:28]
    np.testing.assert_allclose(estimate.diagonal()[:28], exact, rtol=1e-9)


def test_the_coverage_report_says_which_biases_joined():
    joint = fit(deep_linear, PARAMS, (X, Y), "kfac")[1].coverage
    assert all(how == "Kronecker (expand), bias joint" for _, how, _ in joint.rows)
    apart = fit(deep_linear, PARAMS, (X, Y), "kfac", joint_bias=False)[1].coverage
    assert {how for _, how, _ in apart.rows} == {"Kronecker (expand)", "exact dense block"}


@pytest.mark.parametrize("kind", ["fisher_mc", "fisher_empirical"])
def test_kfac_takes_the_fishers_too(kind):
    options = {"curvature": cases.CURVATURES[kind]}
    actual = dense(tanh_net, PARAMS, (X[:1], Y[:1]), "ekfac", joint_bias=False, **options)
    expected = dense(tanh_net, PARAMS, (X[:1], Y[:1]), "full", **options)
    np.testing.assert_allclose(jnp.trace(actual), jnp.trace(expected), rtol=1e-9)


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac", "block_diagonal"])
def test_batches_loaders_masks_and_subsets_do_not_change_the_answer(curv_type):
    whole = dense(tanh_net, PARAMS, (X, Y), curv_type)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)

    close(dense(tanh_net, PARAMS, (X, Y), curv_type, batch_size=2), whole)
    close(dense(tanh_net, PARAMS, [(X[:5], Y[:5]), (X[5:], Y[5:])], curv_type), whole)
    close(dense(tanh_net, PARAMS, (X, Y), curv_type, num_total_samples=18), 2 * whole)
    padded = (jnp.concatenate([X, X[:3]]), jnp.concatenate([Y, Y[:3]]))
    mask = jnp.asarray([1.0] * 9 + [0.0] * 3)
    close(dense(tanh_net, PARAMS, cases.weighted(*padded, mask), curv_type), whole)


def test_a_prior_per_layer_is_exact_and_a_finer_one_is_refused():
    posterior_fn, estimate = fit(tanh_net, PARAMS, (X, Y), "kfac")
    posterior = posterior_fn({"prior_prec": {"one": 0.5, "two": 2.0}})
    prior = jnp.concatenate([jnp.full(16, 0.5), jnp.full(10, 2.0)])
    expected = jnp.linalg.inv(estimate.to_dense() + jnp.diag(prior))
    np.testing.assert_allclose(posterior.cov_mv(jnp.ones(26)), expected @ jnp.ones(26), rtol=1e-9)
    for finer in ({"w": 0.5, "b": 2.0}, {"w": jnp.ones((3, 4)), "b": 1.0}):
        with pytest.raises(ValueError, match=r"one number per layer.*joint_bias=False"):
            posterior_fn({"prior_prec": {"one": finer, "two": 2.0}})


def test_the_hessian_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="need rows, which the Hessian does not have"):
        fit(tanh_net, PARAMS, (X, Y), "kfac", curvature=laplax.Hessian(indefinite="clip"))


def test_calibration_and_evaluation_work_unchanged():
    posterior_fn, _ = fit(tanh_net, PARAMS, (X, Y), "kfac")
    arguments, _ = laplax.calibration(
        posterior_fn, tanh_net, PARAMS, (X, Y), calibration_method="gradient_descent"
    )
    results, predictive = laplax.evaluation(posterior_fn, tanh_net, PARAMS, arguments, (X, Y))
    assert np.isfinite(list(results.values())).all()
    J = laplax.pushforward.jacobian(predictive.model, PARAMS, posterior_fn.space, X)
    cov = jnp.linalg.inv(jax.vmap(predictive.posterior.prec_mv)(jnp.eye(26)))
    expected = jnp.einsum("ncp,pq,ncq->nc", J, cov, J)
    np.testing.assert_allclose(predictive(X).pred_var, expected, rtol=1e-8)
    searched = laplax.calibration(
        posterior_fn,
        tanh_net,
        PARAMS,
        (X, Y),
        calibration_objective="nll",
        calibration_method=laplax.GridSearch(grid=[0.5]),
        prior_arguments={"sigma_squared": 2.0},
    )[1]
    arguments = {"prior_prec": 0.5, "sigma_squared": 2.0}
    by_hand = laplax.evaluation(posterior_fn, tanh_net, PARAMS, arguments, (X, Y), metrics=["nll"])[
        0
    ]
    np.testing.assert_allclose(searched.trace.values[0], by_hand["nll"], rtol=1e-9)


def test_a_one_shot_iterator_suffices_for_kfac_but_not_for_ekfac():
    once = dense(tanh_net, PARAMS, iter([(X, Y)]), "kfac")
    np.testing.assert_allclose(once, dense(tanh_net, PARAMS, (X, Y), "kfac"), rtol=1e-12)
    with pytest.raises(ValueError, match="several times"):
        dense(tanh_net, PARAMS, iter([(X, Y)]), "ekfac")


@pytest.mark.parametrize("curv_type", ["kfac", "ekfac"])
def test_large_factors_are_decomposed_alike_on_the_host(monkeypatch, curv_type):
    expected = dense(tanh_net, PARAMS, (X, Y), curv_type)
    monkeypatch.setattr(linalg, "HOST_SIDE", 0)
    monkeypatch.setattr(linalg, "_eigh_all", None)
    posterior_fn, estimate = fit(tanh_net, PARAMS, (X, Y), curv_type)
    np.testing.assert_allclose(estimate.to_dense(), expected, rtol=1e-9, atol=1e-11)
    assert {leaf.dtype for leaf in jax.tree.leaves(posterior_fn)} == {np.dtype("float64")}


def test_what_is_not_finite_shows_on_the_host_too():
    values, vectors = eigh_on_host(np.full((2, 3, 3), np.inf, np.float32))
    assert values.shape == (2, 3)
    assert np.isnan(values).all()
    assert np.isnan(vectors).all()
    assert values.dtype == np.float32
