"""Curvatures whose vectors are lists of leaves, for parameters that devices divide.

The blocks are those of every other curvature. What differs is that no leaf is joined with others
to a flat vector, which would gather all of them: a diagonal has the shapes of the leaves, a basis
has one array for each, and a Kronecker block joins the leaves of its own layer alone.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from .._engine.vectors import Leaves, Vector
from .._space import ParamSpace
from .._tree import pytree, static
from ._base import resolves
from ._block_diagonal import check_one_prior_per_block
from ._blocks import Block, DiagonalBlock, deep_axes
from ._coordinates import (
    MIN_RESIDUAL_SHARE,
    Coordinates,
    Group,
    SplitCoordinates,
    split_by,
    take,
    total,
)
from ._jacobian import Jacobian
from ._structure import Eigen

Shape = tuple[int, ...]


@pytree
class LeafBasis(Block):
    """An orthonormal basis U by leaves, with `values` e; zero outside of its span.

    As in `DenseBlock`, all that lies outside has one eigenvalue more.
    """

    vectors: tuple[jax.Array, ...]  # (*leaf shape, r)

    @property
    def is_complete(self) -> bool:
        """Whether nothing lies outside."""
        return self.values.size == sum(math.prod(u.shape[:-1]) for u in self.vectors)

    @property
    def eigenvalues(self) -> jax.Array:
        return self.values if self.is_complete else jnp.pad(self.values, (0, 1))

    def rotate(self, v: Leaves) -> jax.Array:  # type: ignore[override]
        pairs = zip(self.vectors, v, strict=True)
        return total(jnp.tensordot(part, u, axes=part.ndim) for u, part in pairs)

    def unrotate(self, v: jax.Array) -> Leaves:  # type: ignore[override]
        return [u @ v for u in self.vectors]

    def apply(self, d: jax.Array, v: Leaves) -> Leaves:  # type: ignore[override]
        """`U diag(d) U^T v`, and the last of d times `v - U U^T v`."""
        coordinates = self.rotate(v)
        inside = self.unrotate(d[: self.values.size] * coordinates)
        if self.is_complete:
            return inside
        parts = zip(v, inside, self.unrotate(coordinates), strict=True)
        return [x + d[-1] * (part - within) for part, x, within in parts]

    def squares(self, d: jax.Array) -> Leaves:  # type: ignore[override]
        """The diagonal of Q diag(d) Q^T, leaf by leaf."""
        inside = [jnp.square(u) @ d[: self.values.size] for u in self.vectors]
        if self.is_complete:
            return inside
        pairs = zip(inside, self._outside(), strict=True)
        return [x + d[-1] * rest for x, rest in pairs]

    def _outside(self) -> Leaves:
        """|e_i - U U^T e_i|^2 of every axis, formed where 1 - |u_i|^2 would be round-off."""
        rest = [1 - jnp.sum(jnp.square(u), axis=-1) for u in self.vectors]
        smallest = jnp.min(jnp.stack([jnp.min(x) for x in rest]))

        def formed() -> Leaves:
            return [self._formed(i, x) for i, x in enumerate(rest)]

        return jax.lax.cond(smallest >= MIN_RESIDUAL_SHARE, lambda: rest, formed)

    def _formed(self, leaf: int, rest: jax.Array) -> jax.Array:
        """The axes of one leaf of which little lies outside: they are few."""
        few = min(rest.size, deep_axes(self.values.size))
        deep = jnp.unravel_index(jax.lax.top_k(-rest.reshape(-1), few)[1], rest.shape)

        def one(index: tuple[jax.Array, ...]) -> jax.Array:
            image = self.unrotate(self.vectors[leaf][index])
            image[leaf] = image[leaf].at[index].add(-1)
            return total(jnp.sum(jnp.square(x)) for x in image)

        return rest.at[deep].set(jax.lax.map(one, deep))

    def coordinates(self, J: Jacobian, group: Group) -> Coordinates:
        """J U, and J J^T without it; the difference itself where it would be round-off."""
        parts = [J.coordinates((leaf,)) for leaf in group]
        pairs = list(zip(parts, self.vectors, strict=True))
        inner = total(x.matmul(u) for x, u in pairs)
        if self.is_complete:
            return SplitCoordinates(inner, None)
        whole = total(x.gram() for x in parts)
        return split_by(inner, whole, lambda: total(x.rest(u, inner) for x, u in pairs))


@pytree
class ByLeaf(Eigen):
    """G in blocks over leaves of these `shapes`; `leaves` names those of each block."""

    blocks: tuple[Block, ...]
    leaves: tuple[tuple[int, ...], ...] = static()
    shapes: tuple[Shape, ...] = static()
    by_leaf = True

    def parts(self) -> list[tuple[Block, Group]]:
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = itertools.accumulate(sizes, initial=0)
        slices = list(zip(starts, sizes, strict=False))
        groups = [tuple(slices[i] for i in own) for own in self.leaves]
        return list(zip(self.blocks, groups, strict=True))

    def placed(self, space: ParamSpace) -> "ByLeaf":
        """The same numbers, divided among the devices as the parameters of the space are."""
        if space.shards is None:
            return self
        numbers = list(space.slices)
        pairs = zip(self.blocks, self.leaves, strict=True)
        blocks = [_placed(block, space, [numbers[i] for i in own]) for block, own in pairs]
        return ByLeaf(tuple(blocks), self.leaves, self.shapes)

    @property
    def width(self) -> int:
        bases = [block for block in self.blocks if isinstance(block, LeafBasis)]
        return max((basis.values.size for basis in bases), default=0)

    @property
    def spectrum(self) -> list[jax.Array]:
        """e of every block, of a diagonal one in the shape of its leaf."""
        return [
            block.values if isinstance(block, DiagonalBlock) else block.eigenvalues
            for block in self.blocks
        ]

    def apply(self, values: Sequence[jax.Array], v: Vector) -> Leaves:
        """Q diag(values) Q^T v, block by block."""
        out: dict[int, jax.Array] = {}
        for d, block, own in zip(values, self.blocks, self.leaves, strict=True):
            images = _apply(block, d, [v[i] for i in own])
            out.update(zip(own, images, strict=True))
        return [out[i] for i in sorted(out)]

    def squares(self, values: Sequence[jax.Array]) -> Leaves:
        """The diagonal of Q diag(values) Q^T."""
        out: dict[int, jax.Array] = {}
        for d, block, own in zip(values, self.blocks, self.leaves, strict=True):
            squares = _squares(block, d, [self.shapes[i] for i in own])
            out.update(zip(own, squares, strict=True))
        return [out[i] for i in sorted(out)]

    def block_priors(self, prior: Vector) -> list[jax.Array]:
        """t of every block: a number, or one per parameter for diagonal blocks."""
        if not isinstance(prior, list):
            return [prior for _ in self.blocks]
        return [prior[own[0]] for own in self.leaves]

    def is_resolved(self, c: jax.Array, prior: Vector) -> jax.Array:
        """By the round-off of eigenvalues; for a basis, by its largest beside the prior."""
        checks = [super().is_resolved(c, prior)]
        for block, t in zip(self.blocks, self.block_priors(prior), strict=True):
            if isinstance(block, LeafBasis):
                values = c * block.values
                smallest = jnp.min(values) + t if block.is_complete else t
                checks.append(resolves(jnp.max(values) / smallest))
        return jnp.all(jnp.asarray(checks))

    def with_spectrum(self, values: Sequence[jax.Array]) -> "ByLeaf":
        pairs = zip(self.blocks, values, strict=True)
        blocks = tuple(block.with_eigenvalues(e) for block, e in pairs)
        return ByLeaf(blocks, self.leaves, self.shapes)

    def mv(self, v: Vector) -> Leaves:
        return self.apply(self.spectrum, v)

    def diagonal(self) -> jax.Array:
        """The diagonal of G, flat."""
        return jnp.concatenate([leaf.reshape(-1) for leaf in self.squares(self.spectrum)])

    def trace(self) -> jax.Array:
        return total(jnp.sum(e) for e in self.spectrum)

    def to_dense(self) -> jax.Array:
        """G as a (P, P) array, for what is small enough."""
        groups = [((start, size),) for _, group in self.parts() for start, size in group]

        def product(v: jax.Array) -> jax.Array:
            pairs = zip(sorted(groups), self.shapes, strict=True)
            image = self.mv([take(v, group).reshape(shape) for group, shape in pairs])
            return jnp.concatenate([leaf.reshape(-1) for leaf in image])

        return jax.vmap(product)(jnp.eye(self.size, dtype=self.dtype))

    def check_prior(self, sources: Mapping[int, int | None], name: str = "prior_prec") -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        several = len(set(sources.values())) > 1 or None in sources.values()
        if several and any(isinstance(block, LeafBasis) for block in self.blocks):
            raise ValueError(
                "a low-rank curvature of parameters that devices divide takes one number as "
                f"{name}; for one per layer or per parameter use curv_type='diagonal' or "
                "'kfac', or parameters that are whole on every device"
            )
        check_one_prior_per_block(self.parts(), sources, name)


def _placed(block: Block, space: ParamSpace, numbers: list[int]) -> Block:
    if isinstance(block, DiagonalBlock):
        return DiagonalBlock(space.placed_leaf(numbers[0], block.values))
    if isinstance(block, LeafBasis):
        pairs = zip(numbers, block.vectors, strict=True)
        turned = [space.placed_leaf(i, jnp.moveaxis(u, -1, 0)) for i, u in pairs]
        return LeafBasis(block.values, tuple(jnp.moveaxis(u, 0, -1) for u in turned))
    assert space.shards is not None
    return jax.tree.map(space.shards.shared, block)


def _apply(block: Block, d: jax.Array, leaves: Leaves) -> Leaves:
    """`Q diag(d) Q^T v` of one block."""
    if isinstance(block, LeafBasis):
        return block.apply(d, leaves)
    if isinstance(block, DiagonalBlock):
        return [d * leaves[0]]
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    return _pieces(block.apply(d, flat[:, None])[:, 0], [leaf.shape for leaf in leaves])


def _squares(block: Block, d: jax.Array, shapes: Sequence[Shape]) -> Leaves:
    """The diagonal of Q diag(d) Q^T of one block."""
    if isinstance(block, LeafBasis):
        return block.squares(d)
    if isinstance(block, DiagonalBlock):
        return [d]
    return _pieces(block.squares(d), shapes)


def _pieces(flat: jax.Array, shapes: Sequence[Shape]) -> Leaves:
    """A flat vector of some leaves, leaf by leaf."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
