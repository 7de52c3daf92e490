"""The diagonal of the curvature: exact by rows, or Hutchinson's estimate from products."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._arguments import check_key, whole_number
from .._engine.chunks import Work
from ..curvature import (
    CurvatureOperator,
    bytes_per_example,
    coverage_of,
    diagonal_of_batch,
    leaves_of_diagonal,
)
from ..structures import Diagonal, DiagonalBlock, Structure
from ._base import Diagnostics, Estimator, by_leaf, identity_blocks, settle_negative


@dataclasses.dataclass(frozen=True, eq=False)
class ExactDiagonal(Estimator):
    """`"diagonal"`: exact. From taps where the curvature has rows; the Hessian by P products.

    The coverage report in the diagnostics says how each leaf was computed.
    """

    several_passes: ClassVar[bool] = False

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        if operator.has_rows:
            program = operator.program
            space = operator.space
            # An entry's square is cut out of its leaf's, so the temporaries are those of the leaf.
            size = bytes_per_example(program, space.whole, operator.rows_per_example)
            work = operator.work(size, reread=True)
            return _exact(operator, work), {"coverage": coverage_of(program, space)}
        operator.require_passes("an exact diagonal of the Hessian")
        blocks = [
            jnp.diagonal(operator.mm(eye), offset=start)
            for start, eye in identity_blocks(operator.size, operator.space.dtype)
        ]
        return Diagonal(settle_negative(jnp.concatenate(blocks), operator)), {}


def _exact(operator: CurvatureOperator, work: Work) -> Structure:
    space = operator.space
    if not space.by_leaf:
        return Diagonal(operator.sum(diagonal_of_batch, work))
    leaves = operator.sum(leaves_of_diagonal, work)
    return by_leaf(space, [DiagonalBlock(leaf) for leaf in leaves])


@dataclasses.dataclass(frozen=True, eq=False)
class Hutchinson(Estimator):
    """`"hutchinson"`: the mean of z * G z over Rademacher probes z; for what has no rows.

    `standard_error` in the diagnostics says how good it is, entry by entry.
    """

    key: jax.Array
    num_samples: int = 100

    def __post_init__(self) -> None:
        check_key(self.key)
        whole_number(self.num_samples, "num_samples", least=2)

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Blocks of probes share a pass over the data."""
        operator = operator.linearised()
        dtype = operator.space.dtype
        block = 16
        mean = jnp.zeros(operator.size, dtype)
        spread = jnp.zeros(operator.size, dtype)
        done = 0
        for i in range(0, self.num_samples, block):
            count = min(block, self.num_samples - i)
            key = jax.random.fold_in(self.key, i)
            probes = jax.random.rademacher(key, (count, operator.size), dtype)
            products = probes * operator.mm(probes)
            # Welford's update for a block: stable where a plain sum of squares is not.
            done += count
            change = products - mean[None]
            mean = mean + jnp.sum(change, axis=0) / done
            spread = spread + jnp.sum(change * (products - mean[None]), axis=0)
        error = jnp.sqrt(jnp.maximum(spread, 0) / (done * (done - 1)))
        return Diagonal(settle_negative(mean, operator)), {"standard_error": error}
