"""What a report is about: everything that can be checked before work starts."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch, Loader, as_data
from .._engine.samples import whole_batch
from .._problem import Problem, make_problem
from .._tree import PyTree
from ..calibration import EVIDENCE, Method
from ..likelihoods import (
    Bernoulli,
    Categorical,
    DataFit,
    Gaussian,
    HeteroscedasticGaussian,
)
from ..plot import map_points
from ._budget import Budget
from ._curvatures import Options

LINE_POINTS = 200  # of a band
MAP_SIDE = 60  # points along each side of a confidence map
Arrays = Mapping[str, np.ndarray]  # fields of predictions
Limits = tuple[float, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Checked arguments. `inputs` are all inputs that are ever predicted, by their part."""

    problem: Problem
    calibration: Batch | None
    test: Batch
    inputs: dict[str, PyTree]
    curvatures: dict[str, Options]
    objective: Any
    method: str | Method | None
    fit: DataFit
    seed: int
    progress: bool | None
    budget: Budget

    @property
    def model_fn(self) -> Callable[..., jax.Array]:
        """The user's network."""
        return self.problem.model.fn

    @property
    def classification(self) -> bool:
        """Whether predictions are class probabilities."""
        return isinstance(self.problem.likelihood, Categorical | Bernoulli)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of predictions that metrics and figures need."""
        return ("log_pred_act",) if self.classification else ("pred_mean", "pred_var", "total_var")

    @property
    def by_evidence(self) -> bool:
        """Whether hyperparameters are chosen on the training data."""
        return isinstance(self.objective, str) and self.objective == EVIDENCE

    @property
    def objective_name(self) -> str:
        """What the objective is called: its name, or that of the function."""
        return str(getattr(self.objective, "__name__", self.objective))

    @property
    def residual(self) -> float:
        """The mean squared residual of the MAP on the training data: its noise, if it has one."""
        if not self.problem.likelihood.has_noise:
            return 1.0
        return 2 * float(self.fit.loss) / float(self.fit.count)

    @property
    def num_inputs(self) -> int:
        """How many inputs are predicted."""
        return sum(jax.tree.leaves(tree)[0].shape[0] for tree in self.inputs.values())

    def everything(self) -> PyTree:
        """All inputs in one batch: one program per curvature serves every purpose."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), *self.inputs.values())

    def part(self, values: Arrays, name: str) -> dict[str, np.ndarray]:
        """What belongs to one part of `inputs`, of predictions for `everything`."""
        start = 0
        for key, tree in self.inputs.items():
            size = jax.tree.leaves(tree)[0].shape[0]
            if key == name:
                return {field: x[start : start + size] for field, x in values.items()}
            start += size
        raise KeyError(name)

    def target(self, part: str) -> jax.Array:
        """Targets as metrics want them; binary ones are two classes, as in `log_pred_act`."""
        batch = self.test if part == "test" else self.calibration
        assert batch is not None
        target: jax.Array = batch.target
        if not isinstance(self.problem.likelihood, Bernoulli):
            return target
        if jnp.issubdtype(target.dtype, jnp.floating):
            return jnp.stack([1 - target, target], axis=-1)
        return target.astype(int)


def check_likelihood(problem: Problem) -> None:
    """A report judges by metrics, which need a normal or a class distribution."""
    judged = Gaussian | HeteroscedasticGaussian | Categorical | Bernoulli
    if not isinstance(problem.likelihood, judged):
        raise ValueError(
            "a report is for loss_fn 'mse', 'heteroscedastic', 'cross_entropy' and "
            f"'binary_cross_entropy'; got {problem.likelihood.name or problem.likelihood!r}. Use "
            "laplax.laplace, calibration and evaluation with metrics of your own."
        )


def check_training(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    train: Any,
    loss_fn: Any,
    vmap_over_data: bool,
    progress: bool | None,
) -> Problem:
    """The training problem; several fits read its data, which must allow it."""
    problem = make_problem(
        model_fn, params, train, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    check_likelihood(problem)
    if isinstance(problem.data, Loader):
        problem.data.require_passes("a report on several curvatures")
    return problem


def held_out(problem: Problem, data: Any, progress: bool | None) -> Batch:
    """Held-out data, checked against the model and in one piece."""
    checked = make_problem(
        problem.model.fn,
        problem.params,
        as_data(data, progress),
        problem.likelihood,
        vmap_over_data=problem.model.vmap_over_data,
    )
    batch = whole_batch(checked.data)
    if batch.weight is not None:
        raise ValueError("held-out data of a report take no weight; drop it")
    return batch


def all_inputs(
    problem: Problem, test: Batch, calibration: Batch | None, ood: PyTree | None, draw: bool
) -> dict[str, PyTree]:
    """Inputs by part: held-out data, `ood`, and those that figures need."""
    inputs = {"test": test.input}
    if calibration is not None:
        inputs["calibration"] = calibration.input
    if ood is not None:
        inputs["ood"] = _like(ood, test.input)
    points = _figure_points(problem, [problem.first.input, *inputs.values()]) if draw else None
    if points is not None:
        inputs["figure"] = points
    return inputs


def _like(ood: PyTree, reference: PyTree) -> PyTree:
    """Foreign inputs, refused unless they have the shape of the known ones."""
    structure: Any = jax.tree.structure(ood)
    expected: Any = jax.tree.structure(reference)
    if structure != expected:
        raise ValueError(
            "ood must hold inputs alone (no targets), of the structure of the test inputs: "
            f"{expected}; got {structure}"
        )

    def like(x: Any, test: jax.Array) -> jax.Array:
        if np.shape(x)[1:] != test.shape[1:] or np.shape(x)[:1] == (0,):
            raise ValueError(
                f"ood must hold inputs like the test data's, shape (n, "
                f"{', '.join(map(str, test.shape[1:]))}); got {np.shape(x)}"
            )
        return jnp.asarray(x, test.dtype)

    return jax.tree.map(like, ood, reference)


def _figure_points(problem: Problem, parts: list[PyTree]) -> jax.Array | None:
    """Where bands (one input) and confidence maps (two) are drawn; None if neither fits."""
    arrays = [jax.tree.leaves(part) for part in parts]
    observations = math.prod(problem.likelihood.batch_shape(problem.output.shape))
    if observations != 1 or any(len(leaves) != 1 for leaves in arrays):
        return None
    inputs = [np.asarray(leaves[0]) for leaves in arrays]
    shape = inputs[0].shape[1:]
    dtype = inputs[0].dtype
    if not np.issubdtype(dtype, np.floating):
        return None
    flat = np.concatenate([x.reshape(len(x), -1) for x in inputs])
    if shape in ((), (1,)) and isinstance(problem.likelihood, Gaussian | HeteroscedasticGaussian):
        line = np.linspace(*_range(flat[:, 0], 0.1), LINE_POINTS)
        return jnp.asarray(line.reshape(-1, *shape), dtype)
    if shape == (2,) and isinstance(problem.likelihood, Categorical | Bernoulli):
        xlim, ylim = (_range(column, 0.15) for column in flat.T)
        return jnp.asarray(map_points(xlim, ylim, MAP_SIDE), dtype)
    return None


def _range(values: np.ndarray, margin: float) -> Limits:
    low = float(values.min())
    high = float(values.max())
    pad = margin * (high - low) or 1.0
    return low - pad, high + pad
