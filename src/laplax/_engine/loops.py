"""The loops over examples: a sum over data, and a map over a batch.

Nothing else in the library slices a data set, but for `samples`. `fn` is always a module-level
function: programs are found again by it. Its first argument is a part of the data; its second, the
`owner`, has the model whose function keeps the programs alive (see `memo.model_jit`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._data import Batch, Data, Loader, progress_bar
from .._tree import PyTree
from .arrays import is_concrete
from .chunks import Chunks
from .memo import model_jit

Step = Callable[..., Any]


def sum_over(fn: Step, data: Data, chunks: Chunks, owner: Any, *args: PyTree) -> Any:
    """The sum of `fn(batch, owner, *args)` over the data.

    Arrays are summed inside one compiled call; a loader drives the same call.
    """
    if isinstance(data, Loader):
        return _add_up(sum_over(fn, batch, chunks, owner, *args) for batch in data)
    if not _by_python(chunks, data, data.num_examples):
        return _sum_inside(owner, fn, chunks.size, data, args)
    return _add_up(_parts(fn, data, data.num_examples, chunks.size, owner, args))


def map_over(
    fn: Step, batch: PyTree, chunks: Chunks, owner: Any, *args: PyTree, static: Any = None
) -> Any:
    """`fn(part, owner, *args)` of every chunk of a batch, joined along the first axis.

    A `static` configuration that is not None becomes the last argument of `fn`.
    """
    count = num_rows(batch)
    if not _by_python(chunks, batch, count):
        return _map_inside(owner, fn, chunks.size, static, batch, args)
    return _join(list(_parts(fn, batch, count, chunks.size, owner, args, static)))


def map_parts(
    fn: Step,
    batch: PyTree,
    chunks: Chunks,
    owner: Any,
    *args: PyTree,
    label: str = "",
    progress: bool | None = False,
) -> Iterator[Any]:
    """The same, one chunk after the other, for a caller that looks at them as they come."""
    count = num_rows(batch)
    parts = _parts(fn, batch, count, chunks.size, owner, args)
    yield from progress_bar(parts, -(-count // chunks.size), label, progress)


def _by_python(chunks: Chunks, batch: PyTree, count: int) -> bool:
    # Inside a trace every step would be one more copy of the program.
    return chunks.by_python and count > chunks.size and is_concrete(batch)


def num_rows(batch: PyTree) -> int:
    """How many examples lie along the first axis."""
    return jax.tree.leaves(batch)[0].shape[0]


def _parts(
    fn: Step,
    batch: PyTree,
    count: int,
    size: int,
    owner: Any,
    args: tuple[PyTree, ...],
    static: Any = None,
) -> Iterator[Any]:
    if count <= size:
        yield _map_inside(owner, fn, size, static, batch, args)
        return
    for start in range(0, count, size):
        yield _part(owner, fn, min(size, count - start), static, batch, start, args)


def _add_up(parts: Iterator[Any]) -> Any:
    return functools.reduce(_added, parts)


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: PyTree, part: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, part)


def _join(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


@functools.partial(model_jit, static_argnums=(1, 2))
def _sum_inside(owner: Any, fn: Step, size: int, batch: Batch, args: tuple[PyTree, ...]) -> PyTree:
    # A jit of its own for its trace alone, which serves shapes, loop and rest.
    once = jax.jit(lambda part, owner, args: fn(part, owner, *args), inline=True)

    def step(part: Batch) -> PyTree:
        return once(part, owner, args)

    chunks, rest = divmod(batch.num_examples, size)
    if batch.num_examples <= size:
        return step(batch)
    if chunks == 1:
        return _plus_rest(step, step(_slice(batch, 0, size)), batch, size, rest)

    def body(total: PyTree, i: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, step(_slice(batch, i * size, size))), None

    shapes = jax.eval_shape(step, _slice(batch, 0, size))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(body, zeros, jnp.arange(chunks))
    return _plus_rest(step, total, batch, chunks * size, rest)


def _plus_rest(step: Step, total: PyTree, batch: Batch, start: int, rest: int) -> PyTree:
    if not rest:
        return total
    return jax.tree.map(jnp.add, total, step(_slice(batch, start, rest)))


@functools.partial(model_jit, static_argnums=(1, 2, 3))
def _map_inside(
    owner: Any, fn: Step, size: int, static: Any, batch: PyTree, args: tuple[PyTree, ...]
) -> Any:
    def step(part: PyTree) -> Any:
        return _called(fn, part, owner, args, static)

    count = num_rows(batch)
    if count <= size:
        return step(batch)
    whole = count - count % size
    head = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), batch)
    done = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(step, head))
    if whole == count:
        return done
    return _join([done, step(jax.tree.map(lambda x: x[whole:], batch))])


@functools.partial(model_jit, static_argnums=(1, 2, 3))
def _part(
    owner: Any,
    fn: Step,
    size: int,
    static: Any,
    batch: PyTree,
    start: int | jax.Array,
    args: tuple[PyTree, ...],
) -> Any:
    return _called(fn, _slice(batch, start, size), owner, args, static)


def _called(fn: Step, part: PyTree, owner: Any, args: tuple[PyTree, ...], static: Any) -> Any:
    return fn(part, owner, *args) if static is None else fn(part, owner, *args, static)


def _slice(batch: PyTree, start: int | jax.Array, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), batch)
