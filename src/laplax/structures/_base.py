"""What a posterior precision Lambda = c G + T answers, and G seen through Jacobians."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from .._engine import vectors
from .._engine.linalg import diagonal
from .._engine.vectors import Vector
from ._coordinates import RowCoordinates
from ._jacobian import Jacobian

LOST = 2  # times eps: a number that is this share of those it was computed from has no digit left

# A vector in the span of U leaves eps of itself outside by round-off, where the variance is
# 1 / tau: an error of eps^2 / tau. A posterior is refused if that is more than this share of the
# vector's own variance, 1 / (c s).
ROUND_OFF = 1e-2


class Precision(abc.ABC):
    """Lambda = c G + T in some structure: the posterior precision and its inverse.

    Vectors are flat, shape (P,) or (P, k), or lists of leaves where `by_leaf` says so. `prior` is
    T: a scalar or one number per parameter.
    """

    prior: Vector
    by_leaf: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of parameters, P."""

    @property
    def width(self) -> int | None:
        """How many columns each factor of J is multiplied with; None if J is read as an array."""
        return None

    @property
    def dimension(self) -> int | jax.Array:
        """How many directions vary: P, unless the covariance is singular."""
        return self.size

    @abc.abstractmethod
    def mv(self, v: Vector) -> Vector:
        """The precision times vectors: `Lambda v`."""

    @abc.abstractmethod
    def solve(self, v: Vector) -> Vector:
        """The covariance times vectors: `Lambda^-1 v`."""

    @abc.abstractmethod
    def scale_mv(self, v: Vector) -> Vector:
        """L v with L L^T = Lambda^-1."""

    @abc.abstractmethod
    def scale_t_mv(self, v: Vector) -> Vector:
        """L^T v: |L^T v|^2 is the variance along v."""

    @abc.abstractmethod
    def variance(self) -> Vector:
        """The diagonal of Lambda^-1, shape (P,)."""

    def diagonal(self) -> Vector:
        """The diagonal of Lambda, shape (P,)."""
        return diagonal(self.mv(jnp.eye(self.size, dtype=self.prior.dtype)))

    @abc.abstractmethod
    def logdet_ratio(self) -> jax.Array:
        """log det Lambda - log det T, without the cancellation of two large numbers."""

    def is_resolved(self) -> bool | jax.Array:
        """Whether the dtype tells the prior apart from the round-off of the curvature.

        Where a factorisation fails, `logdet_ratio` is NaN and nothing else need tell.
        """
        return True

    def covariance(self, J: Jacobian) -> jax.Array:
        """J Lambda^-1 J^T for each of n Jacobians, shape (n, C, C)."""
        return RowCoordinates(self._half(J)).gram()

    def marginal(self, J: Jacobian) -> jax.Array:
        """The diagonals of `covariance`, shape (n, C)."""
        return jnp.sum(jnp.square(self._half(J)), axis=-1)

    def _half(self, J: Jacobian) -> jax.Array:
        """J L, whose squares are variances."""
        half = self.scale_t_mv(J.array.reshape(-1, self.size).T)
        return half.T.reshape(*J.shape, -1)

    def prior_energy(self, offset: Vector) -> jax.Array:
        """v^T T v for the mean's distance v from the prior's mean."""
        return vectors.total(lambda t, v: t * jnp.square(v), self.prior, offset)

    def effective_parameters(self) -> jax.Array:
        """P - tr(T Lambda^-1)."""
        return vectors.total(lambda t, d: 1 - t * d, self.prior, self.variance())

    def logdet(self) -> jax.Array:
        """log det Lambda."""
        return self.logdet_ratio() + self.prior_logdet()

    def prior_logdet(self) -> jax.Array:
        """The log determinant of the prior precision T."""
        return jnp.sum(jnp.log(self.prior)) * (self.size if self.prior.ndim == 0 else 1)

    @property
    def scale(self) -> jax.Array | Self:
        """L as this structure keeps it."""
        return self


class Projection(abc.ABC):
    """G seen through Jacobians: J (c G + tau I)^-1 J^T for any c and tau, without touching P again.

    This is what makes a search over hyperparameters cheap: the basis goes through the Jacobians
    once, every further point is a small product.
    """

    per_example: ClassVar[tuple[str, ...]] = ()  # fields with a leading axis of examples

    def join(self, others: "Sequence[Projection]") -> "Projection":
        """This projection and those of further examples, as one."""
        joined = {
            name: jnp.concatenate([getattr(x, name) for x in (self, *others)])
            for name in self.per_example
        }
        whole: Any = self
        return dataclasses.replace(whole, **joined)

    @abc.abstractmethod
    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""

    @abc.abstractmethod
    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """The diagonals of `covariance`, shape (n, C)."""


def columns(d: jax.Array, v: jax.Array) -> jax.Array:
    """diag(d) v for a scalar or vector d, and v of shape (P,) or (P, k)."""
    return d[:, None] * v if d.ndim == 1 and v.ndim == 2 else d * v


def t_mv(matrix: jax.Array, v: jax.Array) -> jax.Array:
    """M^T v. Outside of `jit`, `matrix.T` would be a copy, and a basis can be gigabytes."""
    return jnp.tensordot(matrix, v, axes=(0, 0))


def resolves(ratio: jax.Array) -> jax.Array:
    """Whether a largest precision of `ratio` times the smallest leaves digits of either."""
    return ratio * float(jnp.finfo(ratio.dtype).eps) ** 2 <= ROUND_OFF
