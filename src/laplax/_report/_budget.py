"""What a curvature of a report would need, estimated before work starts from sizes alone."""

import dataclasses
import math
from typing import Any

import jax

from .._api import make_operator
from .._problem import Problem
from ..curvature import CurvatureOperator
from ..estimators import KFAC, Estimator, ExactBlocks, Full, Lanczos, Lobpcg
from ._curvatures import Options, resolve_objects
from ._tables import human_bytes

FLOPS_PER_SECOND = 1e10  # of a few cores, with all that is not arithmetic
EIGEN = 10  # times n^3: an eigendecomposition of n rows


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

    bytes: float
    seconds: float

    def excess(self, cost: Cost) -> str | None:
        """Why that does not fit, or None."""
        if cost.bytes <= self.bytes and cost.seconds <= self.seconds:
            return None
        return (
            f"it needs about {human_bytes(int(cost.bytes))} and {_human_seconds(cost.seconds)}, "
            f"estimated; allowed are max_bytes={human_bytes(int(self.bytes))} and "
            f"max_seconds={self.seconds:g}. Raise them, or give it a subset"
        )


def estimated_cost(problem: Problem, options: Options, num_inputs: int) -> Cost:
    """Of a fit by these options of `laplace`, and of predictions for so many inputs."""
    measured, estimator = resolve_objects(options)
    operator = make_operator(problem, measured, options.get("subset"), progress=False)
    return _fit_cost(estimator, operator) + _prediction_cost(estimator, operator, num_inputs)


def _fit_cost(estimator: Estimator, operator: CurvatureOperator) -> Cost:
    size = operator.size
    item = operator.space.dtype.itemsize
    examples = int(operator.data.num_counted)
    forward = _forward_flops(operator)
    if isinstance(estimator, Lanczos | Lobpcg):
        products = _width(estimator, operator)
        return Cost(3 * products * size * item, 6 * products * examples * forward)
    if not operator.has_rows:  # a product for every parameter
        blocks = Cost(3 * size**2 * item if isinstance(estimator, Full) else 0)
        return blocks + Cost(flops=6 * size * examples * forward)
    rows = examples * operator.rows_per_example
    backward = Cost(3 * size * item, forward * (examples + 2 * rows))
    if isinstance(estimator, Full):
        side = min(rows, size)
        other = max(rows, size)
        # G or its rows, the eigenvectors, and as much again for the decomposition.
        return backward + Cost(4 * side * size * item, 4 * other * side**2 + EIGEN * side**3)
    return sum((_block_cost(estimator, shape, item) for shape in _shapes(operator)), backward)


def _block_cost(estimator: Estimator, shape: tuple[int, ...], item: int) -> Cost:
    """Of the factors, or of the block, of one leaf."""
    size = math.prod(shape)
    if isinstance(estimator, KFAC):
        sides = [math.prod(shape[:-1]), shape[-1]] if len(shape) > 1 else [size]
    elif isinstance(estimator, ExactBlocks) and size <= estimator.max_dense:
        sides = [size]
    else:
        sides = []
    return Cost(sum(4 * n**2 * item for n in sides), sum(EIGEN * n**3 for n in sides))


def _prediction_cost(estimator: Estimator, operator: CurvatureOperator, inputs: int) -> Cost:
    """Jacobians of all inputs, and their products with a basis of so many columns."""
    outputs = math.prod(operator.traced.output.shape)
    jacobians = inputs * (1 + 2 * outputs) * _forward_flops(operator)
    products = 2 * inputs * outputs * operator.size * _width(estimator, operator)
    return Cost(flops=jacobians + products)


def _width(estimator: Estimator, operator: CurvatureOperator) -> int:
    if isinstance(estimator, Lanczos | Lobpcg):
        return min(estimator.rank, operator.size)
    if not isinstance(estimator, Full):
        return 1
    if not operator.has_rows:
        return operator.size
    return min(operator.size, int(operator.data.num_counted) * operator.rows_per_example)


def _shapes(operator: CurvatureOperator) -> list[tuple[int, ...]]:
    return [operator.space.shapes[i] for i in operator.space.slices]


def _forward_flops(operator: CurvatureOperator) -> float:
    """Of one example, as JAX counts them; parameters where it does not."""
    local = operator.local
    example = operator.data.peek().example()[0]
    counted: Any = jax.jit(local.model.one).lower(example, local.params).cost_analysis()
    flops = counted.get("flops", 0.0) if isinstance(counted, dict) else 0.0
    return max(float(flops), 2.0 * operator.space.whole.size)


def _human_seconds(seconds: float) -> str:
    """Seconds with the unit that fits.

    >>> _human_seconds(45.0), _human_seconds(7200.0)
    ('45 s', '2.0 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
