"""Parameters as one flat vector: the order of leaves is `jax.tree.leaves`, each in C order."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from ._engine import versions
from ._engine.arrays import is_concrete
from ._engine.shards import Shards, axis_names, on_automatic_axes, places_of
from ._engine.vectors import Leaves, Vector
from ._tree import PyTree

Places = tuple[NamedSharding | None, ...]


@dataclasses.dataclass(frozen=True)
class Elements:
    """Some entries of one leaf: their flat indices, ascending, as the bytes of an int64 array.

    Bytes keep their hash once it is computed, so that a space with many indices stays cheap as a
    static argument of `jax.jit`.
    """

    buffer: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, mask: np.ndarray) -> "Elements":
        """The entries at which a boolean mask is true."""
        return cls(np.flatnonzero(mask).astype(np.int64).tobytes())

    @classmethod
    def chosen(cls, mask: bool | np.ndarray) -> "Elements | bool":
        """A truth value for a mask that is the same everywhere: a whole leaf, in or out."""
        if isinstance(mask, bool):
            return mask
        some = bool(np.any(mask))
        return cls.of(np.asarray(mask)) if some and not np.all(mask) else some

    @property
    def indices(self) -> np.ndarray:
        """The flat indices."""
        return np.frombuffer(self.buffer, np.int64)

    def take(self, flat: jax.Array) -> jax.Array:
        """The entries out of (*batch, leaf size)."""
        return flat.at[..., self.indices].get(
            indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
        )

    def place(self, part: jax.Array, size: int) -> jax.Array:
        """The entries at their places in (*batch, size), and zero elsewhere: `take` transposed."""
        zeros = jnp.zeros((*part.shape[:-1], size), part.dtype)
        return zeros.at[..., self.indices].set(
            part, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
        )


@dataclasses.dataclass(frozen=True)
class ParamSpace:
    """The vector space R^P in which the parameters vary: all leaves, or those `selected`.

    Of a selected leaf all entries vary, or those in `elements` where that is not None.

    Frozen configuration (hashable), so that it can be a static argument of `jax.jit`.
    `dtype` is the type in which sums are accumulated: half precision leaves count as float32.
    """

    treedef: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    dtype: np.dtype
    selected: tuple[bool, ...]
    elements: tuple[Elements | None, ...]
    # Where each leaf lies, if devices divide one of them.
    places: Places | None = None
    # Where each selected leaf lies in the flat vector: its number to (start, size).
    slices: dict[int, tuple[int, int]] = dataclasses.field(init=False, compare=False, repr=False)
    size: int = dataclasses.field(init=False, compare=False)  # P, the parameters that vary

    @classmethod
    def of(cls, params: PyTree, masks: Sequence[bool | np.ndarray] | None = None) -> "ParamSpace":
        """Read the space off a pytree of floating-point arrays.

        `masks` say what varies, leaf by leaf: a truth value, or one for each entry.
        """
        leaves, treedef = jax.tree.flatten(params)
        chosen = [Elements.chosen(mask) for mask in masks or [True] * len(leaves)]
        dtypes = tuple(jnp.dtype(leaf.dtype) for leaf in leaves)
        # Half precision cannot hold a sum over a data set; float32 is the smallest accumulator.
        wide = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes)
        return cls(
            treedef=treedef,
            shapes=tuple(tuple(leaf.shape) for leaf in leaves),
            dtypes=dtypes,
            dtype=jnp.dtype(jnp.float64 if wide else jnp.float32),
            # A leaf without entries has none that vary.
            selected=tuple(
                part is not False and math.prod(leaf.shape) > 0
                for part, leaf in zip(chosen, leaves, strict=True)
            ),
            elements=tuple(part if isinstance(part, Elements) else None for part in chosen),
        )

    def __post_init__(self) -> None:
        slices = {}
        start = 0
        for i, (shape, elements) in enumerate(zip(self.shapes, self.elements, strict=True)):
            if self.selected[i]:
                size = math.prod(shape) if elements is None else len(elements.indices)
                slices[i] = (start, size)
                start += size
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "size", start)

    def __getstate__(self) -> dict[str, Any]:
        """Without the places: the devices of a process cannot be pickled."""
        return {**vars(self), "places": None}

    @property
    def template(self) -> PyTree:
        """The tree of the parameters, with shapes and dtypes in the place of arrays."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]
        return jax.tree.unflatten(self.treedef, structs)

    @property
    def whole(self) -> "ParamSpace":
        """The space of all entries of the selected leaves: what derivatives are computed in."""
        none = (None,) * len(self.elements)
        return self if self.elements == none else dataclasses.replace(self, elements=none)

    def at(self, params: PyTree) -> "ParamSpace":
        """The same space, where these parameters lie."""
        places = places_of(jax.tree.leaves(params)) if is_concrete(params) else None
        return dataclasses.replace(self, places=places)

    @property
    def shards(self) -> Shards | None:
        """The devices that divide the parameters."""
        if self.places is None:
            return None
        divided = [place for place in self.places if place is not None and any(place.spec)]
        names = {name for place in divided for name in axis_names(place)}
        mesh = divided[0].mesh
        return Shards(mesh, tuple(name for name in mesh.axis_names if name in names))

    @property
    def by_leaf(self) -> bool:
        """Whether vectors are lists of leaves, because devices divide the parameters."""
        return self.places is not None and self.whole is self

    @property
    def is_all_leaves(self) -> bool:
        """Whether the flat vector is nothing but all leaves, one after the other."""
        whole = all(self.selected) and self.whole is self
        return whole and all(dtype == self.dtype for dtype in self.dtypes)

    def parts(self) -> dict[int, str]:
        """The leaves of which only some entries vary, with how many: `12 of 64 elements`."""
        return {
            i: f"{size} of {math.prod(self.shapes[i])} elements"
            for i, (_, size) in self.slices.items()
            if self.elements[i] is not None
        }

    def flatten_leaf(self, i: int, leaf: ArrayLike, batch_ndim: int = 0) -> jax.Array:
        """What varies of leaf number i, shape (*batch, size), in the accumulation dtype."""
        array = jnp.asarray(leaf)
        flat = array.reshape(*array.shape[:batch_ndim], -1)
        elements = self.elements[i]
        return (flat if elements is None else elements.take(flat)).astype(self.dtype)

    def unflatten_leaf(self, i: int, flat: jax.Array) -> jax.Array:
        """Leaf number i of an array (*batch, P), shape (*batch, *leaf shape), in its own dtype."""
        start, size = self.slices[i]
        part = jax.lax.slice_in_dim(flat, start, start + size, axis=-1).astype(self.dtypes[i])
        elements = self.elements[i]
        if elements is not None:
            part = elements.place(part, math.prod(self.shapes[i]))
        return part.reshape(*flat.shape[:-1], *self.shapes[i])

    def flatten(self, tree: PyTree, batch_ndim: int = 0) -> jax.Array:
        """What varies to one array of shape (*batch, P) in the accumulation dtype."""
        return self.join(self.varying(tree), batch_ndim)

    def unflatten(self, flat: jax.Array) -> PyTree:
        """An array (*batch, P) to leaves (*batch, *leaf shape) in the leaves' own dtypes.

        What does not vary is zero: this is a direction, a difference or a variance.
        """
        batch = flat.shape[:-1]
        zeros = [jnp.zeros((*batch, *s), t) for s, t in zip(self.shapes, self.dtypes, strict=True)]
        return self.merge(jax.tree.unflatten(self.treedef, zeros), self.split(flat))

    def vector(self, tree: PyTree, by_leaf: bool) -> Vector:
        """What varies: flat, or as a list of leaves, in the accumulation dtype."""
        if not by_leaf:
            return self.flatten(tree)
        return [jnp.asarray(leaf).astype(self.dtype) for leaf in self.varying(tree)]

    def tree(self, vector: Vector) -> PyTree:
        """`unflatten`, of a list of leaves too, all of which may have leading axes."""
        if not isinstance(vector, list):
            return self.unflatten(vector)
        batch = vector[0].shape[: vector[0].ndim - len(self.shapes[min(self.slices)])]
        zeros = [jnp.zeros((*batch, *s), t) for s, t in zip(self.shapes, self.dtypes, strict=True)]
        return self.merge(jax.tree.unflatten(self.treedef, zeros), self.placed(self.narrow(vector)))

    def narrow(self, leaves: Leaves) -> Leaves:
        """Leaves that vary in their own dtypes."""
        return [leaf.astype(self.dtypes[i]) for i, leaf in zip(self.slices, leaves, strict=True)]

    def placed(self, leaves: Leaves) -> Leaves:
        """Leaves that vary, divided among the devices as the parameters are."""
        return [self.placed_leaf(i, leaf) for i, leaf in zip(self.slices, leaves, strict=True)]

    def placed_leaf(self, i: int, leaf: jax.Array) -> jax.Array:
        """Something like leaf number i, divided as it is."""
        return leaf if self.places is None else versions.constrain(leaf, self.places[i])

    def normal(self, key: jax.Array, by_leaf: bool) -> Vector:
        """Standard normal numbers; those of a leaf are drawn on the devices that hold it."""
        if not by_leaf:
            return jax.random.normal(key, (self.size,), self.dtype)
        keys = [jax.random.fold_in(key, i) for i in self.slices]
        shapes = [self.shapes[i] for i in self.slices]
        pairs = zip(keys, shapes, strict=True)
        return self.placed([jax.random.normal(k, shape, self.dtype) for k, shape in pairs])

    def varying(self, tree: PyTree) -> list[jax.Array]:
        """The leaves that vary: derivatives are taken in them alone."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self.slices]

    def merge(self, tree: PyTree, varying: Sequence[jax.Array]) -> PyTree:
        """The tree with the leaves that vary in their places."""
        leaves, treedef = jax.tree.flatten(tree)
        for i, leaf in zip(self.slices, varying, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(treedef, leaves)

    def join(self, varying: Sequence[ArrayLike], batch_ndim: int = 0) -> jax.Array:
        """The leaves that vary to one array of shape (*batch, P), as `flatten` does."""
        pairs = zip(self.slices, varying, strict=True)
        flat = [self.flatten_leaf(i, leaf, batch_ndim) for i, leaf in pairs]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1)

    def split(self, flat: jax.Array) -> list[jax.Array]:
        """The leaves that vary of an array (*batch, P)."""
        return [self.unflatten_leaf(i, flat) for i in self.slices]

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

    def apply(self, fn: Callable[..., Vector], vector: PyTree, by_leaf: bool = False) -> PyTree:
        """Apply a map of vectors to a pytree or a flat vector; the same form comes back."""
        image = fn(self.read(vector, by_leaf))
        if not self.is_flat(vector):
            return self.tree(image)
        return self.join(image) if by_leaf else image

    def read(self, vector: PyTree, by_leaf: bool) -> Vector:
        """What users write, a pytree or a flat vector, as a vector."""
        vector = on_automatic_axes(vector) if by_leaf else vector
        if self.is_flat(vector):
            flat = jnp.asarray(vector).astype(self.dtype)
            return self.pieces(flat) if by_leaf else flat
        shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(vector))
        if shapes != self.shapes:
            raise ValueError(f"leaves of shapes {shapes} given; params have {self.shapes}")
        return self.vector(vector, by_leaf)

    def pieces(self, flat: jax.Array) -> Leaves:
        """A flat array (*batch, P) as a list of leaves, in the accumulation dtype."""
        parts = []
        for i, (start, size) in self.slices.items():
            part = jax.lax.slice_in_dim(flat, start, start + size, axis=-1)
            parts.append(part.reshape(*flat.shape[:-1], *self.shapes[i]))
        return parts
