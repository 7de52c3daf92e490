"""J of a batch in factors, and its coordinates in the eigenbasis of a block.

A weight that an example uses once has the Jacobian a (x) g: its input times the gradient of the
outputs at its output. A diagonal or Kronecker posterior needs no more than a and g: rotate both,
weigh, contract. Rows of length P are never formed.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._tree import pytree, static

Map = Callable[[jax.Array], jax.Array]
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

    def rotated(self, left: jax.Array, right: jax.Array) -> "Coordinates":
        """J (Q_A (x) Q_B) for Q_A (B, I, I) and Q_B (B, O, O), in the order of (B, I, O)."""
        positions, inputs, outputs = self.a.shape[2], left.shape[-1], right.shape[-1]
        rows = self.g.shape[1]
        factors = positions * (inputs**2 + rows * outputs**2)
        if positions > 1 and factors > rows * inputs * outputs * (inputs + outputs):
            product = jnp.einsum("bij,ncbip,bpo->ncbjo", left, self._summed(), right)
            return RowCoordinates(product.reshape(*product.shape[:2], -1))
        a = jnp.einsum("nbti,bij->nbtj", self.a, left)
        g = jnp.einsum("ncbto,bop->ncbtp", self.g, right)
        return dataclasses.replace(self, a=a, g=g).coordinates()

    def coordinates(self) -> "Coordinates":
        """J itself, in the order of (B, I, O)."""
        if self.a.shape[2] == 1:
            return OuterCoordinates(self.a[:, :, 0], self.g[:, :, :, 0], shared=self.shared)
        rows = self._summed()
        return RowCoordinates(rows.reshape(*rows.shape[:2], -1))

    def _summed(self) -> jax.Array:
        """Sum over positions: (n, C, B, I, O)."""
        if self.shared:
            return jnp.einsum("nbti,cbto->ncbio", self.a, self.g[0])
        return jnp.einsum("nbti,ncbto->ncbio", self.a, self.g)


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


class Coordinates(abc.ABC):
    """J in an eigenbasis, in which a covariance is diag(d): J diag(d) J^T per example."""

    @abc.abstractmethod
    def marginal(self, d: jax.Array) -> jax.Array:
        """The diagonals, (n, C), for d of shape (size,)."""

    @abc.abstractmethod
    def covariance(self, d: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""

    @abc.abstractmethod
    def matmul(self, matrix: jax.Array) -> jax.Array:
        """J M for M of shape (size, R): (n, C, R)."""

    @abc.abstractmethod
    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """R R^T for R = J - Z U^T, with U (size, R) and Z (n, C, R): (n, C, C)."""

    @abc.abstractmethod
    def join(self, others: Sequence[Any]) -> "Coordinates":
        """These and those of further examples, as one."""


@pytree
class RowCoordinates(Coordinates):
    """Rows, (n, C, size)."""

    rows: jax.Array

    def marginal(self, d: jax.Array) -> jax.Array:
        """Squares times d. For a whole grid of d this is one GEMM."""
        return jnp.square(self.rows) @ d

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of d."""
        half = self.rows * jnp.sqrt(d)
        return jnp.einsum("ncp,ndp->ncd", half, half)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """One GEMM."""
        return self.rows @ matrix

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """The rows are there already."""
        rest = self.rows - inner @ basis.T
        return jnp.einsum("ncp,ndp->ncd", rest, rest)

    def join(self, others: "Sequence[RowCoordinates]") -> "RowCoordinates":
        """More rows."""
        return RowCoordinates(jnp.concatenate([self.rows, *(x.rows for x in others)]))


