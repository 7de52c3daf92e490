"""Pytrees and their values: frozen classes that are pytrees, what is known of arrays."""

import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from ._engine.memo import has_hash

PyTree = Any
Cls = TypeVar("Cls", bound=type)


def static(**options: Any) -> Any:
    """A dataclass field that is configuration, not numbers."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def pytree(cls: Cls) -> Cls:
    """Class decorator: a frozen dataclass that is a pytree of its numbers.

    `eq=False`: equality of arrays is not a truth value, and a generated `__hash__` would break
    `jax.jit(obj)`.
    """
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    jax.tree_util.register_dataclass(cls)
    return cls


def one_of(batch: PyTree) -> PyTree:
    """Shapes and dtypes of one example of a batch."""
    return jax.tree.map(lambda x: _struct(x.shape[1:], x.dtype), batch)


@functools.lru_cache(maxsize=1024)
def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def same_structure(tree: PyTree, other: PyTree) -> bool:
    """Whether two pytrees differ in their leaves alone."""
    structure: object = jax.tree.structure(tree)
    return structure == jax.tree.structure(other)


def leaf_names(tree: PyTree) -> list[str]:
    """The path of each leaf as people write it: `layers/0/kernel`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [_name(path) for path, _ in paths]


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def tree_difference(given: PyTree, params: PyTree, prefix: bool = False) -> str:
    """Where a tree that should be like `params` differs from it first, or an empty string.

    A `prefix` matches params from the top: one leaf may stand for all that is below, and shapes do
    not matter.
    """
    own = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    other = dict(jax.tree_util.tree_flatten_with_path(given)[0])
    above = {path: _beginnings(path) if prefix else {path} for path in own}
    for path, allowed in above.items():
        if allowed.isdisjoint(other):
            return f"params have {_name(path)!r}, which it does not"
    known = set().union(*above.values())
    for path in other:
        if path not in known:
            return f"it has {_name(path)!r}, which params have not"
    if prefix:
        return ""
    for path, leaf in own.items():
        shape = jnp.shape(other[path])
        if shape != leaf.shape:
            return f"{_name(path)!r} has shape {shape}, and {leaf.shape} in params"
    if same_structure(given, params):
        return ""
    kinds = f"{jax.tree.structure(given)}, and {jax.tree.structure(params)} in params"
    return f"the containers are {kinds}"


def _beginnings(path: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return {path[:n] for n in range(len(path) + 1)}


Shapes = tuple[Any, tuple[tuple[Any, Any, bool], ...]]


def shapes_of(*trees: PyTree) -> Shapes:
    """What a trace of arrays depends on, as a key: structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(trees)
    # Not the structs themselves: making one costs more than all of this.
    return treedef, tuple([(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves])


def structs_of(shapes: Shapes) -> PyTree:
    """The trees of `shapes_of`, with `jax.ShapeDtypeStruct` in place of arrays."""
    treedef, kinds = shapes
    structs = [jax.ShapeDtypeStruct(s, d, weak_type=weak) for s, d, weak in kinds]
    return jax.tree.unflatten(treedef, structs)


def is_floating(dtype: np.dtype) -> bool:
    """Whether numbers of a dtype are real and not whole; bfloat16 and its like count."""
    return dtype.kind == "f" or bool(jnp.issubdtype(dtype, jnp.floating))


def coarsest_eps(tree: PyTree) -> float:
    """The relative rounding error of the narrowest floating-point type among the leaves."""
    dtypes = {x.dtype for x in jax.tree.leaves(tree) if is_floating(x.dtype)}
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def widen(x: jax.Array) -> jax.Array:
    """At least float32: bfloat16 counts to 256, float16 to 2,048."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


class ByValue:
    """Equal where class and attributes are, also those that a subclass adds without a dataclass.

    Two objects must compare equal only if they compute the same thing: programs are looked up by
    them. An attribute without a hash, such as an array, equals only itself.
    """

    def _value(self) -> Any:
        parts = sorted(vars(self).items())
        return type(self), tuple((n, v if has_hash(v) else id(v)) for n, v in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())
