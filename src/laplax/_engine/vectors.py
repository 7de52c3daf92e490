"""Vectors of parameters: one flat array (P,), or a list of leaves in their own shapes.

Leaves are used where devices divide the parameters: to join them would gather them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Leaves = list[jax.Array]
Vector = Any  # jax.Array | Leaves: a structure takes one of them


def parts(vector: Vector) -> Leaves:
    """The arrays of a vector."""
    return vector if isinstance(vector, list) else [vector]


def each(fn: Callable[..., jax.Array], *vectors: Vector) -> Vector:
    """An elementwise function of vectors of one form, and of numbers."""
    if not any(isinstance(v, list) for v in vectors):
        return fn(*vectors)
    count = max(len(v) for v in vectors if isinstance(v, list))
    columns = [v if isinstance(v, list) else [v] * count for v in vectors]
    return [fn(*row) for row in zip(*columns, strict=True)]


def total(fn: Callable[..., jax.Array], *vectors: Vector) -> jax.Array:
    """The sum of an elementwise function over all parameters."""
    first, *others = [jnp.sum(x) for x in parts(each(fn, *vectors))]
    return sum(others, first)


def dot(u: Vector, v: Vector) -> jax.Array:
    """u^T v."""
    # Not by `vdot`, which makes each of them flat.
    pairs = zip(parts(u), parts(v), strict=True)
    first, *others = [jnp.tensordot(a, b, axes=a.ndim) for a, b in pairs]
    return sum(others, first)
