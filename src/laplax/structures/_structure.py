"""How G is kept: the base classes, and the two structures that every other one can become."""

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.arrays import is_concrete
from .._engine.linalg import cholesky, diagonal, eigh, numerical_rank, qr, solve_triangular
from .._engine.vectors import Vector
from .._tree import pytree, static
from ._base import Precision, Projection, columns, resolves, t_mv
from ._blocks import Block, DenseBlock
from ._coordinates import Group, take, total
from ._dense import dense_precision
from ._eigen import Eigenbasis, EigenPrecision, EigenProjection
from ._jacobian import Jacobian
from ._low_rank import general_low_rank


class Structure(abc.ABC):
    """How G is kept. No prior in it.

    A new structure needs `size` and `mv`; every other answer has a dense default.
    """

    by_leaf: ClassVar[bool] = False  # whether vectors are lists of leaves, not flat
    own_prior: ClassVar[bool] = False  # whether the prior is inside, and `prior_prec` scales it

    # Whether `state["scale"]` is the (P, P) array that "full" promises, however G is kept.
    dense_scale: bool = False

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of parameters, P."""

    @abc.abstractmethod
    def mv(self, v: Vector) -> Vector:
        """G v, for v of shape (P,) or (P, k)."""

    def energy(self, v: jax.Array) -> jax.Array:
        """`v^T G v` for one vector."""
        return jnp.vdot(v, self.mv(v))

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
        return self.mv(jnp.eye(self.size, dtype=self.dtype))

    def diagonal(self) -> jax.Array:
        """The diagonal of G, shape (P,)."""
        return diagonal(self.to_dense())

    def trace(self) -> jax.Array:
        """The sum of the eigenvalues of G."""
        return jnp.sum(self.diagonal())

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """Lambda = c G + T."""
        return dense_precision(self.to_dense(), c, prior)

    def times(self, scale: float | jax.Array) -> "Structure":
        """`scale` times G."""
        return Dense(jnp.asarray(scale, self.dtype) * self.to_dense())

    def plus(self, other: "Structure") -> "Structure":
        """The sum of two curvatures of the same parameters, exactly: dense, unless overridden."""
        if type(other) is type(self) or isinstance(other, Dense):
            return Dense(self.to_dense() + other.to_dense())
        raise ValueError(
            f"a curvature kept as {type(self).__name__} and one kept as {type(other).__name__} "
            "have no sum of either kind; fit both with the same curv_type"
        )

    def compressed(self, rank: int | None = None) -> "Structure":
        """The same in the form that takes the least memory; of a sum of low ranks, `rank` pairs."""
        self.check_rank(rank)
        return self

    def check_rank(self, rank: int | None) -> None:
        """Raise where a rank is asked for that nothing reads."""
        if rank is not None:
            raise ValueError(
                "rank= cuts a low-rank curvature (curv_type='lanczos', 'lobpcg', or 'full' with "
                f"few rows); this one is kept as {type(self).__name__}. Leave rank out"
            )

    def diffused(self, prior: jax.Array, noise: jax.Array) -> tuple["Structure", jax.Array]:
        """G' and T' of the precision G' + T' = (Q + (G + T)^-1)^-1, for diagonal T and Q.

        With G + T = C C^T it is C (I + C^T Q C)^-1 C^T. Each of `prior` and `noise` is a number, or
        one per parameter.
        """
        spread = jnp.broadcast_to(prior, (self.size,))
        chol = cholesky(self.to_dense() + jnp.diag(spread))
        inner = jnp.eye(self.size, dtype=chol.dtype) + chol.T @ columns(noise, chol)
        half = solve_triangular(cholesky(inner), chol.T)
        left = prior / (1 + noise * prior)
        return Dense(half.T @ half - jnp.diag(jnp.broadcast_to(left, (self.size,)))), left

    def nearest(self) -> "Structure":
        """Of a sum of Kronecker products, the nearest one; all others are as they are."""
        return self

    @property
    def fits(self) -> bool:
        """Whether its posterior fits the memory of this machine."""
        return True

    @property
    def has_kronecker(self) -> bool:
        """Whether it holds Kronecker products, whose sum is none."""
        return False

    def check_prior(self, sources: Mapping[int, int | None], name: str = "prior_prec") -> None:
        """Raise if this structure cannot take a prior, or another argument, of this granularity.

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

    def plus(self, other: Structure) -> Structure:
        """With a low-rank curvature too: full curvatures of few rows are kept so."""
        if isinstance(other, Dense | LowRank | LowRankSum):
            return Dense(self.matrix + other.to_dense())
        return super().plus(other)


