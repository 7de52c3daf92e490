"""Posteriors in an eigenbasis: full (spectral), low-rank, diagonal and block curvatures."""

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.vectors import Vector, each
from .._tree import pytree
from ._base import LOST, Precision, Projection
from ._blocks import Block, DiagonalBlock
from ._coordinates import Coordinates, Group, put, take, total
from ._jacobian import Jacobian


class Eigenbasis(abc.ABC):
    """An orthogonal basis of the parameters, and eigenvalues: blocks over groups of leaves."""

    by_leaf: ClassVar[bool] = False  # whether vectors are lists of leaves

    @abc.abstractmethod
    def parts(self) -> list[tuple[Block, Group]]:
        """Every block, and where its parameters lie in the flat vector."""

    @property
    def size(self) -> int:
        """The number of parameters, P."""
        return sum(size for _, group in self.parts() for _, size in group)

    @property
    def width(self) -> int:
        """How many columns each factor of J is multiplied with."""
        return 0

    @property
    def spectrum(self) -> list[jax.Array]:
        """e of every block."""
        return [block.eigenvalues for block, _ in self.parts()]

    def coordinates(self, J: Jacobian) -> list[Coordinates]:
        """The Jacobians in the eigenbasis of every block."""
        return [block.coordinates(J, group) for block, group in self.parts()]

    def apply(self, values: Sequence[jax.Array], v: Vector) -> Vector:
        """Q diag(values) Q^T v, block by block."""
        matrix = v[:, None] if v.ndim == 1 else v
        pairs = zip(values, self.parts(), strict=True)
        out = self._put([block.apply(d, take(matrix, group)) for d, (block, group) in pairs])
        return out[:, 0] if v.ndim == 1 else out

    def squares(self, values: Sequence[jax.Array]) -> Vector:
        """The diagonal of Q diag(values) Q^T."""
        pairs = zip(values, self.parts(), strict=True)
        return self._put([block.squares(d) for d, (block, _) in pairs])

    def block_priors(self, prior: Vector) -> list[jax.Array]:
        """t of every block: a number, or one per parameter for diagonal blocks."""
        if prior.ndim == 0:
            return [prior for _ in self.parts()]
        return [
            take(prior, group) if isinstance(block, DiagonalBlock) else prior[group[0][0]]
            for block, group in self.parts()
        ]

    def is_resolved(self, c: jax.Array, prior: Vector) -> jax.Array:
        """By the round-off of eigenvalues beside what they and the prior add up to."""
        resolved = [
            jnp.all(LOST * jnp.finfo(spread.dtype).eps * c * spread <= c * block.values + t)
            for (block, _), t in zip(self.parts(), self.block_priors(prior), strict=True)
            if (spread := block.spread()) is not None
        ]
        return jnp.all(jnp.asarray(resolved))

    def _put(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Blocks back into the flat order."""
        return put(parts, [group for _, group in self.parts()])


@pytree
class EigenPrecision(Precision):
    """Lambda = Q diag(c e + t) Q^T, block by block: every power of it is elementwise."""

    structure: Eigenbasis
    c: jax.Array
    prior: Vector

    @property
    def size(self) -> int:
        return self.structure.size

    @property
    def by_leaf(self) -> bool:  # type: ignore[override]
        return self.structure.by_leaf

    @property
    def width(self) -> int:
        return self.structure.width

    def _values(self, power: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
        """A power of the eigenvalues c e + t of every block."""
        priors = self.structure.block_priors(self.prior)
        blocks = zip(self.structure.spectrum, priors, strict=True)
        return [power(self.c * e + t) for e, t in blocks]

    def mv(self, v: Vector) -> Vector:
        return self.structure.apply(self._values(jnp.positive), v)

    def solve(self, v: Vector) -> Vector:
        return self.structure.apply(self._values(jnp.reciprocal), v)

    def scale_mv(self, v: Vector) -> Vector:
        return self.structure.apply(self._values(jax.lax.rsqrt), v)

    def scale_t_mv(self, v: Vector) -> Vector:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> Vector:
        return self.structure.squares(self._values(jnp.reciprocal))

    def diagonal(self) -> Vector:
        """`c diag(G) + T`."""
        squares = self.structure.squares(self.structure.spectrum)
        return each(lambda d, t: self.c * d + t, squares, self.prior)

    def covariance(self, J: Jacobian) -> jax.Array:
        """Block by block, from factors where there are some."""
        pairs = zip(self.structure.coordinates(J), self._values(jnp.reciprocal), strict=True)
        return total(x.covariance(d) for x, d in pairs)

    def marginal(self, J: Jacobian) -> jax.Array:
        pairs = zip(self.structure.coordinates(J), self._values(jnp.reciprocal), strict=True)
        return total(x.marginal(d) for x, d in pairs)

    def is_resolved(self) -> jax.Array:
        return self.structure.is_resolved(self.c, self.prior)

    def logdet_ratio(self) -> jax.Array:
        """Sum of log(1 + c e / t): outside of a basis it adds nothing."""
        priors = self.structure.block_priors(self.prior)
        blocks = zip(self.structure.spectrum, priors, strict=True)
        return total(jnp.sum(jnp.log1p(self.c * e / t)) for e, t in blocks)

    def prior_logdet(self) -> jax.Array:
        if not isinstance(self.prior, list):
            return super().prior_logdet()
        priors = self.structure.block_priors(self.prior)
        blocks = zip(self.structure.spectrum, priors, strict=True)
        return total(jnp.sum(jnp.broadcast_to(jnp.log(t), e.shape)) for e, t in blocks)

    @property
    def scale(self) -> "Vector | EigenPrecision":
        """One number per parameter if all blocks are diagonal, else a map."""
        if all(isinstance(block, DiagonalBlock) for block, _ in self.structure.parts()):
            return self.structure.squares(self._values(jax.lax.rsqrt))
        return self


@pytree
class EigenProjection(Projection):
    """J Q diag(c e + tau)^-1 Q^T J^T, block by block. A grid of tau is a few GEMMs."""

    coordinates: tuple[Coordinates, ...]  # J Q of every block
    eigenvalues: tuple[jax.Array, ...]  # e of every block

    def join(self, others: "Sequence[EigenProjection]") -> "EigenProjection":  # type: ignore[override]
        pairs = zip(self.coordinates, *(x.coordinates for x in others), strict=True)
        return EigenProjection(tuple(x.join(more) for x, *more in pairs), self.eigenvalues)

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        pairs = zip(self.coordinates, self.eigenvalues, strict=True)
        return total(x.covariance(1 / (c * e + prior)) for x, e in pairs)

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        pairs = zip(self.coordinates, self.eigenvalues, strict=True)
        return total(x.marginal(1 / (c * e + prior)) for x, e in pairs)
