"""The same weights and data for every library. NumPy alone, so that every environment has it.

Weights are random with the scale of a usual initialisation: what is measured does not depend on
training. Layers are stored as JAX writes them: dense (in, out), convolutions (height, width, in,
out), images (height, width, channels).
"""

import dataclasses
import itertools

import numpy as np

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Problem:
    """`kind` says which network the workers build around `weights`."""

    name: str
    kind: str  # "mlp" or "cnn"
    loss: str  # "mse" or "cross_entropy"
    weights: list[tuple[np.ndarray, np.ndarray]]
    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray  # 1,000 inputs for predictions
    y_new: np.ndarray


def _dense(rng, *sizes):
    return [
        (
            (rng.standard_normal((a, b)) / a**0.5).astype(np.float32),
            (0.1 * rng.standard_normal(b)).astype(np.float32),
        )
        for a, b in itertools.pairwise(sizes)
    ]


def _regression(rng, weights, inputs, count):
    x = rng.uniform(-1, 1, (count, inputs)).astype(np.float32)
    y = np.sin(3 * x.sum(axis=1, keepdims=True)) + 0.2 * rng.standard_normal((count, 1))
    return x, y.astype(np.float32)


def _labelled(rng, shape, count):
    x = rng.standard_normal((count, *shape)).astype(np.float32)
    return x, rng.integers(0, CLASSES, count)


def make(name, count=None):
    """Problem (a), (b), (c) or (d); `count` examples instead of its own number."""
    rng = np.random.default_rng(ord(name))
    if name in "ab":
        sizes, own = {"a": ((1, 50, 50, 1), 150), "b": ((8, 50, 1), 10_000)}[name]
        weights = _dense(rng, *sizes)
        x, y = _regression(rng, weights, sizes[0], count or own)
        new = _regression(rng, weights, sizes[0], 1000)
        return Problem(name, "mlp", "mse", weights, x, y, *new)
    if name == "c":
        weights, shape, own, kind = _dense(rng, 784, 256, 128, CLASSES), (784,), 6000, "mlp"
    else:
        channels = (3, 16, 32, 64)
        weights = [
            (
                (rng.standard_normal((3, 3, a, b)) / (9 * a) ** 0.5).astype(np.float32),
                np.zeros(b, np.float32),
            )
            for a, b in itertools.pairwise(channels)
        ]
        weights += _dense(rng, 4 * 4 * 64, CLASSES)
        shape, own, kind = (32, 32, 3), 2000, "cnn"
    x, y = _labelled(rng, shape, count or own)
    return Problem(name, kind, "cross_entropy", weights, x, y, *_labelled(rng, shape, 1000))
