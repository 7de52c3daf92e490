"""Points for integrals over a Gaussian: scrambled Sobol points, mapped by the normal quantile."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

BITS = 32
SOBOL_DIMENSIONS = 21_201  # as many as SciPy has direction numbers for


def normal_points(key: jax.Array, num_points: int, dimension: int, dtype: jnp.dtype) -> jax.Array:
    """Points (num_points, dimension) whose average over keys is that over N(0, I).

    The scrambled net is fixed; the key shifts its binary digits. Every shifted net is as uniform
    as the net itself, and every point of it is uniform over the keys. A shift can be traced, so
    that a key under `jit`, `vmap` or export has the points that it has elsewhere.
    """
    sobol = min(dimension, SOBOL_DIMENSIONS)
    shift_key, rest_key = jax.random.split(key)
    shift = jax.random.bits(shift_key, (sobol,), jnp.uint32)
    points = _quantile(jnp.asarray(_net(num_points, sobol)) ^ shift[None], dtype)
    if dimension > sobol:
        rest = jax.random.normal(rest_key, (num_points, dimension - sobol), dtype)
        points = jnp.concatenate([points, rest], axis=1)
    return points


def _net(num_points: int, dimension: int) -> np.ndarray:
    """The binary digits of the first scrambled Sobol points."""
    from scipy.stats import qmc  # takes long to import

    rng = np.random.default_rng(0)
    # Drawn to the next power of two, of which it is a prefix: others make SciPy warn.
    power = (num_points - 1).bit_length()
    unit = qmc.Sobol(dimension, scramble=True, bits=BITS, rng=rng).random_base2(power)
    return (unit[:num_points] * 2.0**BITS).astype(np.uint32)


def _quantile(digits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The normal quantile of (digits + 1/2) / 2^32, by the nearer tail: its digits are not lost."""
    half = jnp.uint32(1 << (BITS - 1))
    upper = digits >= half
    tail = jnp.where(upper, ~digits, digits)
    quantile = ndtri((tail.astype(dtype) + 0.5) / 2.0**BITS)
    return jnp.where(upper, -quantile, quantile)
