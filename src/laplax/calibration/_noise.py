"""The noise that a prior precision asks for, in the units of the target.

At a fixed ratio rho = prior_prec x sigma_squared x temperature the posterior covariance is
sigma_squared times a matrix that does not depend on it: the best noise has a closed form, for the
evidence and for predictions alike. A grid of ratios searches both hyperparameters at the price of
one, from "all uncertainty is in the weights" to "all of it is noise".
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import warn
from .._engine.memo import model_jit
from .._tree import PyTree, pytree, static
from ._objectives import Objective
from ._points import CalibrationWarning, Point, Searched

CONTRADICTION = 10.0  # in variances: intervals three times too wide or too narrow
UPDATES = 12  # of the noise, where it has no closed form
SETTLED = 1e-4  # its last gap
REACH = 27.6  # in natural logarithms: twelve decades to either side of the start


@pytree
class NoisyObjective(Searched):
    """An objective of a likelihood with noise.

    `free` says that the noise is chosen too, `by_ratio` that the points of a grid are ratios.
    """

    free: bool = static()
    by_ratio: bool = static(default=False)

    def natural_grid(
        self, size: int, fixed: Mapping[str, PyTree]
    ) -> tuple["NoisyObjective", np.ndarray]:
        """A logarithmic grid around the natural ratio, or that of the noise that is kept."""
        noise = self.scale["sigma_squared"] if self.free else fixed["sigma_squared"]
        natural = float(self.scale["prior_prec"]) * float(noise)
        temperature = float(fixed.get("temperature", 1.0))
        grid = natural * temperature * np.logspace(*self.objective.decades, size)
        return dataclasses.replace(self, by_ratio=True), grid

    def point(self, point: jax.Array, fixed: Mapping[str, PyTree]) -> Point:
        """Prior precision, the best noise, and the value there."""
        arguments = self.at(point, fixed)
        shown = {name: arguments[name] for name in ("prior_prec", "sigma_squared")}
        return shown, self.objective(arguments)

    def at(self, point: jax.Array, fixed: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The hyperparameters of one point of a grid, the best noise among them."""
        start = self.scale["sigma_squared"]
        point = point.astype(start.dtype)
        temperature = jnp.asarray(fixed.get("temperature", 1.0)).astype(start.dtype)

        def place(noise: jax.Array) -> dict[str, PyTree]:
            prior_prec = point / (noise * temperature) if self.by_ratio else point
            return {**fixed, "prior_prec": prior_prec, "sigma_squared": noise}

        if not self.free:
            return place(jnp.asarray(fixed["sigma_squared"]).astype(start.dtype))

        def asked(noise: jax.Array) -> jax.Array:
            return self.objective.asked_noise(place(noise), self.by_ratio).astype(start.dtype)

        exact = self.by_ratio and self.objective.proportional
        return place(_settle(asked, start, 1 if exact else UPDATES))


def _settle(asked: Callable[[jax.Array], jax.Array], start: jax.Array, updates: int) -> jax.Array:
    """The noise that asks for itself: secants of log(asked / noise), which falls in log noise.

    The first step takes the slope -1 of variances that are proportional to the noise, for which
    it arrives.
    """
    first = jnp.log(start)
    least = jnp.finfo(start.dtype).tiny

    def step(carry: Secant) -> Secant:
        gap = jnp.log(jnp.maximum(asked(jnp.exp(carry.log)), least)) - carry.log
        moved = carry.log - carry.log_before
        fallen = (carry.gap - gap) / jnp.where(moved == 0, 1.0, moved)
        slope = jnp.clip(jnp.where(moved == 0, 1.0, fallen), 0.05, 10.0)
        new = jnp.clip(carry.log + gap / slope, first - REACH, first + REACH)
        return Secant(new, carry.log, gap, carry.steps + 1)

    def unsettled(carry: Secant) -> jax.Array:
        return (carry.steps < updates) & (jnp.abs(carry.gap) > SETTLED)

    carry = step(Secant(first, first, jnp.zeros_like(first), jnp.zeros((), int)))
    if updates > 1:
        carry = jax.lax.while_loop(unsettled, step, carry)
    return jnp.exp(carry.log)


class Secant(NamedTuple):
    """A step on its way: where it leads, whence it came, and the gap there."""

    log: jax.Array
    log_before: jax.Array
    gap: jax.Array
    steps: jax.Array


def warn_if_contradicted(objective: Objective, chosen: Mapping[str, PyTree]) -> None:
    """Say so if the residuals are far from what the chosen noise lets expect.

    A noise in other units than the target is the usual reason.
    """
    chosen = {"sigma_squared": 1.0, **chosen}
    misfit = float(_misfit(objective, chosen))
    if 1 / CONTRADICTION <= misfit <= CONTRADICTION:
        return
    squares, count = objective.squared_residuals()
    warn(
        f"sigma_squared={float(chosen['sigma_squared']):.3g} contradicts the residuals: they have "
        f"a mean square of {squares / count:.3g}, {misfit:.2g} times what the predictions say. "
        "sigma_squared is a variance, in the units of the target squared; where prior_arguments "
        "leaves it out, the evidence or calibration_objective='nll' chooses it",
        CalibrationWarning,
    )


@model_jit
def _misfit(objective: Objective, chosen: Mapping[str, PyTree]) -> jax.Array:
    return objective.misfit(chosen)
