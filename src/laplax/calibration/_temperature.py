"""The temperature that a ratio of prior to curvature asks for.

At a fixed ratio rho = prior_prec x temperature the covariance of the outputs is the temperature
times J (G + rho)^-1 J^T. So it is computed once for a ratio, and every temperature scales it. The
ratios run from a prior that counts for nothing to one beside which the curvature does.
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import model_jit
from .._tree import PyTree, pytree
from ..posterior import PosteriorFamily
from ..pushforward import with_output_scale
from ._objectives import PredictiveObjective, scaled
from ._points import Point, Searched

RATIOS = (-8.0, 1.0)  # decades around the trace of G: at the upper end it counts for nothing
SPREADS = (-4.0, 4.0)  # decades of the mean variance of the outputs, in their natural unit
STEPS = 17
ROUNDS = 2  # of parabolas, through points half a decade apart and an eighth: temperatures to 2%
NARROWER = 4.0
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
        unit = with_output_scale(unit, fixed.get("output_scale"))
        assert unit.var is not None
        typical = self.objective.typical_variance(unit.var).astype(point.dtype)

        def value(objective: PredictiveObjective, log_spread: jax.Array) -> jax.Array:
            tempered = scaled(unit, jnp.exp(log_spread) / typical)
            found = objective.value_of(tempered, jnp.ones_like(point))
            return jnp.where(jnp.isnan(found), jnp.inf, found)

        spreads = jnp.linspace(*SPREADS, STEPS, dtype=point.dtype) * math.log(10)
        values = jax.lax.map(
            functools.partial(value, self.objective.cheaper(closed_form=True)), spreads
        )
        nearest = spreads[jnp.argmin(values)]
        rough = functools.partial(value, self.objective.cheaper(closed_form=False))
        log_spread = _zoom(rough, nearest, spreads[1] - spreads[0])
        temperature = jnp.exp(log_spread) / typical
        arguments = {"prior_prec": point / temperature, "temperature": temperature}
        return arguments, value(self.objective, log_spread)


def _zoom(value: Callable[[jax.Array], jax.Array], x: jax.Array, step: jax.Array) -> jax.Array:
    """The lowest point near x: parabolas through x - step, x and x + step, with ever less step."""

    def narrowed(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, step = state
        three = x + step * jnp.arange(-1, 2, dtype=x.dtype)
        values = jax.lax.map(value, three)
        left, middle, right = values
        bend = left - 2 * middle + right
        is_valley = (bend > 0) & jnp.isfinite(bend)
        ahead = (left - right) / (2 * jnp.where(is_valley, bend, 1.0))
        vertex = x + step * jnp.where(is_valley, jnp.clip(ahead, -1, 1), 0.0).astype(x.dtype)
        trials = jnp.append(three, vertex)
        best = jnp.argmin(jnp.append(values, value(vertex)))
        return trials[best], step / NARROWER

    nearest: jax.Array = jax.lax.fori_loop(0, ROUNDS, narrowed, (x, step))[0]
    return nearest


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
