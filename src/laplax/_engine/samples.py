"""Examples picked out of a data set: all in one piece, at random, or evenly spread."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from .._data import Batch, Data, Loader
from .._tree import PyTree
from .loops import num_rows
from .shards import everywhere


def whole_batch(data: Data) -> Batch:
    """Data in one piece, for what visits them again and again or at random."""
    if isinstance(data, Batch):
        return data
    batches = list(data)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)


def random_batches(data: Data, size: int | None, key: jax.Array) -> Iterator[Batch]:
    """Shuffled batches of one size, pass after pass; or a loader's own."""
    data = data.on_automatic_axes()  # explicit ones would ask how each result is divided
    if isinstance(data, Loader):
        data.require_passes("training")
        while True:
            yield from data
    count = data.num_examples
    if size is None or size >= count:
        while True:
            yield data
    epoch = 0
    while True:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), count)
        for start in range(0, count - size + 1, size):  # a ragged rest comes in another epoch
            yield take(data, order[start : start + size])
        epoch += 1


def draw(examples: PyTree, num: int, key: jax.Array) -> PyTree:
    """`num` examples without replacement."""
    chosen = jax.random.choice(key, num_rows(examples), (num,), replace=False)
    return take(examples, chosen)


def spread(examples: PyTree, most: int) -> PyTree:
    """At most `most` examples, evenly spread."""
    examples = everywhere(examples)
    step = max(1, -(-num_rows(examples) // most))
    return jax.tree.map(lambda x: x[::step], examples)


def take(examples: PyTree, rows: jax.Array) -> PyTree:
    """The examples with these numbers."""
    return jax.tree.map(lambda x: x[rows], examples)
