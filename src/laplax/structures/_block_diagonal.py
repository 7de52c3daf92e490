"""Diagonal and block-diagonal curvature, and sums of it: what online updates add up to."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from .._engine.chunks import total_memory
from .._engine.linalg import eigh
from .._tree import pytree, static
from ._base import Precision
from ._blocks import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from ._coordinates import Group, put, take, total
from ._dense import dense_precision
from ._eigen import EigenPrecision
from ._nearest import nearest_kronecker
from ._structure import Eigen, Structure

MEMORY_SHARE = 0.5  # of this machine's: what dense blocks and their factors may need together
GIB = 2**30


@pytree
class Diagonal(Eigen):
    """The diagonal of G alone."""

    values: jax.Array

    def parts(self) -> list[tuple[Block, Group]]:
        return [(DiagonalBlock(self.values), ((0, self.values.shape[-1]),))]

    def with_spectrum(self, values: Sequence[jax.Array]) -> "Diagonal":
        return Diagonal(values[0])

    def plus(self, other: Structure) -> Structure:
        if isinstance(other, Diagonal):
            return Diagonal(self.values + other.values)
        return super().plus(other)


@pytree
class BlockDiagonal(Eigen):
    """G as blocks over groups of leaves; `groups` names the flat slices of each block."""

    blocks: tuple[Block, ...]
    groups: tuple[Group, ...] = static()  # (start, size) of the leaves of each block

    def parts(self) -> list[tuple[Block, Group]]:
        return list(zip(self.blocks, self.groups, strict=True))

    def with_spectrum(self, values: Sequence[jax.Array]) -> "BlockDiagonal":
        pairs = zip(self.blocks, values, strict=True)
        return BlockDiagonal(tuple(block.with_eigenvalues(e) for block, e in pairs), self.groups)

    def plus(self, other: Structure) -> Structure:
        """The terms of both, over the same blocks."""
        return sum_of_blocks(self, other)

    @property
    def has_kronecker(self) -> bool:
        return any(isinstance(block, KroneckerBlock) for block in self.blocks)

    def check_prior(self, sources: Mapping[int, int | None], name: str = "prior_prec") -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        check_one_prior_per_block(self.parts(), sources, name)


@pytree
class BlockSum(Structure):
    """G as blocks over groups of leaves, each the sum of one or more blocks.

    A sum of Kronecker products is none. Its terms are kept, so that a product with it is exact; a
    posterior needs it as a dense matrix, or `nearest()`, in which each sum is one Kronecker
    product.
    """

    terms: tuple[tuple[Block, ...], ...]
    groups: tuple[Group, ...] = static()  # (start, size) of the leaves of each block

    def parts(self) -> list[tuple[tuple[Block, ...], Group]]:
        """The terms of every block, and where its parameters lie in the flat vector."""
        return list(zip(self.terms, self.groups, strict=True))

    @property
    def size(self) -> int:
        return sum(size for group in self.groups for _, size in group)

    def mv(self, v: jax.Array) -> jax.Array:
        """The sum of the products with every term: `G v`."""
        matrix = v[:, None] if v.ndim == 1 else v
        products = [
            total(block.apply(block.eigenvalues, take(matrix, group)) for block in blocks)
            for blocks, group in self.parts()
        ]
        out = put(products, self.groups)
        return out[:, 0] if v.ndim == 1 else out

    def energy(self, v: jax.Array) -> jax.Array:
        """By squares in the eigenbasis of every term."""
        return total(
            block.energy(take(v, group)) for blocks, group in self.parts() for block in blocks
        )

    def diagonal(self) -> jax.Array:
        """Of every term, added up."""
        sums = [total(b.squares(b.eigenvalues) for b in blocks) for blocks in self.terms]
        return put(sums, self.groups)

    def times(self, scale: float | jax.Array) -> "BlockSum":
        """Every term times the scale."""
        factor = jnp.asarray(scale, self.dtype)
        scaled = [
            tuple(block.with_eigenvalues(factor * block.eigenvalues) for block in blocks)
            for blocks in self.terms
        ]
        return BlockSum(tuple(scaled), self.groups)

    def diffused(self, prior: jax.Array, noise: jax.Array) -> tuple[Structure, jax.Array]:
        """A sum of Kronecker products is one no more after noise."""
        raise ValueError(
            "process noise has no closed form on a sum of Kronecker products; take the nearest "
            "product first, as_prior(..., merge='nearest')"
        )

    def plus(self, other: Structure) -> Structure:
        """The terms of both; diagonal blocks are added."""
        return sum_of_blocks(self, other)

    def compressed(self, rank: int | None = None) -> Structure:
        """Exactly the same with one term where that is possible: where no term is Kronecker."""
        self.check_rank(rank)
        merged = [
            blocks if _is_kronecker(blocks) else (_merged(blocks, _size(group)),)
            for blocks, group in self.parts()
        ]
        return _simplest(merged, self.groups)

    def nearest(self) -> BlockDiagonal:
        """One block each: of a sum of Kronecker products, the nearest one in Frobenius norm."""
        blocks = [
            nearest_kronecker(blocks) if _is_kronecker(blocks) else _merged(blocks, _size(group))
            for blocks, group in self.parts()
        ]
        return BlockDiagonal(tuple(blocks), self.groups)

    def spectral(self) -> BlockDiagonal:
        """Eigenpairs of every block, as a dense matrix where there are several terms."""
        self._check_memory()
        blocks = [_merged(blocks, _size(group)) for blocks, group in self.parts()]
        return BlockDiagonal(tuple(blocks), self.groups)

    @property
    def has_kronecker(self) -> bool:
        return any(_is_kronecker(blocks) for blocks in self.terms)

    @property
    def fits(self) -> bool:
        """Whether its posterior fits the memory: sums of Kronecker products as dense matrices."""
        return self._dense_bytes <= MEMORY_SHARE * total_memory()

    @property
    def _dense_bytes(self) -> int:
        """Of a dense block, its precision and the factor of that."""
        sizes = [_size(group) for blocks, group in self.parts() if _needs_dense(blocks)]
        return 3 * self.dtype.itemsize * sum(size**2 for size in sizes)

    def precision(self, c: jax.Array, prior: jax.Array) -> "BlockSumPrecision":
        """Block by block: by Cholesky where there are several terms."""
        self._check_memory()
        factors = [
            _block_precision(blocks, _size(group), c, _local(prior, blocks, group))
            for blocks, group in self.parts()
        ]
        return BlockSumPrecision(self, tuple(factors), c, prior)

    def _check_memory(self) -> None:
        if self.fits:
            return
        largest = max(_size(group) for blocks, group in self.parts() if _needs_dense(blocks))
        raise ValueError(
            "the posterior of a sum of Kronecker products needs them as dense matrices, the "
            f"largest of {largest:,} x {largest:,}: {self._dense_bytes / GIB:.1f} GiB, and "
            f"{MEMORY_SHARE * total_memory() / GIB:.1f} GiB are allowed. Take the nearest "
            "Kronecker product instead, as_prior(prior_arguments, merge='nearest'); the sum "
            "serves as a penalty in training: 0.5 * prior.energy(params)"
        )

    def check_prior(self, sources: Mapping[int, int | None], name: str = "prior_prec") -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        check_one_prior_per_block(
            [(blocks[0], group) for blocks, group in self.parts()], sources, name
        )


@pytree
class BlockSumPrecision(Precision):
    """Lambda = c G + T for a sum of blocks: each has a factorisation of its own."""

    structure: BlockSum
    factors: tuple[Precision, ...]  # of every block, over its own parameters
    c: jax.Array
    prior: jax.Array

    @property
    def size(self) -> int:
        return self.structure.size

    def _blockwise(self, method: str, v: jax.Array) -> jax.Array:
        """A product with the factor of every block, put together again."""
        groups = self.structure.groups
        pairs = zip(self.factors, groups, strict=True)
        return put([getattr(factor, method)(take(v, group)) for factor, group in pairs], groups)

    def mv(self, v: jax.Array) -> jax.Array:
        return self._blockwise("mv", v)

    def solve(self, v: jax.Array) -> jax.Array:
        return self._blockwise("solve", v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        return self._blockwise("scale_mv", v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        return self._blockwise("scale_t_mv", v)

    def diagonal(self) -> jax.Array:
        return put([factor.diagonal() for factor in self.factors], self.structure.groups)

    def variance(self) -> jax.Array:
        return put([factor.variance() for factor in self.factors], self.structure.groups)

    def logdet_ratio(self) -> jax.Array:
        """The sum over all blocks."""
        return total(factor.logdet_ratio() for factor in self.factors)

    def is_resolved(self) -> jax.Array:
        """Whether all blocks are."""
        return jnp.all(jnp.asarray([jnp.asarray(x.is_resolved()) for x in self.factors]))


def check_one_prior_per_block(
    parts: Iterable[tuple[Block, Group]], sources: Mapping[int, int | None], name: str
) -> None:
    """Raise where a block that mixes parameters would have several prior precisions."""
    for block, group in parts:
        given = {sources[start] for start, _ in group}
        if not isinstance(block, DiagonalBlock) and (None in given or len(given) > 1):
            raise ValueError(
                f"this curvature keeps blocks that mix the parameters of a layer, so {name} "
                "must be one number per layer: a number, or a pytree whose entries cover whole "
                "layers, such as {'layer_1': 1.0, 'layer_2': 2.0}. For one number per leaf "
                "keep biases apart: joint_bias=False."
            )


def sum_of_blocks(first: Structure, second: Structure) -> Structure:
    """Two block curvatures over the same blocks, as one: diagonal if all blocks are."""
    one, other = _as_sum(first), _as_sum(second)
    if other is None or one is None or differing_block(one, other) is not None:
        raise ValueError(
            "two block curvatures add up where they have the same blocks; these are of "
            f"{type(first).__name__} and {type(second).__name__}"
        )
    own = dict(zip(other.groups, other.terms, strict=True))
    pairs = [(blocks, own[group]) for blocks, group in one.parts()]
    return _simplest([_added(*pair) for pair in pairs], one.groups)


def differing_block(first: Structure, second: Structure) -> int | None:
    """Where the first block begins in which two block curvatures differ; None if none does."""
    one, other = _as_sum(first), _as_sum(second)
    assert one is not None
    assert other is not None
    kinds = {group: _kind(blocks) for blocks, group in other.parts()}
    for blocks, group in sorted(one.parts(), key=lambda part: min(part[1])):
        if kinds.pop(group, None) != _kind(blocks):
            return min(group)[0]
    return min((min(group)[0] for group in kinds), default=None)


def _as_sum(structure: Structure) -> BlockSum | None:
    if isinstance(structure, BlockDiagonal):
        return BlockSum(tuple((block,) for block in structure.blocks), structure.groups)
    return structure if isinstance(structure, BlockSum) else None


def _kind(blocks: Sequence[Block]) -> tuple[object, ...]:
    """What two blocks must have in common to be added."""
    block = blocks[0]
    if isinstance(block, KroneckerBlock):
        return KroneckerBlock, block.values.shape, block.to_matrix, block.from_matrix
    return (type(block),)


def _added(first: tuple[Block, ...], second: tuple[Block, ...]) -> tuple[Block, ...]:
    if isinstance(first[0], DiagonalBlock):
        return (DiagonalBlock(total(block.values for block in (*first, *second))),)
    return (*first, *second)


def _simplest(terms: Sequence[tuple[Block, ...]], groups: tuple[Group, ...]) -> Structure:
    if all(len(blocks) == 1 for blocks in terms):
        return BlockDiagonal(tuple(blocks[0] for blocks in terms), groups)
    return BlockSum(tuple(terms), groups)


def _is_kronecker(blocks: tuple[Block, ...]) -> bool:
    return isinstance(blocks[0], KroneckerBlock)


def _needs_dense(blocks: tuple[Block, ...]) -> bool:
    return len(blocks) > 1


def _size(group: Group) -> int:
    return sum(size for _, size in group)


def _local(prior: jax.Array, blocks: tuple[Block, ...], group: Group) -> jax.Array:
    """The prior of one block: a number, or one per parameter where the block is diagonal."""
    if prior.ndim == 0:
        return prior
    return take(prior, group) if isinstance(blocks[0], DiagonalBlock) else prior[group[0][0]]


def _dense(blocks: tuple[Block, ...], size: int) -> jax.Array:
    eye = jnp.eye(size, dtype=blocks[0].values.dtype)
    return total(block.apply(block.eigenvalues, eye) for block in blocks)


def _merged(blocks: tuple[Block, ...], size: int) -> Block:
    """Several blocks as a dense one, in the eigenbasis of their sum."""
    if len(blocks) == 1:
        return blocks[0]
    values, vectors = eigh(_dense(blocks, size))
    return DenseBlock(jnp.maximum(values, 0), vectors)


def _block_precision(
    blocks: tuple[Block, ...], size: int, c: jax.Array, prior: jax.Array
) -> Precision:
    if _needs_dense(blocks):
        return dense_precision(_dense(blocks, size), c, prior)
    return EigenPrecision(BlockDiagonal(blocks, (((0, size),),)), c, prior)
