"""The networks in JAX: for this library, for laplax 0.0.2 and for the floors."""

import jax
import jax.numpy as jnp


def as_params(problem):
    """Weights as a list of {"w", "b"}."""
    return [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in problem.weights]


def mlp(input, params):
    """Dense layers with tanh between them."""
    x = input
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cnn(input, params):
    """Three 3 x 3 convolutions, each followed by relu and 2 x 2 pooling, and a dense layer."""
    x = input[None]
    for layer in params[:-1]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + layer["b"])
        _, height, width, channels = x.shape
        x = x.reshape(height // 2, 2, width // 2, 2, channels).max(axis=(1, 3))[None]
    return x.reshape(-1) @ params[-1]["w"] + params[-1]["b"]


def _convolve(x, layer, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    out = jax.lax.conv_general_dilated(x, layer["w"], strides, "SAME", dimension_numbers=layout)
    return out + layer["b"]


def resnet(input, params):
    """ResNet-20; a shortcut that halves the image takes every second pixel and adds channels."""
    x = jax.nn.relu(_convolve(input[None], params[0]))
    for i in range(1, 19, 2):
        wide = params[i]["w"].shape[-1]
        stride = 1 if wide == x.shape[-1] else 2
        inner = jax.nn.relu(_convolve(x, params[i], stride))
        more = [(0, 0)] * 3 + [(0, wide - x.shape[-1])]
        x = jax.nn.relu(_convolve(inner, params[i + 1]) + jnp.pad(x[:, ::stride, ::stride], more))
    return x.mean(axis=(0, 1, 2)) @ params[-1]["w"] + params[-1]["b"]


def _normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def transformer(input, params, heads=4):
    """Blocks of attention and a dense pair; the mean over places goes to the classes."""
    x = params[0]["w"][input] + params[0]["b"]
    length, width = x.shape
    for i in range(1, len(params) - 1, 4):
        qkv, out, up, down = params[i : i + 4]
        parts = jnp.split(_normed(x) @ qkv["w"] + qkv["b"], 3, axis=-1)
        q, k, v = (part.reshape(length, heads, -1) for part in parts)
        weights = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k) / (width / heads) ** 0.5)
        mixed = jnp.einsum("hij,jhd->ihd", weights, v).reshape(length, width)
        x = x + mixed @ out["w"] + out["b"]
        hidden = jax.nn.gelu(_normed(x) @ up["w"] + up["b"])
        x = x + hidden @ down["w"] + down["b"]
    return _normed(x).mean(axis=0) @ params[-1]["w"] + params[-1]["b"]


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "transformer": transformer}


def ggn_diagonal(fn, params, x, batch=50):
    """The diagonal of the cross-entropy's GGN by whole Jacobians: plain, and slow."""

    def of_one(x):
        p = jax.nn.softmax(fn(x, params))
        jacobian = jax.jacrev(fn, argnums=1)(x, params)

        def entry(rows):
            return jnp.tensordot(p, rows**2, 1) - jnp.tensordot(p, rows, 1) ** 2

        return jax.tree.map(entry, jacobian)

    @jax.jit
    def of_batch(x):
        return jax.tree.map(lambda leaf: leaf.sum(0), jax.vmap(of_one)(x))

    total = jax.tree.map(jnp.zeros_like, params)
    for i in range(0, len(x), batch):
        total = jax.tree.map(jnp.add, total, of_batch(x[i : i + batch]))
    return total
