"""The loops over examples: a sum over data, and a map over a batch.

Nothing else in the library slices a data set, but for `samples`. `fn` is always a module-level
function: programs are found again by it. Its first argument is a part of the data; its second, the
`owner`, has the model whose function keeps the programs alive (see `memo.model_jit`).
"""

import functools
from collections.abc import Callable, Hashable, Iterator

import jax
import jax.numpy as jnp

from .._data import Data, Loader, progress_bar
from .._tree import PyTree
from .arrays import is_concrete
from .chunks import Chunks, even_size
from .memo import model_jit
from .shards import Shards, shards_of

Step = Callable[..., PyTree]
Start = int | jax.Array


def sum_over(fn: Step, data: Data | PyTree, chunks: Chunks, owner: PyTree, *args: PyTree) -> PyTree:
    """The sum of `fn(batch, owner, *args)` over the data.

    Arrays are summed inside one compiled call; a loader drives the same call. Where the examples
    are divided among devices, each device sums its own, and the sums are added once.
    """
    if isinstance(data, Loader):
        return _add_up(sum_over(fn, batch, chunks, owner, *args) for batch in data)
    shards = shards_of(data)
    if not _by_python(chunks, data, shards):
        return _sum_inside(owner, fn, chunks.size, shards, data, args)
    sums = _add_up(_parts(fn, data, chunks.size, shards, owner, args, as_rows=shards is not None))
    return sums if shards is None else _sum_of_devices(sums)


def map_over(
    fn: Step, batch: PyTree, chunks: Chunks, owner: PyTree, *args: PyTree, static: Hashable = None
) -> PyTree:
    """`fn(part, owner, *args)` of every chunk of a batch, joined along the first axis.

    A `static` configuration that is not None becomes the last argument of `fn`.
    """
    shards = shards_of(batch)
    if not _by_python(chunks, batch, shards):
        return _map_inside(owner, fn, chunks.size, static, shards, batch, args)
    return _joined(list(_parts(fn, batch, chunks.size, shards, owner, args, static)), shards)


def map_parts(
    fn: Step,
    batch: PyTree,
    chunks: Chunks,
    owner: PyTree,
    *args: PyTree,
    label: str = "",
    progress: bool | None = False,
) -> Iterator[PyTree]:
    """The same, one chunk after the other, for a caller that looks at them as they come.

    `join` makes one of them: where examples are divided among devices, a chunk has some of each.
    """
    shards = shards_of(batch)
    parts = _parts(fn, batch, chunks.size, shards, owner, args)
    total = -(-num_rows(batch, shards) // chunks.size)
    yield from progress_bar(parts, total, label, progress)


def join(parts: list[PyTree], batch: PyTree) -> PyTree:
    """What `map_parts` gave for a batch, one after the other as its examples are."""
    return _joined(parts, shards_of(batch))


def _joined(parts: list[PyTree], shards: Shards | None = None) -> PyTree:
    if len(parts) == 1:
        return parts[0]
    if shards is None:
        return jax.tree.map(_concatenate, *parts)
    return _join_shards(parts, shards)


def _by_python(chunks: Chunks, batch: PyTree, shards: Shards | None) -> bool:
    # Inside a trace every step would be one more copy of the program.
    return chunks.by_python and num_rows(batch, shards) > chunks.size and is_concrete(batch)


def num_rows(batch: PyTree, shards: Shards | None = None) -> int:
    """Examples of a batch on one device."""
    count = jax.tree.leaves(batch)[0].shape[0]
    return count if shards is None else count // shards.count


def _parts(
    fn: Step,
    batch: PyTree,
    size: int,
    shards: Shards | None,
    owner: PyTree,
    args: tuple[PyTree, ...],
    static: Hashable = None,
    as_rows: bool = False,
) -> Iterator[PyTree]:
    count = num_rows(batch, shards)
    if shards is not None:  # the size was chosen for the examples of all devices
        size = even_size(count, size)
    for start in range(0, count, size):
        part = min(size, count - start)
        yield _part(owner, fn, part, static, shards, as_rows, batch, start, args)


def _add_up(parts: Iterator[PyTree]) -> PyTree:
    return functools.reduce(_added, parts)


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: PyTree, part: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, part)


