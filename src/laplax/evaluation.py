"""Metrics of a predictive over a data set."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._data import Batch, Data, DataLike, Loader
from ._engine.shards import on_one_device, parts_here, to_numpy
from ._tree import PyTree
from .likelihoods import Bernoulli
from .metrics import (
    CLASSIFICATION_METRICS,
    REGRESSION_METRICS,
    Metric,
    average,
    get_metric,
    required_parameters,
)
from .pushforward import FIELDS, Prediction, PredictiveFamily, ProbPredictive, Recipe

MetricLike = str | Metric | Callable[..., ArrayLike]
Metrics = Sequence[MetricLike] | Mapping[str, MetricLike] | None
Results = dict[str, Any]  # a number for most metrics, an array for some
NOTHING_LEFT = "the weights of the data are all zero: there is nothing to judge"


class Judged(Protocol):
    """What can be judged: a Laplace predictive at fixed hyperparameters, a baseline, a mixture."""

    @property
    def recipe(self) -> Recipe:
        """Likelihood and fields."""

    def __call__(self, input: PyTree, fields: Sequence[str] | None = None) -> Prediction:
        """Fields of the prediction."""

    def checked(self, data: DataLike, progress: bool | None = None) -> Data:
        """Data that were compared with model and likelihood."""


def evaluate(
    predictive: PredictiveFamily,
    prior_arguments: Mapping[str, PyTree],
    data: DataLike,
    metrics: Metrics,
    progress: bool | None,
) -> tuple[Results, ProbPredictive]:
    """Metrics of a predictive over a data set, exact on ragged batches; and what was judged."""
    resolved = resolve_metrics(metrics, predictive.recipe)
    prob_predictive = predictive(prior_arguments)
    return judge(prob_predictive, data, resolved, progress), prob_predictive


def judge(
    prob_predictive: Judged,
    data: DataLike,
    metrics: Metrics = None,
    progress: bool | None = None,
) -> Results:
    """Metrics of any predictive over a data set, exact on ragged batches.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        data: Held-out data, arrays or a loader, as for `laplax.evaluation`.
        metrics: As for `laplax.evaluation`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Returns:
        A dict from metric to number.
    """
    recipe = prob_predictive.recipe
    resolved = resolve_metrics(metrics, recipe)
    checked = prob_predictive.checked(data, progress)
    fields = needed_fields(resolved.values(), recipe)
    parts: dict[str, list[PyTree]] = {name: [] for name in resolved}
    for observed in observations(prob_predictive, checked, fields):
        for name, metric in resolved.items():
            parts[name].append(on_one_device(metric.batch(observed)))
    results = {name: m.finalise(m.merge(parts[name])) for name, m in resolved.items()}
    return {name: float(x) if x.ndim == 0 else x for name, x in results.items()}


def observations(
    prob_predictive: Judged, data: Data, fields: Sequence[str]
) -> Iterator[dict[str, jax.Array]]:
    """Predictions and targets of checked data, batch by batch, as metrics want them."""
    nothing = True
    for batch in data if isinstance(data, Loader) else [data]:
        kept_entries(batch)  # a weight must be a mask
        prediction = dict(prob_predictive(batch.input, fields))
        for part in parts_here((prediction, batch.target, batch.weight)):
            kept = _kept(part[2])
            if kept is None or kept[0].size:
                nothing = False
                yield observe(prob_predictive.recipe, part[0], part[1], kept)
    if nothing:
        raise ValueError(NOTHING_LEFT)


def resolve_metrics(metrics: Metrics, recipe: Recipe) -> dict[str, Metric]:
    """Names and functions to metrics; one that asks for a field that is not there is refused."""
    if metrics is None:
        metrics = _default_metrics(recipe)
    if isinstance(metrics, str):
        raise TypeError(f"metrics must be a list or a mapping; write metrics=[{metrics!r}]")
    named = metrics if isinstance(metrics, Mapping) else {_name_of(m): m for m in metrics}
    if len(named) < len(metrics):
        names = [_name_of(m) for m in metrics]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two metrics are named {twice!r}: pass a mapping, metrics={{'mine': ...}}"
        )
    resolved = {name: as_metric(metric, recipe) for name, metric in named.items()}
    for name, metric in resolved.items():
        check_metric(name, metric, recipe)
    return resolved


def as_metric(metric: MetricLike, recipe: Recipe) -> Metric:
    """A name, a function or a metric, as a metric."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return _metric_of_name(metric, recipe)
    return average(_of_ones(metric) if isinstance(recipe.likelihood, Bernoulli) else metric)


