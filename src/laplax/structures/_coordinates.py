"""J of a batch in the eigenbasis of a block, in which a covariance is diag(d).

A weight that an example uses once has the Jacobian a (x) g, and J diag(d) J^T needs no more than
a and g; one that it uses at several positions has a sum of them. Rows of length P are not formed,
or only for one example at a time.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import jax
import jax.numpy as jnp

from .._engine.linalg import diagonal
from .._engine.products import batched_matmul, each_example, few_examples
from .._tree import pytree, static

Map = Callable[[jax.Array], jax.Array]
Group = tuple[tuple[int, int], ...]  # (start, size) of leaves in the flat vector

# Below this share of |J|^2 the difference of two squares is dominated by round-off, which a weak
# prior divides by tau: there the residual itself is formed.
MIN_RESIDUAL_SHARE = 1 / 16


class Coordinates(abc.ABC):
    """J in an eigenbasis, in which a covariance is diag(d): J diag(d) J^T per example."""

    @abc.abstractmethod
    def marginal(self, d: jax.Array) -> jax.Array:
        """The diagonals, (n, C), for d of shape (size,)."""

    @abc.abstractmethod
    def covariance(self, d: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""

    def kept(self) -> "Coordinates":
        """The same, for many products with it."""
        return self

    def join(self, others: Sequence[Self]) -> "Coordinates":
        """These and those of further examples, as one."""
        parts = [x.kept() for x in (self, *others)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


class WholeCoordinates(Coordinates):
    """Coordinates in a complete basis: they hold all of J, which can be multiplied further.

    Of one leaf, d and the columns of matrices may have its shape: a part of it stays in its place.
    """

    def kept(self) -> "WholeCoordinates":
        return self

    @abc.abstractmethod
    def gram(self) -> jax.Array:
        """J J^T, (n, C, C)."""

    @abc.abstractmethod
    def matmul(self, matrix: jax.Array) -> jax.Array:
        """J M for M of shape (size, R): (n, C, R)."""

    @abc.abstractmethod
    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """R R^T for R = J - Z U^T, with U (size, R) and Z (n, C, R): (n, C, C)."""

    def split(self, basis: jax.Array) -> "SplitCoordinates":
        """J in an orthonormal basis U (size, r), and what of it lies outside.

        With the residual R = J - J U U^T, R R^T = J J^T - Z Z^T for Z = J U needs no row of length
        P, unless little of J is outside.
        """
        inner = self.matmul(basis)
        if basis.shape[1] == basis.shape[0]:
            return SplitCoordinates(inner, None)
        return split_by(inner, self.gram(), lambda: self.rest(basis, inner))


@pytree
class RowCoordinates(WholeCoordinates):
    """Rows, (n, C, size)."""

    rows: jax.Array

    def marginal(self, d: jax.Array) -> jax.Array:
        """Squares times d. For a whole grid of d this is one GEMM."""
        return jnp.square(self.rows) @ d.reshape(-1)

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of d."""
        return RowCoordinates(self.rows * jnp.sqrt(d.reshape(-1))[None, None]).gram()

    def gram(self) -> jax.Array:
        """One GEMM for every example."""
        return jnp.einsum("ncp,ndp->ncd", self.rows, self.rows)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        return self.rows @ flat_columns(matrix)

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """The rows are there already."""
        return RowCoordinates(self.rows - inner @ flat_columns(basis).T).gram()


