"""The temperature that a ratio of prior to curvature asks for.

At a fixed ratio rho = prior_prec x temperature the covariance of the outputs is the temperature
times J (G + rho)^-1 J^T. So it is computed once for a ratio, and every temperature scales it. The
ratios run from a prior that counts for nothing to one beside which the curvature does.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import model_jit
from .._tree import PyTree, pytree
from ..posterior import PosteriorFamily
from ._objectives import PredictiveObjective, scaled
from ._points import Point, Searched

RATIOS = (-8.0, 1.0)  # decades around the trace of G: at the upper end it counts for nothing
SPREADS = (-4.0, 4.0)  # decades of the mean variance of the outputs, in their natural unit
STEPS = 17
ROUNDS = 6  # of halving half a decade: temperatures to 2%
ROUND_OFF = 64  # times eps: the share of G below which its eigenvalues are noise


@pytree
class UntemperedObjective(Searched):
    """An objective without noise whose temperature is free: a natural grid chooses it."""

    objective: PredictiveObjective

    def natural_grid(self, size: int, fixed: Mapping[str, PyTree]) -> tuple[Searched, np.ndarray]:
        """Ratios, each with the temperature that is best for it."""
        if "temperature" in fixed:
            return super().natural_grid(size, fixed)
        grid = _ratios(self.objective.predictive.posterior_fn, size)
        return TemperedObjective(self.objective, self.scale), grid


@pytree
class TemperedObjective(Searched):
    """The points of a grid are ratios, each with the temperature that is best for it."""

    objective: PredictiveObjective

    def point(self, point: jax.Array, fixed: Mapping[str, PyTree]) -> Point:
        """Temperatures half a decade apart; around the best, ever closer ones."""
        point = point.astype(self.scale["prior_prec"].dtype)
        unit = self.objective.moments(jnp.ones_like(point), point)
        assert unit.var is not None
        typical = self.objective.typical_variance(unit.var).astype(point.dtype)

        def value(log_spread: jax.Array) -> jax.Array:
            tempered = scaled(unit, jnp.exp(log_spread) / typical)
            return self.objective.value_of(tempered, jnp.ones_like(point))

        spreads = jnp.linspace(*SPREADS, STEPS, dtype=point.dtype) * math.log(10)
        values = jax.lax.map(value, spreads)
        values = jnp.where(jnp.isnan(values), jnp.inf, values)
        best = jnp.argmin(values)
        log_spread, lowest = _zoom(value, spreads[best], values[best], spreads[1] - spreads[0])
        temperature = jnp.exp(log_spread) / typical
        return {"prior_prec": point / temperature, "temperature": temperature}, lowest


def _zoom(
    value: Callable[[jax.Array], jax.Array], x: jax.Array, low: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The minimum near x, bracketed by x -+ step: the bracket halves in every round."""

    def narrowed(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, low, step = state
        trials = jnp.stack([x - step / 2, x, x + step / 2])
        values = jnp.stack([value(trials[0]), low, value(trials[2])])
        values = jnp.where(jnp.isnan(values), jnp.inf, values)
        best = jnp.argmin(values)
        return trials[best], values[best], step / 2

    x, low, _ = jax.lax.fori_loop(0, ROUNDS, narrowed, (x, low, step))
    return x, low


def _ratios(posterior_fn: PosteriorFamily, size: int) -> np.ndarray:
    """A grid around the trace of G, as the prior measures it, that the dtype resolves."""
    low, high = RATIOS
    low = max(low, float(np.log10(ROUND_OFF * jnp.finfo(posterior_fn.space.dtype).eps)))
    return float(_trace(posterior_fn)) * np.logspace(low, high, size)


@model_jit
def _trace(posterior_fn: PosteriorFamily) -> jax.Array:
    """tr(T^-1 G) at prior precision one, as the slope of a log determinant."""
    one = jnp.ones((), posterior_fn.space.dtype)

    def logdet(c: jax.Array) -> jax.Array:
        return posterior_fn.structure.precision(c, one).logdet_ratio()

    return jax.grad(logdet)(jnp.zeros_like(one))
