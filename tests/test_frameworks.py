"""One network in several frameworks: the library must see the same network every time."""

import collections
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import laplax
from cases import random

pytestmark = pytest.mark.usefixtures("quick_compilation")

LABELS = jnp.asarray([0, 1, 2, 2, 0, 1])
EPSILON = 1e-5  # the default differs between frameworks


def weights_of(shapes):
    """A tree of shapes, filled with numbers of a sensible size."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    return jax.tree.unflatten(treedef, [0.5 * random(*s, seed=i) for i, s in enumerate(leaves)])


def affine(*kernel, bias=None):
    return {"kernel": kernel, "bias": kernel[-1:] if bias is None else bias}


# Weights as flax lays them out. The bare functions take the same tree.
CNN = weights_of({"conv1": affine(3, 3, 2, 3), "conv2": affine(3, 3, 3, 4), "head": affine(16, 3)})
TRANSFORMER = weights_of(
    {
        "embed": {"embedding": (7, 4)},
        "norm": {"scale": (4,), "bias": (4,)},
        "attention": {
            **{name: affine(4, 2, 2, bias=(2, 2)) for name in ("query", "key", "value")},
            "out": affine(2, 2, 4),
        },
        "up": affine(4, 6),
        "down": affine(6, 4),
        "head": affine(4, 3),
    }
)
RESNET = weights_of(
    {
        "stem": {"kernel": (3, 3, 1, 3)},
        "norm1": {"scale": (3,), "bias": (3,)},
        "conv": {"kernel": (3, 3, 3, 3)},
        "norm2": {"scale": (3,), "bias": (3,)},
        "head": affine(3, 3),
    }
)
STATISTICS = {
    name: {"mean": 0.2 * random(3, seed=20 + i), "var": jnp.exp(random(3, seed=30 + i))}
    for i, name in enumerate(("norm1", "norm2"))
}


# Bare functions.


def convolve(x, kernel, strides=1, padding="SAME"):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x[None], kernel, (strides, strides), padding, dimension_numbers=numbers
    )[0]


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def bare_cnn(input, params):
    one, two = params["conv1"], params["conv2"]
    h = jax.nn.relu(convolve(input, one["kernel"], 2) + one["bias"])
    h = jnp.tanh(convolve(h, two["kernel"], 1, "VALID") + two["bias"])
    return dense(h.reshape(-1), params["head"])


def layer_norm(x, layer):
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return centred / deviation * layer["scale"] + layer["bias"]


def mix(query, key, value, **options):
    scores = jnp.einsum("thk,shk->hts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("hts,shk->thk", jax.nn.softmax(scores, axis=-1), value)


def attend(x, layers):
    q, k, v = (
        jnp.einsum("td,dhk->thk", x, layers[name]["kernel"]) + layers[name]["bias"]
        for name in ("query", "key", "value")
    )
    out = layers["out"]
    return jnp.einsum("thk,hkd->td", mix(q, k, v), out["kernel"]) + out["bias"]


def bare_transformer(input, params):
    h = params["embed"]["embedding"][input]
    h = h + attend(layer_norm(h, params["norm"]), params["attention"])
    h = h + dense(jax.nn.gelu(dense(h, params["up"])), params["down"])
    return dense(h.mean(0), params["head"])


def batch_norm(x, layer, statistics):
    deviation = jnp.sqrt(statistics["var"] + EPSILON)
    return (x - statistics["mean"]) / deviation * layer["scale"] + layer["bias"]


def bare_resnet(input, params):
    h = convolve(input, params["stem"]["kernel"], 2)
    h = jax.nn.relu(batch_norm(h, params["norm1"], STATISTICS["norm1"]))
    branch = convolve(h, params["conv"]["kernel"])
    h = h + batch_norm(branch, params["norm2"], STATISTICS["norm2"])
    return dense(jax.nn.relu(h).mean((0, 1)), params["head"])


def flax_fn(model_fn):
    """Norms of flax promote float32 with the type of their input, here to float64."""
    return jax.numpy_dtype_promotion("standard")(model_fn)


# flax linen.


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(3, (3, 3), 2, name="conv1")(x))
        x = jnp.tanh(nn.Conv(4, (3, 3), padding="VALID", name="conv2")(x))
        return nn.Dense(3, name="head")(x.reshape(-1))


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 4, name="embed")(x)
        h = nn.LayerNorm(epsilon=EPSILON, name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(h)
        x = x + nn.Dense(4, name="down")(nn.gelu(nn.Dense(6, name="up")(x)))
        return nn.Dense(3, name="head")(x.mean(0))


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=True, epsilon=EPSILON)
        x = nn.Conv(3, (3, 3), 2, use_bias=False, name="stem")(x)
        x = nn.relu(norm(name="norm1")(x))
        h = nn.Conv(3, (3, 3), use_bias=False, name="conv")(x)
        x = nn.relu(x + norm(name="norm2")(h))
        return nn.Dense(3, name="head")(x.mean((0, 1)))


def linen(module, params, **state):
    """Parameters are an argument, everything else is closed over."""
    return flax_fn(lambda input, params: module.apply({"params": params, **state}, input)), params


# flax nnx.


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(2, 3, (3, 3), 2, rngs=rngs)
        self.conv2 = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.conv2(nnx.relu(self.conv1(x)))).reshape(-1))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(4, epsilon=EPSILON, rngs=rngs)
        # Its own default has the softmax in float32.
        self.attention = nnx.MultiHeadAttention(2, 4, attention_fn=mix, decode=False, rngs=rngs)
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.down = nnx.Linear(6, 4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm(x))
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.head(x.mean(0))


class NnxResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(1, 3, (3, 3), 2, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(3, epsilon=EPSILON, rngs=rngs)
        self.conv = nnx.Conv(3, 3, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(3, epsilon=EPSILON, rngs=rngs)
        self.head = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.stem(x)))
        return self.head(nnx.relu(x + self.norm2(self.conv(x))).mean((0, 1)))


def nnx_split(make, weights, statistics=None):
    """Parameters as the `State` of `nnx.split`; the function takes it, or a plain dictionary."""
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    module.eval()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    nnx.replace_by_pure_dict(params, weights)
    nnx.replace_by_pure_dict(rest, statistics or {})
    return flax_fn(lambda input, params: nnx.merge(graph, params, rest)(input)), params


# equinox: channels first, outputs before inputs, one vector at a time.


def shell(make, *args, **options):
    """A layer without numbers: ours go into it."""
    return eqx.filter_eval_shape(make, *args, key=jax.random.key(0), **options)


def filled(layer, weight, bias):
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))


def eqx_linear(layer, inputs):
    matrix = layer["kernel"].reshape(inputs, -1)
    return filled(shell(eqx.nn.Linear, *matrix.shape), matrix.T, layer["bias"].reshape(-1))


def eqx_conv(layer, **options):
    inputs, outputs = layer["kernel"].shape[2:]
    empty = shell(eqx.nn.Conv2d, inputs, outputs, 3, **options)
    return filled(empty, layer["kernel"].transpose(3, 2, 0, 1), layer["bias"][:, None, None])


class EquinoxCNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, weights):
        self.conv1 = eqx_conv(weights["conv1"], stride=2, padding="SAME")
        self.conv2 = eqx_conv(weights["conv2"])
        self.head = eqx_linear(weights["head"], 16)

    def __call__(self, x):
        x = jax.nn.relu(self.conv1(x.transpose(2, 0, 1)))
        return self.head(jnp.tanh(self.conv2(x)).transpose(1, 2, 0).reshape(-1))


class EquinoxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, weights):
        self.embed = eqx.nn.Embedding(weight=weights["embed"]["embedding"])
        empty = eqx.nn.LayerNorm(4, eps=EPSILON)
        self.norm = filled(empty, weights["norm"]["scale"], weights["norm"]["bias"])
        names = ("query", "key", "value", "output")
        biases = {f"use_{name}_bias": True for name in names}
        self.attention = eqx.tree_at(
            lambda m: [getattr(m, f"{name}_proj") for name in names],
            shell(eqx.nn.MultiheadAttention, 2, 4, **biases),
            [
                eqx_linear(weights["attention"][name], 4)
                for name in ("query", "key", "value", "out")
            ],
        )
        self.up, self.down = eqx_linear(weights["up"], 4), eqx_linear(weights["down"], 6)
        self.head = eqx_linear(weights["head"], 4)

    def __call__(self, x):
        x = jax.vmap(self.embed)(x)
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        x = x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
        return self.head(x.mean(0))


def equinox(module):
    params, static = eqx.partition(module, eqx.is_array)
    return lambda input, params: eqx.combine(params, static)(input), params


# Every network in every framework: (model_fn, params).
NETWORKS = {
    "cnn": {
        "bare": (bare_cnn, CNN),
        "linen": linen(LinenCNN(), CNN),
        "nnx": nnx_split(NnxCNN, CNN),
        "equinox": equinox(EquinoxCNN(CNN)),
    },
    "transformer": {
        "bare": (bare_transformer, TRANSFORMER),
        "linen": linen(LinenTransformer(), TRANSFORMER),
        "nnx": (nnx_split(NnxTransformer, TRANSFORMER)[0], TRANSFORMER),
        "equinox": equinox(EquinoxTransformer(TRANSFORMER)),
    },
    "resnet": {
        "bare": (bare_resnet, RESNET),
        "linen": linen(LinenResNet(), RESNET, batch_stats=STATISTICS),
        "nnx": nnx_split(NnxResNet, RESNET, STATISTICS),
    },
}
INPUTS = {
    "cnn": random(6, 8, 8, 2, seed=40),
    "transformer": jnp.asarray(np.random.default_rng(41).integers(0, 7, (6, 4))),
    "resnet": random(6, 6, 6, 1, seed=42),
}
FITS = {
    **{name: {"curv_type": name} for name in ("diagonal", "kfac", "ekfac", "full")},
    "last_layer": {"curv_type": "full", "subset": "last_layer"},
}
# Fits that report how each leaf is kept, and the ways that are no fallback.
TAPPED = {
    "diagonal": ("taps",),
    "kfac": ("Kronecker", "exact dense block"),
    "ekfac": ("Kronecker", "exact dense block"),
}


def fit(network, framework, **options):
    model_fn, params = NETWORKS[network][framework]
    data = (INPUTS[network], LABELS)
    return laplax.laplace(model_fn, params, data, loss_fn="cross_entropy", **options)


@functools.cache
def results(network, framework, name):
    """log p(D), the variance of the outputs, and how many leaves of each size are kept how."""
    model_fn, params = NETWORKS[network][framework]
    posterior_fn, estimate = fit(network, framework, **FITS[name])
    x, arguments = INPUTS[network], {"prior_prec": 0.7}
    evidence = laplax.log_marginal_likelihood(
        posterior_fn, arguments, model_fn, params, (x, LABELS)
    )
    prediction = laplax.predictive(posterior_fn, model_fn)(arguments)(x, ["pred_var"])
    kept = collections.Counter()
    if name in TAPPED:
        leaves = zip(estimate.coverage.rows, jax.tree.leaves(params), strict=True)
        kept.update((how, leaf.size) for (_, how, _), leaf in leaves)
    return evidence, prediction.pred_var, kept


def instances(names):
    """Each network in each framework but the reference, under each of these fits."""
    return [
        (*case, name)
        for case in ((n, f) for n in ("cnn", "transformer") for f in NETWORKS[n] if f != "bare")
        for name in names
    ]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_networks_are_the_same_function(network):
    outputs = [
        jax.jit(jax.vmap(model_fn, (0, None)))(INPUTS[network], params)
        for model_fn, params in NETWORKS[network].values()
    ]
    for output in outputs:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("network", "framework", "name"), instances(FITS))
def test_evidence_and_predictive_variance_do_not_depend_on_the_framework(network, framework, name):
    evidence, variance, _ = results(network, framework, name)
    expected_evidence, expected_variance, _ = results(network, "bare", name)
    np.testing.assert_allclose(evidence, expected_evidence, rtol=1e-9)
    np.testing.assert_allclose(variance, expected_variance, rtol=1e-9)


@pytest.mark.parametrize(("network", "framework", "name"), instances(TAPPED))
def test_layers_are_grouped_alike_and_taps_reach_every_leaf(network, framework, name):
    kept = results(network, framework, name)[2]
    assert kept == results(network, "bare", name)[2]
    assert all(how.startswith(TAPPED[name]) for how, _ in kept)


@functools.partial(jax.jit, static_argnums=0)
def ggn(model_fn, params, x):
    """J^T H J, the Jacobian taken as a whole and H that of the cross-entropy."""
    theta, unravel = jax.flatten_util.ravel_pytree(params)
    p = jax.nn.softmax(jax.vmap(model_fn, (0, None))(x, params))
    H = jax.vmap(jnp.diag)(p) - jnp.einsum("nc,nd->ncd", p, p)
    J = jax.vmap(jax.jacrev(lambda t, x: model_fn(x, unravel(t))), (None, 0))(theta, x)
    return jnp.einsum("ncp,ncd,ndq->pq", J, H, J)


@pytest.mark.parametrize("framework", NETWORKS["resnet"])
def test_curvature_under_batch_norm_equals_a_dense_reference(framework):
    """Batch statistics are no parameters: they are closed over, and count nowhere."""
    model_fn, params = NETWORKS["resnet"][framework]
    expected = ggn(model_fn, params, INPUTS["resnet"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    estimates = {
        name: fit("resnet", framework, curv_type=name)[1]
        for name in ("full", "diagonal", "block_diagonal")
    }
    close(estimates["full"].to_dense(), expected)
    close(estimates["diagonal"].diagonal(), jnp.diagonal(expected))
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(RESNET))
    same_leaf = np.equal.outer(*[np.repeat(np.arange(len(sizes)), sizes)] * 2)
    close(estimates["block_diagonal"].to_dense(), jnp.where(same_leaf, expected, 0.0))
    assert all(how.startswith("taps") for _, how, _ in estimates["diagonal"].coverage.rows)
