"""Folding a function over data: inside one compiled call, or driven from Python."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._data import Batch, Data, Loader
from ._memo import compiled
from ._tree import PyTree, is_concrete, pytree, static


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How many examples a step sees, and who drives the loop.

    XLA's CPU backend runs convolutions about ten times slower inside `scan`, so for models with
    convolutions Python drives (`host_loop`) and every step is a compiled call of its own.
    """

    size: int
    host_loop: bool = False


Step = Callable[..., PyTree]


@pytree
class Zeros:
    """Where a sum starts: made inside of the compiled fold, where zeros cost nothing.

    `shapes` is a tree of tuples, kept in two parts so that it can be hashed.
    """

    treedef: Any = static()
    shapes: tuple[tuple[int, ...], ...] = static()
    dtype: Any = static()

    @classmethod
    def of(cls, shapes: PyTree, dtype: Any) -> "Zeros":
        """A tree with a tuple for every array."""
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        return cls(treedef, tuple(leaves), np.dtype(dtype))

    def make(self, zeros: Callable[..., Any]) -> PyTree:
        """By NumPy or JAX."""
        return jax.tree.unflatten(self.treedef, [zeros(s, self.dtype) for s in self.shapes])


def fold(
    step: Step,
    carry: PyTree,
    data: Data,
    chunking: Chunking,
    owner: Any,
    *args: PyTree,
    then: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """carry <- step(carry, batch, owner, *args) over the data, in chunks; `then(carry)` at the end.

    `owner` has the model (`_memo.compiled`). `step` and `then` must be module-level functions: they
    are the key under which compiled code is found again. In-memory data is scanned inside one
    compiled call; a loader drives the same call. `carry` may be `Zeros`.
    """
    if isinstance(data, Loader):
        carry = _on_host(carry)  # one program for the first batch and the others
        for batch in data:
            carry = fold(step, carry, batch, chunking, owner, *args)
        return _finish(then, carry)
    inside = not is_concrete(data)  # a traced program would hold a copy for every step
    if inside or not chunking.host_loop or data.num_examples <= chunking.size:
        return _fold_scan(owner, step, chunking.size, then, carry, data, args)
    carry = _on_host(carry)
    whole = data.num_examples - data.num_examples % chunking.size
    for start in range(0, whole, chunking.size):
        carry = _fold_slice(owner, step, chunking.size, carry, data, start, args)
    if whole < data.num_examples:
        carry = _fold_slice(owner, step, data.num_examples - whole, carry, data, whole, args)
    return _finish(then, carry)


def _on_host(carry: PyTree) -> PyTree:
    return carry.make(np.zeros) if isinstance(carry, Zeros) else carry


def _finish(then: Callable[[PyTree], PyTree] | None, carry: PyTree) -> PyTree:
    return carry if then is None else _compiled(then, carry)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(then: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    return then(carry)


@functools.partial(compiled, static_argnums=(1, 2, 3))
def _fold_scan(
    owner: Any,
    step: Step,
    size: int,
    then: Callable[[PyTree], PyTree] | None,
    carry: PyTree,
    batch: Batch,
    args: tuple[PyTree, ...],
) -> PyTree:
    carry = carry.make(jnp.zeros) if isinstance(carry, Zeros) else carry
    chunks, rest = divmod(batch.num_examples, size)
    if chunks > 1:

        def body(carry: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            return step(carry, batch.slice(i * size, size), owner, *args), None

        carry, _ = jax.lax.scan(body, carry, jnp.arange(chunks))
    elif chunks == 1:
        carry = step(carry, batch.slice(0, size) if rest else batch, owner, *args)
    if rest:
        carry = step(carry, batch.slice(chunks * size, rest), owner, *args)
    return carry if then is None else then(carry)


@functools.partial(compiled, static_argnums=(1, 2))
def _fold_slice(
    owner: Any,
    step: Step,
    size: int,
    carry: PyTree,
    batch: Batch,
    start: int | jax.Array,
    args: tuple[PyTree, ...],
) -> PyTree:
    return step(carry, batch.slice(start, size), owner, *args)