@pytree
class FactorCoordinates(WholeCoordinates):
    """Inputs a of a weight and gradients g of its outputs, at one position or at several."""

    a: jax.Array  # (n, B, [T,] I)
    g: jax.Array  # (n, C, B, [T,] O), or (1, C, B, [T,] O) if shared
    to_matrix: Map | None = static(default=None)  # (size,) -> (B, I, O), if d has another order
    shared: bool = static(default=False)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape (B, I, O) of the weight as matrices."""
        return self.a.shape[1], self.a.shape[-1], self.g.shape[-1]

    def _matrix(self, d: jax.Array) -> jax.Array:
        """(size,) to (B, I, O)."""
        return d.reshape(self.matrix_shape) if self.to_matrix is None else self.to_matrix(d)

    def _factors(self) -> tuple[jax.Array, ...]:
        """What every example has of its own."""
        return (self.a,) if self.shared else (self.a, self.g)

    def _both(self, factors: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """a and g of one example."""
        return factors[0], self.g[0] if self.shared else factors[1]


@pytree
class OuterCoordinates(FactorCoordinates):
    """a (x) g: J diag(d) J^T = G diag(w) G^T with w_o = sum_i a_i^2 d_io."""

    def _weights(self, d: jax.Array) -> jax.Array:
        return batched_matmul(jnp.square(self.a)[:, :, None], self._matrix(d))[:, :, 0]

    def marginal(self, d: jax.Array) -> jax.Array:
        w = self._weights(d)
        squares = jnp.square(self.g)
        if self.shared:
            return jnp.einsum("nbo,cbo->nc", w, squares[0])
        return jnp.einsum("nbo,ncbo->nc", w, squares)

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of w."""
        return self._weighed(self._weights(d))

    def gram(self) -> jax.Array:
        return self._weighed(jnp.sum(jnp.square(self.a), axis=2, keepdims=True))

    def _weighed(self, w: jax.Array) -> jax.Array:
        """The gradients weighed and contracted: `g diag(w) g^T`."""
        # At w = 0 the root has no derivative; the double `where` gives it 0.
        root = jnp.where(w > 0, jnp.sqrt(jnp.where(w > 0, w, 1)), 0)
        half = self.g * root[:, None]
        return jnp.einsum("ncbo,ndbo->ncd", half, half)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """C times fewer operations than with rows: first a, or first a g that all share."""
        columns = jax.vmap(self._matrix, in_axes=-1, out_axes=3)(matrix)
        if self.shared:
            weighed = jnp.einsum("cbo,bior->bicr", self.g[0], columns)
            return jnp.einsum("nbi,bicr->ncr", self.a, weighed)
        flat = columns.reshape(*columns.shape[:2], -1)  # (B, I, O R)
        shape = (len(self.a), columns.shape[0], *columns.shape[2:])
        weighed = batched_matmul(self.a[:, :, None], flat).reshape(shape)
        return jnp.einsum("ncbo,nbor->ncr", self.g, weighed)

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """A few examples' rows at a time."""
        rows_of_basis = jax.vmap(self._matrix, in_axes=-1)(basis)  # (R, B, I, O)

        def one(of_example: tuple[tuple[jax.Array, ...], jax.Array]) -> jax.Array:
            factors, z = of_example
            a, g = self._both(factors)
            # Not an einsum, which would turn it twice.
            rows = a[None, :, :, None] * g[:, :, None]  # (C, B, I, O)
            rest = rows - jnp.tensordot(z, rows_of_basis, axes=1)
            return jnp.tensordot(rest, rest, axes=((1, 2, 3), (1, 2, 3)))

        examples = (self._factors(), inner)
        return few_examples(one, examples, entries=inner.shape[1] * rows_of_basis[0].size)

    def join(self, others: Sequence[Self]) -> Coordinates:
        """More examples; a shared g stays one."""
        if not self.shared:
            return super().join(others)
        return dataclasses.replace(self, a=jnp.concatenate([x.a for x in (self, *others)]))


@pytree
class PositionCoordinates(FactorCoordinates):
    """sum_t a_t (x) g_t, of a weight that an example uses at several positions.

    A product with it forms the rows of one example at a time: those of all are C times the weights
    for every example.
    """

    def _each(self, fn: Callable[..., jax.Array], *more: jax.Array) -> jax.Array:
        """fn of every example's rows (B, I, C, O), as a product makes them, and of its `more`."""

        def one(of_example: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]) -> jax.Array:
            factors, more = of_example
            return fn(jnp.einsum("bti,cbto->bico", *self._both(factors)), *more)

        return each_example(one, (self._factors(), more))

    def marginal(self, d: jax.Array) -> jax.Array:
        """Squares times d."""
        weights = self._matrix(d)[:, :, None]
        return self._each(lambda rows: jnp.sum(jnp.square(rows) * weights, axis=(0, 1, 3)))

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of d."""
        root = jnp.sqrt(self._matrix(d))[:, :, None]

        def one(rows: jax.Array) -> jax.Array:
            half = _in_line(rows * root)
            return half @ half.T

        return self._each(one)

    def gram(self) -> jax.Array:
        """One example's rows at a time."""
        return self._each(lambda rows: jnp.einsum("bico,bido->cd", rows, rows))

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """One example's rows at a time."""
        columns = self._columns(matrix)
        return self._each(lambda rows: _in_line(rows) @ columns)

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """One example's rows at a time."""
        columns = self._columns(basis)

        def one(rows: jax.Array, z: jax.Array) -> jax.Array:
            rest = _in_line(rows) - z @ columns.T
            return rest @ rest.T

        return self._each(one, inner)

    def _columns(self, matrix: jax.Array) -> jax.Array:
        """(size, R) in the order of (B, I, O)."""
        return flat_columns(jax.vmap(self._matrix, in_axes=-1, out_axes=3)(matrix))

    def summed(self) -> jax.Array:
        """Rows of all examples, (n, C, B, I, O)."""
        if self.shared:
            return jnp.einsum("nbti,cbto->ncbio", self.a, self.g[0])
        return jnp.einsum("nbti,ncbto->ncbio", self.a, self.g)

    def kept(self) -> RowCoordinates:
        """Rows of all examples, in the order of d."""
        rows = self.summed()
        if self.to_matrix is None:
            return RowCoordinates(rows.reshape(*rows.shape[:2], -1))
        flat = jax.ShapeDtypeStruct((math.prod(self.matrix_shape),), rows.dtype)
        back = jax.linear_transpose(self.to_matrix, flat)  # it only rearranges
        return RowCoordinates(jax.vmap(jax.vmap(lambda x: back(x)[0]))(rows))


def _in_line(rows: jax.Array) -> jax.Array:
    """(B, I, C, O) to (C, size)."""
    return jnp.moveaxis(rows, 2, 0).reshape(rows.shape[2], -1)


