"""How hyperparameters are searched: a grid, or gradient descent in log space."""

import abc
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _optim
from .._arguments import outside, whole_number
from .._data import progress_bar
from .._engine.chunks import MEMORY_BUDGET, Work, cut
from .._engine.memo import model_jit
from .._engine.products import in_groups
from .._tree import PyTree, pytree
from ._noise import CalibrationWarning, NoisyObjective

if TYPE_CHECKING:
    from optax import GradientTransformation

Objective = Callable[[Mapping[str, Any]], jax.Array]


@pytree
class Trace:
    """The record of a search: hyperparameters (leading axis: points) and their values.

    Values are what was minimised: for the evidence, minus its logarithm.
    """

    points: dict[str, Any]
    values: jax.Array


class Method(abc.ABC):
    """A search: from an objective and a starting point to the best prior arguments."""

    @abc.abstractmethod
    def search(
        self, objective: Any, initial: dict[str, Any], progress: bool | None
    ) -> tuple[dict[str, Any], Trace]:
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
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        return -4.0 if low is None else low, 4.0 if high is None else high

    @property
    def _is_default(self) -> bool:
        given = (self.log_prior_prec_min, self.log_prior_prec_max, self.grid)
        return all(limit is None for limit in given)

    def search(
        self, objective: Any, initial: dict[str, Any], progress: bool | None
    ) -> tuple[dict[str, Any], Trace]:
        """Evaluate every point, take the best finite one."""
        if not _is_scalar(initial["prior_prec"]):
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
        best = _best(values, points)
        _warn_about_grid(grid, points["prior_prec"], values, best)
        found = {name: jnp.asarray(x[best]) for name, x in points.items()}
        trace = Trace(jax.tree.map(jnp.asarray, points), jnp.asarray(values))
        return {**initial, **found}, trace


def _is_scalar(value: Any) -> bool:
    return jax.tree_util.all_leaves([value]) and jnp.ndim(value) == 0


@model_jit
def _evaluate(
    objective: Any, grid: jax.Array, fixed: dict[str, Any]
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


def _best(values: np.ndarray, points: dict[str, Any]) -> int:
    finite = np.isfinite(values)
    if not bool(finite.any()):
        raise ValueError(
            f"the calibration objective is not finite at any of {values.size} points; first point "
            f"{jax.tree.map(lambda x: x[0].tolist(), points)}. Look at the predictions there: "
            "set_prob_predictive(prior_arguments)(input)"
        )
    return int(np.argmin(np.where(finite, values, np.inf)))


def _last_of_best(values: np.ndarray, points: dict[str, Any]) -> int:
    """The last point whose value rounding cannot tell from the best: the most settled one."""
    least = values[_best(values, points)]
    rounding = ROUNDING * np.finfo(values.dtype).eps * abs(least)
    return int(np.flatnonzero(values <= least + rounding)[-1])


def _warn_about_grid(
    grid: np.ndarray, precisions: np.ndarray, values: np.ndarray, best: int
) -> None:
    if grid.size < 3:
        return
    at_edge = bool((grid[best] == grid.min()) | (grid[best] == grid.max()))
    if not _warn_if_flat(values, 1e-6) and at_edge:
        warnings.warn(
            f"the best prior precision, {float(precisions[best]):.3g}, lies at the edge of the "
            "grid; widen it: calibration_method=GridSearch(log_prior_prec_min=..., "
            "log_prior_prec_max=...)",
            CalibrationWarning,
            stacklevel=outside(),
        )


def _warn_if_flat(values: np.ndarray, tolerance: float) -> bool:
    finite = values[np.isfinite(values)]
    spread = float(finite.max() - finite.min())
    flat = values.size > 2 and spread <= tolerance * float(np.abs(finite).max())
    if flat:
        warnings.warn(
            "the calibration objective is flat: it does not tell the points of the search apart "
            f"(all values within {spread:.2g} of {float(finite.min()):.6g})",
            CalibrationWarning,
            stacklevel=outside(),
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
        self, objective: Any, initial: dict[str, Any], progress: bool | None
    ) -> tuple[dict[str, Any], Trace]:
        """Steps in blocks; the best point on the way is the answer."""
        optimizer = self.optimizer or _optim.default_optimizer(self.learning_rate, self.num_steps)
        mean = initial.get("prior_mean")
        fixed = {} if mean is None else {"prior_mean": mean}
        free = {name: value for name, value in initial.items() if name != "prior_mean"}
        logs = jax.tree.map(lambda x: jnp.log(jnp.asarray(x, float)), free)
        state = _optim.start(optimizer, logs)
        points, values = [], []
        block = 50
        for start in progress_bar(
            range(0, self.num_steps, block), None, "gradient descent", progress
        ):
            steps = min(block, self.num_steps - start)
            logs, state, point, value = _descend(objective, optimizer, steps, logs, state, fixed)
            points.append(point)
            values.append(value)
        trace = Trace(
            jax.tree.map(lambda *x: jnp.exp(jnp.concatenate(x)), *points), jnp.concatenate(values)
        )
        seen = np.asarray(trace.values)
        best = _last_of_best(seen, trace.points)
        _warn_if_flat(seen, 1e-12)  # a search that starts at its optimum hardly moves
        _warn_if_moving({n: x for n, x in trace.points.items() if _is_scalar(initial[n])})
        chosen = jax.tree.map(lambda x: x[best], trace.points)
        return {**fixed, **chosen}, trace


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
        warnings.warn(
            f"gradient descent did not settle: {' and '.join(moving)} in the second half of its "
            f"{logs.size} steps. Give it more: calibration_method=GradientDescent(num_steps=..., "
            "learning_rate=...); if it still moves, the objective has no optimum there",
            CalibrationWarning,
            stacklevel=outside(),
        )


ROUNDING = 16  # of values of an objective, in eps

# In natural logarithms. With the default schedule a search that moves all the time makes a fifth of
# its way in the second half; one that has arrived makes next to none.
LAST_MOVE, SETTLED = 0.1, 0.1


@functools.partial(model_jit, static_argnums=(1, 2))
def _descend(
    objective: Any,
    optimizer: "GradientTransformation",
    steps: int,
    logs: PyTree,
    state: PyTree,
    fixed: dict[str, Any],
) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
    def value_of(logs: PyTree) -> jax.Array:
        return objective({**fixed, **jax.tree.map(jnp.exp, logs)})

    def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], Any]:
        logs, state = carry
        value, gradient = jax.value_and_grad(value_of)(logs)
        return _optim.step(optimizer, gradient, state, logs), (logs, value)

    (logs, state), (points, values) = jax.lax.scan(step, (logs, state), None, length=steps)
    return logs, state, points, values
