"""Data in every form users have it: arrays in memory, or any iterable of batches."""

import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ._arguments import warn
from ._engine import versions
from ._engine.arrays import all_finite, is_concrete, owned
from ._engine.shards import on_automatic_axes
from ._enums import check_names
from ._fingerprint import Fingerprint, fingerprint
from ._tree import PyTree, is_floating, leaf_names, one_of, pytree

Item = TypeVar("Item")
FIELDS = ("input", "target", "weight")
ALL_MASKED = (
    "data's weights are all zero: there is nothing to judge or to fit, as an example of weight 0 "
    "does not count. Give the examples that count a positive weight, or leave the weight out"
)
ORDER = "the order is (model_fn, params, data)"


@dataclasses.dataclass(frozen=True)
class Form:
    """Shapes and dtypes of one example's input: a pytree that can be hashed."""

    treedef: jax.tree_util.PyTreeDef
    structs: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, example: PyTree) -> "Form":
        """Of a pytree of structs."""
        leaves, treedef = jax.tree.flatten(example)
        return cls(treedef, tuple(leaves))

    @property
    def example(self) -> PyTree:
        """One example as a pytree of structs."""
        return jax.tree.unflatten(self.treedef, self.structs)


@pytree
class Batch:
    """Examples along the first axis of every leaf. `index` numbers them through the data set."""

    input: PyTree
    target: PyTree
    weight: jax.Array | None
    index: Any  # (n,) integers

    @property
    def num_examples(self) -> int:
        """How many examples there are."""
        return self.index.shape[0]

    @property
    def num_counted(self) -> int | jax.Array:
        """How many examples take part: one whose weight is zero is masked out."""
        return self.num_examples if self.weight is None else jnp.sum(self.counted)

    @property
    def counted(self) -> jax.Array:
        """Which examples take part, a truth value each."""
        if self.weight is None:
            return jnp.ones(self.num_examples, bool)
        return jnp.any(self.weight != 0, axis=tuple(range(1, self.weight.ndim)))

    def peek(self) -> "Batch":
        """All of it; of a `Loader` it is the first batch."""
        return self

    def on_automatic_axes(self) -> "Batch":
        """The same examples on automatic axes of a mesh: parameters lie there."""
        batch: Batch = on_automatic_axes(self)
        return batch

    def example(self) -> tuple[PyTree, PyTree]:
        """Shapes and dtypes of one input and one target."""
        return one_of(self.input), one_of(self.target)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Which examples these are, if their values are known."""
        if not is_concrete(self):
            return None
        return fingerprint(self.input, self.target, self.weight)


RawBatch = tuple[PyTree, PyTree] | Mapping[str, PyTree]  # as users have it


class Loader:
    """A foreign iterable of batches, with what must hold checked while it is read."""

    def __init__(self, batches: Iterable[RawBatch], progress: bool | None = None) -> None:
        self._batches = batches
        self.one_shot = iter(batches) is batches if isinstance(batches, Iterator) else False
        self.progress = progress
        self._num_counted: int | jax.Array | None = None
        self.validate: Callable[[Batch, int], None] = lambda batch, number: None
        self.fingerprint: Fingerprint | None = None  # of the first whole pass
        self._num_examples: int | None = None
        self._passes = 0
        self._first: Batch | None = None
        self._ahead: Iterable[RawBatch] | None = None  # a pass that `peek` began, for the next one
        self._warned = False
        self._place: Callable[[Batch], Batch] = lambda batch: batch
        self.one_form = False  # whether the inputs of all batches must have one shape and dtype

    def on_automatic_axes(self) -> "Loader":
        """This loader, its batches on automatic axes of a mesh: parameters lie there."""
        self._place = on_automatic_axes
        return self

    @property
    def num_counted(self) -> int | jax.Array:
        """How many examples took part, known after the first whole pass."""
        if self._num_counted is None:
            raise ValueError("the data loader was not read to its end")
        return self._num_counted

    def peek(self) -> Batch:
        """The first batch. The first pass goes on from here, so that no iterator loses it."""
        if self._first is None:
            iterator = iter(self._batches)
            try:
                raw = next(iterator)
            except StopIteration:
                spent = " (a spent iterator gives none: pass a new one)" * self.one_shot
                raise ValueError(f"the data loader is empty: it gave no batch{spent}") from None
            self._first = self._place(as_batch(raw))
            self._ahead = itertools.chain([raw], iterator)
        return self._first

    def require_passes(self, why: str) -> None:
        """Refuse a one-shot iterator where several passes are needed."""
        if self.one_shot:
            raise ValueError(
                f"{why} passes over the data several times, but data is a one-shot iterator that "
                "is gone after the first pass. Pass a re-iterable (a list of batches, a "
                "DataLoader) or use a curv_type that needs one pass: 'full', 'diagonal', 'kfac' or "
                "'block_diagonal'."
            )

    def __iter__(self) -> Iterator[Batch]:
        if self.one_shot and self._passes:
            self.require_passes("this computation")
        self._passes += 1
        seen = 0
        counted: int | jax.Array = 0
        given: list[Fingerprint | None] = []
        for number, raw in enumerate(self._bar(), 1):
            batch = self._place(as_batch(raw, start=seen))
            if self._num_examples is None:
                self._check(batch, number)
            seen += batch.num_examples
            counted = counted + batch.num_counted
            given.append(batch.fingerprint)
            yield batch
        self._finish(seen, counted)
        self._compare(given)

    def _check(self, batch: Batch, number: int) -> None:
        first = self.peek()
        if (batch.weight is None) != (first.weight is None):
            with_one, without = (1, number) if batch.weight is None else (number, 1)
            raise ValueError(
                f"batch {with_one} of the data has a weight, batch {without} has none. Give one to "
                "every batch (ones, where examples count as they are) or to none"
            )
        check_finite(batch)
        self.validate(batch, number)

    def _compare(self, given: list[Fingerprint | None]) -> None:
        """Warn where a pass gave other examples than the first one."""
        known = [part for part in given if part is not None]
        if len(known) < len(given):  # traced, or on other machines
            return
        total = functools.reduce(operator.add, known)
        if self.fingerprint is None:
            self.fingerprint = total
        elif not self._warned and not self.fingerprint.matches(total):
            self._warned = True
            warn(
                "the data loader gave other examples in this pass than in the first one, as one "
                "does that shuffles and drops the last batch, or that augments at random. Every "
                "pass must give the same examples, in any order: for a DataLoader, drop_last=False "
                "and no random augmentation"
            )

    def _bar(self) -> Iterable[RawBatch]:
        total = operator.length_hint(self._batches) or None
        batches = self._batches if self._ahead is None else self._ahead
        self._ahead = None
        return progress_bar(batches, total, f"pass {self._passes}", self.progress)

    def _finish(self, seen: int, counted: int | jax.Array) -> None:
        if seen == 0:
            reason = "is empty: it gave no batch"
            if self._num_examples:
                reason = (
                    "was exhausted after its first pass: pass a re-iterable, whose __iter__ "
                    "starts anew (a list of batches, a DataLoader), not an iterator"
                )
            raise ValueError(f"the data loader {reason}")
        if self._num_examples not in (None, seen):
            raise ValueError(
                f"the data loader gave {self._num_examples} examples in an earlier pass and {seen} "
                "in this one; every pass must give the same examples"
            )
        self._num_examples = seen
        self._num_counted = counted
        if is_concrete(counted) and int(counted) == 0:
            raise ValueError(ALL_MASKED)


Data = Batch | Loader
DataLike = Data | RawBatch | Iterable[RawBatch]  # what users pass


def progress_bar(
    items: Iterable[Item], total: int | None, label: str, progress: bool | None
) -> Iterable[Item]:
    """A tqdm bar, on the first process alone; `None` shows it where a terminal is attached."""
    wanted = sys.stderr.isatty() if progress is None else progress
    shown = wanted and jax.process_index() == 0
    return tqdm(items, total=total, desc=label, leave=False) if shown else items


def as_data(data: object, progress: bool | None = None) -> Data:
    """Normalise what users pass: a tuple, a dict, or an iterable of batches."""
    if isinstance(data, Batch | Loader):
        return data
    if isinstance(data, tuple | Mapping):
        batch = as_batch(data)
        check_finite(batch)
        if is_concrete(batch) and batch.weight is not None and not np.any(batch.weight):
            raise ValueError(ALL_MASKED)
        return batch
    _refuse_table(data, "data")
    if isinstance(data, str | bytes) or not isinstance(data, Iterable) or _is_array(data):
        raise TypeError(
            f"data must be a tuple (input, target), a dict with 'input' and 'target', or an "
            f"iterable of such batches; got {type(data).__name__} ({ORDER})"
        )
    if isinstance(data, list):
        if not data:
            raise ValueError("data is an empty list: there is no batch in it")
        if any(_is_array(item) for item in data):
            raise TypeError(
                "data is a list of arrays; a list is read as a list of batches. For arrays write "
                "a tuple: (input, target)"
            )
    return Loader(data, progress)


def as_batch(raw: Any, start: int = 0) -> Batch:
    """One batch in the forms users have it, as arrays with equal first axes."""
    if set(getattr(raw, "_fields", ("",))) <= set(FIELDS):
        raw = raw._asdict()  # a named tuple says itself what is what
    _refuse_table(raw, "a batch")
    if isinstance(raw, Mapping):
        if not set(raw) & set(FIELDS):
            names = ", ".join(repr(str(name)) for name in raw) or "none"
            raise ValueError(
                f"unknown keys in data: {names}; it needs the keys 'input' and 'target' "
                f"(allowed: {', '.join(FIELDS)}; {ORDER})"
            )
        check_names(raw, FIELDS, "key in data")
        missing = [name for name in FIELDS[:2] if name not in raw]
        if missing:
            raise ValueError(f"data has no {missing[0]!r}; it needs the keys 'input' and 'target'")
        parts = [raw["input"], raw["target"], raw.get("weight")]
    elif isinstance(raw, tuple | list) and len(raw) == 2:
        parts = [*raw, None]
    elif isinstance(raw, tuple | list) and len(raw) == 3:
        raise TypeError(
            "a batch has three entries, and the third has no name: it could be a weight, or the "
            "index of an example. Name a weight: {'input': x, 'target': y, 'weight': w}. Leave "
            "anything else out: (x, y)"
        )
    else:
        length = f" of length {len(raw)}" if isinstance(raw, tuple | list) else ""
        raise TypeError(
            "a batch must be (input, target), or a dict with the keys 'input', 'target' and "
            f"'weight'; got {type(raw).__name__}{length}"
        )
    arrays = [_to_arrays(field, part) for field, part in zip(FIELDS, parts, strict=True)]
    input, target, weight = arrays
    if weight is not None and not _is_array(weight):
        raise TypeError(f"data's weight must be one array; got {type(parts[2]).__name__}")
    size = _common_length(arrays)
    index = np.arange(start, start + size, dtype=np.int32)  # on the device when it is needed
    return Batch(input, target, weight, index)


def _refuse_table(given: object, what: str) -> None:
    """A data frame does not say which of its columns are the target."""
    if hasattr(given, "to_numpy") and hasattr(given, "columns"):
        raise TypeError(
            f"{what} is a {type(given).__name__}, which does not say what is the input and what "
            "the target; write (frame[input_columns].to_numpy(), frame[target].to_numpy())"
        )


def _to_arrays(field: str, part: PyTree) -> PyTree:
    if isinstance(part, jax.Array):  # the most frequent case, by far faster
        return to_array(field, part)
    return jax.tree.map(functools.partial(to_array, field), part)


def _is_array(item: object) -> bool:
    return hasattr(item, "shape") and hasattr(item, "dtype")


def to_array(field: str, leaf: Any) -> jax.Array:
    """A leaf of a field of the data, checked."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if array.dtype.kind not in "biuf" and not is_floating(array.dtype):
        if array.dtype.kind == "c":
            raise TypeError(
                f"data's {field} holds {array.dtype}; give its real and imaginary part as two "
                "real arrays, and join them in the model: jax.lax.complex(real, imag)"
            )
        hint = ""
        if hasattr(leaf, "to_numpy"):
            hint = "; take the columns of numbers alone: frame[columns].to_numpy()"
        raise TypeError(f"data's {field} holds {array.dtype}, which is not a number{hint}")
    if isinstance(array, jax.core.Tracer):
        _refuse_varying(array, field)
    if field == "weight":
        # Masks and integers count as numbers, and their roots need the widest type there is.
        return owned(array).astype(jnp.result_type(float))
    return owned(array)  # loaders write into their arrays again, and JAX may read them later


