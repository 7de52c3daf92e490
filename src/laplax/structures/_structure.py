"""How G is kept: the base class, and the two structures that every other one can become."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import diagonal, eigh
from .._tree import pytree, static
from ._base import Precision, Projection, columns, t_mv
from ._dense import dense_precision
from ._jacobian import Jacobian
from ._low_rank import (
    IsotropicLowRank,
    SpectralProjection,
    general_low_rank,
    spectral_projection,
)


class Structure(abc.ABC):
    """How G is kept. No prior in it.

    A new structure needs `size` and `mv`; every other answer has a dense default.
    """

    factored: ClassVar[bool] = False  # whether `project` takes a `Jacobian` too
    own_prior: ClassVar[bool] = False  # whether the prior is inside, and `prior_prec` scales it

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of parameters, P."""

    @abc.abstractmethod
    def mv(self, v: jax.Array) -> jax.Array:
        """G v, for v of shape (P,) or (P, k)."""

    @property
    def width(self) -> int:
        """How many columns J is multiplied with."""
        return 0

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers it holds."""
        return jax.tree.leaves(self)[0].dtype

    def to_dense(self) -> jax.Array:
        """G as a (P, P) array."""
        return self.mv(jnp.eye(self.size, dtype=self.dtype))

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

    def project(self, jacobian: jax.Array) -> Projection:
        """Push the eigenbasis through Jacobians (n, C, P)."""
        return self.spectral().project(jacobian)


@pytree
class Dense(Structure):
    """G as a (P, P) array."""

    matrix: jax.Array

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    def mv(self, v: jax.Array) -> jax.Array:
        return self.matrix @ v

    def to_dense(self) -> jax.Array:
        return self.matrix


@pytree
class LowRank(Structure):
    """G ~= U diag(S) U^T, U of shape (P, R) orthonormal, S >= 0.

    `dense_scale` marks an exact full curvature kept on its smaller side (fewer rows than
    parameters): its `state["scale"]` is then the (P, P) array that "full" promises.
    """

    basis: jax.Array
    eigenvalues: jax.Array
    dense_scale: bool = static(default=False)
    factored: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.basis.shape[-2]

    @property
    def rank(self) -> int:
        """The number of eigenpairs."""
        return self.basis.shape[-1]

    @property
    def width(self) -> int:
        return self.rank

    def mv(self, v: jax.Array) -> jax.Array:
        return self.basis @ columns(self.eigenvalues, t_mv(self.basis, v))

    def diagonal(self) -> jax.Array:
        """Rows of U squared, weighted by S."""
        return jnp.square(self.basis) @ self.eigenvalues

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """Elementwise in the basis for T = tau I; by an R x R Cholesky for a general T."""
        if prior.ndim == 0:
            return IsotropicLowRank(self.basis, c * self.eigenvalues, prior, self.dense_scale)
        return general_low_rank(
            self.basis, self.eigenvalues, c, prior, dense_scale=self.dense_scale
        )

    def times(self, scale: float | jax.Array) -> "LowRank":
        """Its eigenvalues times the scale."""
        eigenvalues = jnp.asarray(scale, self.dtype) * self.eigenvalues
        return LowRank(self.basis, eigenvalues, dense_scale=self.dense_scale)

    def spectral(self) -> "LowRank":
        """It is in its eigenbasis."""
        return self

    def project(self, jacobian: jax.Array | Jacobian) -> SpectralProjection:
        """J U, and the rest of J, which lies outside of U."""
        return spectral_projection(jacobian, self.basis, self.eigenvalues)
