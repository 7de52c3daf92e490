"""CIFAR-10 from one file, a three-layer convolutional network, and its training."""

import pathlib
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import progress_bar

KEYS = ("x_train", "y_train", "x_test", "y_test")
FORMAT = (
    "an .npz file with x_train (n, 32, 32, 3) and x_test, images of bytes (uint8), and "
    "y_train (n,) and y_test, labels from 0 to 9"
)
PIXEL_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
PIXEL_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)
CHANNELS = (16, 32, 64)
NUM_CLASSES = 10

Data = dict[str, jax.Array]
PyTree = Any


# -- data -----------------------------------------------------------------------------------------
def load(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The four arrays, checked: a message that says what is wrong, before any work."""
    if not path.is_file():
        raise FileNotFoundError(f"--data {path}: there is no such file; it must be {FORMAT}")
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name in KEYS}
    except (ValueError, zipfile.BadZipFile, AttributeError, TypeError):
        raise ValueError(f"--data {path}: not an .npz file; it must be {FORMAT}") from None
    missing = [name for name in KEYS if name not in arrays]
    if missing:
        raise ValueError(f"--data {path}: there is no array {missing[0]!r} in it; needed: {FORMAT}")
    for part in ("train", "test"):
        _check(path, part, arrays[f"x_{part}"], arrays[f"y_{part}"])
    return arrays


def _check(path: pathlib.Path, part: str, x: np.ndarray, y: np.ndarray) -> None:
    where = f"--data {path}:"
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"{where} x_{part} must be uint8 images of shape (n, 32, 32, 3); "
            f"it is {x.dtype} {x.shape}"
        )
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise ValueError(
            f"{where} y_{part} must be {len(x)} whole numbers, one for each image; "
            f"it is {y.dtype} {y.shape}"
        )
    if len(y) == 0 or y.min() < 0 or y.max() >= NUM_CLASSES:
        raise ValueError(f"{where} y_{part} must hold labels from 0 to {NUM_CLASSES - 1}")


def split(arrays: dict[str, np.ndarray], num_valid: int, seed: int) -> tuple[Data, Data, Data]:
    """Training, validation (drawn at random from the training images) and test data."""
    order = np.random.default_rng(seed).permutation(len(arrays["y_train"]))
    x, y = arrays["x_train"], arrays["y_train"]
    train, valid = order[num_valid:], order[:num_valid]
    return (
        as_data(x[train], y[train]),
        as_data(x[valid], y[valid]),
        as_data(arrays["x_test"], arrays["y_test"]),
    )


def as_data(x: np.ndarray, y: np.ndarray) -> Data:
    """What `laplace` takes."""
    return {"input": jnp.asarray(x), "target": jnp.asarray(y.astype(np.int32))}


# -- the network ----------------------------------------------------------------------------------
def init_params(seed: int) -> PyTree:
    """He-normal weights, zero biases, float32."""
    sizes = (3, *CHANNELS)
    shapes: dict[str, tuple[int, ...]] = {
        f"conv_{i}": (3, 3, sizes[i], sizes[i + 1]) for i in range(len(CHANNELS))
    }
    shapes["last"] = (4 * CHANNELS[-1], NUM_CLASSES)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: {
            "w": jax.random.normal(key, shape, jnp.float32) * float(2 / np.prod(shape[:-1])) ** 0.5,
            "b": jnp.zeros(shape[-1], jnp.float32),
        }
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def model_fn(input: jax.Array, params: PyTree) -> jax.Array:
    """Logits of one image of bytes: three strided 3 x 3 convolutions, a 2 x 2 mean, one layer."""
    x = (input.astype(jnp.float32) / 255 - PIXEL_MEAN) / PIXEL_STD
    for i in range(len(CHANNELS)):
        layer = params[f"conv_{i}"]
        x = jax.lax.conv_general_dilated(
            x[None], layer["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )[0]
        x = jax.nn.relu(x + layer["b"])
    x = x.reshape(2, 2, 2, 2, -1).mean(axis=(1, 3)).reshape(-1)
    return x @ params["last"]["w"] + params["last"]["b"]


# -- training -------------------------------------------------------------------------------------
def train(
    params: PyTree,
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    progress: bool | None,
) -> PyTree:
    """Adam with a cosine decay on the mean cross entropy; no penalty, no augmentation."""
    count = len(data["target"])
    batch_size = min(batch_size, count)
    per_epoch = count // batch_size
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, epochs * per_epoch))

    @jax.jit
    def step(params: PyTree, state: Any, x: jax.Array, y: jax.Array) -> tuple[PyTree, Any]:
        def loss(params: PyTree) -> jax.Array:
            logits = jax.vmap(model_fn, in_axes=(0, None))(x, params)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(seed)
    images, labels = np.asarray(data["input"]), np.asarray(data["target"])
    # XLA's CPU backend runs convolutions far slower inside a loop: Python drives the steps.
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        state = optimizer.init(params)
        for _ in progress_bar(range(epochs), epochs, "training, epochs", progress):
            order = rng.permutation(count)[: per_epoch * batch_size].reshape(per_epoch, -1)
            for index in order:
                params, state = step(params, state, images[index], labels[index])
    return params
