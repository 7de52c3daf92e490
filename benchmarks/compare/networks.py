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


NETWORKS = {"mlp": mlp, "cnn": cnn}