def _refuse_varying(array: jax.Array, field: str) -> None:
    """Inside a checked `jax.shard_map`, JAX sums derivatives along what does not vary over devices.

    Those along the perturbations of taps and along hyperparameters would be of other examples,
    too, without a message.
    """
    axes = versions.varying_axes(array)
    if axes:
        raise ValueError(
            f"data's {field} varies along {', '.join(sorted(axes))}, inside a jax.shard_map that "
            "checks this, and there JAX sums derivatives over the devices. Write "
            "jax.shard_map(..., check_vma=False), or pass divided arrays to laplax outside of the "
            "jax.shard_map"
        )


def _common_length(arrays: list[PyTree]) -> int:
    leaves = jax.tree.leaves(arrays)
    if not leaves or any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            "every array in data needs a first axis that counts the examples (a list of numbers "
            "is not an array: wrap it with np.asarray)"
        )
    lengths = {leaf.shape[0] for leaf in leaves}
    if len(lengths) > 1:
        each = zip(leaf_names(dict(zip(FIELDS, arrays, strict=True))), leaves, strict=True)
        sizes = ", ".join(f"{name}: {leaf.shape[0]}" for name, leaf in each)
        raise ValueError(f"input and target must have the same number of examples; got {sizes}")
    if lengths == {0}:
        raise ValueError("data is empty: it has 0 examples")
    return lengths.pop()


def check_finite(batch: Batch) -> None:
    """Raise for NaN or infinity, and for negative weights, when the values are known."""
    if not is_concrete(batch):
        return
    fields = {"input": batch.input, "target": batch.target, "weight": batch.weight}
    if not all_finite(fields):
        _name_the_bad(fields)
    if batch.weight is not None and bool(jnp.any(batch.weight < 0)):
        raise ValueError("data's weight holds negative values; a weight multiplies the loss")


def _name_the_bad(fields: dict[str, PyTree]) -> None:
    for name, leaf in zip(leaf_names(fields), jax.tree.leaves(fields), strict=True):
        if not all_finite(leaf):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            raise ValueError(
                f"data's {name} holds {bad} values that are NaN or infinite; remove or impute them"
                " (a weight of 0 masks an example, but its values must still be finite)"
            )
