"""Inputs under shift of a stated strength: pure functions of (input, strength, key).

A strength of 0 leaves the input as it is. Images have the shape (N, H, W) or (N, H, W, channels);
noise is for arrays of every shape.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates
from jax.typing import ArrayLike

from ._arguments import check_key
from ._enums import check_names
from ._tree import is_floating

Shift = Callable[[ArrayLike, float, jax.Array | None], jax.Array]
TAIL = 4  # standard deviations of a blur that are kept


def gaussian_noise(input: ArrayLike, strength: float, key: jax.Array | None = None) -> jax.Array:
    """Independent Gaussian noise on every entry.

    Args:
        input: Arrays of any shape, in units in which the strength has a meaning.
        strength: The standard deviation of the noise.
        key: The random key; by default `jax.random.key(0)`.
    """
    x = _floating(input)
    key = jax.random.key(0) if key is None else key
    check_key(key)
    return x + _positive(strength) * jax.random.normal(key, x.shape, x.dtype)


def rotation(input: ArrayLike, strength: float, key: jax.Array | None = None) -> jax.Array:
    """Images turned counterclockwise about their centres, bilinear; what comes in is zero.

    Args:
        input: Images (N, H, W) or (N, H, W, channels).
        strength: The angle in degrees.
        key: Not used.
    """
    del key
    x = _images(input)
    height, width = x.shape[1:3]
    angle = math.radians(strength)
    rows, columns = jnp.meshgrid(
        jnp.arange(height, dtype=x.dtype) - (height - 1) / 2,
        jnp.arange(width, dtype=x.dtype) - (width - 1) / 2,
        indexing="ij",
    )
    # Where the value of a pixel comes from: the rotation backwards, with rows counted downwards.
    source = [
        math.cos(angle) * rows + math.sin(angle) * columns + (height - 1) / 2,
        math.cos(angle) * columns - math.sin(angle) * rows + (width - 1) / 2,
    ]

    def turned(plane: jax.Array) -> jax.Array:
        return map_coordinates(plane, source, order=1)

    planes = jnp.moveaxis(x.reshape(*x.shape[:3], -1), -1, 1).reshape(-1, height, width)
    result = jax.vmap(turned)(planes).reshape(x.shape[0], -1, height, width)
    return jnp.moveaxis(result, 1, -1).reshape(x.shape)


def brightness(input: ArrayLike, strength: float, key: jax.Array | None = None) -> jax.Array:
    """Every entry larger by the same number.

    Args:
        input: Arrays of any shape.
        strength: The number that is added; a negative one makes images darker.
        key: Not used.
    """
    del key
    return _floating(input) + strength


def contrast(input: ArrayLike, strength: float, key: jax.Array | None = None) -> jax.Array:
    """Every example drawn towards its mean, `mean + (1 - strength) (x - mean)`.

    Args:
        input: Arrays whose first axis counts the examples.
        strength: The share of the contrast that is lost, up to 1.
        key: Not used.
    """
    del key
    x = _floating(input)
    if not 0 <= strength <= 1:
        raise ValueError(f"the strength of a contrast shift is from 0 to 1; got {strength}")
    mean = x.mean(axis=tuple(range(1, x.ndim)), keepdims=True)
    return mean + (1 - strength) * (x - mean)


def blur(input: ArrayLike, strength: float, key: jax.Array | None = None) -> jax.Array:
    """Images blurred by a Gaussian; their edges are continued.

    Args:
        input: Images (N, H, W) or (N, H, W, channels).
        strength: The standard deviation of the Gaussian, in pixels.
        key: Not used.
    """
    del key
    x = _images(input)
    if _positive(strength) == 0:
        return x
    reach = math.ceil(TAIL * strength)
    offsets = jnp.arange(-reach, reach + 1).astype(x.dtype)
    weights = jnp.exp(-0.5 * (offsets / strength) ** 2)
    weights = weights / weights.sum()
    for axis in (1, 2):
        x = _smoothed(x, weights, reach, axis)
    return x


SHIFTS: Mapping[str, Shift] = MappingProxyType(
    {
        "gaussian_noise": gaussian_noise,
        "rotation": rotation,
        "brightness": brightness,
        "contrast": contrast,
        "blur": blur,
    }
)


def shifted(
    input: ArrayLike, kind: str, strength: float, key: jax.Array | None = None
) -> jax.Array:
    """Inputs under a shift by name: `"gaussian_noise"`, `"rotation"`, `"blur"`, ...

    Args:
        input: As the shift takes it.
        kind: The name of a function of this module.
        strength: In the unit of the shift; 0 changes nothing.
        key: The random key of a shift that draws.

    >>> shifted(jnp.zeros((1, 2)), "brightness", 0.5).tolist()
    [[0.5, 0.5]]
    """
    check_names([kind], SHIFTS, "kind of shift")
    return SHIFTS[kind](input, strength, key)


def _smoothed(x: jax.Array, weights: jax.Array, reach: int, axis: int) -> jax.Array:
    padding = [(reach, reach) if i == axis else (0, 0) for i in range(x.ndim)]
    padded = jnp.pad(x, padding, mode="edge")
    size = x.shape[axis]
    parts = [
        weight * jax.lax.slice_in_dim(padded, start, start + size, axis=axis)
        for start, weight in enumerate(weights)
    ]
    return sum(parts[1:], parts[0])


def _floating(input: ArrayLike) -> jax.Array:
    x = jnp.asarray(input)
    if not is_floating(x.dtype):
        raise TypeError(f"a shift needs floating-point inputs; got {x.dtype}. Use input / 255")
    return x


def _images(input: ArrayLike) -> jax.Array:
    x = _floating(input)
    if x.ndim not in (3, 4):
        raise ValueError(
            "images have the shape (N, H, W) or (N, H, W, channels); got "
            f"{x.shape}. Reshape them: input.reshape(-1, 28, 28)"
        )
    return x


def _positive(strength: float) -> float:
    if not strength >= 0:
        raise ValueError(f"strength must be zero or positive; got {strength}")
    return strength
