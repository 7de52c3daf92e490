"""Blocks of a curvature, each in its eigenbasis: dense, low-rank, diagonal and Kronecker ones.

Every block is Q diag(e) Q^T with orthogonal Q, so that under a prior that is constant on it the
posterior is elementwise in its coordinates. Only the rotation differs between the kinds.
"""

import abc
import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from .._tree import pytree, static
from ._base import columns, t_mv
from ._coordinates import (
    MIN_RESIDUAL_SHARE,
    Coordinates,
    Group,
    Map,
    RowCoordinates,
    WholeCoordinates,
)
from ._jacobian import Jacobian


@dataclasses.dataclass(frozen=True, eq=False)
class Block(abc.ABC):
    """One block. Vectors come as (size, k), coordinates too."""

    values: jax.Array  # e, of any shape

    @property
    def eigenvalues(self) -> jax.Array:
        """e as a vector, one entry for each coordinate."""
        return self.values.reshape(-1)

    def with_eigenvalues(self, e: jax.Array) -> Self:
        """The same eigenbasis with other eigenvalues; what lies outside of it is left out."""
        values = e[: self.values.size].reshape(self.values.shape)
        return dataclasses.replace(self, values=values)

    @abc.abstractmethod
    def rotate(self, v: jax.Array) -> jax.Array:
        """Into the eigenbasis of the block: `Q^T v`."""

    @abc.abstractmethod
    def unrotate(self, v: jax.Array) -> jax.Array:
        """Out of the eigenbasis of the block: `Q v`."""

    def apply(self, d: jax.Array, v: jax.Array) -> jax.Array:
        """`Q diag(d) Q^T v`, for d in the order of `eigenvalues`."""
        return self.unrotate(d[:, None] * self.rotate(v))

    def energy(self, v: jax.Array) -> jax.Array:
        """`v^T Q diag(e) Q^T v` for one vector, shape (size,)."""
        coordinates = self.rotate(v[:, None])[:, 0]
        return jnp.sum(self.values.reshape(-1) * jnp.square(coordinates))

    @abc.abstractmethod
    def squares(self, d: jax.Array) -> jax.Array:
        """The diagonal of Q diag(d) Q^T, shape (size,)."""

    @abc.abstractmethod
    def coordinates(self, J: Jacobian, group: Group) -> Coordinates:
        """J Q, from the factors of J where they rotate by themselves."""

    def spread(self) -> jax.Array | None:
        """What the round-off of each of `values` is a share of; None if they have their own."""
        return None


@pytree
class DiagonalBlock(Block):
    """Q = I."""

    def with_eigenvalues(self, e: jax.Array) -> "DiagonalBlock":
        """In the shape they come in: by leaves, that of the leaf."""
        return DiagonalBlock(e)

    def rotate(self, v: jax.Array) -> jax.Array:
        return v

    def unrotate(self, v: jax.Array) -> jax.Array:
        return v

    def squares(self, d: jax.Array) -> jax.Array:
        return d

    def coordinates(self, J: Jacobian, group: Group) -> WholeCoordinates:
        return J.coordinates(group)


@pytree
class DenseBlock(Block):
    """Q by columns. With fewer columns than rows, the block is zero outside of their span U.

    All that lies outside has one eigenvalue more, the last of `eigenvalues`.
    """

    vectors: jax.Array  # (size, r)

    @property
    def is_complete(self) -> bool:
        """Whether nothing lies outside."""
        return self.vectors.shape[-1] == self.vectors.shape[-2]

    @property
    def eigenvalues(self) -> jax.Array:
        return self.values if self.is_complete else jnp.pad(self.values, (0, 1))

    def rotate(self, v: jax.Array) -> jax.Array:
        return t_mv(self.vectors, v)

    def unrotate(self, v: jax.Array) -> jax.Array:
        return self.vectors @ v

    def apply(self, d: jax.Array, v: jax.Array) -> jax.Array:
        """`U diag(d) U^T v`, and the last of d times `v - U U^T v`.

        Differences of d with its last would save a product, and cancel for a weak prior.
        """
        coordinates = self.rotate(v)
        inside = self.unrotate(columns(d[: self.values.size], coordinates))
        if self.is_complete:
            return inside
        return inside + d[-1] * (v - self.unrotate(coordinates))

    def squares(self, d: jax.Array) -> jax.Array:
        inside = jnp.square(self.vectors) @ d[: self.values.size]
        return inside if self.is_complete else inside + d[-1] * outside_of(self.vectors)

    def spread(self) -> jax.Array:
        """An eigenvalue is known to round-off of the largest."""
        return jnp.max(self.values, keepdims=True)

    def coordinates(self, J: Jacobian, group: Group) -> Coordinates:
        """From factors for a bias: it is a matrix with one row, so that Q acts on g alone."""
        outer = J.outer(group) if self.is_complete else None
        if outer is None or outer.a.shape[1] != 1 or outer.a.shape[3] != 1:
            return J.coordinates(group).split(self.vectors)
        right = jax.vmap(outer.to_matrix, in_axes=1, out_axes=3)(self.vectors)  # (1, 1, O, O)
        return outer.rotated(jnp.ones((1, 1, 1), right.dtype), right[:, 0])


