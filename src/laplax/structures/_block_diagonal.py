"""Diagonal and block-diagonal curvature."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from .._tree import pytree, static
from ._blocks import Block, DiagonalBlock
from ._coordinates import Group
from ._structure import Eigen


@pytree
class Diagonal(Eigen):
    """The diagonal of G alone."""

    values: jax.Array

    def parts(self) -> list[tuple[Block, Group]]:
        return [(DiagonalBlock(self.values), ((0, self.values.shape[-1]),))]

    def times(self, scale: float | jax.Array) -> "Diagonal":
        return Diagonal(jnp.asarray(scale, self.dtype) * self.values)


@pytree
class BlockDiagonal(Eigen):
    """G as blocks over groups of leaves; `groups` names the flat slices of each block."""

    blocks: tuple[Block, ...]
    groups: tuple[Group, ...] = static()  # (start, size) of the leaves of each block

    def parts(self) -> list[tuple[Block, Group]]:
        return list(zip(self.blocks, self.groups, strict=True))

    def times(self, scale: float | jax.Array) -> "BlockDiagonal":
        """The eigenvalues of every block times the scale."""
        factor = jnp.asarray(scale, self.dtype)
        blocks = [dataclasses.replace(b, values=factor * b.values) for b in self.blocks]
        return BlockDiagonal(tuple(blocks), self.groups)

    def check_prior(self, sources: Mapping[int, int | None]) -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        check_one_prior_per_block(self.parts(), sources)


def check_one_prior_per_block(
    parts: Iterable[tuple[Block, Group]], sources: Mapping[int, int | None]
) -> None:
    """Raise where a block that mixes parameters would have several prior precisions."""
    for block, group in parts:
        given = {sources[start] for start, _ in group}
        if not isinstance(block, DiagonalBlock) and (None in given or len(given) > 1):
            raise ValueError(
                "this curvature keeps blocks that mix the parameters of a layer, so prior_prec "
                "must be one number per layer: a number, or a pytree whose entries cover whole "
                "layers, such as {'layer_1': 1.0, 'layer_2': 2.0}. For one number per leaf "
                "keep biases apart: joint_bias=False."
            )
