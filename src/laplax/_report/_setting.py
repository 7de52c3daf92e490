"""What a report is about: everything that can be checked before work starts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.samples import whole_batch
from .._tree import PyTree
from ..calibration import EVIDENCE, Method
from ..curvature import CurvatureOperator
from ..evaluation import observe
from ..likelihoods import DataFit, Likelihood
from ..plot import map_points
from ..pushforward import Recipe, make_recipe
from ._budget import Budget
from ._curvatures import Options, Problem

LINE_POINTS = 200  # of a band
OOD = "out-of-distribution inputs"
MAP_SIDE = 60  # points along each side of a confidence map
Fields = Mapping[str, jax.Array]  # of predictions
Parts = dict[str, Fields]  # predictions by part of the inputs, with the targets of held-out data


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Checked arguments. `inputs` are all inputs that are ever predicted, by their part."""

    problem: Problem
    training: CurvatureOperator
    recipe: Recipe
    inputs: dict[str, PyTree]
    targets: dict[str, jax.Array]
    curvatures: dict[str, Options]
    objective: Any
    method: str | Method | None
    fit: DataFit
    seed: int
    budget: Budget
    shifted: tuple[str, ...] = ()  # parts that are test sets of another kind
    foreign: tuple[str, ...] = ()  # parts that uncertainty should reveal
    split: bool = False  # whether the calibration data are every second test example

    @property
    def likelihood(self) -> Likelihood:
        """That of the fit."""
        return self.recipe.likelihood

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of predictions that metrics and figures need."""
        if self.recipe.classification:
            return ("log_pred_act",)
        return ("pred_mean", "pred_var", "pred_std", "total_var", "total_std")

    @property
    def by_evidence(self) -> bool:
        """Whether hyperparameters are chosen on the training data."""
        return self.objective is EVIDENCE

    @property
    def objective_name(self) -> str:
        """What the objective is called: its name, or that of the function."""
        return str(getattr(self.objective, "__name__", self.objective))

    @property
    def residual(self) -> float:
        """The mean squared residual of the MAP on the training data: its noise, if it has one."""
        if not self.likelihood.has_noise:
            return 1.0
        return 2 * float(self.fit.loss) / float(self.fit.count)

    @property
    def counts(self) -> dict[str, int]:
        """How many inputs are predicted, by part."""
        return {name: jax.tree.leaves(tree)[0].shape[0] for name, tree in self.inputs.items()}

    def everything(self) -> PyTree:
        """All inputs in one batch: one call per curvature serves every purpose."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), *self.inputs.values())

    def by_part(self, prediction: Mapping[str, jax.Array]) -> Parts:
        """Predictions for `everything`, cut into the parts of `inputs`."""
        ends = np.cumsum(list(self.counts.values()))[:-1]
        pieces = {field: np.split(np.asarray(x), ends) for field, x in prediction.items()}
        parts: Parts = {
            part: {field: jnp.asarray(x[i]) for field, x in pieces.items()}
            for i, part in enumerate(self.inputs)
        }
        held_out = {part: observe(self.recipe, parts[part], y) for part, y in self.targets.items()}
        return {**parts, **held_out}


def check_likelihood(likelihood: Likelihood) -> Recipe:
    """A report judges by metrics, which need a normal or a class distribution."""
    recipe = make_recipe(likelihood, "linear", None, 1)
    if recipe.regression or recipe.classification:
        return recipe
    raise ValueError(
        "a report is for loss_fn 'mse', 'heteroscedastic', 'cross_entropy' and "
        f"'binary_cross_entropy'; got {likelihood.name or likelihood!r}. Use "
        "laplax.laplace, calibration and evaluation with metrics of your own."
    )


def whole(checked: CurvatureOperator) -> tuple[PyTree, jax.Array]:
    """Inputs and targets of held-out data, in one piece."""
    batch = whole_batch(checked.data)
    if batch.weight is not None:
        raise ValueError("held-out data of a report take no weight; drop it")
    return batch.input, batch.target


def halves(part: tuple[PyTree, jax.Array]) -> dict[str, tuple[PyTree, jax.Array]]:
    """Test data in two: every second example calibrates, the others judge."""
    count = part[1].shape[0]
    if count < 4:
        raise ValueError(
            f"test has {count} examples, too few to take some of them for calibration: pass "
            "calibration=(input, target)"
        )
    starts = {"test": 0, "calibration": 1}
    return {name: jax.tree.map(lambda x, k=k: x[k::2], part) for name, k in starts.items()}


def foreign_sets(ood: PyTree, reference: PyTree) -> dict[str, PyTree]:
    """Out-of-distribution inputs by name: one set, or a mapping from names to sets."""
    if ood is None:
        return {}
    structure: Any = jax.tree.structure(ood)
    named = isinstance(ood, Mapping) and structure != jax.tree.structure(reference)
    sets = ood if named else {OOD: ood}
    return {str(name): check_ood(part, reference) for name, part in sets.items()}


def check_part_names(*names: str) -> None:
    """Names of further sets must tell them apart."""
    taken = ["test", "calibration", "figure"]
    for name in names:
        if name in taken:
            raise ValueError(
                f"two sets of a report are called {name!r}; 'test', 'calibration' and 'figure' "
                "are names of its own. Give every set of `shifted` and `ood` another one"
            )
        taken.append(name)


def check_ood(ood: PyTree, reference: PyTree) -> PyTree:
    """Out-of-distribution inputs, refused unless they have the shape of the test inputs."""
    structure: Any = jax.tree.structure(ood)
    expected: Any = jax.tree.structure(reference)
    if structure != expected:
        raise ValueError(
            "ood must hold inputs alone (no targets), of the structure of the test inputs: "
            f"{expected}; got {structure}"
        )

    def like(x: PyTree, test: jax.Array) -> jax.Array:
        if np.shape(x)[1:] != test.shape[1:] or np.shape(x)[:1] == (0,):
            raise ValueError(
                f"ood must hold inputs like the test data's, shape (n, "
                f"{', '.join(map(str, test.shape[1:]))}); got {np.shape(x)}"
            )
        return jnp.asarray(x, test.dtype)

    return jax.tree.map(like, ood, reference)


def figure_points(
    training: CurvatureOperator, recipe: Recipe, parts: Mapping[str, PyTree]
) -> jax.Array | None:
    """Where bands (one input) and confidence maps (two) are drawn; None if neither fits."""
    arrays = [jax.tree.leaves(part) for part in (training.data.peek().input, *parts.values())]
    observations = math.prod(recipe.likelihood.batch_shape(training.traced.output.shape))
    if observations != 1 or any(len(leaves) != 1 for leaves in arrays):
        return None
    inputs = [np.asarray(leaves[0]) for leaves in arrays]
    shape = inputs[0].shape[1:]
    dtype = inputs[0].dtype
    if not np.issubdtype(dtype, np.floating):
        return None
    flat = np.concatenate([x.reshape(len(x), -1) for x in inputs])
    if shape in ((), (1,)) and recipe.regression:
        line = np.linspace(*_range(flat[:, 0], 0.1), LINE_POINTS)
        return jnp.asarray(line.reshape(-1, *shape), dtype)
    if shape == (2,) and recipe.classification:
        xlim, ylim = (_range(column, 0.15) for column in flat.T)
        return jnp.asarray(map_points(xlim, ylim, MAP_SIDE), dtype)
    return None


def _range(values: np.ndarray, margin: float) -> tuple[float, float]:
    low = float(values.min())
    high = float(values.max())
    pad = margin * (high - low) or 1.0
    return low - pad, high + pad