@pytree
class KroneckerBlock(Block):
    """Q = Q_A (x) Q_B on matrices (B, I, O); values (B, I, O) e_bio = a_i b_o, or EKFAC's own.

    `to_matrix` rearranges the block's parameters (size,) into (B, I, O): the weight as the
    product uses it and, if it joins, the bias as one more row; `from_matrix` is its inverse.
    """

    left: jax.Array  # Q_A, (B, I, I)
    right: jax.Array  # Q_B, (B, O, O)
    to_matrix: Map = static()
    from_matrix: Map = static()

    def rotate(self, v: jax.Array) -> jax.Array:
        """Q_A^T M Q_B, flattened in the order of (B, I, O)."""
        matrices = jax.vmap(self.to_matrix, in_axes=1)(v)
        turned = jnp.einsum("bij,kbip,bpo->kbjo", self.left, matrices, self.right)
        return turned.reshape(v.shape[1], -1).T

    def unrotate(self, v: jax.Array) -> jax.Array:
        matrices = v.T.reshape(-1, *self.values.shape)
        turned = jnp.einsum("bij,kbjp,bop->kbio", self.left, matrices, self.right)
        return jax.vmap(self.from_matrix)(turned).T

    def squares(self, d: jax.Array) -> jax.Array:
        """Q_A^2 D (Q_B^2)^T."""
        matrix = d.reshape(self.values.shape)
        squares = (jnp.square(self.left), matrix, jnp.square(self.right))
        return self.from_matrix(jnp.einsum("bij,bjp,bop->bio", *squares))

    def spread(self) -> jax.Array:
        """a_i is known to round-off of the largest a, and b_o of the largest b."""
        return jnp.max(self.values, axis=1, keepdims=True) + jnp.max(
            self.values, axis=2, keepdims=True
        )

    def coordinates(self, J: Jacobian, group: Group) -> Coordinates:
        """`Q_A^T a (x) Q_B^T g`, or rotated rows."""
        outer = J.outer(group)
        if outer is not None:
            return outer.rotated(self.left, self.right)
        rows = J.rows(group)
        rotated = self.rotate(rows.reshape(-1, rows.shape[-1]).T)
        return RowCoordinates(rotated.T.reshape(rows.shape))


def deep_axes(rank: int) -> int:
    """How many axes at most lie so deep in a subspace that `MIN_RESIDUAL_SHARE` is not outside."""
    return int(rank / (1 - MIN_RESIDUAL_SHARE)) + 1


def outside_of(basis: jax.Array) -> jax.Array:
    """|e_i - U U^T e_i|^2 of every axis, (P,): how much of it lies outside of U.

    Where that is little, 1 - |u_i|^2 would be round-off, which a weak prior divides by tau: there
    the rest itself is formed. As all |u_i|^2 add up to r, no more than about r axes are such.
    """
    inside = jnp.sum(jnp.square(basis), axis=-1)
    few = min(basis.shape[0], deep_axes(basis.shape[1]))

    def formed() -> jax.Array:
        deep = jax.lax.top_k(inside, few)[1]
        rest = jax.lax.map(lambda i: jnp.sum(jnp.square((basis @ basis[i]).at[i].add(-1))), deep)
        return (1 - inside).at[deep].set(rest)

    enough = jnp.all(1 - inside >= MIN_RESIDUAL_SHARE)
    return jax.lax.cond(enough, lambda: 1 - inside, formed)
