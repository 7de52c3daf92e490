"""Leading eigenpairs by Lanczos with full re-orthogonalisation."""

import dataclasses

import jax

from .._arguments import check_key, whole_number
from .._engine.lanczos import krylov_by_leaf, krylov_space, random_direction
from ..curvature import CurvatureOperator
from ..structures import LeafBasis, LowRank, Structure
from ._base import (
    CONVERGED,
    Diagnostics,
    Estimator,
    by_leaf,
    settle_negative,
    told_from_zero,
    warn_of_residuals,
)

# A product is cheap up to this many parameters, or bytes of activations, times examples: some
# milliseconds. Three times the rank, and never fewer than 20 more, converges on what was tried.
CHEAP = 2**22
GENEROUS = 3
MORE = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Lanczos(Estimator):
    """`"lanczos"`: the leading `rank` Ritz pairs.

    `num_products` is how many products with the curvature find them. By default they are a tenth
    more than the rank; where a product is cheap (parameters times examples up to 4 million),
    three times the rank, and 20 more at least: the last pairs are the last to converge.

    A pair (u, s) is kept when its residual |G u - s u| is at most `tol * s`; the default keeps
    whatever can be told from zero. Dropped pairs have eigenvalue zero, and the residuals of all
    are in the diagnostics. A warning says how many kept pairs have residuals above s / 4: raise
    `num_products`, or drop them with a smaller `tol`. `key` seeds the start vector.
    """

    rank: int = 20
    num_products: int | None = None
    tol: float = 1.0
    key: jax.Array | None = None

    def __post_init__(self) -> None:
        whole_number(self.rank, "rank")
        if self.key is not None:
            check_key(self.key)
        if self.num_products is None:
            return
        if whole_number(self.num_products, "num_products") < self.rank:
            raise ValueError(
                f"num_products ({self.num_products}) must not be smaller than rank ({self.rank})"
            )

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """Products driven from Python, so that any data source serves."""
        size = operator.size
        products = self.num_products or self._default_products(operator)
        steps = min(products, size)
        rank = min(self.rank, size)
        key = jax.random.key(0) if self.key is None else self.key
        space = operator.space
        operator = operator.linearised()
        if space.by_leaf:
            krylov = krylov_by_leaf(operator.mm, key, steps, space, operator.progress)
        else:
            krylov = krylov_space(
                operator.mm,
                random_direction(key, size, space.dtype),
                steps,
                space,
                operator.progress,
                reads=(operator.local, operator.data),
            )
        values, weights, residuals = krylov.ritz_pairs(rank)
        values = settle_negative(values, operator)
        kept = ~(residuals > self.tol * values) & told_from_zero(values)  # NaN is kept, and shows
        cure = (
            f"Raise num_products ({steps} now), for example to {GENEROUS * max(steps, rank)}, or "
            f"drop such pairs with tol={CONVERGED} (tol={self.tol:g} now)"
        )
        warn_of_residuals(values, residuals, kept, cure)
        diagnostics = {"residuals": residuals, "kept": kept, "num_products": steps}
        basis, values = krylov.combine(weights, values, kept)
        if not space.by_leaf:
            return LowRank(basis, values), diagnostics
        every = tuple(range(len(basis)))
        return by_leaf(space, [LeafBasis(values, tuple(basis))], [every]), diagnostics

    def _default_products(self, operator: CurvatureOperator) -> int:
        examples = operator.num_examples
        wide = max(operator.size, operator.cost.activation_bytes)
        if examples is not None and wide * examples <= CHEAP:
            return max(GENEROUS * self.rank, self.rank + MORE)
        return self.rank + max(2, self.rank // 10)
