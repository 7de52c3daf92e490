"""J of a batch, read leaf by leaf: in factors where there are some, else in rows.

A weight that an example uses once has the Jacobian a (x) g: its input times the gradient of the
outputs at its output. A diagonal or Kronecker posterior needs no more than a and g: rotate both,
weigh, contract. Rows of length P are never formed.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from .._engine.products import batched_matmul
from .._tree import pytree, static
from ._coordinates import (
    Group,
    LeafCoordinates,
    Map,
    OuterCoordinates,
    PositionCoordinates,
    RowCoordinates,
    SparseCoordinates,
    WholeCoordinates,
)


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

    def rotated(self, left: jax.Array, right: jax.Array) -> WholeCoordinates:
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

    def coordinates(self, to_matrix: Map | None = None) -> WholeCoordinates:
        """J itself, for d in the order of (B, I, O) or in one that `to_matrix` rearranges."""
        if self.a.shape[2] > 1:
            return PositionCoordinates(self.a, self.g, to_matrix, self.shared)
        return OuterCoordinates(self.a[:, :, 0], self.g[:, :, :, 0], to_matrix, self.shared)


class Jacobian(abc.ABC):
    """J of n inputs over the flat parameters: whole, or read leaf by leaf."""

    shape: tuple[int, int]  # (n, C)

    @property
    @abc.abstractmethod
    def array(self) -> jax.Array:
        """All of it, (n, C, P)."""

    @abc.abstractmethod
    def rows(self, group: Group) -> jax.Array:
        """The columns of these leaves, (n, C, size)."""

    def leaves(self, group: Group) -> Group:
        """The finest parts that these columns can be read in, in their order."""
        return group

    def outer(self, group: Group) -> Outer | None:
        """The columns of these leaves in factors, if they have them."""
        return None

    def sparse(self, group: Group) -> SparseCoordinates | None:
        """The same without its zero columns, if each example has only a few others."""
        return None

    def coordinates(self, group: Group) -> WholeCoordinates:
        """J over parameters whose covariance is diagonal as they stand."""
        parts: list[WholeCoordinates] = []
        places: list[Group] = []
        start = 0
        for leaf in self.leaves(group):
            parts.append(self._leaf_coordinates((leaf,)))
            places.append(((start, leaf[1]),))
            start += leaf[1]
        return parts[0] if len(parts) == 1 else LeafCoordinates(tuple(parts), tuple(places))

    def _leaf_coordinates(self, leaf: Group) -> WholeCoordinates:
        sparse = self.sparse(leaf)
        if sparse is not None:
            return sparse
        outer = self.outer(leaf)
        if outer is None or outer.is_thin:
            return RowCoordinates(self.rows(leaf))
        return outer.coordinates(outer.to_matrix)


class DenseJacobian(Jacobian):
    """An array (n, C, P)."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self.shape = array.shape[0], array.shape[1]

    @property
    def array(self) -> jax.Array:
        return self._array

    def rows(self, group: Group) -> jax.Array:
        parts = [jax.lax.slice_in_dim(self.array, s, s + size, axis=2) for s, size in group]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
