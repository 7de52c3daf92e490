"""The demonstration's two problems, generated and trained here: nothing is read or fetched."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 2000
LEARNING_RATE = 1e-2
Data = dict[str, jax.Array]
Layers = list[dict[str, jax.Array]]


def sinusoid(seed: int) -> dict[str, Any]:
    """A noisy sinusoid with a gap in the middle; the network has seen nothing there."""
    rng = np.random.default_rng(seed)

    def observe(n: int) -> Data:
        x = rng.uniform(0.4, 1.6, (n, 1)) * np.where(np.arange(n) < n // 2, -1, 1)[:, None]
        y = np.sin(1.5 * np.pi * x) + 0.15 * rng.normal(size=x.shape)
        return {"input": _float(x), "target": _float(y)}

    data = {"train": observe(80), "calibration": observe(40), "test": observe(100)}
    return {
        "model_fn": model_fn,
        "params": fit_map(init_params(seed, (1, 32, 1)), data["train"], optax.squared_error, 1e-4),
        **data,
        "loss_fn": "mse",
        "ood": _float(rng.uniform(-0.25, 0.25, (100, 1))),
        "title": "Regression: a sinusoid with a gap",
    }


def two_moons(seed: int) -> dict[str, Any]:
    """Two interleaved half circles that overlap; a network that fits them is overconfident."""
    rng = np.random.default_rng(seed)

    def observe(n: int) -> Data:
        label = np.arange(n) % 2
        turn = rng.uniform(0, np.pi, n)
        x = np.where(label, 1 - np.cos(turn), np.cos(turn))
        y = np.where(label, 0.5 - np.sin(turn), np.sin(turn))
        points = np.stack([x, y], axis=-1) + 0.3 * rng.normal(size=(n, 2))
        return {"input": _float(points), "target": jnp.asarray(label)}

    data = {"train": observe(100), "calibration": observe(80), "test": observe(300)}
    turn = rng.uniform(0, 2 * np.pi, 200)
    ring = np.stack([0.5 + 2.5 * np.cos(turn), 0.25 + 2.5 * np.sin(turn)], axis=-1)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return {
        "model_fn": model_fn,
        "params": fit_map(init_params(seed, (2, 32, 2)), data["train"], cross_entropy, 1e-5),
        **data,
        "loss_fn": "cross_entropy",
        "ood": _float(ring + 0.2 * rng.normal(size=ring.shape)),
        "title": "Classification: two moons",
        "calibration_objective": "nll",
    }


def model_fn(input: jax.Array, params: Layers) -> jax.Array:
    """A tanh network."""
    for layer in params[:-1]:
        input = jnp.tanh(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


def init_params(seed: int, widths: tuple[int, ...]) -> Layers:
    """Weights of the usual size, drawn by the seed."""
    rng = np.random.default_rng(seed)
    return [
        {"w": _float(rng.normal(size=shape) / np.sqrt(shape[0])), "b": jnp.zeros(shape[1])}
        for shape in itertools.pairwise(widths)
    ]


def fit_map(params: Layers, data: Data, loss_fn: Callable[..., jax.Array], decay: float) -> Layers:
    """Adam on all of the data; `decay` times the squared weights is added to the mean loss."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    def loss(params: Layers) -> jax.Array:
        squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))
        return loss_fn(model_fn(data["input"], params), data["target"]).mean() + decay * squares

    def step(carry: tuple[Layers, Any], _: None) -> tuple[tuple[Layers, Any], None]:
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=STEPS)[0][0]


def _float(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, float)
