"""Parameters as one flat vector: the order of leaves is `jax.tree.leaves`, each in C order."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

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


@dataclasses.dataclass(frozen=True)
class ParamSpace:
    """The vector space R^P in which the parameters vary: all leaves, or those `selected`.

    Frozen configuration (hashable), so that it can be a static part of compiled functions.
    `dtype` is the type in which sums are accumulated: half precision leaves count as float32.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    dtype: Any
    selected: tuple[bool, ...]

    @classmethod
    def of(cls, params: PyTree, selected: Sequence[bool] | None = None) -> "ParamSpace":
        """Read the space off a pytree of floating-point arrays; `selected` leaves vary in it."""
        leaves, treedef = jax.tree.flatten(params)
        dtypes = tuple(jnp.dtype(leaf.dtype) for leaf in leaves)
        # Half precision cannot hold a sum over a data set; float32 is the smallest accumulator.
        wide = max((jnp.finfo(d).bits for d in dtypes), default=32) > 32
        return cls(
            treedef=treedef,
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            dtypes=dtypes,
            dtype=jnp.dtype(jnp.float64 if wide else jnp.float32),
            selected=tuple(selected) if selected is not None else (True,) * len(leaves),
        )

    @property
    def slices(self) -> dict[int, tuple[int, int]]:
        """Where each selected leaf lies in the flat vector: its number to (start, size)."""
        found, start = {}, 0
        for i, (shape, chosen) in enumerate(zip(self.shapes, self.selected, strict=True)):
            if chosen:
                found[i] = (start, math.prod(shape))
                start += math.prod(shape)
        return found

    @property
    def size(self) -> int:
        """P, the number of parameters that vary."""
        return sum(size for _, size in self.slices.values())

    def flatten(self, tree: PyTree, batch_ndim: int = 0) -> jax.Array:
        """Selected leaves to one array of shape (*batch, P) in the accumulation dtype."""
        leaves = jax.tree.leaves(tree)
        flat = [
            jnp.asarray(leaf).reshape(*jnp.shape(leaf)[:batch_ndim], -1).astype(self.dtype)
            for leaf, chosen in zip(leaves, self.selected, strict=True)
            if chosen
        ]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1)

    def unflatten(self, flat: jax.Array) -> PyTree:
        """An array (*batch, P) to leaves (*batch, *leaf shape) in the leaves' own dtypes.

        Leaves that do not vary are zero: this is a direction, a difference or a variance.
        """
        batch, slices = flat.shape[:-1], self.slices
        leaves = []
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            if i not in slices:
                leaves.append(jnp.zeros((*batch, *shape), dtype))
                continue
            start, size = slices[i]
            part = jax.lax.slice_in_dim(flat, start, start + size, axis=flat.ndim - 1)
            leaves.append(part.reshape(*batch, *shape).astype(dtype))
        return jax.tree.unflatten(self.treedef, leaves)

    def is_flat(self, vector: PyTree) -> bool:
        """Whether `vector` is a flat (P,) array rather than a pytree like `params`."""
        structure = jax.tree.structure(vector)
        is_array = jax.tree_util.all_leaves([vector])
        shape = jnp.shape(vector) if is_array else None
        if structure == self.treedef and (not is_array or shape == self.shapes[0]):
            return False
        if shape == (self.size,):
            return True
        raise ValueError(
            f"expected a pytree like params ({self.treedef}) or a flat vector of shape "
            f"({self.size},); got {structure if shape is None else f'an array of shape {shape}'}"
        )

    def apply(self, fn: Any, vector: PyTree) -> PyTree:
        """Apply a map of flat vectors to a pytree or a flat vector; the same form comes back."""
        if self.is_flat(vector):
            return fn(jnp.asarray(vector).astype(self.dtype))
        shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(vector))
        if shapes != self.shapes:
            raise ValueError(f"leaves of shapes {shapes} given; params have {self.shapes}")
        return self.unflatten(fn(self.flatten(vector)))


def leaf_names(tree: PyTree) -> list[str]:
    """The path of each leaf as people write it: `layers/0/kernel`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in paths]


def is_concrete(*trees: PyTree) -> bool:
    """Whether the values can be looked at now: nothing is traced, and no trace is under way.

    Inside `jax.jit` even an operation on known arrays is staged, so its result has no value.
    """
    probe = jnp.zeros(())
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((trees, probe)))
