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
        return BlockDiagonal(scaled(self.blocks, jnp.asarray(scale, self.dtype)), self.groups)

    def check_prior(self, sources: Mapping[int, int | None]) -> None:
        """A block that mixes parameters needs one prior precision for all of them."""
        check_layers(self.parts(), sources)


def scaled(blocks: Iterable[Block], factor: jax.Array) -> tuple[Block, ...]:
    """Blocks whose eigenvalues are multiplied with a factor."""
    return tuple(dataclasses.replace(b, values=factor * b.values) for b in blocks)


def check_layers(parts: Iterable[tuple[Block, Group]], sources: Mapping[int, int | None]) -> None:
    """Refuse several prior precisions for a block that mixes parameters."""
    for block, group in parts:
        given = {sources[start] for start, _ in group}
        if not isinstance(block, DiagonalBlock) and (None in given or len(given) > 1):
            raise ValueError(
                "this curvature keeps blocks that mix the parameters of a layer, so prior_prec "
                "must be one number per layer: a number, or a pytree whose entries cover whole "
                "layers, such as {'layer_1': 1.0, 'layer_2': 2.0}. For one number per leaf "
                "keep biases apart: joint_bias=False."
            )
