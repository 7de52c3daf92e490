"""The precision of a Gaussian prior: a diagonal, or what a posterior left behind."""

import abc
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ._engine import vectors
from ._engine.vectors import Vector
from ._space import ParamSpace
from ._tree import pytree, static
from .structures import EXACT, Structure


class PriorPrecision(abc.ABC):
    """The precision T of a Gaussian prior. A pytree."""

    @abc.abstractmethod
    def mv(self, v: Vector) -> Vector:
        """`T v` for a vector v, flat or by leaves."""

    @abc.abstractmethod
    def energy(self, offset: Vector) -> jax.Array:
        """`v^T T v` for a vector v, flat or by leaves."""

    @abc.abstractmethod
    def logdet(self) -> jax.Array:
        """The log determinant of T."""

    @abc.abstractmethod
    def decayed(self, factor: jax.Array) -> "PriorPrecision":
        """`factor` times T."""

    @abc.abstractmethod
    def diffused(self, noise: Vector, sources: Mapping[int, int | None]) -> "PriorPrecision":
        """`(Q + T^-1)^-1` for a diagonal Q, one number or one per parameter.

        `sources` are as in `Structure.check_prior`.
        """


@pytree
class DiagonalPriorPrecision(PriorPrecision):
    """T as one number for all parameters, or one for each."""

    values: Vector  # a scalar, (P,), or by leaves: arrays or numbers
    sizes: tuple[int, ...] = static()  # how many parameters each part of `values` is for

    @classmethod
    def of(cls, values: Vector, space: ParamSpace) -> "DiagonalPriorPrecision":
        """The precision of the parameters of a space."""
        if not isinstance(values, list):
            return cls(values, (space.size,))
        return cls(values, tuple(size for _, size in space.slices.values()))

    def mv(self, v: Vector) -> Vector:
        return vectors.each(jnp.multiply, self.values, v)

    def energy(self, offset: Vector) -> jax.Array:
        return vectors.total(lambda t, v: t * jnp.square(v), self.values, offset)

    def logdet(self) -> jax.Array:
        pairs = zip(vectors.parts(self.values), self.sizes, strict=True)
        logs = [jnp.sum(jnp.log(t)) * (size if t.ndim == 0 else 1) for t, size in pairs]
        return jnp.sum(jnp.stack(logs))

    def decayed(self, factor: jax.Array) -> "DiagonalPriorPrecision":
        return self._with(vectors.each(lambda t: factor * t, self.values))

    def diffused(
        self, noise: Vector, sources: Mapping[int, int | None]
    ) -> "DiagonalPriorPrecision":
        del sources  # nothing is mixed
        return self._with(vectors.each(lambda t, q: t / (1 + q * t), self.values, noise))

    def _with(self, values: Vector) -> "DiagonalPriorPrecision":
        return dataclasses.replace(self, values=values)


@pytree
class StructuredPriorPrecision(PriorPrecision):
    """`T = G0 + T0`: the curvature of earlier data, and a diagonal.

    `merge` says what a posterior makes of G0 and the Kronecker products of new data: `"exact"`,
    their sum; `"nearest"`, the nearest Kronecker product. `dropped` is the share of the trace of
    G0 that a truncation left out.
    """

    structure: Structure  # G0
    diagonal: jax.Array  # T0: a scalar, or (P,)
    ratio: jax.Array | None  # log det T - log det T0; None where no factorisation fits the memory
    dropped: jax.Array
    merge: str = static(default=EXACT)

    def mv(self, v: jax.Array) -> jax.Array:
        return self.diagonal * v + self.structure.mv(v)

    def energy(self, offset: jax.Array) -> jax.Array:
        return jnp.sum(self.diagonal * jnp.square(offset)) + self.structure.energy(offset)

    def logdet(self) -> jax.Array:
        """As the posterior found it; nothing is factorised."""
        if self.ratio is None:
            raise ValueError(
                "the log determinant of this sum of Kronecker products needs dense blocks, which "
                "do not fit the memory. The penalty without this constant serves in training: "
                "0.5 * prior.energy(params); as_prior(..., merge='nearest') has both"
            )
        spread = jnp.broadcast_to(self.diagonal, (self.structure.size,))
        return self.ratio + jnp.sum(jnp.log(spread))

    def decayed(self, factor: jax.Array) -> "StructuredPriorPrecision":
        structure = self.structure.times(factor)
        diagonal = factor * self.diagonal
        return StructuredPriorPrecision(structure, diagonal, self.ratio, self.dropped, self.merge)

    def diffused(
        self, noise: jax.Array, sources: Mapping[int, int | None]
    ) -> "StructuredPriorPrecision":
        self.structure.check_prior(sources, "process_noise")
        structure, diagonal = _diffused(self.structure, self.diagonal, noise)
        return structured(structure, diagonal, self.dropped, self.merge)


def structured(
    structure: Structure, diagonal: jax.Array, dropped: jax.Array, merge: str
) -> StructuredPriorPrecision:
    """G0 + T0 with its determinant, where that can be had."""
    ratio = _log_ratio(structure, diagonal) if structure.fits else None
    return StructuredPriorPrecision(structure, diagonal, ratio, dropped, merge)


@jax.jit
def _diffused(
    structure: Structure, diagonal: jax.Array, noise: jax.Array
) -> tuple[Structure, jax.Array]:
    return structure.diffused(diagonal, noise)


@jax.jit
def _log_ratio(structure: Structure, diagonal: jax.Array) -> jax.Array:
    """log det (G0 + T0) - log det T0; NaN where the sum is not positive definite."""
    return structure.precision(jnp.ones_like(diagonal, shape=()), diagonal).logdet_ratio()
