"""How G is kept: the base classes, and the two structures that every other one can become."""

import abc
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import diagonal, eigh
from .._tree import pytree, static
from ._base import Precision, Projection, resolves
from ._blocks import Block, DenseBlock
from ._coordinates import Group
from ._dense import dense_precision
from ._eigen import Eigenbasis, EigenPrecision, EigenProjection
from ._jacobian import Jacobian
from ._low_rank import general_low_rank


class Structure(abc.ABC):
    """How G is kept. No prior in it.

    A new structure needs `size` and `mv`; every other answer has a dense default.
    """

    own_prior: ClassVar[bool] = False  # whether the prior is inside, and `prior_prec` scales it

    # Whether `state["scale"]` is the (P, P) array that "full" promises, however G is kept.
    dense_scale: bool = False

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of parameters, P."""

    @abc.abstractmethod
    def mv(self, v: jax.Array) -> jax.Array:
        """G v, for v of shape (P,) or (P, k)."""

    @property
    def width(self) -> int | None:
        """How many columns each factor of J is multiplied with; None if J is read as an array."""
        return None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the numbers it holds."""
        return jax.tree.leaves(self)[0].dtype

    def to_dense(self) -> jax.Array:
        """G as a (P, P) array."""
        return _times_identity(self)

    def diagonal(self) -> jax.Array:
        """The diagonal of G, shape (P,)."""
        return diagonal(self.to_dense())

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """Lambda = c G + T."""
        return dense_precision(self.to_dense(), c, prior)

    def times(self, scale: float | jax.Array) -> "Structure":
        """`scale` times G."""
        return Dense(jnp.asarray(scale, self.dtype) * self.to_dense())

    def check_prior(self, sources: Mapping[int, int | None]) -> None:
        """Raise if this structure cannot take a prior of this granularity.

        `sources` says, for each leaf by its start in the flat vector, which entry of the user's
        pytree it took its one number from (None: it has one per parameter).
        """
        return

    def spectral(self) -> "Structure":
        """The same G in a form whose posterior under T = tau I is elementwise."""
        values, vectors = eigh(self.to_dense())
        return LowRank(vectors, jnp.maximum(values, 0))

    def project(self, J: Jacobian) -> Projection:
        """Push the eigenbasis through Jacobians."""
        return self.spectral().project(J)


@jax.jit
def _times_identity(structure: Structure) -> jax.Array:
    """One program for all operations of a product."""
    return structure.mv(jnp.eye(structure.size, dtype=structure.dtype))


@pytree
class Dense(Structure):
    """G as a (P, P) array."""

    matrix: jax.Array
    dense_scale = True

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    def mv(self, v: jax.Array) -> jax.Array:
        return self.matrix @ v

    def to_dense(self) -> jax.Array:
        return self.matrix


class Eigen(Eigenbasis, Structure):
    """G in its eigenbasis: blocks Q diag(e) Q^T over groups of leaves."""

    def mv(self, v: jax.Array) -> jax.Array:
        return self.apply(self.spectrum, v)

    def diagonal(self) -> jax.Array:
        return self.squares(self.spectrum)

    def spectral(self) -> "Eigen":
        """It is in its eigenbasis."""
        return self

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """c e + t, t being the prior of the block."""
        return EigenPrecision(self, c, prior)

    def project(self, J: Jacobian) -> EigenProjection:
        """The Jacobians in the eigenbasis, where G is diagonal."""
        coordinates = tuple(x.kept() for x in self.coordinates(J))
        return EigenProjection(coordinates, tuple(self.spectrum))


@pytree
class LowRank(Eigen):
    """G ~= U diag(e) U^T, U of shape (P, r) orthonormal, e >= 0.

    `dense_scale` marks an exact full curvature kept on its smaller side (fewer rows than
    parameters): its `state["scale"]` is then the (P, P) array that "full" promises.
    """

    basis: jax.Array
    eigenvalues: jax.Array
    dense_scale: bool = static(default=False)

    def parts(self) -> list[tuple[Block, Group]]:
        block = DenseBlock(self.eigenvalues, self.basis)
        return [(block, ((0, self.basis.shape[-2]),))]

    @property
    def rank(self) -> int:
        """The number of eigenpairs."""
        return self.basis.shape[-1]

    @property
    def width(self) -> int:
        return self.rank

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """Elementwise in the basis for T = tau I; by an r x r Cholesky for a general T."""
        if prior.ndim == 0:
            return super().precision(c, prior)
        return general_low_rank(self.basis, self.eigenvalues, c, prior)

    def times(self, scale: float | jax.Array) -> "LowRank":
        eigenvalues = jnp.asarray(scale, self.dtype) * self.eigenvalues
        return LowRank(self.basis, eigenvalues, dense_scale=self.dense_scale)

    def is_resolved(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """By the largest precision beside the smallest."""
        values = c * self.eigenvalues
        smallest = jnp.min(values) + prior if self.rank == self.size else prior
        return resolves(jnp.max(values) / smallest)
