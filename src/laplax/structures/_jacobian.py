"""J of a batch in factors, and its coordinates in the eigenbasis of a block.

A weight that an example uses once has the Jacobian a (x) g: its input times the gradient of the
outputs at its output. A diagonal or Kronecker posterior needs no more than a and g: rotate both,
weigh, contract. Rows of length P are never formed.
"""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._engine.linalg import diagonal
from .._engine.products import batched_matmul
from .._tree import pytree, static
from ._coordinates import (
    Coordinates,
    Map,
    OuterCoordinates,
    PositionCoordinates,
    RowCoordinates,
    SparseCoordinates,
)

Group = tuple[tuple[int, int], ...]  # (start, size) of leaves in the flat vector


@pytree
class Outer:
    """J over a matrix W (B, I, O) as sum_t a_t (x) g_t; a `shared` g is one for all examples.

    `to_matrix` rearranges the parameters (size,) into (B, I, O).
    """

    a: jax.Array  # (n, B, T, I)
    g: jax.Array  # (n, C, B, T, O), or (1, C, B, T, O) if shared
    to_matrix: Map = static()
    shared: bool = static(default=False)

    @property
    def is_thin(self) -> bool:
        """Whether rows are no longer than g, as those of a bias, and g is not one for all."""
        return self.a.shape[3] == 1 and (self.a.shape[2] > 1 or not self.shared)

    def rotated(self, left: jax.Array, right: jax.Array) -> "Coordinates":
        """J (Q_A (x) Q_B) for Q_A (B, I, I) and Q_B (B, O, O), in the order of (B, I, O)."""
        positions, inputs, outputs = self.a.shape[2], left.shape[-1], right.shape[-1]
        rows = self.g.shape[1]
        factors = positions * (inputs**2 + rows * outputs**2)
        if positions > 1 and factors > rows * inputs * outputs * (inputs + outputs):
            summed = PositionCoordinates(self.a, self.g, shared=self.shared).summed()
            product = jnp.einsum("bij,ncbip,bpo->ncbjo", left, summed, right)
            return RowCoordinates(product.reshape(*product.shape[:2], -1))
        a = batched_matmul(self.a, left)
        g = batched_matmul(self.g, right)
        return dataclasses.replace(self, a=a, g=g).coordinates()

    def coordinates(self, to_matrix: Map | None = None) -> Coordinates:
        """J itself, for d in the order of (B, I, O) or in one that `to_matrix` rearranges."""
        if self.a.shape[2] > 1:
            return PositionCoordinates(self.a, self.g, to_matrix, self.shared)
        return OuterCoordinates(self.a[:, :, 0], self.g[:, :, :, 0], to_matrix, self.shared)


class Jacobian(abc.ABC):
    """J of n inputs over the flat parameters, read leaf by leaf."""

    groups: Sequence[Group]  # the finest parts that it can be read in, in their order
    shape: tuple[int, int]  # (n, C)

    @abc.abstractmethod
    def rows(self, group: Group) -> jax.Array:
        """The columns of these leaves, (n, C, size)."""

    def outer(self, group: Group) -> Outer | None:
        """The same in factors, if it has them."""
        return None

    def sparse(self, group: Group) -> "SparseCoordinates | None":
        """The same without the columns that are zero, if each example has only a few others."""
        return None


class DenseJacobian(Jacobian):
    """An array (n, C, P)."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self.shape = array.shape[0], array.shape[1]
        self.groups = (((0, array.shape[-1]),),)

    def rows(self, group: Group) -> jax.Array:
        """A part of the last axis."""
        parts = [jax.lax.slice_in_dim(self.array, s, s + size, axis=2) for s, size in group]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def as_jacobian(jacobian: jax.Array | Jacobian) -> Jacobian:
    """An array (n, C, P) or factors, as factors."""
    return jacobian if isinstance(jacobian, Jacobian) else DenseJacobian(jacobian)


def take(v: jax.Array, group: Group) -> jax.Array:
    """The entries of one part of the flat vector, or the rows of one part of a matrix."""
    parts = [jax.lax.slice_in_dim(v, start, start + size) for start, size in group]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def diagonal_coordinates(jacobian: Jacobian, group: Group) -> Coordinates:
    """J over parameters whose covariance is diagonal as they stand."""
    sparse = jacobian.sparse(group)
    if sparse is not None:
        return sparse
    outer = jacobian.outer(group)
    if outer is None or outer.is_thin:
        return RowCoordinates(jacobian.rows(group))
    return outer.coordinates(outer.to_matrix)


PLENTY = 1 / 16  # of |J|^2 must lie outside of U for a difference to be trusted with it


def split(jacobian: jax.Array | Jacobian, basis: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Z = J U (n, C, R), and R R^T (n, C, C) of the rest R = J - Z U^T; None if U is complete.

    R R^T = J J^T - Z Z^T needs no row of length P. Where little of J is outside, the difference
    would be round-off, which a weak prior divides by tau: there R is formed.
    """
    parts = _parts(jacobian)
    inner = total([x.matmul(take(basis, group)) for x, group in parts])
    if basis.shape[1] == basis.shape[0]:
        return inner, None

    def exact() -> jax.Array:
        # Cut here, not outside: what a branch takes from outside is kept for it.
        return total([x.rest(take(basis, group), inner) for x, group in parts])

    whole = total([x.gram() for x, _ in parts])
    rest = whole - jnp.einsum("ncr,ndr->ncd", inner, inner)
    outside, length = (diagonal(x) for x in (rest, whole))
    return inner, jax.lax.cond(jnp.all(outside >= PLENTY * length), lambda: rest, exact)


def matmul(jacobian: jax.Array | Jacobian, matrix: jax.Array) -> jax.Array:
    """J M for M of shape (P, R): (n, C, R)."""
    return total([x.matmul(take(matrix, group)) for x, group in _parts(jacobian)])


def _parts(jacobian: jax.Array | Jacobian) -> list[tuple[Coordinates, Group]]:
    """The parts that J can be read in."""
    J = as_jacobian(jacobian)
    return [(diagonal_coordinates(J, group), group) for group in J.groups]


def total(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of a non-empty list of arrays."""
    return sum(parts[1:], parts[0])