@jax.jit
def _times_identity(structure: Structure) -> jax.Array:
    """One program for all operations of a product."""
    dense: jax.Array = structure.mv(jnp.eye(structure.size, dtype=structure.dtype))
    return dense


class Eigen(Eigenbasis, Structure):
    """G in its eigenbasis: blocks Q diag(e) Q^T over groups of leaves."""

    def mv(self, v: Vector) -> Vector:
        return self.apply(self.spectrum, v)

    def to_dense(self) -> jax.Array:
        return _times_identity(self)

    def diagonal(self) -> jax.Array:
        squares: jax.Array = self.squares(self.spectrum)
        return squares

    def energy(self, v: jax.Array) -> jax.Array:
        """By squares in the eigenbasis: half of a product with G."""
        return total(block.energy(take(v, group)) for block, group in self.parts())

    def times(self, scale: float | jax.Array) -> "Eigen":
        """The eigenvalues of every block times the scale."""
        factor = jnp.asarray(scale, self.dtype)
        return self.with_spectrum([factor * e for e in self.spectrum])

    def spectral(self) -> "Eigen":
        """It is in its eigenbasis."""
        return self

    def precision(self, c: jax.Array, prior: Vector) -> Precision:
        """c e + t, t being the prior of the block."""
        return EigenPrecision(self, c, prior)

    def diffused(self, prior: jax.Array, noise: jax.Array) -> tuple[Structure, jax.Array]:
        """Elementwise in the eigenbasis, where prior and noise are constant on each block."""
        priors = self.block_priors(prior)
        noises = self.block_priors(noise)
        values = [
            e / ((1 + q * (e + t)) * (1 + q * t))
            for e, t, q in zip(self.spectrum, priors, noises, strict=True)
        ]
        return self.with_spectrum(values), prior / (1 + noise * prior)

    @abc.abstractmethod
    def with_spectrum(self, values: Sequence[jax.Array]) -> "Eigen":
        """The same eigenbasis with other eigenvalues, in the order of `spectrum`."""

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

    def precision(self, c: jax.Array, prior: Vector) -> Precision:
        """Elementwise in the basis for T = tau I; by an r x r Cholesky for a general T."""
        if prior.ndim == 0:
            return super().precision(c, prior)
        # Two roots, not the root of the product: its gradient in c fails where S is zero.
        return general_low_rank(self.basis, jnp.sqrt(c) * jnp.sqrt(self.eigenvalues), prior)

    def with_spectrum(self, values: Sequence[jax.Array]) -> "LowRank":
        eigenvalues = values[0][: self.rank]  # what lies outside of the basis has one more
        return LowRank(self.basis, eigenvalues, dense_scale=self.dense_scale)

    def diffused(self, prior: jax.Array, noise: jax.Array) -> tuple[Structure, jax.Array]:
        """In its eigenbasis where prior and noise are numbers."""
        if prior.ndim == 0 and noise.ndim == 0:
            return super().diffused(prior, noise)
        return self.as_sum().diffused(prior, noise)

    def as_sum(self) -> "LowRankSum":
        """The same with the roots of the eigenvalues as a matrix."""
        return LowRankSum(self.basis, jnp.diag(jnp.sqrt(self.eigenvalues)), self.dense_scale)

    def plus(self, other: Structure) -> Structure:
        """In a basis of both spans, by a QR decomposition."""
        return self.as_sum().plus(other)

    def compressed(self, rank: int | None = None) -> "LowRank":
        """The leading `rank` eigenpairs."""
        if rank is None or rank >= self.rank:
            return self
        values, leading = jax.lax.top_k(self.eigenvalues, rank)
        return LowRank(self.basis[:, leading], values)

    def is_resolved(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """By the largest precision beside the smallest."""
        values = c * self.eigenvalues
        smallest = jnp.min(values) + prior if self.rank == self.size else prior
        return resolves(jnp.max(values) / smallest)


@pytree
class LowRankSum(Structure):
    """G = U B B^T U^T, U (P, r) orthonormal: a sum of low ranks in a basis of all their spans.

    Where spans overlap B B^T is singular; no eigenvectors are taken, which would have no gradient.
    """

    basis: jax.Array
    root: jax.Array  # B, (r, m)
    dense_scale: bool = static(default=False)

    @property
    def size(self) -> int:
        return self.basis.shape[-2]

    def mv(self, v: jax.Array) -> jax.Array:
        return self.basis @ (self.root @ (self.root.T @ t_mv(self.basis, v)))

    def energy(self, v: jax.Array) -> jax.Array:
        """By squares: `|B^T U^T v|^2`."""
        return jnp.sum(jnp.square(self.root.T @ t_mv(self.basis, v)))

    def diagonal(self) -> jax.Array:
        return jnp.sum(jnp.square(self.basis @ self.root), axis=-1)

    def times(self, scale: float | jax.Array) -> "LowRankSum":
        factor = jnp.sqrt(jnp.asarray(scale, self.dtype))
        return LowRankSum(self.basis, factor * self.root, self.dense_scale)

    def plus(self, other: Structure) -> Structure:
        """In a basis of both spans, by a QR decomposition."""
        if isinstance(other, LowRank):
            other = other.as_sum()
        if not isinstance(other, LowRankSum):
            return other.plus(self) if isinstance(other, Dense) else super().plus(other)
        basis, turn = qr(jnp.concatenate([self.basis, other.basis], axis=-1))
        own = self.basis.shape[-1]
        root = jnp.concatenate([turn[:, :own] @ self.root, turn[:, own:] @ other.root], axis=-1)
        return LowRankSum(basis, root, self.dense_scale and other.dense_scale)

    def precision(self, c: jax.Array, prior: jax.Array) -> Precision:
        """By Cholesky factors of B B^T and B^T B beside the identity."""
        spread = jnp.broadcast_to(prior, (self.size,))
        return general_low_rank(self.basis, jnp.sqrt(c) * self.root, spread)

    def diffused(self, prior: jax.Array, noise: jax.Array) -> tuple[Structure, jax.Array]:
        """By Woodbury's formula: a low rank beside a diagonal stays one.

        U' = U / (1 + q t) and B'B'^T = B (I + B^T U^T diag(q / (1 + q t)) U B)^-1 B^T.
        """
        shrink = jnp.broadcast_to(1 / (1 + noise * prior), (self.size,))
        scaled = self.basis @ self.root
        inner = scaled.T @ columns(jnp.broadcast_to(noise, shrink.shape) * shrink, scaled)
        chol = cholesky(jnp.eye(inner.shape[0], dtype=inner.dtype) + inner)
        basis, turn = qr(columns(shrink, self.basis))
        root = solve_triangular(chol, (turn @ self.root).T).T
        return LowRankSum(basis, root, self.dense_scale).compressed(), prior / (1 + noise * prior)

    def spectral(self) -> LowRank:
        """Its eigenpairs."""
        values, turn = eigh(self.root @ self.root.T)
        return LowRank(self.basis @ turn, jnp.maximum(values, 0), self.dense_scale)

    def compressed(self, rank: int | None = None) -> LowRank:
        """Eigenpairs, the largest first; those of round-off are left out where they are known."""
        pairs = self.spectral()
        kept = pairs.rank
        if is_concrete(pairs.eigenvalues):
            kept = numerical_rank(np.asarray(pairs.eigenvalues), noise=kept**0.5)
        kept = min(kept, rank or kept)
        return LowRank(
            pairs.basis[:, ::-1][:, :kept],
            pairs.eigenvalues[::-1][:kept],
            self.dense_scale and rank is None,
        )
