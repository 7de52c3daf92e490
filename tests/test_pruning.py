"""Pruning: scores against dense algebra, masks, and smaller networks that equal masked ones."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from cases import random
from laplax import pruning

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYOUT = ("NHWC", "HWIO", "NHWC")


def weights_of(shapes):
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    return jax.tree.unflatten(treedef, [random(*s, seed=i) for i, s in enumerate(leaves)])


def affine(*shape, names="wb"):
    return {names[0]: shape, names[1]: shape[-1:]}


# -- scores ---------------------------------------------------------------------------------------
X, Y = cases.random(7, 2, seed=4), cases.TARGETS["mse"]
PER_LAYER = [{"w": 0.5, "b": 2.0}, {"w": 1.5, "b": 0.3}]
DENSE_CASES = {
    "full": {"curv_type": "full"},
    "full, a prior per layer": {"curv_type": "full", "prior_prec": PER_LAYER},
    "diagonal": {"curv_type": "diagonal", "prior_prec": PER_LAYER},
    "kfac": {"curv_type": "kfac", "joint_bias": False, "prior_prec": PER_LAYER},
    "lanczos": {"curv_type": "lanczos", "rank": 5},
    "lanczos, a prior per layer": {"curv_type": "lanczos", "rank": 5, "prior_prec": PER_LAYER},
    "last layer": {"curv_type": "full", "subset": lambda name: name.startswith("1/")},
}


def flat(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", DENSE_CASES)
def test_scores_are_those_of_the_dense_precision(name):
    options = dict(DENSE_CASES[name])
    prior_prec = options.pop("prior_prec", 0.7)
    params = cases.mlp()
    posterior_fn, estimate = laplax.laplace(cases.mlp_fn, params, (X, Y), loss_fn="mse", **options)
    posterior = posterior_fn({"prior_prec": prior_prec, "sigma_squared": 0.4})
    found = flat(pruning.parameter_scores(posterior))
    T = flat(jax.tree.map(jnp.full_like, params, jax.tree.broadcast(prior_prec, params)))
    varies = np.isfinite(found)
    assert varies.sum() == (15 if name == "last layer" else T.size)
    Lambda = np.asarray(estimate.to_dense()) / 0.4 + np.diag(T[varies])
    expected = np.diag(Lambda) * flat(params)[varies] ** 2
    np.testing.assert_allclose(found[varies], expected, rtol=1e-9)
    diagonal = flat(posterior.prec_diagonal())
    np.testing.assert_allclose(diagonal[varies], np.diag(Lambda), rtol=1e-9)


def test_half_a_score_is_what_removing_a_parameter_adds_to_a_quadratic_loss():
    prior_prec, sigma_squared = {"v": 0.5, "w": 1.5}, 0.3
    case = cases.regression(prior_prec, sigma_squared)
    posterior_fn, _ = laplax.laplace(
        case.model_fn, case.params, case.data, loss_fn="mse", curv_type="full"
    )
    arguments = {"prior_prec": prior_prec, "sigma_squared": sigma_squared}
    scores = flat(pruning.parameter_scores(posterior_fn(arguments)))
    X, y = (np.asarray(x) for x in case.data)
    T = np.asarray(case.prior(prior_prec))

    def neg_log_joint(theta):
        return np.sum((X @ theta - y) ** 2) / (2 * sigma_squared) + 0.5 * theta @ (T * theta)

    theta = flat(case.params)
    increases = [
        neg_log_joint(theta * (np.arange(6) != k)) - neg_log_joint(theta) for k in range(6)
    ]
    np.testing.assert_allclose(0.5 * scores, increases, rtol=1e-9)


def test_the_conditional_mean_is_the_fit_without_the_features_that_go():
    """Ridge regression on the features that are left, by NumPy."""
    prior_prec, sigma_squared = {"v": 0.5, "w": 1.5}, 0.3
    case = cases.regression(prior_prec, sigma_squared)
    posterior_fn, _ = laplax.laplace(
        case.model_fn, case.params, case.data, loss_fn="mse", curv_type="full"
    )
    posterior = posterior_fn({"prior_prec": prior_prec, "sigma_squared": sigma_squared})
    mask = {"v": {"u": jnp.asarray([True, False])}, "w": jnp.asarray([True, True, False, True])}
    found = flat(pruning.conditional_mean(posterior, mask))
    X, y = (np.asarray(x) for x in case.data)
    left = np.flatnonzero(flat(mask))
    Lambda = X[:, left].T @ X[:, left] / sigma_squared + np.diag(case.prior(prior_prec)[left])
    expected = np.linalg.solve(Lambda, X[:, left].T @ y / sigma_squared)
    np.testing.assert_allclose(found[left], expected, rtol=1e-7)
    assert (found[~flat(mask)] == 0).all()
    compensated = pruning.prune(posterior, 0.4, compensate=True)
    expected = pruning.conditional_mean(posterior, compensated.mask)
    np.testing.assert_array_equal(flat(compensated.params), flat(expected))


@pytest.mark.parametrize("name", ["kfac", "lanczos", "diagonal", "last layer"])
def test_the_conditional_mean_is_that_of_the_dense_gaussian(name):
    options = dict(DENSE_CASES[name])
    options.pop("prior_prec", None)
    params = cases.mlp()
    posterior_fn, estimate = laplax.laplace(cases.mlp_fn, params, (X, Y), loss_fn="mse", **options)
    posterior = posterior_fn({"prior_prec": 0.7, "sigma_squared": 0.4})
    mask = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape) % 3 != 1, params)
    found = flat(pruning.conditional_mean(posterior, mask))
    varies = np.isfinite(flat(pruning.parameter_scores(posterior)))
    covariance = np.linalg.inv(np.asarray(estimate.to_dense()) / 0.4 + 0.7 * np.eye(varies.sum()))
    theta = flat(params)
    gone = ~flat(mask)[varies]
    gain = np.linalg.solve(covariance[np.ix_(gone, gone)], theta[varies][gone])
    expected = np.where(flat(mask), theta, 0)
    expected[varies] = np.where(gone, 0, theta[varies] - covariance[:, gone] @ gain)
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_scores_jit_and_do_not_overflow_in_half_precision(dtype):
    params = cases.mlp(dtype=dtype)
    data = (X.astype(dtype), Y.astype(jnp.float32))
    options = {"loss_fn": "mse", "curv_type": "diagonal", "num_total_samples": 10**7}
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, data, **options)
    posterior = posterior_fn({"prior_prec": 1.0})
    scores = jax.jit(pruning.parameter_scores)(posterior)
    assert {x.dtype for x in jax.tree.leaves(scores)} == {jnp.dtype(jnp.float32)}
    assert np.isfinite(flat(scores)).all()
    expected = flat(pruning.parameter_scores(posterior))
    np.testing.assert_allclose(flat(scores), expected, rtol=1e-5)


# -- units of networks ----------------------------------------------------------------------------
def mlp_fn(input, params):
    h = jax.nn.relu(input @ params["fc1"]["w"] + params["fc1"]["b"])
    h = jax.nn.sigmoid(params["fc2"]["w"] @ h + params["fc2"]["b"])
    return h @ params["out"]["w"] + params["out"]["b"]


MLP = weights_of({"fc1": affine(5, 8), "fc2": {"w": (6, 8), "b": (6,)}, "out": affine(6, 3)})


def cnn_fn(input, params):
    """Convolution, pool, flatten, dense; the second convolution has a scale of its own."""
    x = jax.lax.conv_general_dilated(
        input[None], params["conv1"]["w"], (1, 1), "SAME", dimension_numbers=LAYOUT
    )
    x = jax.nn.relu(x + params["conv1"]["b"])
    x = jax.lax.conv_general_dilated(
        x, params["conv2"]["w"], (1, 1), "VALID", dimension_numbers=LAYOUT
    )
    x = jnp.tanh((x - params["mean"]) * jax.lax.rsqrt(params["var"] ** 2 + 0.1))
    x = x.reshape(3, 2, 3, 2, -1).max(axis=(1, 3)).reshape(-1)
    return jax.nn.relu(x @ params["fc"]["w"] + params["fc"]["b"]) @ params["out"]["w"]


CNN = weights_of(
    {
        "conv1": affine(3, 3, 2, 4),
        "conv2": {"w": (3, 3, 4, 5)},
        "mean": (5,),
        "var": (5,),
        "fc": affine(45, 7),
        "out": {"w": (7, 3)},
    }
)


class FlaxCNN(nn.Module):
    features: tuple[int, int]

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(self.features[0], (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.features[1])(x.reshape(-1)))
        return nn.Dense(3)(x)


def flax_fn(input, params):
    """The module is built from the sizes of the parameters."""
    features = (params["Conv_0"]["bias"].size, params["Dense_0"]["bias"].size)
    return FlaxCNN(features).apply({"params": params}, input)


FLAX = weights_of(
    {
        "Conv_0": affine(3, 3, 1, 4, names=("kernel", "bias")),
        "Dense_0": affine(36, 5, names=("kernel", "bias")),
        "Dense_1": affine(5, 3, names=("kernel", "bias")),
    }
)


def attention_fn(input, params):
    q, k, v = (jnp.einsum("td,dhk->thk", input, params[name]) for name in "qkv")
    shares = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k), axis=-1)
    return jnp.einsum("thk,hkd->td", jnp.einsum("hts,shk->thk", shares, v), params["o"])


ATTENTION = weights_of({"q": (3, 4, 5), "k": (3, 4, 5), "v": (3, 4, 6), "o": (4, 6, 2)})


def tokens_fn(input, params):
    h = params["embedding"][input].mean(axis=0)
    return jnp.tanh(h @ params["w1"]) @ params["w2"]


TOKENS = weights_of({"embedding": (7, 4), "w1": (4, 5), "w2": (5, 2)})


def gated_fn(input, params):
    """A convolution, one of every channel by itself, and a gate."""
    x = jax.lax.conv_general_dilated(
        input[None], params["conv"], (1, 1), "VALID", dimension_numbers=LAYOUT
    )
    x = jax.lax.conv_general_dilated(
        jax.nn.relu(x),
        params["depthwise"],
        (1, 1),
        "VALID",
        dimension_numbers=LAYOUT,
        feature_group_count=x.shape[-1],
    )
    x = jax.nn.silu(x @ params["gate"]) * (x @ params["up"] + params["bias"])
    return x.mean(axis=(0, 1, 2)) @ params["out"]


GATED = weights_of(
    {
        "conv": (2, 2, 1, 4),
        "depthwise": (2, 2, 1, 4),
        "gate": (4, 6),
        "up": (4, 6),
        "bias": (6,),
        "out": (6, 2),
    }
)

# model, parameters, inputs, and for every group: its number of units, incoming and outgoing leaves
NETWORKS = {
    "mlp": (
        mlp_fn,
        MLP,
        random(3, 5),
        {
            "fc1/w": (8, "fc1/b fc1/w", "fc2/w"),
            "fc2/w": (6, "fc2/b fc2/w", "out/w"),
        },
    ),
    "cnn": (
        cnn_fn,
        CNN,
        random(2, 8, 8, 2),
        {
            "conv1/w": (4, "conv1/b conv1/w", "conv2/w"),
            "conv2/w": (5, "conv2/w mean var", "fc/w"),
            "fc/w": (7, "fc/b fc/w", "out/w"),
        },
    ),
    "flax": (
        flax_fn,
        FLAX,
        random(2, 6, 6, 1),
        {
            "Conv_0/kernel": (4, "Conv_0/bias Conv_0/kernel", "Dense_0/kernel"),
            "Dense_0/kernel": (5, "Dense_0/bias Dense_0/kernel", "Dense_1/kernel"),
        },
    ),
    "gated": (
        gated_fn,
        GATED,
        random(2, 4, 4, 1),
        {
            "conv": (4, "conv", "depthwise gate up"),
            "gate": (6, "bias gate up", "out"),
        },
    ),
    "heads of an attention": (
        attention_fn,
        ATTENTION,
        random(2, 7, 3),
        {"v": (4, "k q v", "o"), "v, axis 2": (6, "v", "o")},
    ),
    "tokens": (
        tokens_fn,
        TOKENS,
        jnp.asarray([[0, 3, 3], [6, 1, 2]]),
        {"embedding": (4, "embedding", "w1"), "w1": (5, "w1", "w2")},
    ),
}


@functools.cache
def units_of(name):
    model_fn, params, input, _ = NETWORKS[name]
    return pruning.find_units(model_fn, params, input)


def some_kept(units, seed=0):
    rng = np.random.default_rng(seed)
    kept = {name: rng.random(n) < 0.6 for name, n in units.num_units.items()}
    for stays in kept.values():
        stays[0] = True
    return kept


@pytest.mark.parametrize("name", NETWORKS)
def test_units_are_found_with_all_that_belongs_to_them(name):
    units = units_of(name)

    def names(slices):
        return " ".join(units.names[s.leaf] for s in slices)

    found = {g.name: (g.num_units, names(g.incoming), names(g.outgoing)) for g in units.groups}
    assert found == NETWORKS[name][3]
    assert len(units.skipped) == 1  # the outputs


@pytest.mark.parametrize("name", NETWORKS)
def test_the_smaller_network_gives_what_the_masked_one_gives(name):
    model_fn, params, input, _ = NETWORKS[name]
    units = units_of(name)
    kept = some_kept(units)
    mask = pruning.unit_mask(units, kept)
    small = pruning.shrink(params, units, kept)
    run = jax.jit(jax.vmap(lambda x, p: model_fn(x, p), (0, None)))
    masked = pruning.masked(params, mask)
    np.testing.assert_allclose(run(input, small), run(input, masked), rtol=1e-12, atol=1e-12)
    assert units.num_parameters(kept) == sum(x.size for x in jax.tree.leaves(small))
    assert units.num_parameters(kept) < units.num_parameters()
    # The entries that stay are those of the mask, in their order.
    for leaf, stays, rest in zip(*map(jax.tree.leaves, (params, mask, small)), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[stays], rest.ravel())


def test_a_filter_that_is_flattened_feeds_a_row_for_every_pixel():
    (reader,) = units_of("cnn")["conv2/w"].outgoing
    np.testing.assert_array_equal(reader.units, np.arange(45) % 5)
    assert reader.axis == 0


def test_the_units_of_the_smaller_network_are_those_that_stayed():
    model_fn, params, input, _ = NETWORKS["cnn"]
    units = units_of("cnn")
    kept = some_kept(units)
    small = pruning.shrink(params, units, kept)
    after = units.after(kept)
    found = pruning.find_units(model_fn, small, input)
    assert after.num_units == found.num_units
    for ours, theirs in zip(after.divided(), found.divided(), strict=True):
        assert ours[1].place == theirs[1].place
        np.testing.assert_array_equal(ours[1].units, theirs[1].units)
    assert after.num_parameters() == units.num_parameters(kept)


def test_scores_of_units_are_sums_over_their_slices():
    scores = jax.tree.map(jnp.square, CNN)
    units = units_of("cnn")
    incoming = pruning.unit_scores(scores, units)
    both = jax.jit(lambda s: pruning.unit_scores(s, units, outgoing=True))(scores)
    s = jax.tree.map(np.asarray, scores)
    expected = s["conv2"]["w"].sum((0, 1, 2)) + s["mean"] + s["var"]
    np.testing.assert_allclose(incoming["conv2/w"], expected, rtol=1e-12)
    expected = expected + s["fc"]["w"].reshape(9, 5, 7).sum((0, 2))
    np.testing.assert_allclose(both["conv2/w"], expected, rtol=1e-12)
    np.testing.assert_allclose(incoming["fc/w"], s["fc"]["w"].sum(0) + s["fc"]["b"], rtol=1e-12)


# -- what cannot go -------------------------------------------------------------------------------
def residual_fn(input, params):
    h = input @ params["stem"]
    h = h + jax.nn.relu(h @ params["up"]) @ params["down"]
    centred = h - h.mean()
    return (centred / jnp.sqrt(jnp.mean(centred**2))) @ params["out"]


RESIDUAL = weights_of({"stem": (3, 4), "up": (4, 5), "down": (5, 4), "out": (4, 2)})


def average_fn(input, params):
    h = jax.nn.relu(input @ params["w1"])
    return (h @ params["w2"]) / h.size


def fixed_size_fn(input, params):
    return (jnp.tanh(input @ params["w1"]) + jnp.arange(4.0)) @ params["w2"]


TWO_LAYERS = weights_of({"w1": (3, 4), "w2": (4, 2)})


def test_what_is_kept_whole_says_why():
    units = pruning.find_units(residual_fn, RESIDUAL, random(1, 3))
    assert units.num_units == {"up": 5}
    assert "skip connection" in units.skipped["stem"]
    assert "normalisation" in units.skipped["down"]
    assert "they are the outputs" in units.skipped["out"]
    assert str(units).splitlines()[0].split() == ["up", "5", "units", "up", "->", "down"]
    assert str(units).count("kept whole") == 3


@pytest.mark.parametrize(
    ("model_fn", "params", "layers", "message"),
    [
        (residual_fn, RESIDUAL, "stem", r"stem: its units reach the outputs past .* skip"),
        (residual_fn, RESIDUAL, ["up", "do*"], r"down: its units are mixed .* normalisation"),
        (residual_fn, RESIDUAL, "out", "out: no weight reads its units: they are the outputs"),
        (residual_fn, RESIDUAL, "stme", r"layers='stme' names no weight; did you mean 'stem'"),
        (average_fn, TWO_LAYERS, None, r"w1: without some of its units the outputs .* a mean"),
        (fixed_size_fn, TWO_LAYERS, None, r"w1: the model does not run without .* sizes"),
    ],
)
def test_weights_whose_units_cannot_go_are_named(model_fn, params, layers, message):
    with pytest.raises(ValueError, match=message):
        pruning.find_units(model_fn, params, random(1, 3), layers=layers)


def test_groups_by_hand_are_checked_like_all_others():
    """A recurrent network has units that feed themselves, which nothing finds."""

    def model_fn(input, params):
        h = jnp.zeros(params["b"].shape)
        for x in input:
            h = jnp.tanh(x @ params["in"] + h @ params["h"] + params["b"])
        return h @ params["out"]

    params = weights_of({"in": (2, 5), "h": (5, 5), "b": (5,), "out": (5, 3)})
    input = random(4, 3, 2)
    with pytest.raises(ValueError, match="in: its units are mixed"):
        pruning.find_units(model_fn, params, input)
    right = {"incoming": {"in": 1, "h": -1, "b": 0}, "outgoing": {"h": 0, "out": 0}}
    units = pruning.find_units(model_fn, params, input, groups={"hidden": right})
    kept = some_kept(units)
    small = pruning.shrink(params, units, kept)
    masked = pruning.masked(params, pruning.unit_mask(units, kept))
    run = jax.vmap(model_fn, (0, None))
    np.testing.assert_allclose(run(input, small), run(input, masked), rtol=1e-12)
    wrong = {**right, "outgoing": {"out": 0}}
    with pytest.raises(ValueError, match=r"groups\['hidden'\] cannot be pruned: the model does"):
        pruning.find_units(model_fn, params, input, groups={"hidden": wrong})


PAIRS = {"incoming": {"fc1/w": (1, [0, 0, 1, 1, 2, 2, -1, -1])}, "outgoing": {"fc2/w": 1}}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": {"incoming": {"fc/w": 1}}}, r"groups\['a'\]\['incoming'\] names no leaf 'fc/w'"),
        ({"a": {"incoming": {"fc1/w": 2}}}, r"must be an axis of its shape \(5, 8\)"),
        ({"a": {"incoming": {"fc1/w": (1, [0.5])}}}, r"-1 or more, for each of the 8 indices"),
        ({"a": {"incoming": {"fc1/w": 1}, "outgoing": {"fc2/w": 0}}}, "the same number of units"),
        ({"a": {"incoming": {"fc1/w": 1}, "out": {}}}, "unknown part of groups"),
        ({"a": {"outgoing": {"fc2/w": 1}}}, "must be a dict such as"),
        ([1], "groups must be a dict"),
        ({"pairs": PAIRS}, "the same number of units; got"),
    ],
)
def test_groups_by_hand_are_refused_by_name(groups, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pruning.find_units(mlp_fn, MLP, random(1, 5), groups=groups)


# -- choosing -------------------------------------------------------------------------------------
def ramp(units):
    return {name: np.arange(1.0, n + 1) for name, n in units.num_units.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("how", ["sums", "per parameter", "per layer"])
def test_as_many_units_go_as_the_sparsity_needs_and_no_more(sparsity, how):
    units = units_of("cnn")
    scores = ramp(units)
    options = {"per_layer": how == "per layer", "per_parameter": how == "per parameter"}
    kept = pruning.kept_units(scores, units, sparsity, **options)
    most = (1 - sparsity) * units.num_parameters()
    assert units.num_parameters(kept) <= most
    for stays in kept.values():  # the largest stay
        assert stays[-1]
        assert (np.diff(stays.astype(int)) >= 0).all()
    if sparsity == 0:
        assert all(stays.all() for stays in kept.values())
    elif how == "per layer":
        shares = [stays.mean() for stays in kept.values()]
        assert max(shares) - min(shares) <= 1 / min(units.num_units.values())
    else:  # with the last to go, too many parameters would be left
        sizes = {name: 1 if how == "sums" else units.sizes[name] for name in scores}
        ranks = {name: scores[name] / sizes[name] for name in scores}
        removed = [(ranks[n][i], n, i) for n, k in kept.items() for i in np.flatnonzero(~k)]
        last, name, i = max(removed)
        stay = [ranks[n][:-1][k[:-1]].min(initial=np.inf) for n, k in kept.items()]
        assert last <= min(stay)
        kept[name][i] = True
        assert units.num_parameters(kept) > most


def test_the_size_of_a_unit_is_what_goes_with_it():
    units = units_of("cnn")
    for name, sizes in units.sizes.items():
        for i in (0, len(sizes) - 1):
            kept = units.all_kept
            kept[name][i] = False
            assert units.num_parameters() - units.num_parameters(kept) == sizes[i]


def test_no_layer_is_pruned_below_one_unit():
    units = units_of("mlp")
    scores = {"fc1/w": np.zeros(8), "fc2/w": np.arange(10.0, 16.0)}
    kept = pruning.kept_units(scores, units, 0.6)
    assert kept["fc1/w"].sum() == 1
    smallest = {n: np.arange(c) == 0 for n, c in units.num_units.items()}
    largest = 1 - units.num_parameters(smallest) / units.num_parameters()
    assert pruning.kept_units(scores, units, largest)["fc2/w"].sum() == 1
    with pytest.raises(ValueError, match=rf"below one unit of a layer.* is {largest:.4f}"):
        pruning.kept_units(scores, units, largest + 0.01)


def test_what_the_posterior_keeps_fixed_is_not_pruned():
    options = {"loss_fn": "mse", "curv_type": "diagonal"}
    data = (random(9, 5), random(9, 3))
    posterior_fn, _ = laplax.laplace(mlp_fn, MLP, data, subset="fc1/*", **options)
    posterior = posterior_fn({"prior_prec": 1.0})
    pruned = pruning.prune(posterior, 0.3, units_of("mlp"))
    assert pruned.kept["fc2/w"].all()
    assert not pruned.kept["fc1/w"].all()
    mask = pruning.prune(posterior, 0.39).mask
    assert all(x.all() for x in jax.tree.leaves({k: mask[k] for k in ("fc2", "out")}))
    with pytest.raises(ValueError, match="only 48 have a finite score"):
        pruning.prune(posterior, 0.5)


def test_a_mask_takes_the_smallest_scores_of_all_leaves_or_of_each():
    scores = jax.tree.map(jnp.square, MLP)
    mask = pruning.parameter_mask(scores, 0.29)
    values = flat(scores)
    expected = values >= np.sort(values)[int(0.29 * values.size)]
    np.testing.assert_array_equal(flat(mask), expected)
    for leaf, stays in zip(
        jax.tree.leaves(scores),
        jax.tree.leaves(pruning.parameter_mask(scores, 0.5, per_layer=True)),
        strict=True,
    ):
        np.testing.assert_array_equal(stays, leaf >= np.sort(leaf.ravel())[leaf.size // 2])


def test_masked_parameters_have_no_gradient_and_are_a_subset():
    mask = pruning.parameter_mask(jax.tree.map(jnp.square, MLP), 0.5)
    data = (random(9, 5), random(9, 3))

    @jax.jit
    def loss(params):
        f = jax.vmap(mlp_fn, (0, None))(data[0], pruning.masked(params, mask))
        return jnp.mean((f - data[1]) ** 2)

    slopes = flat(jax.grad(loss)(MLP))
    assert (slopes[~flat(mask)] == 0).all()
    options = {"loss_fn": "mse", "curv_type": "diagonal", "subset": mask}
    posterior_fn, _ = laplax.laplace(mlp_fn, pruning.masked(MLP, mask), data, **options)
    np.testing.assert_array_equal(
        flat(posterior_fn({"prior_prec": 1.0}).variance()) > 0, flat(mask)
    )


def test_a_loop_of_pruning_gets_smaller_networks_that_the_model_takes():
    model_fn, params, _, _ = NETWORKS["mlp"]
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    data = (random(9, 5, dtype=jnp.float32), random(9, 3, dtype=jnp.float32))
    units = units_of("mlp")
    sizes = [units.num_parameters()]
    for _ in range(2):
        options = {"loss_fn": "mse", "curv_type": "diagonal"}
        posterior_fn, _ = laplax.laplace(model_fn, params, data, **options)
        posterior = posterior_fn({"prior_prec": 1.0})
        params, mask, units, kept = pruning.prune(posterior, 0.3, units, outgoing=True)
        masked = pruning.masked(posterior.mean, mask)
        run = jax.vmap(model_fn, (0, None))
        expected = run(data[0], masked)
        np.testing.assert_allclose(run(data[0], params), expected, rtol=1e-5, atol=1e-5)
        assert expected.dtype == jnp.float32
        assert {n: k.sum() for n, k in kept.items()} == units.num_units
        sizes.append(units.num_parameters())
    assert sizes[1] <= 0.7 * sizes[0]
    assert sizes[2] <= 0.7 * sizes[1]


# -- bad input ------------------------------------------------------------------------------------
def all_of(units, **changes):
    return {**units.all_kept, **changes}


BAD = {
    "percent": (lambda u: pruning.kept_units(ramp(u), u, 80), "write sparsity=0.8"),
    "one": (lambda u: pruning.parameter_mask(MLP, 1.0), "at least 0 and below 1"),
    "text": (lambda u: pruning.parameter_mask(MLP, "0.5"), "sparsity must be a number"),
    "NaN": (lambda u: pruning.parameter_mask({"a": np.full(3, np.nan)}, 0.5), "scores hold NaN"),
    "no posterior": (lambda u: pruning.parameter_scores(MLP), r"posterior_fn\(prior_arguments\)"),
    "another tree": (lambda u: pruning.unit_scores({"a": 1}, u), "scores must be a pytree like"),
    "shrunk twice": (
        lambda u: pruning.shrink(pruning.shrink(MLP, u, some_kept(u)), u, some_kept(u)),
        r"shape \(\d,\) at 'fc1/b'.*units.after\(kept\)",
    ),
    "scores of one layer": (lambda u: pruning.kept_units({}, u, 0.5), "an entry 'fc1/w'"),
    "wrong shape": (
        lambda u: pruning.kept_units({**ramp(u), "fc2/w": np.ones(2)}, u, 0.5),
        r"scores\['fc2/w'\] must be an array of shape \(6,\)",
    ),
    "none kept": (
        lambda u: pruning.shrink(MLP, u, all_of(u, **{"fc2/w": np.zeros(6, bool)})),
        "keeps none of its 6 units.*Keep at least one",
    ),
    "numbers kept": (
        lambda u: pruning.unit_mask(u, all_of(u, **{"fc2/w": np.arange(6)})),
        r"must be a boolean array of shape \(6,\)",
    ),
    "unknown group": (lambda u: u.num_parameters({"fc3/w": np.ones(2, bool)}), "'fc3/w' that"),
    "no dict": (lambda u: pruning.shrink(MLP, u, np.ones(6, bool)), "kept must be a dict"),
    "mask of another tree": (lambda u: pruning.masked(MLP, {"a": True}), "mask must be a pytree"),
    "mask of numbers": (lambda u: pruning.masked(MLP, 1), "mask at 'fc1/b' must be True, False"),
    "traced": (
        lambda u: jax.jit(lambda k: pruning.shrink(MLP, u, {"fc1/w": k}))(jnp.ones(8, bool)),
        "must be known",
    ),
    "outgoing weights": (lambda u: pruning.prune(POSTERIOR, 0.5, outgoing=True), "is for units"),
}
POSTERIOR = laplax.posterior.Posterior(MLP, None, None)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_the_cure(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError, KeyError), match=re.compile(message, re.S)):
        call(units_of("mlp"))


def test_a_group_is_found_by_its_name():
    units = units_of("mlp")
    assert units["fc1/w"].num_units == 8
    with pytest.raises(KeyError, match="did you mean 'fc1/w'"):
        units["fc1"]
