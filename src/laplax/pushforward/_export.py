"""A prediction as a program of `jax.export`: bytes that a process with JAX alone can run."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from .._tree import PyTree

Program = Callable[..., dict[str, jax.Array]]


def exported(
    program: Program, batch: PyTree, arrays: list[jax.Array] | None, platforms: Sequence[str] | None
) -> bytes:
    """The serialised program of a batch, or of arrays and a batch."""
    given = [batch] if arrays is None else [[_struct(x) for x in arrays], batch]
    return bytes(export.export(jax.jit(program), platforms=platforms)(*given).serialize())


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def fixed_batch(batch: PyTree) -> PyTree:
    """The shapes of a batch as it is."""
    return jax.tree.map(_struct, batch)


def any_batch(batch: PyTree) -> PyTree:
    """The shapes of a batch of n examples, n being known when the program is called."""
    (n,) = export.symbolic_shape("n")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), batch)


def in_chunks(step: Program, size: int, batch: PyTree) -> dict[str, jax.Array]:
    """`step` of chunks of `size` examples, for a batch whose length is a symbol.

    Everything inside of a chunk has known shapes. The last chunk repeats the last example.
    """
    n = jax.tree.leaves(batch)[0].shape[0]
    chunks = (n + size - 1) // size
    index = jnp.minimum(jnp.arange(chunks * size), n - 1)
    parts = jax.tree.map(lambda x: x[index].reshape(chunks, size, *x.shape[1:]), batch)
    fields = jax.lax.map(step, parts)
    return jax.tree.map(lambda x: x.reshape(chunks * size, *x.shape[2:])[:n], fields)