@pytree
class SparseCoordinates(WholeCoordinates):
    """Rows whose columns differ from example to example; a column that comes again is zero."""

    rows: jax.Array  # (n, C, S)
    index: jax.Array  # (n, S)

    def marginal(self, d: jax.Array) -> jax.Array:
        """Squares times what d is there."""
        return jnp.einsum("ncs,ns->nc", jnp.square(self.rows), self._own(d.reshape(-1)))

    def covariance(self, d: jax.Array) -> jax.Array:
        """Both sides through the root of d."""
        return RowCoordinates(self.rows * jnp.sqrt(self._own(d.reshape(-1)))[:, None]).gram()

    def gram(self) -> jax.Array:
        """No column comes twice."""
        return RowCoordinates(self.rows).gram()

    def matmul(self, matrix: jax.Array) -> jax.Array:
        """With the rows of M that an example needs."""
        return jnp.einsum("ncs,nsr->ncr", self.rows, self._own(flat_columns(matrix)))

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        """One example's rows at a time."""

        def one(of_example: tuple[jax.Array, ...]) -> jax.Array:
            own, index, z = of_example
            rows = (-z @ flat_columns(basis).T).at[:, index].add(own, mode="drop")
            return rows @ rows.T

        return jax.lax.map(one, (self.rows, self.index, inner))

    def _own(self, d: jax.Array) -> jax.Array:
        return jnp.take(d, self.index, axis=0, mode="clip")


@pytree
class LeafCoordinates(WholeCoordinates):
    """J leaf by leaf, for d in the order of `groups`."""

    leaves: tuple[WholeCoordinates, ...]
    groups: tuple[Group, ...] = static()

    def marginal(self, d: jax.Array) -> jax.Array:
        return total(x.marginal(take(d, group)) for x, group in self._pairs())

    def covariance(self, d: jax.Array) -> jax.Array:
        return total(x.covariance(take(d, group)) for x, group in self._pairs())

    def gram(self) -> jax.Array:
        return total(x.gram() for x in self.leaves)

    def matmul(self, matrix: jax.Array) -> jax.Array:
        return total(x.matmul(take(matrix, group)) for x, group in self._pairs())

    def rest(self, basis: jax.Array, inner: jax.Array) -> jax.Array:
        return total(x.rest(take(basis, group), inner) for x, group in self._pairs())

    def kept(self) -> "LeafCoordinates":
        return dataclasses.replace(self, leaves=tuple(x.kept() for x in self.leaves))

    def join(self, others: Sequence[Self]) -> "LeafCoordinates":
        pairs = zip(self.leaves, *(x.leaves for x in others), strict=True)
        return dataclasses.replace(self, leaves=tuple(x.join(more) for x, *more in pairs))

    def _pairs(self) -> Iterator[tuple[WholeCoordinates, Group]]:
        return zip(self.leaves, self.groups, strict=True)


@pytree
class SplitCoordinates(Coordinates):
    """J in a basis, and what lies outside of it: the last entry of d weighs all of that."""

    rows: jax.Array  # J U, (n, C, r)
    outside: jax.Array | None  # R R^T, (n, C, C), of the residual; None if U is complete

    def marginal(self, d: jax.Array) -> jax.Array:
        inside = RowCoordinates(self.rows).marginal(d[: self.rows.shape[-1]])
        return inside if self.outside is None else inside + diagonal(self.outside) * d[-1]

    def covariance(self, d: jax.Array) -> jax.Array:
        inside = RowCoordinates(self.rows).covariance(d[: self.rows.shape[-1]])
        return inside if self.outside is None else inside + self.outside * d[-1]


def flat_columns(matrix: jax.Array) -> jax.Array:
    """Columns in the shape of a leaf (*shape, R) as (size, R)."""
    return matrix.reshape(-1, matrix.shape[-1])


def split_by(
    inner: jax.Array, whole: jax.Array, formed: Callable[[], jax.Array]
) -> SplitCoordinates:
    """Z = J U and J J^T: R R^T is their difference, or `formed` where that would be round-off."""
    difference = whole - RowCoordinates(inner).gram()
    enough = jnp.all(diagonal(difference) >= MIN_RESIDUAL_SHARE * diagonal(whole))
    return SplitCoordinates(inner, jax.lax.cond(enough, lambda: difference, formed))


def take(v: jax.Array, group: Group) -> jax.Array:
    """The entries of one part of the flat vector, or the rows of one part of a matrix."""
    if group == ((0, len(v)),):
        return v
    parts = [jax.lax.slice_in_dim(v, start, start + size) for start, size in group]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def put(parts: Sequence[jax.Array], groups: Sequence[Group]) -> jax.Array:
    """Blocks back into the flat order: what `take` took, for all groups together."""
    pieces: dict[int, jax.Array] = {}
    for group, part in zip(groups, parts, strict=True):
        offset = 0
        for start, size in group:
            pieces[start] = take(part, ((offset, size),))
            offset += size
    flat = [pieces[start] for start in sorted(pieces)]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """The sum of one or more arrays."""
    first, *others = parts
    return sum(others, first)
