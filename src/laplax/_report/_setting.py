"""What a report is about: everything that can be checked before work starts."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._api import _field_names, _resolve, laplace
from .._data import Batch, Loader, as_data, whole_batch
from .._problem import Problem, make_problem
from .._tree import PyTree
from ..calibration import EVIDENCE, Method
from ..curvature._kinds import Curvature, curvature_class
from ..estimators import Estimator, estimator_class
from ..likelihoods import (
    Bernoulli,
    Categorical,
    DataFit,
    Gaussian,
    HeteroscedasticGaussian,
)
from ..plot._classification import map_points

CURVATURES = ("full", "diagonal", "kfac", "lanczos", "last_layer")
LINE_POINTS, MAP_SIDE = 200, 60
Curvatures = Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Checked arguments. `inputs` are all inputs that are ever predicted, by their part."""

    model_fn: Callable[..., jax.Array]
    problem: Problem
    train: Any
    calibration: Batch | None
    test: Batch
    inputs: dict[str, PyTree]
    curvatures: dict[str, dict[str, Any]]
    objective: Any
    method: str | Method | None
    fit: DataFit
    seed: int
    progress: bool | None
    max_bytes: float
    max_seconds: float

    @property
    def classification(self) -> bool:
        """Whether predictions are class probabilities."""
        return isinstance(self.problem.likelihood, Categorical | Bernoulli)

    @property
    def by_evidence(self) -> bool:
        """Whether hyperparameters are chosen on the training data."""
        return isinstance(self.objective, str) and self.objective == EVIDENCE

    @property
    def residual(self) -> float:
        """The mean squared residual of the MAP on the training data: its noise, if it has one."""
        if not self.problem.likelihood.has_noise:
            return 1.0
        return 2 * float(self.fit.loss) / float(self.fit.count)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one input, if it is one array."""
        leaves = jax.tree.leaves(self.test.input)
        return tuple(leaves[0].shape[1:]) if len(leaves) == 1 else None

    @property
    def num_inputs(self) -> int:
        """How many inputs are predicted."""
        return sum(jax.tree.leaves(tree)[0].shape[0] for tree in self.inputs.values())

    def everything(self) -> PyTree:
        """All inputs in one batch: one compiled call per curvature serves every purpose."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), *self.inputs.values())

    def part(self, values: Mapping[str, Any], name: str) -> dict[str, Any]:
        """What belongs to one part of `inputs`, of predictions for `everything`."""
        start = 0
        for key, tree in self.inputs.items():
            size = jax.tree.leaves(tree)[0].shape[0]
            if key == name:
                return {field: x[start : start + size] for field, x in values.items()}
            start += size
        raise KeyError(name)


def check_likelihood(problem: Problem) -> None:
    """A report judges by metrics, which need a normal or a class distribution."""
    known = Gaussian | HeteroscedasticGaussian | Categorical | Bernoulli
    if not isinstance(problem.likelihood, known):
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
    """Inputs by part: held-out data, foreign ones, and those that figures need."""
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
    given_tree: Any = jax.tree.structure(ood)
    known_tree: Any = jax.tree.structure(reference)
    if given_tree != known_tree:
        raise ValueError(
            "ood must hold inputs alone (no targets), of the structure of the test inputs: "
            f"{known_tree}; got {given_tree}"
        )
    for given, known in zip(jax.tree.leaves(ood), jax.tree.leaves(reference), strict=True):
        if np.shape(given)[1:] != known.shape[1:] or np.shape(given)[:1] == (0,):
            raise ValueError(
                f"ood must hold inputs like the test data's, shape (n, "
                f"{', '.join(map(str, known.shape[1:]))}); got {np.shape(given)}"
            )
    return jax.tree.map(lambda x, known: jnp.asarray(x, known.dtype), ood, reference)


def _figure_points(problem: Problem, parts: list[PyTree]) -> jax.Array | None:
    """Where bands (one input) and confidence maps (two) are drawn; None if neither fits."""
    arrays = [jax.tree.leaves(part) for part in parts]
    observations = math.prod(problem.likelihood.batch_shape(problem.output.shape))
    if observations != 1 or any(len(leaves) != 1 for leaves in arrays):
        return None
    inputs = [np.asarray(leaves[0]) for leaves in arrays]
    shape, dtype = inputs[0].shape[1:], inputs[0].dtype
    if not np.issubdtype(dtype, np.floating):
        return None
    flat = np.concatenate([x.reshape(len(x), -1) for x in inputs])
    if shape in ((), (1,)) and isinstance(problem.likelihood, Gaussian | HeteroscedasticGaussian):
        (low, high) = _range(flat[:, 0], 0.1)
        return jnp.asarray(np.linspace(low, high, LINE_POINTS).reshape(-1, *shape), dtype)
    if shape == (2,) and isinstance(problem.likelihood, Categorical | Bernoulli):
        return jnp.asarray(map_points(*map_limits(flat), MAP_SIDE), dtype)
    return None


def map_limits(inputs: np.ndarray) -> tuple[tuple[float, float], tuple[float, float]]:
    """The plane around inputs (n, 2)."""
    return _range(inputs[:, 0], 0.15), _range(inputs[:, 1], 0.15)


def _range(values: np.ndarray, margin: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    pad = margin * (high - low) or 1.0
    return low - pad, high + pad


def resolve_curvatures(curvatures: Curvatures, subset: Any, seed: int) -> dict[str, dict[str, Any]]:
    """Names to options of `laplace`; a name or an option that nothing reads is an error here."""
    if isinstance(curvatures, str):
        raise TypeError(f"curvatures must be a list or a mapping; write [{curvatures!r}]")
    if not curvatures:
        raise ValueError("curvatures is empty: name at least one, such as ['diagonal']")
    resolved = {}
    for name in curvatures:
        given = curvatures[name] if isinstance(curvatures, Mapping) else _named(name)
        options = {"curv_type": name, **({} if subset is None else {"subset": subset}), **given}
        curvature, curv_type = options.get("curvature", "ggn"), options["curv_type"]
        pairs = ((curvature_class, curvature), (estimator_class, curv_type))
        classes = [find(which) for find, which in pairs if isinstance(which, str)]
        if any("key" in _field_names(cls) for cls in classes):  # what draws, draws by the seed
            options = {"key": jax.random.key(seed), **options}
        resolve_objects(options)
        resolved[str(name)] = options
    return resolved


def resolve_objects(options: Mapping[str, Any]) -> tuple[Curvature, Estimator]:
    """The curvature and the estimator that options of `laplace` stand for."""
    own = {name: x for name, x in options.items() if name not in _LAPLACE}
    return _resolve(options.get("curvature", "ggn"), options["curv_type"], own)


def _named(name: str) -> dict[str, Any]:
    """`"last_layer"` is the full curvature of the last layer alone."""
    return {"curv_type": "full", "subset": "last_layer"} if name == "last_layer" else {}


_LAPLACE = frozenset(inspect.signature(laplace).parameters)
