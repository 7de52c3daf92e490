"""Block-diagonal curvature: dense, diagonal and Kronecker blocks, each in its eigenbasis.

Every block is Q diag(e) Q^T with orthogonal Q, so that under a prior that is constant on it the
posterior is elementwise in its coordinates. Only the rotation differs between the kinds.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._tree import pytree, static
from ._base import LOST, Precision
from ._coordinates import Coordinates, Map, RowCoordinates
from ._diagonal import CoordinateProjection, sum_covariance, sum_marginal
from ._jacobian import Group, Jacobian, Outer, as_jacobian, diagonal_coordinates, take
from ._structure import Structure


class Block(abc.ABC):
    """One block. Vectors come as (size, k), coordinates too."""

    values: jax.Array  # e, of any shape with `size` entries

    @abc.abstractmethod
    def rotate(self, v: jax.Array) -> jax.Array:
        """Into the eigenbasis of the block: `Q^T v`."""

    @abc.abstractmethod
    def unrotate(self, v: jax.Array) -> jax.Array:
        """Out of the eigenbasis of the block: `Q v`."""

    @abc.abstractmethod
    def squares(self, d: jax.Array) -> jax.Array:
        """The diagonal of Q diag(d) Q^T, shape (size,)."""

    def spread(self) -> jax.Array | None:
        """What the round-off of each of `values` is a share of; None if they have their own."""
        return None

    def coordinates(self, jacobian: Jacobian, group: Group) -> Coordinates:
        """J Q, from the factors of J where they rotate by themselves."""
        outer = jacobian.outer(group)
        turned = None if outer is None else self.rotate_outer(outer)
        if turned is not None:
            return turned
        rows = jacobian.rows(group)
        flat = self.rotate(rows.reshape(-1, rows.shape[-1]).T)
        return RowCoordinates(flat.T.reshape(rows.shape))

    def rotate_outer(self, outer: Outer) -> Coordinates | None:
        """J Q for J = a (x) g, if Q acts on a and on g."""
        return None


@pytree
class DiagonalBlock(Block):
    """Q = I."""

    values: jax.Array

    def rotate(self, v: jax.Array) -> jax.Array:
        return v

    def unrotate(self, v: jax.Array) -> jax.Array:
        return v

    def squares(self, d: jax.Array) -> jax.Array:
        return d

    def coordinates(self, jacobian: Jacobian, group: Group) -> Coordinates:
        return diagonal_coordinates(jacobian, group)


@pytree
class DenseBlock(Block):
    """Q by columns."""

    values: jax.Array
    vectors: jax.Array

    def rotate(self, v: jax.Array) -> jax.Array:
        return self.vectors.T @ v

    def unrotate(self, v: jax.Array) -> jax.Array:
        return self.vectors @ v

    def squares(self, d: jax.Array) -> jax.Array:
        return jnp.square(self.vectors) @ d

    def spread(self) -> jax.Array:
        """An eigenvalue is known to round-off of the largest."""
        return jnp.max(self.values, keepdims=True)

    def rotate_outer(self, outer: Outer) -> Coordinates | None:
        """A bias is a matrix with one row, so that Q acts on g alone."""
        if outer.a.shape[1] != 1 or outer.a.shape[3] != 1:
            return None
        right = jax.vmap(outer.to_matrix, in_axes=1, out_axes=3)(self.vectors)  # (1, 1, O, O)
        return outer.rotated(jnp.ones((1, 1, 1), right.dtype), right[:, 0])


@pytree
class KroneckerBlock(Block):
    """Q = Q_A (x) Q_B on matrices (B, I, O); values e_bio = a_i b_o, or EKFAC's own.

    `to_matrix` rearranges the block's parameters (size,) into (B, I, O): the weight as the
    product uses it and, if it joins, the bias as one more row; `from_matrix` is its inverse.
    """

    values: jax.Array  # (B, I, O)
    left: jax.Array  # Q_A, (B, I, I)
    right: jax.Array  # Q_B, (B, O, O)
    to_matrix: Map = static()
    from_matrix: Map = static()

    def _apply(self, left: jax.Array, right: jax.Array, v: jax.Array) -> jax.Array:
        matrices = jax.vmap(self.to_matrix, in_axes=1)(v)
        return jnp.einsum("bij,kbjp,bpo->kbio", left, matrices, right.swapaxes(1, 2))

    def rotate(self, v: jax.Array) -> jax.Array:
        """Q_A^T M Q_B, flattened in the order of (B, I, O)."""
        turned = self._apply(self.left.swapaxes(1, 2), self.right.swapaxes(1, 2), v)
        return turned.reshape(v.shape[1], -1).T

    def unrotate(self, v: jax.Array) -> jax.Array:
        matrices = v.T.reshape(-1, *self.values.shape)
        turned = jnp.einsum("bij,kbjp,bop->kbio", self.left, matrices, self.right)
        return jax.vmap(self.from_matrix)(turned).T

    def spread(self) -> jax.Array:
        """a_i is known to round-off of the largest a, and b_o of the largest b."""
        return jnp.max(self.values, axis=1, keepdims=True) + jnp.max(
            self.values, axis=2, keepdims=True
        )

    def rotate_outer(self, outer: Outer) -> Coordinates:
        """Q_A^T a (x) Q_B^T g."""
        return outer.rotated(self.left, self.right)

    def squares(self, d: jax.Array) -> jax.Array:
        """Q_A^2 D (Q_B^2)^T."""
        matrix = d.reshape(self.values.shape)
        left, right = jnp.square(self.left), jnp.square(self.right)
        return self.from_matrix(jnp.einsum("bij,bjp,bop->bio", left, matrix, right))


@pytree
class BlockDiagonal(Structure):
    """G as blocks over groups of leaves; `groups` names the flat slices of each block."""

    blocks: tuple[Any, ...]
    groups: tuple[Group, ...] = static()  # the leaves of each block
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return sum(size for group in self.groups for _, size in group)

    def mv(self, v: jax.Array) -> jax.Array:
        return apply_blocks(self, [block.values.reshape(-1) for block in self.blocks], v)

    def diagonal(self) -> jax.Array:
        """The diagonal of G."""
        return diagonal_blocks(self, [block.values.reshape(-1) for block in self.blocks])

    def times(self, scale: float | jax.Array) -> "BlockDiagonal":
        """The eigenvalues of every block times the scale."""
        factor = jnp.asarray(scale, self.dtype)
        blocks = [dataclasses.replace(b, values=factor * b.values) for b in self.blocks]
        return BlockDiagonal(tuple(blocks), self.groups)

    def spectral(self) -> "BlockDiagonal":
        """It is in its eigenbasis."""
        return self

    def precision(self, c: jax.Array, prior: jax.Array) -> "BlockPrecision":
        """c e + t, t being the prior of the block."""
        return BlockPrecision(self, c, prior)

    def coordinates(self, jacobian: jax.Array | Jacobian) -> tuple[Coordinates, ...]:
        """The Jacobians in the eigenbasis of every block."""
        J = as_jacobian(jacobian)
        pairs = zip(self.blocks, self.groups, strict=True)
        return tuple(block.coordinates(J, group) for block, group in pairs)

    def project(self, jacobian: jax.Array | Jacobian) -> CoordinateProjection:
        """The Jacobians in the eigenbasis, where G is diagonal."""
        values = tuple(block.values.reshape(-1) for block in self.blocks)
        return CoordinateProjection(tuple(x.kept() for x in self.coordinates(jacobian)), values)

    def check_prior(self, sources: Mapping[int, int | None]) -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        for block, group in zip(self.blocks, self.groups, strict=True):
            given = {sources[start] for start, _ in group}
            if not isinstance(block, DiagonalBlock) and (None in given or len(given) > 1):
                raise ValueError(
                    "this curvature keeps blocks that mix the parameters of a layer, so prior_prec "
                    "must be one number per layer: a number, or a pytree whose entries cover whole "
                    "layers, such as {'layer_1': 1.0, 'layer_2': 2.0}. For one number per leaf "
                    "keep biases apart: joint_bias=False."
                )

    def block_priors(self, prior: jax.Array) -> list[jax.Array]:
        """t of every block: a number, or one per parameter for diagonal blocks."""
        if prior.ndim == 0:
            return [prior] * len(self.blocks)
        return [
            take(prior, group) if isinstance(block, DiagonalBlock) else prior[group[0][0]]
            for block, group in zip(self.blocks, self.groups, strict=True)
        ]


def put(structure: BlockDiagonal, parts: list[jax.Array]) -> jax.Array:
    """Blocks back into the flat order."""
    pieces: dict[int, jax.Array] = {}
    for group, part in zip(structure.groups, parts, strict=True):
        offset = 0
        for start, size in group:
            pieces[start] = jax.lax.slice_in_dim(part, offset, offset + size)
            offset += size
    return jnp.concatenate([pieces[start] for start in sorted(pieces)])


def apply_blocks(structure: BlockDiagonal, values: list[jax.Array], v: jax.Array) -> jax.Array:
    """Q diag(values) Q^T v, block by block."""
    matrix = v[:, None] if v.ndim == 1 else v
    parts = [
        block.unrotate(d[:, None] * block.rotate(take(matrix, group)))
        for block, d, group in zip(structure.blocks, values, structure.groups, strict=True)
    ]
    out = put(structure, parts)
    return out[:, 0] if v.ndim == 1 else out


def diagonal_blocks(structure: BlockDiagonal, values: list[jax.Array]) -> jax.Array:
    """The diagonal of Q diag(values) Q^T."""
    pairs = zip(structure.blocks, values, strict=True)
    return put(structure, [block.squares(d) for block, d in pairs])


@pytree
class BlockPrecision(Precision):
    """Lambda = Q diag(c e + t) Q^T, block by block."""

    structure: BlockDiagonal
    c: jax.Array
    prior: jax.Array
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.structure.size

    def _values(self) -> list[jax.Array]:
        priors = self.structure.block_priors(self.prior)
        blocks = zip(self.structure.blocks, priors, strict=True)
        return [self.c * block.values.reshape(-1) + t for block, t in blocks]

    def mv(self, v: jax.Array) -> jax.Array:
        return apply_blocks(self.structure, self._values(), v)

    def solve(self, v: jax.Array) -> jax.Array:
        return apply_blocks(self.structure, [1 / d for d in self._values()], v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        return apply_blocks(self.structure, [jax.lax.rsqrt(d) for d in self._values()], v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> jax.Array:
        """The diagonal of Lambda^-1."""
        return diagonal_blocks(self.structure, [1 / d for d in self._values()])

    def covariance(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Block by block, from factors where there are some."""
        variances = [1 / d for d in self._values()]
        return sum_covariance(self.structure.coordinates(jacobian), variances)

    def marginal(self, jacobian: jax.Array | Jacobian) -> jax.Array:
        """Block by block, from factors where there are some."""
        return sum_marginal(self.structure.coordinates(jacobian), [1 / d for d in self._values()])

    def is_resolved(self) -> jax.Array:
        """By the round-off of eigenvalues beside what they and the prior add up to."""
        priors = self.structure.block_priors(self.prior)
        found = [
            jnp.all(LOST * jnp.finfo(spread.dtype).eps * self.c * spread <= self.c * b.values + t)
            for b, t in zip(self.structure.blocks, priors, strict=True)
            if (spread := b.spread()) is not None
        ]
        return jnp.all(jnp.asarray(found))

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c e / t)."""
        priors = self.structure.block_priors(self.prior)
        blocks = zip(self.structure.blocks, priors, strict=True)
        return sum(
            (jnp.sum(jnp.log1p(self.c * block.values.reshape(-1) / t)) for block, t in blocks),
            jnp.zeros((), self.prior.dtype),
        )