def check_metric(name: str, metric: Metric, recipe: Recipe) -> None:
    """Every field that a metric reads must exist in the prediction."""
    for field in metric.fields:
        if field != "target" and field not in recipe.allowed_fields:
            meaning = FIELDS.get(field, "no field of any prediction")
            raise ValueError(
                f"metric {name!r} asks for {field!r} ({meaning}), which this prediction does not "
                f"have, with {recipe.described}; it has: {', '.join(recipe.allowed_fields)}, target"
            )


def needed_fields(metrics: Iterable[Metric], recipe: Recipe) -> tuple[str, ...]:
    """The fields that these metrics read, the target aside."""
    names = {field for metric in metrics for field in metric.fields} - {"target"}
    if recipe.classification and "pred_act" in names:  # read off its logarithm, see `observe`
        names = names - {"pred_act"} | {"log_pred_act"}
    return tuple(sorted(names))


def observe(
    recipe: Recipe,
    prediction: Mapping[str, jax.Array],
    target: jax.Array,
    kept: "Kept | None" = None,
) -> dict[str, jax.Array]:
    """Prediction and target as metrics want them: binary outputs are two classes, no masked one."""
    fields = dict(prediction)
    if "log_pred_act" in fields:
        fields["pred_act"] = jnp.exp(fields["log_pred_act"])
    if isinstance(recipe.likelihood, Bernoulli):
        if jnp.issubdtype(target.dtype, jnp.floating):
            target = jnp.stack([1 - target, target], axis=-1)
        elif target.dtype == bool:
            target = target.astype(int)
    fields["target"] = target
    return fields if kept is None else {name: _keep(name, x, kept) for name, x in fields.items()}


Kept = tuple[jax.Array, ...]  # indices of examples, or of examples and their tokens


def kept_entries(batch: Batch) -> Kept | None:
    """What a mask leaves of a batch: metrics are means over examples, and see those alone."""
    return None if batch.weight is None else _kept(to_numpy(batch.weight))


def _kept(weight: ArrayLike | None) -> Kept | None:
    if weight is None:
        return None
    weight = np.asarray(weight)
    if not np.isin(weight, (0, 1)).all():
        raise ValueError(
            "metrics count examples, so a weight of held-out data must be 0 or 1, a mask; found "
            f"values from {weight.min():g} to {weight.max():g}. Take the weight out of the data"
        )
    return tuple(jnp.asarray(index) for index in np.nonzero(weight))


def _keep(name: str, value: jax.Array, kept: Kept) -> jax.Array:
    if name == "pred_cov" and len(kept) > 1:
        raise ValueError(
            "a metric of 'pred_cov', which relates an example's outputs to each other, takes a "
            "mask of examples, not one of the outputs"
        )
    return value[(slice(None), *kept) if name == "samples" else kept]


def _metric_of_name(name: str, recipe: Recipe) -> Metric:
    if recipe.regression or recipe.classification:
        return get_metric(name, "regression" if recipe.regression else "classification")
    raise ValueError(
        f"metric {name!r}: metrics by name are for regression and classification, not for loss_fn "
        f"{recipe.likelihood.name}; pass a function of the prediction's fields"
    )


def _of_ones(fn: Callable[..., ArrayLike]) -> Callable[..., ArrayLike]:
    """A plain function of binary outputs reads the prediction's own fields: undo `observe`."""
    names = required_parameters(fn)

    @functools.wraps(fn)
    def wrapped(*values: jax.Array) -> ArrayLike:
        return fn(*map(own, names, values))

    def own(name: str, value: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        return value[..., 1] if name == "pred_act" or (name == "target" and floating) else value

    return wrapped


def _default_metrics(recipe: Recipe) -> Mapping[str, MetricLike]:
    if recipe.regression:
        return REGRESSION_METRICS
    if recipe.classification:
        return CLASSIFICATION_METRICS
    raise ValueError(
        f"there is no default set of metrics for loss_fn {recipe.likelihood.name}; pass "
        "metrics=[...], functions of the prediction's fields"
    )


def _name_of(metric: MetricLike) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", None)
    if name is None or name == "<lambda>":
        raise ValueError("a metric without a name: pass a mapping, metrics={'mine': ...}")
    return name