@pytree
class OuterCoordinates(Coordinates):
    """a (x) g: J diag(d) J^T = G diag(w) G^T with w_o = sum_i a_i^2 d_io."""

    a: jax.Array  # (n, B, I)
    g: jax.Array  # (n, C, B, O), or (1, C, B, O) if shared
    to_matrix: Map | None = static(default=None)  # (size,) -> (B, I, O), if d has another order
    shared: bool = static(default=False)

    def _matrix(self, d: jax.Array) -> jax.Array:
        """(size,) to (B, I, O)."""
        shape = (self.a.shape[1], self.a.shape[2], self.g.shape[3])
        return d.reshape(shape) if self.to_matrix is None else self.to_matrix(d)

    def _weights(self, d: jax.Array) -> jax.Array:
        return jnp.einsum("nbi,bio->nbo", jnp.square(self.a), self._matrix(d))

    def marginal(self, d: jax.Array) -> jax.Array:
        """Two GEMMs."""
        w, squares = self._weights(d), jnp.square(self.g)
        if self.shared:
            return jnp.einsum("nbo,cbo->nc", w, squares[0])
        return jnp.einsum("nbo,ncbo->nc", w, squares)

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of w."""
        # At w = 0 the root has no derivative; the double `where` gives it 0.
        w = self._weights(d)
        root = jnp.where(w > 0, jnp.sqrt(jnp.where(w > 0, w, 1)), 0)
        half = self.g * root[:, None]
        return jnp.einsum("ncbo,ndbo->ncd", half, half)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """C times fewer operations than with rows: first a, or first a g that all share."""
        columns = jax.vmap(self._matrix, in_axes=1, out_axes=3)(matrix)
        if self.shared:
            weighed = jnp.einsum("cbo,bior->bicr", self.g[0], columns)
            return jnp.einsum("nbi,bicr->ncr", self.a, weighed)
        return jnp.einsum("ncbo,nbor->ncr", self.g, jnp.einsum("nbi,bior->nbor", self.a, columns))

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """A few examples' rows at a time."""
        rows_of_basis = jax.vmap(self._matrix, in_axes=1)(basis).reshape(basis.shape[1], -1)

        def one(of_example: tuple[jax.Array, ...]) -> jax.Array:
            a, z, *own = of_example
            g = own[0] if own else self.g[0]
            rows = jnp.einsum("bi,cbo->cbio", a, g).reshape(z.shape[0], -1) - z @ rows_of_basis
            return rows @ rows.T

        examples = (self.a, inner) if self.shared else (self.a, inner, self.g)
        size = max(1, ROWS_AT_ONCE // (inner.shape[1] * basis.shape[0]))
        return jax.lax.map(one, examples, batch_size=min(size, self.a.shape[0]))

    def join(self, others: "Sequence[OuterCoordinates]") -> "OuterCoordinates":
        """More examples; a shared g stays one."""
        parts = [self, *others]
        g = self.g if self.shared else jnp.concatenate([x.g for x in parts])
        return dataclasses.replace(self, a=jnp.concatenate([x.a for x in parts]), g=g)


@pytree
class SparseCoordinates(Coordinates):
    """Rows whose columns differ from example to example; a column that comes again is zero."""

    rows: jax.Array  # (n, C, S)
    index: jax.Array  # (n, S)

    def marginal(self, d: jax.Array) -> jax.Array:
        """Squares times what d is there."""
        return jnp.einsum("ncs,ns->nc", jnp.square(self.rows), self._own(d))

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of d."""
        half = self.rows * jnp.sqrt(self._own(d))[:, None]
        return jnp.einsum("ncs,nds->ncd", half, half)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """With the rows of M that an example needs."""
        return jnp.einsum("ncs,nsr->ncr", self.rows, self._own(matrix))

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """One example's rows at a time."""

        def one(of_example: tuple[jax.Array, ...]) -> jax.Array:
            own, index, z = of_example
            rows = (-z @ basis.T).at[:, index].add(own, mode="drop")
            return rows @ rows.T

        return jax.lax.map(one, (self.rows, self.index, inner))

    def join(self, others: "Sequence[SparseCoordinates]") -> "SparseCoordinates":
        """More examples."""
        parts = [self, *others]
        index = jnp.concatenate([x.index for x in parts])
        return SparseCoordinates(jnp.concatenate([x.rows for x in parts]), index)

    def _own(self, d: jax.Array) -> jax.Array:
        return jnp.take(d, self.index, axis=0, mode="clip")


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
    if outer is None or outer.a.shape[2] > 1:
        return RowCoordinates(jacobian.rows(group))
    a, g = outer.a[:, :, 0], outer.g[:, :, :, 0]
    return OuterCoordinates(a, g, outer.to_matrix, outer.shared)


ROWS_AT_ONCE = 2**22  # entries of rows that are formed only to be summed
PLENTY = 1 / 16  # of |J|^2 must lie outside of U for a difference to be trusted with it


def split(jacobian: jax.Array | Jacobian, basis: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Z = J U (n, C, R), and R R^T (n, C, C) of the rest R = J - Z U^T; None if U is complete.

    R R^T = J J^T - Z Z^T needs no row of length P. Where little of J is outside, the difference
    would be round-off, which a weak prior divides by tau: there R is formed.
    """
    parts, bases = _parts(jacobian, basis)
    inner = total([x.matmul(own) for x, own in zip(parts, bases, strict=True)])
    if basis.shape[1] == basis.shape[0]:
        return inner, None

    def exact() -> jax.Array:
        return total([x.rest(own, inner) for x, own in zip(parts, bases, strict=True)])

    ones = [jnp.ones(own.shape[0], basis.dtype) for own in bases]
    whole = total([x.covariance(d) for x, d in zip(parts, ones, strict=True)])
    rest = whole - jnp.einsum("ncr,ndr->ncd", inner, inner)
    outside, length = (jnp.diagonal(x, axis1=1, axis2=2) for x in (rest, whole))
    return inner, jax.lax.cond(jnp.all(outside >= PLENTY * length), lambda: rest, exact)


def matmul(jacobian: jax.Array | Jacobian, matrix: jax.Array) -> jax.Array:
    """J M for M of shape (P, R): (n, C, R)."""
    return total([x.matmul(own) for x, own in zip(*_parts(jacobian, matrix), strict=True)])


def _parts(
    jacobian: jax.Array | Jacobian, matrix: jax.Array
) -> tuple[list[Coordinates], list[jax.Array]]:
    """J and M, cut into the parts that J can be read in."""
    J = as_jacobian(jacobian)
    coordinates = [diagonal_coordinates(J, group) for group in J.groups]
    return coordinates, [take(matrix, group) for group in J.groups]


def total(parts: Sequence[jax.Array]) -> jax.Array:
    """Their sum."""
    return sum(parts[1:], parts[0])
