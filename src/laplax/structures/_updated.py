"""A posterior precision over a structured prior; the sum c G + T behind a precision."""

import jax
import jax.numpy as jnp

from .._tree import pytree, static
from ._base import Precision
from ._block_diagonal import BlockSumPrecision
from ._dense import DensePrecision
from ._eigen import EigenPrecision
from ._jacobian import Jacobian
from ._low_rank import GeneralLowRank
from ._structure import Dense, LowRankSum, Structure

EXACT = "exact"
NEAREST = "nearest"
MERGES = (EXACT, NEAREST)  # how the Kronecker products of old and new data become one curvature


@pytree
class UpdatedPrecision(Precision):
    """Lambda = c G + T for a prior precision T = G0 + T0 that has a structure, T0 a diagonal.

    `inner` is the same Lambda over T0 alone: all that does not depend on what of it is prior.
    """

    inner: Precision
    earlier: Structure  # G0
    earlier_ratio: jax.Array  # log det T - log det T0
    merge: str = static(default=EXACT)

    @property
    def prior(self) -> jax.Array:
        """T0: the part of the prior that is diagonal."""
        return self.inner.prior

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def width(self) -> int | None:
        return self.inner.width

    def mv(self, v: jax.Array) -> jax.Array:
        return self.inner.mv(v)

    def solve(self, v: jax.Array) -> jax.Array:
        return self.inner.solve(v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        return self.inner.scale_mv(v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        return self.inner.scale_t_mv(v)

    def variance(self) -> jax.Array:
        return self.inner.variance()

    def diagonal(self) -> jax.Array:
        return self.inner.diagonal()

    def covariance(self, J: Jacobian) -> jax.Array:
        return self.inner.covariance(J)

    def marginal(self, J: Jacobian) -> jax.Array:
        return self.inner.marginal(J)

    def is_resolved(self) -> bool | jax.Array:
        return self.inner.is_resolved()

    def logdet_ratio(self) -> jax.Array:
        """Both relative to T0."""
        return self.inner.logdet_ratio() - self.earlier_ratio

    def prior_logdet(self) -> jax.Array:
        """Of all of T."""
        return self.earlier_ratio + self.inner.prior_logdet()

    def prior_energy(self, offset: jax.Array) -> jax.Array:
        """Under all of T: `v^T T v`."""
        return self.inner.prior_energy(offset) + self.earlier.energy(offset)

    def effective_parameters(self) -> jax.Array:
        """P - tr(T Lambda^-1), column by column.

        P solves; the slope of the determinant, `laplax.effective_parameters`, needs none.
        """

        def taken(i: jax.Array) -> jax.Array:
            unit = jnp.zeros(self.size, self.prior.dtype).at[i].set(1)
            return self.inner.solve(self.prior * unit + self.earlier.mv(unit))[i]

        return self.size - jnp.sum(jax.lax.map(taken, jnp.arange(self.size)))

    @property
    def scale(self) -> "jax.Array | Precision":  # type: ignore[override]
        return self.inner.scale


def updated(
    earlier: Structure,
    earlier_ratio: jax.Array,
    merge: str,
    structure: Structure,
    c: jax.Array,
    prior: jax.Array,
) -> UpdatedPrecision:
    """c G + G0 + T0, from the sum of both curvatures or the nearest Kronecker products to it."""
    inner = merged(structure.times(c), earlier, merge).precision(jnp.ones_like(c), prior)
    return UpdatedPrecision(inner, earlier, earlier_ratio, merge)


def merged(first: Structure, second: Structure, merge: str) -> Structure:
    """The sum of two curvatures, or the nearest Kronecker products to it."""
    total = first.plus(second)
    return total.nearest() if merge == NEAREST else total


def split(precision: Precision) -> tuple[Structure, jax.Array]:
    """c G and T with c G + T = Lambda, T diagonal."""
    if isinstance(precision, UpdatedPrecision):
        return split(precision.inner)
    prior = precision.prior
    if isinstance(precision, DensePrecision):
        chol = precision.cholesky
        spread = jnp.broadcast_to(prior, chol.shape[-1:])
        return Dense(chol @ chol.T - jnp.diag(spread)), prior
    if isinstance(precision, GeneralLowRank):
        return LowRankSum(*precision.factor()), prior
    if isinstance(precision, EigenPrecision | BlockSumPrecision):
        structure = precision.structure
        assert isinstance(structure, Structure)
        return structure.times(precision.c), prior
    raise ValueError(
        f"a posterior kept as {type(precision).__name__} has no precision on weights that a prior "
        "could take: it is one of functions, or of a structure of its own. Fit with laplace(...) "
        "and one of the named curv_types"
    )
