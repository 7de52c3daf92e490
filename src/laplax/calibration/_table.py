"""Marginal variances in a table over the prior precision, where projected Jacobians do not fit."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._tree import pytree
from ..structures import Projection

LOG_MIN = math.log(1e-8)  # of tau / c, in the table's unit
LOG_MAX = math.log(1e8)
NODES = 129  # eight per decade
STEP = (LOG_MAX - LOG_MIN) / (NODES - 1)


@pytree
class Table(Projection):
    """The logarithm of the variances at nodes of log(tau / c), and cubics between the nodes.

    J (c G + tau I)^-1 J^T is 1 / c times a function of tau / c. A variance is a sum of
    q / (e + tau / c) with q, e >= 0, so that its logarithm is smooth in log(tau / c) (slope between
    -1 and 0, analytic in a strip): the cubics are off by less than 1e-4 of a variance. Beyond the
    table it goes on with the slope of the last cell.
    """

    log_var: jax.Array  # (n, C, nodes)
    log_unit: jax.Array  # of tau / c, which has the units of the output squared
    per_example: ClassVar[tuple[str, ...]] = ("log_var",)

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        dtype = self.log_var.dtype
        position = ((jnp.log(prior) - jnp.log(c) - self.log_unit - LOG_MIN) / STEP).astype(dtype)
        inside = jnp.clip(position, 0, NODES - 1)
        cell = jnp.clip(jnp.floor(inside), 1, NODES - 3)
        four = jax.lax.dynamic_slice_in_dim(self.log_var, cell.astype(int) - 1, 4, axis=-1)
        value = four @ _lagrange(inside - cell)
        beyond = position - inside
        slope = jnp.where(beyond < 0, four[..., 1] - four[..., 0], four[..., 3] - four[..., 2])
        return jnp.exp(value + beyond * slope) / c.astype(dtype)

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Only variances were kept."""
        raise NotImplementedError("a table holds variances alone")


def _lagrange(t: jax.Array) -> jax.Array:
    """Weights of the cubic through the values at -1, 0, 1 and 2."""
    return jnp.stack(
        [
            -t * (t - 1) * (t - 2) / 6,
            (t + 1) * (t - 1) * (t - 2) / 2,
            -(t + 1) * t * (t - 2) / 2,
            (t + 1) * t * (t - 1) / 6,
        ]
    )


@jax.jit
def prior_variances(projection: Projection) -> jax.Array:
    """|J|^2, the variances of the outputs under the prior of precision one, shape (n, C)."""
    if isinstance(projection, Table):  # its end, where the curvature counts for nothing
        end = jnp.exp(projection.log_unit + LOG_MAX)
        return end * projection.marginal(jnp.ones_like(end), end)
    one = jnp.ones((), jax.tree.leaves(projection)[0].dtype)
    return projection.marginal(jnp.zeros_like(one), one)


@jax.jit
def tabulate(projection: Projection, unit: jax.Array | float = 1.0) -> Table:
    """A table of the variances of these examples: for rows of length P it is one GEMM."""
    dtype = jax.tree.leaves(projection)[0].dtype
    unit = jnp.asarray(unit, dtype)
    nodes = unit * jnp.exp(jnp.linspace(LOG_MIN, LOG_MAX, NODES, dtype=dtype))
    one = jnp.ones((), dtype)
    var = jax.vmap(lambda tau: projection.marginal(one, tau), out_axes=-1)(nodes)
    # A variance of zero (an output that no parameter moves) has no logarithm.
    return Table(jnp.log(jnp.maximum(var, jnp.finfo(dtype).tiny)), jnp.log(unit))