@jax.jit
def _sum_of_devices(rows: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), rows)


def _concatenate(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


@functools.partial(jax.jit, static_argnums=1)
def _join_shards(parts: list[PyTree], shards: Shards) -> PyTree:
    return shards.run(lambda parts: jax.tree.map(_concatenate, *parts), parts, apart=True)


@functools.partial(model_jit, static_argnums=(1, 2, 3))
def _sum_inside(
    owner: PyTree,
    fn: Step,
    size: int,
    shards: Shards | None,
    batch: PyTree,
    args: tuple[PyTree, ...],
) -> PyTree:
    # A jit of its own for its trace alone, which serves shapes, loop and rest.
    once = jax.jit(lambda part, owner, args: fn(part, owner, *args), inline=True)

    def local(batch: PyTree, owner: PyTree, args: tuple[PyTree, ...]) -> PyTree:
        return _sum_of_chunks(lambda part: once(part, owner, args), batch, size)

    if shards is None:
        return local(batch, owner, args)
    return shards.sum(local, batch, owner, args)


def _sum_of_chunks(step: Step, batch: PyTree, size: int) -> PyTree:
    """The sum of `step` over the chunks of a batch, inside a trace."""
    count = num_rows(batch)
    if count <= size:
        return step(batch)
    chunks, rest = divmod(count, size)
    if chunks == 1:
        return _plus_rest(step, step(_slice(batch, 0, size)), batch, size, rest)

    def body(total: PyTree, i: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, step(_slice(batch, i * size, size))), None

    shapes = jax.eval_shape(step, _slice(batch, 0, size))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(body, zeros, jnp.arange(chunks))
    return _plus_rest(step, total, batch, chunks * size, rest)


def _plus_rest(step: Step, total: PyTree, batch: PyTree, start: int, rest: int) -> PyTree:
    if not rest:
        return total
    return jax.tree.map(jnp.add, total, step(_slice(batch, start, rest)))


@functools.partial(model_jit, static_argnums=(1, 2, 3, 4))
def _map_inside(
    owner: PyTree,
    fn: Step,
    size: int,
    static: Hashable,
    shards: Shards | None,
    batch: PyTree,
    args: tuple[PyTree, ...],
) -> PyTree:
    def local(batch: PyTree, owner: PyTree, args: tuple[PyTree, ...]) -> PyTree:
        return _map_of_chunks(lambda part: _called(fn, part, owner, args, static), batch, size)

    if shards is None:
        return local(batch, owner, args)
    return shards.run(local, batch, owner, args, apart=True)


def _map_of_chunks(step: Step, batch: PyTree, size: int) -> PyTree:
    """`step` of the chunks of a batch, joined, inside a trace."""
    count = num_rows(batch)
    if count <= size:
        return step(batch)
    whole = count - count % size
    head = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), batch)
    done = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(step, head))
    if whole == count:
        return done
    return _joined([done, step(jax.tree.map(lambda x: x[whole:], batch))])


@functools.partial(model_jit, static_argnums=(1, 2, 3, 4, 5))
def _part(
    owner: PyTree,
    fn: Step,
    size: int,
    static: Hashable,
    shards: Shards | None,
    as_rows: bool,
    batch: PyTree,
    start: Start,
    args: tuple[PyTree, ...],
) -> PyTree:
    """`fn` of one chunk; `as_rows`: of every device's chunk, each a row of the result."""

    def local(batch: PyTree, owner: PyTree, start: Start, args: tuple[PyTree, ...]) -> PyTree:
        out = _called(fn, _slice(batch, start, size), owner, args, static)
        return jax.tree.map(lambda x: x[None], out) if as_rows else out

    if shards is None:
        return local(batch, owner, start, args)
    return shards.run(local, batch, owner, start, args, apart=True)


def _called(
    fn: Step, part: PyTree, owner: PyTree, args: tuple[PyTree, ...], static: Hashable
) -> PyTree:
    return fn(part, owner, *args) if static is None else fn(part, owner, *args, static)


def _slice(batch: PyTree, start: Start, size: int) -> PyTree:
    if num_rows(batch) == size:
        return batch
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), batch)
