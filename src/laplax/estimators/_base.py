"""An estimator turns a curvature operator into a structure."""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import warn
from .._engine.arrays import is_concrete
from .._space import ParamSpace
from ..curvature import CurvatureOperator
from ..structures import Block, ByLeaf, Structure

Diagnostics = dict[str, Any]
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Estimator(abc.ABC):
    """How G is estimated. Its fields are the options that `laplace(...)` takes for it."""

    several_passes: ClassVar[bool] = True  # over the data; a one-shot iterator allows one

    @abc.abstractmethod
    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """The structure that keeps G, and what diagnoses it."""


def by_leaf(
    space: ParamSpace, blocks: Sequence[Block], leaves: Sequence[tuple[int, ...]] | None = None
) -> ByLeaf:
    """Blocks over leaves that devices divide; by default one for each leaf that varies."""
    shapes = tuple(space.shapes[i] for i in space.slices)
    own = [(i,) for i in range(len(shapes))] if leaves is None else leaves
    return _placed(ByLeaf(tuple(blocks), tuple(own), shapes), space)


@functools.partial(jax.jit, static_argnums=1)
def _placed(structure: ByLeaf, space: ParamSpace) -> ByLeaf:
    return structure.placed(space)


def settle_negative(values: jax.Array, operator: CurvatureOperator) -> jax.Array:
    """Eigenvalues (or diagonal entries) with the policy for negative ones applied.

    What lies below zero by no more than rounding is zero under every policy.
    """
    policy = operator.local.curvature.negative_eigenvalues
    if policy == "error" and is_concrete(values):
        noise = 100 * values.size**0.5 * float(jnp.finfo(values.dtype).eps)
        smallest = float(values.min())
        largest = float(abs(values).max())
        if smallest < -noise * largest:
            raise ValueError(
                f"the Hessian is indefinite: smallest value {smallest:.4g}, largest {largest:.4g}. "
                "Choose what that means: curvature=Hessian(indefinite='clip') counts negative "
                "eigenvalues as zero; curvature='ggn' is positive semi-definite everywhere."
            )
    return values.clip(min=0)


CONVERGED = 0.25  # of its value: the largest residual of a pair that is taken without a word


def warn_of_residuals(values: Array, residuals: Array, kept: Array, cure: str) -> None:
    """Say how many of the kept eigenpairs are far from converged, where values are known."""
    if not is_concrete(values, residuals, kept):
        return
    values, residuals = (np.asarray(x)[np.asarray(kept)] for x in (values, residuals))
    # More iterations do not lower what rounding leaves.
    rounding = 100 * float(np.finfo(values.dtype).eps) * values.max(initial=0)
    far = residuals > np.maximum(CONVERGED * values, rounding)
    if far.any():
        worst = float(np.max(residuals[far] / values[far]))
        warn(
            f"{int(far.sum())} of {far.size} eigenpairs have not converged: their residuals "
            f"|G u - s u| are up to {worst:.0%} of the eigenvalue s. {cure}",
            ConvergenceWarning,
        )


def told_from_zero(values: Array) -> Array:
    """Which eigenvalues are more than round-off of the largest; NaN counts, so that it shows."""
    return ~(values <= float(np.finfo(values.dtype).eps) * values.max())


class ConvergenceWarning(UserWarning):
    """An iteration ended before its answer was accurate."""


VECTORS = 64  # of the identity that are multiplied together


def identity_blocks(size: int, dtype: np.dtype) -> Iterator[tuple[int, jax.Array]]:
    """Rows of the identity, some at a time: (first index, (rows, P) array)."""
    for start in range(0, size, VECTORS):
        count = min(VECTORS, size - start)
        yield start, jnp.eye(count, size, k=start, dtype=dtype)
