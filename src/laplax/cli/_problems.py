"""The problems of the demonstration. Nothing is fetched."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..shifts import rotation

STEPS = 2000
LEARNING_RATE = 1e-2
DIGITS = Path(__file__).with_name("data") / "digits.npz"  # see README.md beside it
UNSEEN = (8, 9)  # digits that the network never sees
DEGREES = 15.0
NOISE = 0.25  # of the range of a pixel
Data = dict[str, jax.Array]
Layers = list[dict[str, jax.Array]]


def sinusoid(seed: int) -> dict[str, Any]:
    """A noisy sinusoid with a gap in the middle; the network has seen nothing there."""
    rng = np.random.default_rng(seed)

    def observe(x: np.ndarray) -> Data:
        y = np.sin(2.5 * np.pi * x) + 0.15 * rng.normal(size=x.shape)
        return {"input": _float(x), "target": _float(y)}

    def beside(n: int) -> np.ndarray:
        return rng.uniform(0.4, 1.6, (n, 1)) * np.where(np.arange(n) < n // 2, -1, 1)[:, None]

    train = observe(beside(80))
    return {
        "model_fn": model_fn,
        "params": fit_map(init_params(seed, (1, 32, 1)), train, optax.squared_error, 1e-4),
        "train": train,
        "calibration": observe(beside(100)),
        "test": observe(beside(200)),
        "shifted": {"the gap": observe(rng.uniform(-0.4, 0.4, (200, 1)))},
        "loss_fn": "mse",
        "title": "Regression: a sinusoid with a gap",
    }


def digits(seed: int) -> dict[str, Any]:
    """Handwritten digits from 0 to 7: as they are, turned, noisy. Foreign: 8 and 9, negatives."""
    rng = np.random.default_rng(seed)
    with np.load(DIGITS) as file:
        images = file["images"] / 16
        labels = file["labels"].astype(np.int32)
    unseen = np.isin(labels, UNSEEN)
    order = rng.permutation(np.flatnonzero(~unseen))
    train, calibration, test = np.split(order, [200, 500])

    def part(images: np.ndarray, chosen: np.ndarray) -> Data:
        flat = _float(images.reshape(-1, 64)[chosen])
        return {"input": flat, "target": jnp.asarray(labels[chosen])}

    turned = np.asarray(rotation(images, DEGREES))
    noisy = images + NOISE * rng.normal(size=images.shape)
    seen = part(images, train)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return {
        "model_fn": relu_fn,
        "params": fit_map(init_params(seed, (64, 32, 8)), seen, cross_entropy, 1e-6, relu_fn),
        "train": seen,
        "calibration": part(images, calibration),
        "test": part(images, test),
        "shifted": {
            f"digits turned by {DEGREES:.0f} degrees": part(turned, test),
            f"digits with {NOISE:.0%} noise": part(noisy, test),
        },
        "ood": {
            "unseen digits (8, 9)": part(images, np.flatnonzero(unseen))["input"],
            "negatives": part(1 - images, test)["input"],
        },
        "loss_fn": "cross_entropy",
        "title": "Classification: handwritten digits",
    }


def model_fn(input: jax.Array, params: Layers) -> jax.Array:
    """A tanh network."""
    for layer in params[:-1]:
        input = jnp.tanh(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


def relu_fn(input: jax.Array, params: Layers) -> jax.Array:
    """A ReLU network."""
    for layer in params[:-1]:
        input = jax.nn.relu(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


def init_params(seed: int, widths: tuple[int, ...]) -> Layers:
    """Weights of the usual size, drawn by the seed."""
    rng = np.random.default_rng(seed)
    return [
        {"w": _float(rng.normal(size=shape) / np.sqrt(shape[0])), "b": jnp.zeros(shape[1])}
        for shape in itertools.pairwise(widths)
    ]


def fit_map(
    params: Layers,
    data: Data,
    loss_fn: Callable[..., jax.Array],
    decay: float,
    network: Callable[..., jax.Array] = model_fn,
) -> Layers:
    """Adam on all of the data; `decay` times the squared weights is added to the mean loss."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    def loss(params: Layers) -> jax.Array:
        squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))
        return loss_fn(network(data["input"], params), data["target"]).mean() + decay * squares

    def step(carry: tuple[Layers, Any], _: None) -> tuple[tuple[Layers, Any], None]:
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=STEPS)[0][0]


def _float(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, float)
