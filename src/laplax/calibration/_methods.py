"""How hyperparameters are searched: a grid, or gradient descent in log space."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _optim
from .._arguments import warn, whole_number
from .._data import progress_bar
from .._engine.chunks import MEMORY_BUDGET, Work, cut
from .._engine.memo import model_jit
from .._engine.products import in_groups
from .._tree import PyTree, pytree
from ..priors import is_scalar
from ._points import CalibrationWarning, Point, Searched
from ._warnings import warn_about_grid, warn_if_flat

if TYPE_CHECKING:
    from optax import GradientTransformation


@pytree
class Trace:
    """The record of a search: hyperparameters (leading axis: points) and their values.

    Values are what was minimised: for the evidence, minus its logarithm.
    """

    points: dict[str, PyTree]
    values: jax.Array


class Method(abc.ABC):
    """A search: from an objective and a starting point to the best prior arguments."""

    @abc.abstractmethod
    def search(
        self, objective: Searched, initial: dict[str, PyTree], progress: bool | None
    ) -> tuple[dict[str, PyTree], Trace]:
        """The best prior arguments, and the record."""


@dataclasses.dataclass(frozen=True, eq=False)
class GridSearch(Method):
    """`"grid_search"`: scalar prior precisions on a logarithmic grid.

    Every point takes the noise variance that is best for it, unless `prior_arguments` gives one;
    the rest stays fixed. The whole grid is one vectorised evaluation, in pieces that fit the
    memory budget.

    Without limits the grid lies around the natural scale of the prior, so that it is the same in
    all units of targets, inputs and weights. A metric of held-out data then chooses the
    temperature as well, if the likelihood has no noise and the pushforward is linear: every ratio
    of prior to curvature takes the temperature that is best for it. A temperature in
    `prior_arguments` is kept.

    Args:
        log_prior_prec_min: The logarithm, to base ten, of the smallest prior precision.
        log_prior_prec_max: The same of the largest.
        grid_size: How many points, for every temperature.
        grid: Prior precisions, in the place of the logarithmic grid.
        temperatures: Every prior precision is tried with each of these, for instance
            `np.logspace(-1, 6, 8)`. The evidence cannot choose among them.
    """

    log_prior_prec_min: float | None = None
    log_prior_prec_max: float | None = None
    grid_size: int = 50
    grid: Any = None
    temperatures: Any = None

    def __post_init__(self) -> None:
        whole_number(self.grid_size, "grid_size")
        low, high = self._limits()
        if low > high:
            raise ValueError("log_prior_prec_min must not exceed log_prior_prec_max")
        _check_positive(self.grid, "grid", "prior precisions")
        _check_positive(self.temperatures, "temperatures", "temperatures")

    def _limits(self) -> tuple[float, float]:
        low = self.log_prior_prec_min
        high = self.log_prior_prec_max
        return -4.0 if low is None else low, 4.0 if high is None else high

    @property
    def is_default(self) -> bool:
        """Whether the natural scale decides what the grid is."""
        given = (self.log_prior_prec_min, self.log_prior_prec_max, self.grid)
        return all(limit is None for limit in given)

    def search(
        self, objective: Searched, initial: dict[str, PyTree], progress: bool | None
    ) -> tuple[dict[str, PyTree], Trace]:
        """Evaluate every point, take the best finite one."""
        if not is_scalar(initial["prior_prec"]):
            raise ValueError(
                "a grid search chooses one prior precision for all parameters, but prior_arguments "
                "has several; write calibration_method='gradient_descent', which starts from them "
                "and moves each, or leave 'prior_prec' out"
            )
        rest = {name: value for name, value in initial.items() if name != "prior_prec"}
        rests = self._with_temperatures(rest)
        # Every temperature has a grid of its own: a ratio means another precision in each.
        searched = [self._evaluate(objective, fixed, progress) for fixed in rests]
        grid, points, values = jax.tree.map(lambda *x: np.concatenate(x), *searched)
        _check_any_finite(values, points)
        best = int(np.argmin(np.where(np.isfinite(values), values, np.inf)))
        found = {name: jnp.asarray(x[best]) for name, x in points.items()}
        chosen = {**initial, **found}
        own = np.split(grid, len(rests))[best * len(rests) // grid.size]
        warn_about_grid(objective, own, grid[best], chosen, values)
        trace = Trace(jax.tree.map(jnp.asarray, points), jnp.asarray(values))
        return chosen, trace

    def _with_temperatures(self, rest: dict[str, PyTree]) -> list[dict[str, PyTree]]:
        if self.temperatures is None:
            return [rest]
        if "temperature" in rest:
            raise ValueError(
                "prior_arguments keeps the temperature, and GridSearch(temperatures=...) is to "
                "choose it: leave one of them out"
            )
        return [{**rest, "temperature": float(t)} for t in np.asarray(self.temperatures)]

    def _evaluate(
        self, objective: Searched, rest: dict[str, PyTree], progress: bool | None
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """The grid beside what is fixed, what its numbers stand for, and the values."""
        grid = self.grid
        if self.is_default:
            objective, grid = objective.natural_grid(self.grid_size, rest)
        elif grid is None:
            grid = np.logspace(*self._limits(), self.grid_size)
        grid = np.asarray(jnp.asarray(grid))
        fixed = jax.tree.map(jnp.asarray, rest)
        size = cut(Work(objective.bytes_per_point()), len(grid), MEMORY_BUDGET).size
        pieces = [grid[i : i + size] for i in range(0, len(grid), size)]
        bar = progress_bar(pieces, len(pieces), "grid search", progress)
        evaluated = [_evaluate(objective, piece, fixed) for piece in bar]
        points, values = jax.tree.map(lambda *x: np.concatenate(x), *evaluated)
        if self.temperatures is not None:
            temperature = np.asarray(fixed["temperature"])
            points = {**points, "temperature": np.full(len(grid), temperature)}
        return grid, points, values


def _check_positive(given: Any, name: str, what: str) -> None:
    if given is None:
        return
    values = np.asarray(given)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{name} must be a list of {what}")
    if not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"{name} must hold positive, finite {what}")


@model_jit
def _evaluate(objective: Searched, grid: jax.Array, fixed: dict[str, PyTree]) -> Point:
    """What every number of the grid stands for; the values there."""
    points: Point = in_groups(lambda point: objective.point(point, fixed), grid)
    return points


def _check_any_finite(values: np.ndarray, points: dict[str, PyTree]) -> None:
    if not np.isfinite(values).any():
        raise ValueError(
            f"the calibration objective is not finite at any of {values.size} points; first point "
            f"{jax.tree.map(lambda x: x[0].tolist(), points)}. Look at the predictions there: "
            "set_prob_predictive(prior_arguments)(input)"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class GradientDescent(Method):
    """`"gradient_descent"`: every hyperparameter of the starting point at once, in log space.

    `optimizer` is any optax transformation; by default Adam with a cosine decay to zero.
    """

    num_steps: int = 300
    learning_rate: float = 0.1
    optimizer: "GradientTransformation | None" = None

    def __post_init__(self) -> None:
        whole_number(self.num_steps, "num_steps")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}")

    def search(
        self, objective: Searched, initial: dict[str, PyTree], progress: bool | None
    ) -> tuple[dict[str, PyTree], Trace]:
        """The best point on the way is the answer; of those that look alike, the last."""
        kept = ("prior", "prior_mean")
        fixed = {name: x for name, x in initial.items() if name in kept and x is not None}
        free = {name: x for name, x in initial.items() if name not in kept}
        if not free:
            raise ValueError(
                "there is nothing to choose: prior_arguments has a 'prior', and the likelihood no "
                "noise. To move the temperature, name it: {'prior': prior, 'temperature': 1.0}"
            )
        start = jax.tree.map(lambda x: jnp.log(jnp.asarray(x, float)), free)
        optimizer = self.optimizer or _optim.default_optimizer(self.learning_rate, self.num_steps)
        descent = _optim.Descent(optimizer, self.num_steps, "gradient descent", progress)
        logs, values = descent.records(_value_in_logs, objective, start, fixed)
        trace = Trace(jax.tree.map(jnp.exp, logs), values)
        seen = np.asarray(values)
        _check_any_finite(seen, trace.points)
        best = _optim.last_of_best(seen)
        warn_if_flat(seen, 1e-12)  # a search that starts at its optimum hardly moves
        _warn_if_moving({n: x for n, x in trace.points.items() if is_scalar(initial[n])})
        return {**fixed, **jax.tree.map(lambda x: x[best], trace.points)}, trace


def _value_in_logs(
    logs: PyTree, objective: Searched, fixed: dict[str, PyTree]
) -> tuple[jax.Array, PyTree]:
    """What is minimised, and the record of the point."""
    value = objective({**fixed, **jax.tree.map(jnp.exp, logs)})
    return value, (logs, value)


def _warn_if_moving(points: Mapping[str, jax.Array]) -> None:
    """Where there is no optimum, the answer is nothing but where the steps ended.

    Only numbers that stand alone: of one per layer or parameter some have no optimum as a rule,
    for a parameter that the data do not need.
    """
    moving = []
    for name, values in points.items():
        logs = np.log(np.asarray(values))
        start, middle, end = logs[0], logs[logs.size // 2], logs[-1]
        if abs(end - middle) > max(LAST_MOVE, SETTLED * abs(middle - start)):
            moving.append(f"{name!r} went from {np.exp(middle):.3g} to {np.exp(end):.3g}")
    if moving:
        warn(
            f"gradient descent did not settle: {' and '.join(moving)} in the second half of its "
            f"{logs.size} steps. Give it more: calibration_method=GradientDescent(num_steps=..., "
            "learning_rate=...); if it still moves, the objective has no optimum there",
            CalibrationWarning,
        )


# In natural logarithms. With the default schedule a search that moves all the time makes a fifth of
# its way in the second half; one that has arrived makes next to none.
LAST_MOVE = 0.1
SETTLED = 0.1
