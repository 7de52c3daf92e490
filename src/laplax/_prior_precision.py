"""The precision of a Gaussian prior: a diagonal, or what a posterior left behind."""

import abc
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ._tree import pytree, static
from .structures import EXACT, Structure


class PriorPrecision(abc.ABC):
    """The precision T of a Gaussian prior. A pytree."""

    @abc.abstractmethod
    def mv(self, v: jax.Array) -> jax.Array:
        """`T v` for a flat vector v, shape (P,)."""

    @abc.abstractmethod
    def energy(self, offset: jax.Array) -> jax.Array:
        """`v^T T v` for a flat vector v, shape (P,)."""

    @abc.abstractmethod
    def logdet(self) -> jax.Array:
        """The log determinant of T."""

    @abc.abstractmethod
    def decayed(self, factor: jax.Array) -> "PriorPrecision":
        """`factor` times T."""

    @abc.abstractmethod
    def diffused(self, noise: jax.Array, sources: Mapping[int, int | None]) -> "PriorPrecision":
        """`(Q + T^-1)^-1` for a diagonal Q, one number or one per parameter.

        `sources` are as in `Structure.check_prior`.
        """


@pytree
class DiagonalPriorPrecision(PriorPrecision):
    """T as one number for all parameters, or one for each."""

    values: jax.Array  # a scalar, or (P,)
    size: int = static()  # P

    def mv(self, v: jax.Array) -> jax.Array:
        return self.values * v

    def energy(self, offset: jax.Array) -> jax.Array:
        return jnp.sum(self.values * jnp.square(offset))

    def logdet(self) -> jax.Array:
        return jnp.sum(jnp.log(jnp.broadcast_to(self.values, (self.size,))))

    def decayed(self, factor: jax.Array) -> "DiagonalPriorPrecision":
        return DiagonalPriorPrecision(factor * self.values, self.size)

    def diffused(
        self, noise: jax.Array, sources: Mapping[int, int | None]
    ) -> "DiagonalPriorPrecision":
        del sources  # nothing is mixed
        return DiagonalPriorPrecision(self.values / (1 + noise * self.values), self.size)


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
