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
    kind: str  # "mlp", "cnn", "resnet" or "transformer"
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


def _convolutions(rng, channels):
    return [
        (
            (rng.standard_normal((3, 3, a, b)) / (9 * a) ** 0.5).astype(np.float32),
            np.zeros(b, np.float32),
        )
        for a, b in channels
    ]


def _resnet(rng):
    """ResNet-20 for 32 x 32 images, batch norms folded into the convolutions."""
    stages = [(16, 16)] * 6 + [(16, 32)] + [(32, 32)] * 5 + [(32, 64)] + [(64, 64)] * 5
    return _convolutions(rng, [(3, 16), *stages]) + _dense(rng, 64, CLASSES)


VOCABULARY, LENGTH, WIDTH = 200, 16, 64


def _transformer(rng):
    """Two blocks; the first pair is the table of tokens and that of places."""
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    places = rng.standard_normal((LENGTH, WIDTH)).astype(np.float32)
    block = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    return [(table, places)] + [_dense(rng, *s)[0] for s in block * 2] + _dense(rng, WIDTH, CLASSES)


def make(name, count=None):
    """Problem (a) to (f); `count` examples instead of its own number."""
    rng = np.random.default_rng(ord(name))
    if name in "ab":
        sizes, own = {"a": ((1, 50, 50, 1), 150), "b": ((8, 50, 1), 10_000)}[name]
        weights = _dense(rng, *sizes)
        x, y = _regression(rng, weights, sizes[0], count or own)
        new = _regression(rng, weights, sizes[0], 1000)
        return Problem(name, "mlp", "mse", weights, x, y, *new)
    if name == "c":
        weights, shape, own, kind = _dense(rng, 784, 256, 128, CLASSES), (784,), 6000, "mlp"
    elif name == "d":
        weights = _convolutions(rng, itertools.pairwise((3, 16, 32, 64)))
        weights += _dense(rng, 4 * 4 * 64, CLASSES)
        shape, own, kind = (32, 32, 3), 2000, "cnn"
    elif name == "e":
        weights, shape, own, kind = _resnet(rng), (32, 32, 3), 500, "resnet"
    else:
        weights, kind = _transformer(rng), "transformer"
        x, x_new = (rng.integers(0, VOCABULARY, (n, LENGTH)) for n in (count or 1000, 1000))
        y, y_new = (rng.integers(0, CLASSES, len(tokens)) for tokens in (x, x_new))
        return Problem(name, kind, "cross_entropy", weights, x, y, x_new, y_new)
    x, y = _labelled(rng, shape, count or own)
    return Problem(name, kind, "cross_entropy", weights, x, y, *_labelled(rng, shape, 1000))
