"""The demonstration's two problems, generated and trained here: nothing is read or fetched."""

import functools
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


def sinusoid(seed: int) -> dict[str, Any]:
    """A noisy sinusoid with a gap in the middle; the network has seen nothing there."""
    rng = np.random.default_rng(seed)

    def observe(x: np.ndarray) -> Data:
        y = np.sin(1.5 * np.pi * x) + 0.15 * rng.normal(size=x.shape)
        return {"input": _float(x), "target": _float(y)}

    def sides(n: int) -> np.ndarray:
        return rng.uniform(0.4, 1.6, (n, 1)) * np.where(np.arange(n) < n // 2, -1, 1)[:, None]

    train, calibration, test = (observe(sides(n)) for n in (80, 40, 100))
    return {
        "model_fn": model_fn,
        "params": fit_map(init_params(seed, (1, 32, 1)), train, squared_error, 1e-4),
        "train": train,
        "calibration": calibration,
        "test": test,
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

    train, calibration, test = (observe(n) for n in (100, 80, 300))
    turn = rng.uniform(0, 2 * np.pi, 200)
    ring = np.stack([0.5 + 2.5 * np.cos(turn), 0.25 + 2.5 * np.sin(turn)], axis=-1)
    return {
        "model_fn": model_fn,
        "params": fit_map(init_params(seed, (2, 32, 2)), train, cross_entropy, 1e-5),
        "train": train,
        "calibration": calibration,
        "test": test,
        "loss_fn": "cross_entropy",
        "ood": _float(ring + 0.2 * rng.normal(size=ring.shape)),
        "title": "Classification: two moons",
        "calibration_objective": "nll",
    }


def model_fn(input: jax.Array, params: Any) -> jax.Array:
    """A tanh network."""
    for layer in params[:-1]:
        input = jnp.tanh(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


def init_params(seed: int, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """Weights of the usual size, drawn by the seed."""
    rng = np.random.default_rng(seed)
    return [
        {
            "w": _float(rng.normal(size=(fan_in, fan_out)) / np.sqrt(fan_in)),
            "b": jnp.zeros(fan_out),
        }
        for fan_in, fan_out in itertools.pairwise(widths)
    ]


def squared_error(output: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(output - target))


def cross_entropy(output: jax.Array, target: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


@functools.partial(jax.jit, static_argnums=2)
def fit_map(params: Any, data: Data, loss_fn: Callable[..., jax.Array], decay: float) -> Any:
    """Adam on all of the data; `decay` times the squared weights is added to the loss."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    def loss(params: Any) -> jax.Array:
        squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))
        return loss_fn(model_fn(data["input"], params), data["target"]) + decay * squares

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=STEPS)[0][0]


def _float(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, float)
