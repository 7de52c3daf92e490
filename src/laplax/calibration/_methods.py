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
from ._noise import CalibrationWarning, NoisyObjective, Searched

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

    Without limits the grid runs from 1e-4 to 1e4; for a likelihood with noise, over nine decades
    around the natural scale of prior and noise, so that it is the same in all units. Limits, and
    `grid`, which replaces the logarithmic one, are prior precisions.
    """

    log_prior_prec_min: float | None = None
    log_prior_prec_max: float | None = None
    grid_size: int = 50
    grid: Any = None

    def __post_init__(self) -> None:
        whole_number(self.grid_size, "grid_size")
        low, high = self._limits()
        if low > high:
            raise ValueError("log_prior_prec_min must not exceed log_prior_prec_max")
        if self.grid is None:
            return
        grid = np.asarray(self.grid)
        if grid.ndim != 1 or grid.size == 0:
            raise ValueError("grid must be a list of prior precisions")
        if not np.all((grid > 0) & np.isfinite(grid)):
            raise ValueError("grid must hold positive, finite prior precisions")

    def _limits(self) -> tuple[float, float]:
        low = self.log_prior_prec_min
        high = self.log_prior_prec_max
        return -4.0 if low is None else low, 4.0 if high is None else high

    @property
    def _is_default(self) -> bool:
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
        grid = self.grid
        if grid is None:
            grid = np.logspace(*self._limits(), self.grid_size)
        if self._is_default and isinstance(objective, NoisyObjective):
            objective = dataclasses.replace(objective, by_ratio=True)
            grid = objective.ratios(self.grid_size, rest)
        grid = np.asarray(jnp.asarray(grid))
        fixed = jax.tree.map(jnp.asarray, rest)
        size = cut(Work(objective.bytes_per_point()), len(grid), MEMORY_BUDGET).size
        pieces = [grid[i : i + size] for i in range(0, len(grid), size)]
        bar = progress_bar(pieces, len(pieces), "grid search", progress)
        evaluated = [_evaluate(objective, piece, fixed) for piece in bar]
        points, values = jax.tree.map(lambda *x: np.concatenate(x), *evaluated)
        _check_any_finite(values, points)
        best = int(np.argmin(np.where(np.isfinite(values), values, np.inf)))
        _warn_about_grid(grid, points["prior_prec"], values, best)
        found = {name: jnp.asarray(x[best]) for name, x in points.items()}
        trace = Trace(jax.tree.map(jnp.asarray, points), jnp.asarray(values))
        return {**initial, **found}, trace


@model_jit
def _evaluate(
    objective: Searched, grid: jax.Array, fixed: dict[str, PyTree]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Prior precision, and noise if there is any, of every point; the values there."""

    def at(point: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        if not isinstance(objective, NoisyObjective):
            return {"prior_prec": point}, objective({**fixed, "prior_prec": point})
        arguments = objective.at(point, fixed)
        shown = {name: arguments[name] for name in ("prior_prec", "sigma_squared")}
        return shown, objective(arguments)

    points: tuple[dict[str, jax.Array], jax.Array] = in_groups(at, grid)
    return points


def _check_any_finite(values: np.ndarray, points: dict[str, PyTree]) -> None:
    if not np.isfinite(values).any():
        raise ValueError(
            f"the calibration objective is not finite at any of {values.size} points; first point "
            f"{jax.tree.map(lambda x: x[0].tolist(), points)}. Look at the predictions there: "
            "set_prob_predictive(prior_arguments)(input)"
        )


def _warn_about_grid(
    grid: np.ndarray, precisions: np.ndarray, values: np.ndarray, best: int
) -> None:
    if grid.size < 3:
        return
    at_edge = bool((grid[best] == grid.min()) | (grid[best] == grid.max()))
    if not _warn_if_flat(values, 1e-6) and at_edge:
        warn(
            f"the best prior precision, {float(precisions[best]):.3g}, lies at the edge of the "
            "grid; widen it: calibration_method=GridSearch(log_prior_prec_min=..., "
            "log_prior_prec_max=...)",
            CalibrationWarning,
        )


def _warn_if_flat(values: np.ndarray, tolerance: float) -> bool:
    finite = values[np.isfinite(values)]
    spread = float(finite.max() - finite.min())
    flat = values.size > 2 and spread <= tolerance * float(np.abs(finite).max())
    if flat:
        warn(
            "the calibration objective is flat: it does not tell the points of the search apart "
            f"(all values within {spread:.2g} of {float(finite.min()):.6g})",
            CalibrationWarning,
        )
    return flat


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
        fixed = {name: x for name, x in initial.items() if name == "prior_mean" and x is not None}
        free = {name: x for name, x in initial.items() if name != "prior_mean"}
        start = jax.tree.map(lambda x: jnp.log(jnp.asarray(x, float)), free)
        optimizer = self.optimizer or _optim.default_optimizer(self.learning_rate, self.num_steps)
        descent = _optim.Descent(optimizer, self.num_steps, "gradient descent", progress)
        logs, values = descent.records(_value_in_logs, objective, start, fixed)
        trace = Trace(jax.tree.map(jnp.exp, logs), values)
        seen = np.asarray(values)
        _check_any_finite(seen, trace.points)
        best = _optim.last_of_best(seen)
        _warn_if_flat(seen, 1e-12)  # a search that starts at its optimum hardly moves
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
