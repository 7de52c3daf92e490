"""Part of the network random, the rest at the MAP: every structure, every way to name it."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax._space import ParamSpace

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = {f"Dense_{i}": layer for i, layer in enumerate(cases.mlp())}
X, Y = cases.random(7, 2, seed=4), cases.TARGETS["mse"]
HEAD = PARAMS["Dense_1"]


def model_fn(input, params):
    return cases.mlp_fn(input, [params["Dense_0"], params["Dense_1"]])


def head_fn(input, params):
    """The same network with its first layer closed over: what a subset must equal."""
    return cases.mlp_fn(input, [PARAMS["Dense_0"], params])


def test_a_space_that_was_stored_is_found_again():
    """A hash of bytes or of a treedef holds in one process only."""
    space = ParamSpace.of(PARAMS)
    assert hash(space) == hash(ParamSpace.of(PARAMS))
    again = pickle.loads(pickle.dumps(space))
    assert "_hash" not in vars(again)
    assert {space: 1}[again] == 1


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


# An element-wise subset: some entries of two leaves, one leaf whole, one fixed. Flat order:
# Dense_0/b (4), Dense_0/w (8), Dense_1/b (3), Dense_1/w (12).
MASK = {
    "Dense_0": {"b": False, "w": jnp.zeros((2, 4), bool).at[0, 1].set(True).at[1, 2].set(True)},
    "Dense_1": {"b": True, "w": np.arange(12).reshape(4, 3) % 3 == 1},
}
WHERE = np.asarray([5, 10, 12, 13, 14, 16, 19, 22, 25])
ARGUMENTS = {"prior_prec": 0.3, "sigma_squared": 0.5}
ELEMENTWISE = ("full", "diagonal", "hutchinson", "lanczos", "lobpcg")
SPACE = ParamSpace.of(PARAMS)


@functools.cache
def elementwise(name):
    return fit(name, MASK)


@pytest.fixture(scope="module")
def dense():
    """G of all parameters."""
    return np.asarray(fit(subset=None)[1].to_dense())


def reference(dense, name, prior=0.3):
    """The K x K precision over the subnetwork."""
    G = dense[np.ix_(WHERE, WHERE)]
    G = np.diag(np.diag(G)) if name in ("diagonal", "hutchinson") else G
    return G / ARGUMENTS["sigma_squared"] + np.diag(np.broadcast_to(prior, WHERE.shape))


def jacobian():
    """J of the network at X over all parameters, (n, C, P)."""

    def output(flat, x):
        return model_fn(x, SPACE.unflatten(flat))

    return np.asarray(jax.vmap(jax.jacrev(output), (None, 0))(SPACE.flatten(PARAMS), X))


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name != "hutchinson"])
def test_a_subnetwork_is_the_submatrix_inverted(name, dense):
    posterior_fn, _ = elementwise(name)
    posterior, precision = posterior_fn(ARGUMENTS), reference(dense, name)
    covariance = np.linalg.inv(precision)
    found = jax.vmap(posterior.cov_mv)(jnp.eye(len(WHERE)))
    np.testing.assert_allclose(found, covariance, rtol=1e-8, atol=1e-10)
    variance = np.zeros(SPACE.size)
    variance[WHERE] = np.diag(covariance)
    np.testing.assert_allclose(SPACE.flatten(posterior.variance()), variance, rtol=1e-8)
    np.testing.assert_allclose(posterior.logdet(), np.linalg.slogdet(precision)[1], rtol=1e-9)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, PARAMS)  # only what varies has a density
    v = np.full(len(WHERE), 0.1)
    log_prob = 0.5 * (posterior.logdet() - v @ precision @ v - len(WHERE) * np.log(2 * np.pi))
    np.testing.assert_allclose(posterior.log_prob(moved), log_prob, rtol=1e-8)


@pytest.mark.parametrize("name", ["full", "diagonal", "lanczos", "lobpcg"])
def test_a_subnetwork_predicts_with_its_part_of_the_jacobian(name, dense):
    posterior_fn, J = elementwise(name)[0], jacobian()[:, :, WHERE]
    expected = J @ np.linalg.inv(reference(dense, name)) @ J.swapaxes(1, 2)
    predict = laplax.predictive(posterior_fn, model_fn)(ARGUMENTS)
    found = predict(X, fields=("pred_mean", "pred_var", "pred_cov"))
    np.testing.assert_allclose(found.pred_cov, expected, rtol=1e-8, atol=1e-10)
    variance = np.diagonal(expected, axis1=1, axis2=2)
    np.testing.assert_allclose(found.pred_var, variance, rtol=1e-8)
    np.testing.assert_allclose(predict(X).pred_var, variance, rtol=1e-8)
    np.testing.assert_array_equal(found.pred_mean, jax.vmap(model_fn, (0, None))(X, PARAMS))


def test_a_subnetwork_pushed_through_the_network_is_an_ensemble_of_its_samples():
    posterior_fn, key = elementwise("full")[0], jax.random.key(3)
    options = {"pushforward_type": "nonlinear", "num_samples": 5, "key": key}
    found = laplax.predictive(posterior_fn, model_fn, **options)(ARGUMENTS)(X)
    draws = posterior_fn(ARGUMENTS).sample(key, 5)
    outputs = jax.vmap(lambda p: jax.vmap(model_fn, (0, None))(X, p))(draws)
    np.testing.assert_allclose(found.pred_var, jnp.var(outputs, axis=0, ddof=1), rtol=1e-8)


@pytest.mark.parametrize("name", ["full", "diagonal", "lanczos", "lobpcg"])
def test_the_evidence_of_a_subnetwork_has_the_determinant_of_the_submatrix(name, dense):
    posterior_fn = elementwise(name)[0]
    theta, f = np.asarray(SPACE.flatten(PARAMS))[WHERE], jax.vmap(model_fn, (0, None))(X, PARAMS)
    log_likelihood = np.sum(-((f - Y) ** 2) / (2 * 0.5) - 0.5 * np.log(2 * np.pi * 0.5))
    logdet = np.linalg.slogdet(reference(dense, name))[1] - len(WHERE) * np.log(0.3)
    expected = log_likelihood - 0.5 * (0.3 * theta @ theta + logdet)
    found = laplax.log_marginal_likelihood(posterior_fn, ARGUMENTS, model_fn, PARAMS, (X, Y))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_outside_stay_at_the_map(name):
    posterior = elementwise(name)[0](ARGUMENTS)
    samples = SPACE.flatten(posterior.sample(jax.random.key(0), 4), batch_ndim=1)
    fixed = np.setdiff1d(np.arange(SPACE.size), WHERE)
    theta = np.asarray(SPACE.flatten(PARAMS))
    np.testing.assert_array_equal(samples[:, fixed], np.broadcast_to(theta[fixed], (4, len(fixed))))
    assert (samples[:, WHERE] != theta[WHERE]).all()


def test_hutchinson_estimates_the_diagonal_of_the_submatrix(dense):
    _, estimate = elementwise("hutchinson")
    error = estimate.diagonal() - np.diag(dense)[WHERE]
    assert (np.abs(error) <= 6 * estimate.diagnostics["standard_error"] + 1e-12).all()


@pytest.mark.parametrize("curvature", ["hessian", "fisher_mc", "fisher_empirical"])
def test_every_curvature_has_its_submatrix(curvature):
    options = {"loss_fn": "mse", "curvature": cases.CURVATURES[curvature], "curv_type": "diagonal"}
    whole = laplax.laplace(model_fn, PARAMS, (X, Y), **options)[1]
    part = laplax.laplace(model_fn, PARAMS, (X, Y), subset=MASK, **options)[1]
    np.testing.assert_allclose(part.diagonal(), whole.diagonal()[WHERE], rtol=1e-9, atol=1e-12)


def test_elements_take_the_prior_of_their_leaf_or_their_own(dense):
    posterior_fn, eye = elementwise("full")[0], jnp.eye(len(WHERE))
    per_leaf = {"Dense_0": 9.0, "Dense_1": {"b": 2.0, "w": 0.5}}
    per_element = SPACE.unflatten(jnp.linspace(0.5, 2.0, SPACE.size))
    in_order = np.linspace(0.5, 2.0, SPACE.size)[WHERE]
    for given, prior in ((per_leaf, [9.0] * 2 + [2.0] * 3 + [0.5] * 4), (per_element, in_order)):
        posterior = posterior_fn({**ARGUMENTS, "prior_prec": given})
        expected = reference(dense, "full", np.asarray(prior))
        np.testing.assert_allclose(jax.vmap(posterior.prec_mv)(eye), expected, rtol=1e-9, atol=1e-9)


def test_a_subnetwork_is_calibrated(dense):
    posterior_fn, J = elementwise("full")[0], jacobian()[:, :, WHERE]
    f, grid = jax.vmap(model_fn, (0, None))(X, PARAMS), [0.1, 10.0]
    searched = laplax.calibration(
        posterior_fn,
        model_fn,
        PARAMS,
        (X, Y),
        calibration_objective="nll",
        calibration_method=laplax.GridSearch(grid=grid),
        prior_arguments={"prior_prec": 1.0, "sigma_squared": 0.5},
    )[1]
    for tau, value in zip(grid, searched.trace.values, strict=True):
        covariance = np.linalg.inv(reference(dense, "full", tau))
        total = np.einsum("ncp,pq,ncq->nc", J, covariance, J) + 0.5
        nll = 0.5 * (np.log(2 * np.pi * total) + (f - Y) ** 2 / total)
        np.testing.assert_allclose(value, nll.mean(), rtol=1e-8)


def test_priors_of_a_subnetwork_are_chosen_layer_by_layer():
    posterior_fn = elementwise("full")[0]
    start = {"prior_prec": {"Dense_0": 1.0, "Dense_1": 1.0}, "sigma_squared": 1.0}
    found, _ = laplax.calibration(
        posterior_fn,
        model_fn,
        PARAMS,
        (X, Y),
        calibration_method=laplax.GradientDescent(num_steps=20),
        prior_arguments=start,
    )
    before, after = (
        laplax.log_marginal_likelihood(posterior_fn, arguments, model_fn, PARAMS, (X, Y))
        for arguments in (start, found)
    )
    assert after > before


def test_posterior_fn_of_a_subnetwork_compiles_once_and_differentiates():
    traced = []

    @jax.jit
    def variance(posterior_fn, tau):
        traced.append(1)
        return posterior_fn({"prior_prec": tau}).variance()

    first, second = fit("full", MASK)[0], fit("full", MASK)[0]
    eager = first({"prior_prec": jnp.asarray(0.3)}).variance()
    for posterior_fn in (first, second):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
            variance(posterior_fn, jnp.asarray(0.3)),
            eager,
        )
    assert len(traced) == 1  # equal masks are equal configuration
    slope = jax.grad(lambda tau: SPACE.flatten(variance(first, tau)).sum())(0.3)
    step = 1e-6
    up, down = (SPACE.flatten(variance(first, 0.3 + s)).sum() for s in (step, -step))
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


def test_a_mask_of_whole_leaves_is_the_subset_of_these_leaves():
    mask = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), PARAMS)
    mask["Dense_1"] = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool), HEAD)
    for name in ("kfac", "full"):
        by_mask, by_name = fit(name, mask)[0], fit(name, "Dense_1/*")[0]
        assert by_mask.space == by_name.space
        np.testing.assert_array_equal(by_mask(ARGUMENTS).logdet(), by_name(ARGUMENTS).logdet())


def test_flat_vectors_and_trees_of_a_subnetwork_are_each_others_transpose():
    params = {"w": cases.random(3, 4), "b": jnp.zeros((), jnp.float32)}
    space = ParamSpace.of(params, [True, np.eye(3, 4, dtype=bool)])
    assert (space.size, space.slices) == (4, {0: (0, 1), 1: (1, 3)})
    flat = cases.random(2, 4, seed=1)
    tree = jax.jit(space.unflatten)(flat)
    assert (tree["w"].shape, tree["b"].dtype) == ((2, 3, 4), jnp.float32)
    assert not tree["w"][:, ~np.eye(3, 4, dtype=bool)].any()
    np.testing.assert_allclose(jax.vmap(space.flatten)(tree), flat, rtol=1e-7)
    np.testing.assert_array_equal(space.flatten(tree, batch_ndim=1), jax.vmap(space.flatten)(tree))
    pulled = jax.grad(lambda t: space.flatten(t) @ flat[0])(params)
    np.testing.assert_allclose(pulled["w"], tree["w"][0], rtol=1e-7)


def test_the_coverage_report_counts_elements():
    rows = {leaf: why for leaf, _, why in elementwise("diagonal")[1].coverage.rows}
    assert rows["Dense_0/b"] == "outside of the subset"
    assert rows["Dense_0/w"] == "2 of 8 elements"
    assert rows["Dense_1/b"] == ""
    assert rows["Dense_1/w"] == "4 of 12 elements"


@pytest.mark.parametrize("name", ["kfac", "ekfac", "block_diagonal"])
def test_blocks_refuse_to_be_cut(name):
    message = (
        r"cuts through 'Dense_0/w' \(2 of 8 elements\), 'Dense_1/w' \(4 of 12 elements\)\. "
        r".*'full', 'diagonal', 'lanczos', 'lobpcg'.*subset='Dense_0/w'"
    )
    with pytest.raises(ValueError, match=message):
        fit(name, MASK)


def chosen(mask):
    return np.flatnonzero(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mask)]))


def test_the_largest_variances_are_chosen_exactly_k():
    variances = {"a": jnp.asarray([[0.1, 5.0], [2.0, 0.3]]), "b": jnp.asarray(3.0)}
    for k, expected in ((1, [1]), (2, [1, 4]), (3, [1, 2, 4]), (5, range(5))):
        mask = laplax.largest_variance(variances, k)
        assert mask["a"].shape == (2, 2)
        np.testing.assert_array_equal(chosen(mask), expected)
    ties = {"a": jnp.ones(3), "b": jnp.ones(2)}
    np.testing.assert_array_equal(chosen(laplax.largest_variance(ties, 4)), range(4))


def test_the_largest_magnitudes_are_chosen_whatever_their_sign():
    params = {"a": jnp.asarray([-7.0, 1.0, 2.0]), "b": jnp.asarray([-3.0, 0.0])}
    np.testing.assert_array_equal(chosen(laplax.largest_magnitude(params, 2)), [0, 3])


def test_a_diagonal_posterior_chooses_the_subnetwork_of_a_full_one(dense):
    diagonal = fit("diagonal", None)[0]({"prior_prec": 0.3})
    mask = laplax.largest_variance(diagonal.variance(), 6)
    smallest = np.sort(np.argsort(np.diag(dense), kind="stable")[:6])
    np.testing.assert_array_equal(chosen(mask), smallest)
    np.testing.assert_allclose(
        fit("full", mask)[1].to_dense(), dense[np.ix_(smallest, smallest)], atol=1e-12
    )


@pytest.mark.parametrize("k", [0, -1, 28, 2.0, True])
def test_a_subnetwork_of_an_impossible_size_is_refused(k):
    for choose in (laplax.largest_variance, laplax.largest_magnitude):
        with pytest.raises(ValueError, match=rf"k must be a whole number from 1 to 27.*got {k}"):
            choose(PARAMS, k)


def test_a_subnetwork_cannot_be_chosen_from_what_has_no_order_or_no_value():
    with pytest.raises(ValueError, match=r"variances hold NaN"):
        laplax.largest_variance({"a": jnp.asarray([1.0, jnp.nan])}, 1)
    with pytest.raises(TypeError, match=r"variances must be known numbers; inside jax\.jit"):
        jax.jit(lambda v: laplax.largest_variance(v, 1))(jnp.ones(2))


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (jnp.ones(3, bool), ValueError, r"shape \(3,\) at 'Dense_0/w'.*boolean array.*\(2, 4\)"),
        (jnp.ones((4, 2), bool), ValueError, r"shape \(4, 2\) at 'Dense_0/w'.*for example"),
        (jnp.ones((2, 4)), TypeError, r"found an array of float64 at 'Dense_0/w'.*> threshold"),
        (jnp.ones((2, 4), int), TypeError, r"must hold booleans; found an array of int64"),
        ("w", TypeError, r"must hold booleans; found str at 'Dense_0/w'"),
        (jnp.zeros((2, 4), bool), ValueError, r"False everywhere \(leaves: .*largest_variance"),
        (False, ValueError, r"the mask given as subset selects no parameter"),
    ],
)
def test_a_mask_that_means_nothing_is_refused(leaf, error, message):
    with pytest.raises(error, match=message):
        fit(subset={"Dense_0": {"b": False, "w": leaf}, "Dense_1": False})
