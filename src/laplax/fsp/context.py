"""Context points: where the prior is imposed on the network.

Every function takes the number of points first and an explicit key where it is random, and can be
used alone. A `box` is a pair (low, high) of numbers or arrays, one entry per input dimension;
`bounding_box` reads one off data.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import check_key, whole_number
from .._data import as_data
from .._engine.loops import num_rows
from .._engine.samples import draw, whole_batch
from .._tree import PyTree

Box = tuple[Any, Any]


def bounding_box(input: Any, margin: float = 0.0) -> Box:
    """The smallest box around inputs (n, ...), widened by `margin` of its width on every side.

    Example:
        >>> import numpy as np
        >>> low, high = bounding_box(np.asarray([[0.0, 1.0], [2.0, 1.5]]), margin=0.5)
        >>> print(low.tolist(), high.tolist())
        [-1.0, 0.75] [3.0, 1.75]
    """
    x = np.asarray(input)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"bounding_box needs inputs along the first axis; got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("bounding_box: the inputs hold NaN or infinite values")
    low = x.min(axis=0)
    width = x.max(axis=0) - low
    return low - margin * width, low + (1 + margin) * width


def uniform(num: int, box: Box, key: jax.Array) -> jax.Array:
    """Independent and uniform in the box. It can be traced."""
    low, high = _bounds(num, box)
    return jax.random.uniform(key, (num, *low.shape), low.dtype, low, high)


def halton(num: int, box: Box, key: jax.Array | None = None) -> jax.Array:
    """A Halton sequence; with a key it is scrambled.

    Example:
        >>> print(halton(4, (0.0, 1.0)).tolist())
        [0.0, 0.5, 0.25, 0.75]
    """
    low, high = _bounds(num, box)
    return _placed(_sequence("Halton", low.size, key).random(num), low, high)


def sobol(num: int, box: Box, key: jax.Array | None = None) -> jax.Array:
    """A Sobol sequence; with a key it is scrambled. Powers of two are balanced best."""
    low, high = _bounds(num, box)
    # Drawn to the next power of two, of which it is a prefix: others make SciPy warn.
    unit = _sequence("Sobol", low.size, key).random_base2(max(num - 1, 0).bit_length())
    return _placed(unit[:num], low, high)


def latin_hypercube(num: int, box: Box, key: jax.Array) -> jax.Array:
    """One point in each of `num` slices of every dimension."""
    low, high = _bounds(num, box)
    return _placed(_sequence("LatinHypercube", low.size, key).random(num), low, high)


def grid(num: int, box: Box) -> jax.Array:
    """A regular grid, `num` points along every dimension, the box's faces included.

    Example:
        >>> print(grid(3, (0.0, 1.0)).tolist())
        [0.0, 0.5, 1.0]
    """
    low, high = _bounds(num, box)
    if num ** max(low.size, 1) > 10**8:
        raise ValueError(
            f"a grid of {num} points along each of {low.size} dimensions has more than 10^8 "
            "points; low-discrepancy points cover such a box better: halton(num, box)"
        )
    axes = [jnp.linspace(a, b, num) for a, b in zip(low.ravel(), high.ravel(), strict=True)]
    points = jnp.stack([x.ravel() for x in jnp.meshgrid(*axes, indexing="ij")], axis=-1)
    return points.reshape(-1, *low.shape)


def from_data(num: int, data: Any, key: jax.Array) -> PyTree:
    """`num` inputs drawn without replacement from a data set, a loader, or an array of inputs."""
    if isinstance(data, jax.Array | np.ndarray):
        inputs: PyTree = jnp.asarray(data)
    else:
        inputs = whole_batch(as_data(data).on_automatic_axes()).input
    count = num_rows(inputs)
    if whole_number(num, "num") > count:
        raise ValueError(f"{num} context points asked for; the data have {count} inputs")
    return draw(inputs, num, key)


def _bounds(num: int, box: Box) -> tuple[jax.Array, jax.Array]:
    whole_number(num, "num")
    if not isinstance(box, tuple | list) or len(box) != 2:
        raise ValueError(f"a box is a pair (low, high); got {box!r}")
    low, high = np.broadcast_arrays(*(np.asarray(side) for side in box))
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise ValueError(f"a box needs finite bounds with low <= high; got {box!r}")
    lower = jnp.asarray(low if low.dtype.kind == "f" else low.astype(float))
    return lower, jnp.asarray(high).astype(lower.dtype)


def _sequence(name: str, dimension: int, key: jax.Array | None) -> Any:
    """A generator of SciPy for points in the unit cube, without a key the plain sequence."""
    from scipy.stats import qmc

    rng = None
    if key is not None:
        check_key(key)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    return getattr(qmc, name)(max(dimension, 1), scramble=key is not None, rng=rng)


def _placed(unit: np.ndarray, low: jax.Array, high: jax.Array) -> jax.Array:
    """Points of the unit cube in the box, in the shape of one input."""
    points = jnp.asarray(unit, low.dtype).reshape(-1, *low.shape)
    return low + points * (high - low)
