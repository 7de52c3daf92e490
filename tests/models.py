"""Small networks that use parameters in every way taps must follow."""

import jax
import jax.numpy as jnp
import numpy as np

from cases import random

LAYOUT = ("NHWC", "HWIO", "NHWC")


def dense(input, params):
    hidden = jnp.tanh(input @ params["w1"] + params["b1"])
    return params["w2"] @ hidden - params["b2"]


def convolution(input, params):
    x = jax.lax.conv_general_dilated(
        input[None], params["k1"], (2, 1), "SAME", dimension_numbers=LAYOUT
    )
    x = jax.nn.relu((x - 0.1) * (params["s"] / 1.3) + params["b"])
    x = jax.lax.conv_general_dilated(
        x,
        params["k2"],
        (1, 1),
        [(1, 0), (0, 2)],
        rhs_dilation=(2, 1),
        lhs_dilation=(1, 2),
        dimension_numbers=LAYOUT,
        feature_group_count=2,
    )
    return jnp.tanh(x).mean((1, 2))[0] @ params["w"] + params["c"]


def channels_first(input, params):
    x = jax.lax.conv_general_dilated(input[None], params["k"], (1, 2), [(1, 1), (0, 0)])
    return jnp.sin(x).sum((2, 3))[0]


def transformer(input, params):
    h = params["embedding"][input]
    centred = h - h.mean(-1, keepdims=True)
    h2 = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    h2 = h2 * params["gain"] + params["shift"]
    q, k, v = (jnp.einsum("td,dhk->thk", h2, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k), axis=-1)
    mixed = jnp.einsum("hts,shk->thk", weights, v)
    h = h + jnp.einsum("thk,hkd->td", mixed, params["o"])
    return h @ params["embedding"].T  # tied to the input


def scanned(input, params):
    def layer(h, weights):
        return jnp.tanh(h @ weights["w"] + weights["b"] + 0.1 * params["shared"] @ h), h.sum()

    h, _ = jax.lax.scan(layer, input, params["layers"])
    return h * jnp.exp(params["log_scale"])  # no tap follows an exponential


def rematerialised(input, params):
    layer = jax.checkpoint(lambda x, w: jax.nn.silu(w @ x))
    return layer(layer(input, params["w"]), params["w"])[:2] - params["b"]


def nested_calls(input, params):
    @jax.jit
    def inner(x, w):
        return jax.nn.relu(x @ w.T.reshape(3, 4))

    return inner(input, params["w"].astype(jnp.float64)) * params["s"]


def unused(input, params):
    return input @ params["w"]


def embedded(input, params):
    tokens = params["tokens"][input]  # an example reads a row twice
    tokens = tokens + jax.vmap(lambda i: params["one by one"][i])(input)
    there = jnp.arange(5) + jnp.where(input > 3, 2, 0)  # some lie beyond the table
    places = jnp.take(params["places"], there, axis=0, mode="fill", fill_value=0.5)
    return (jnp.tanh(tokens + places) @ params["w"]).sum(0)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 7, (4, 5)))
LABELS = jnp.asarray([0, 1, 2, 0, 1])

# name: (model, params, (input, target), loss_fn)
MODELS = {
    "dense": (
        dense,
        {"w1": random(3, 4), "b1": random(4), "w2": random(2, 4, seed=1), "b2": random(2)},
        (random(6, 3, seed=2), random(6, 2, seed=3)),
        "mse",
    ),
    "convolution": (
        convolution,
        {
            "k1": random(3, 3, 2, 4),
            "s": random(4, seed=1),
            "b": random(4, seed=2),
            "k2": random(2, 3, 2, 6, seed=3),
            "w": random(6, 3, seed=4),
            "c": random(3, seed=5),
        },
        (random(5, 8, 6, 2, seed=6), LABELS),
        "cross_entropy",
    ),
    "channels first": (
        channels_first,
        {"k": random(3, 2, 3, 2)},
        (random(5, 2, 5, 6, seed=6), LABELS),
        "cross_entropy",
    ),
    "transformer": (
        transformer,
        {
            "embedding": random(7, 4),
            "gain": random(4, seed=1),
            "shift": random(4, seed=2),
            "q": random(4, 2, 3, seed=3),
            "k": random(4, 2, 3, seed=4),
            "v": random(4, 2, 3, seed=5),
            "o": random(2, 3, 4, seed=6),
        },
        (TOKENS, (TOKENS + 1) % 7),
        "cross_entropy",
    ),
    "embedded": (
        embedded,
        {
            "tokens": random(7, 3),
            "one by one": random(7, 3, seed=5),
            "places": random(5, 3, seed=1),
            "w": random(3, 2, seed=2),
        },
        (TOKENS, random(4, 2, seed=4)),
        "mse",
    ),
    "scanned": (
        scanned,
        {
            "layers": {"w": random(3, 4, 4), "b": random(3, 4)},
            "shared": random(4, 4, seed=3),
            "log_scale": random(4, seed=9),
        },
        (random(6, 4, seed=5), random(6, 4, seed=7)),
        "mse",
    ),
    "rematerialised": (
        rematerialised,
        {"w": random(4, 4), "b": random(2)},
        (random(6, 4, seed=5), random(6, 2, seed=7)),
        "mse",
    ),
    "nested calls": (
        nested_calls,
        {"w": random(4, 3), "s": random(4, seed=1)},
        (random(6, 3, seed=5), random(6, 4, seed=7)),
        "mse",
    ),
    "unused": (
        unused,
        {"w": random(3, 2), "nothing": random(5)},
        (random(6, 3, seed=5), random(6, 2, seed=7)),
        "mse",
    ),
}
