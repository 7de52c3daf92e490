"""What a curvature of a report would need, estimated before work starts from sizes alone."""

import dataclasses
import math

import jax

from .._api import curvature_mv
from ..curvature import CurvatureOperator
from ..estimators import KFAC, Estimator, ExactBlocks, Full, Lanczos, Lobpcg
from ._curvatures import Options, Problem, resolve_objects
from ._tables import human_bytes

FLOPS_PER_SECOND = 3e9  # of two cores, with all that is not arithmetic
EIGEN = 10  # times n^3: an eigendecomposition of n rows
DENSE = 0.1  # products and decompositions of matrices run ten times as fast as networks


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that are alive at once, and floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    @property
    def seconds(self) -> float:
        """How long that takes, to the order of magnitude."""
        return self.flops / FLOPS_PER_SECOND


@dataclasses.dataclass(frozen=True)
class Budget:
    """What one curvature may take."""

    max_bytes: float
    max_seconds: float

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if not limit > 0:
                raise ValueError(f"{name} must be positive (float('inf') is no limit); got {limit}")

    def excess(self, cost: Cost) -> str | None:
        """Why that does not fit, or None."""
        if cost.bytes <= self.max_bytes and cost.seconds <= self.max_seconds:
            return None
        return (
            f"it needs about {human_bytes(int(cost.bytes))} and {_human_seconds(cost.seconds)}, "
            f"estimated; allowed are max_bytes={human_bytes(int(self.max_bytes))} and "
            f"max_seconds={self.max_seconds:g}. Raise them, or give it a subset"
        )


def estimated_cost(problem: Problem, options: Options, num_inputs: int) -> Cost:
    """Of a fit by these options of `laplace`, and of predictions for so many inputs."""
    curvature, estimator = resolve_objects(options)
    operator = curvature_mv(**problem, curvature=curvature, subset=options.get("subset"))
    forward = _forward_flops(operator)
    outputs = math.prod(operator.traced.output.shape)
    # Jacobians of all inputs, and their products with the columns of a basis.
    jacobian = (1 + 2 * outputs) * forward
    products = 2 * outputs * operator.size * _basis_columns(estimator, operator)
    return _fit_cost(estimator, operator, forward) + Cost(flops=num_inputs * (jacobian + products))


def _fit_cost(estimator: Estimator, operator: CurvatureOperator, forward: float) -> Cost:
    size = operator.size
    item = operator.space.dtype.itemsize
    examples = int(operator.data.num_counted)
    if isinstance(estimator, Lanczos | Lobpcg):
        products = _basis_columns(estimator, operator)
        return Cost(3 * products * size * item, 6 * products * examples * forward)
    if not operator.has_rows:  # a product for every parameter
        matrix = 3 * size**2 * item if isinstance(estimator, Full) else 0
        return Cost(matrix, 6 * size * examples * forward)
    rows = examples * operator.rows_per_example
    backward = Cost(3 * size * item, forward * (examples + 2 * rows))
    if isinstance(estimator, Full):
        side = min(rows, size)
        # G or its rows, the eigenvectors, and as much again for the decomposition.
        flops = DENSE * (4 * max(rows, size) * side**2 + EIGEN * side**3)
        return backward + Cost(4 * side * size * item, flops)
    shapes = (operator.space.shapes[i] for i in operator.space.slices)
    sides = [side for shape in shapes for side in _block_sides(estimator, shape)]
    return backward + Cost(
        sum(4 * n**2 * item for n in sides), DENSE * sum(EIGEN * n**3 for n in sides)
    )


def _block_sides(estimator: Estimator, shape: tuple[int, ...]) -> list[int]:
    """Of the factors, or of the block, of one leaf."""
    size = math.prod(shape)
    if isinstance(estimator, KFAC):
        return [math.prod(shape[:-1]), shape[-1]] if len(shape) > 1 else [size]
    return [size] if isinstance(estimator, ExactBlocks) and size <= estimator.max_dense else []


def _basis_columns(estimator: Estimator, operator: CurvatureOperator) -> int:
    if isinstance(estimator, Lanczos | Lobpcg):
        return min(estimator.rank, operator.size)
    if not isinstance(estimator, Full):
        return 1
    if not operator.has_rows:
        return operator.size
    return min(operator.size, int(operator.data.num_counted) * operator.rows_per_example)


def _forward_flops(operator: CurvatureOperator) -> float:
    """Of one example, as JAX counts them; parameters where it does not."""
    local = operator.local
    example = operator.data.peek().example()[0]
    counted = jax.jit(local.model.one).lower(example, local.params).cost_analysis()
    flops = counted.get("flops", 0.0) if isinstance(counted, dict) else 0.0
    return max(float(flops), 2.0 * operator.space.whole.size)


def _human_seconds(seconds: float) -> str:
    """Seconds with the unit that fits.

    >>> _human_seconds(45.0), _human_seconds(110.0), _human_seconds(7200.0)
    ('45 s', '110 s', '2.0 h')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:.0f} s"
