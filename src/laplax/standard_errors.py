"""How sure a number over a data set is: standard errors, by formula or by the bootstrap."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._arguments import check_key, whole_number
from ._data import DataLike
from ._tree import PyTree
from .evaluation import (
    Judged,
    MetricLike,
    Metrics,
    as_metric,
    check_metric,
    needed_fields,
    observations,
    resolve_metrics,
)
from .metrics import Metric

Statistic = Callable[[PyTree], jax.Array]


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.standard_error:.2g}"


def per_example(
    prob_predictive: Judged,
    data: DataLike,
    metric: MetricLike = "nll",
    progress: bool | None = None,
) -> jax.Array:
    """The value of a metric for every example; their mean is the metric, if no mask cuts examples.

    The entries of one example (outputs, tokens) are averaged. Where a mask leaves out a part of
    the entries of an example, there is one value for each entry that is left.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        data: Held-out data, arrays or a loader, as for `laplax.evaluation`.
        metric: A metric that is a mean over examples: its name, such as `"brier"`, or object.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Returns:
        Shape (N,).
    """
    recipe = prob_predictive.recipe
    resolved = as_metric(metric, recipe)
    if resolved.each is None:
        raise ValueError(
            f"metric {metric!r} is not a mean over examples, so that an example has no value of "
            "its own; give one that is, such as 'nll'. `evaluate_with_errors` takes all metrics"
        )
    check_metric(str(metric), resolved, recipe)
    fields = needed_fields([resolved], recipe)
    checked = prob_predictive.checked(data, progress)
    batches = observations(prob_predictive, checked, fields)
    return jnp.concatenate([_mean_of_each(resolved, observed) for observed in batches])


def nll_per_example(
    prob_predictive: Judged, data: DataLike, progress: bool | None = None
) -> jax.Array:
    """The negative log-likelihood of every example, in nats; see `per_example`.

    Of a regression it is the mean over the outputs of one example, as in the metric `"nll"`.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        data: Held-out data, arrays or a loader, as for `laplax.evaluation`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.
    """
    return per_example(prob_predictive, data, "nll", progress)


def mean_with_error(values: ArrayLike) -> Estimate:
    """The mean of independent values, and its standard error `s / sqrt(N)`.

    Args:
        values: One per example, (N,), N at least 2.

    >>> str(mean_with_error(jnp.asarray([1.0, 2.0, 3.0])))
    '2 +- 0.58'
    """
    array = _one_per_example(values, "values")
    return Estimate(float(array.mean()), float(array.std(ddof=1) / np.sqrt(array.size)))


def paired_difference(first: ArrayLike, second: ArrayLike) -> Estimate:
    """The mean of `first - second` over the same examples, and its standard error.

    Methods that are judged on the same examples err together, so that their difference is known
    much better than either mean.

    Args:
        first: One value per example, (N,), such as `nll_per_example(...)`.
        second: The values of another method for the same examples, in the same order.

    >>> str(paired_difference(jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([0.0, 1.0, 2.5])))
    '0.8333 +- 0.17'
    """
    a = _one_per_example(first, "first")
    b = _one_per_example(second, "second")
    if a.shape != b.shape:
        raise ValueError(
            "a paired difference needs the values of the same examples twice; got "
            f"{a.size} and {b.size} of them"
        )
    return mean_with_error(a - b)


def bootstrap(
    values: PyTree,
    statistic: Statistic = jnp.mean,
    num_resamples: int = 1000,
    key: jax.Array | None = None,
) -> Estimate:
    """A statistic of a data set, and its standard error over resampled data sets.

    Args:
        values: An array, or a pytree of arrays, with the examples on the first axis. Examples are
            drawn with replacement, whole.
        statistic: A function of `values` to a number, written with jax.numpy.
        num_resamples: How many data sets are drawn.
        key: The random key of the draws; by default `jax.random.key(0)`.

    Example:
        >>> import jax
        >>> values = jax.random.normal(jax.random.key(1), (400,))
        >>> estimate = bootstrap(values)
        >>> abs(estimate.standard_error - values.std() / 20) < 0.005
        Array(True, dtype=bool)
    """
    return bootstrap_samples((values,), statistic, num_resamples, key)


def bootstrap_samples(
    samples: Sequence[PyTree],
    statistic: Callable[..., jax.Array],
    num_resamples: int = 1000,
    key: jax.Array | None = None,
) -> Estimate:
    """`bootstrap` of a statistic of several independent samples, each resampled on its own.

    Args:
        samples: Arrays, or pytrees of arrays, each with its examples on the first axis.
        statistic: A function of all samples to a number, written with jax.numpy.
        num_resamples: How many data sets are drawn.
        key: The random key of the draws; by default `jax.random.key(0)`.
    """
    num_resamples = whole_number(num_resamples, "num_resamples", least=2)
    key = jax.random.key(0) if key is None else key
    check_key(key)
    arrays = [jax.tree.map(jnp.asarray, sample) for sample in samples]
    sizes = [_num_examples(sample) for sample in arrays]

    def resampled(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(sizes))
        indices = [jax.random.randint(k, (n,), 0, n) for k, n in zip(keys, sizes, strict=True)]
        drawn = zip(arrays, indices, strict=True)
        return statistic(*(jax.tree.map(lambda x, i=i: x[i], sample) for sample, i in drawn))

    draws = jax.jit(lambda keys: jax.lax.map(resampled, keys))(jax.random.split(key, num_resamples))
    error = np.asarray(draws, np.float64).std(axis=0, ddof=1)
    return Estimate(float(statistic(*arrays)), float(error))


def evaluate_with_errors(
    prob_predictive: Judged,
    data: DataLike,
    metrics: Metrics = None,
    num_resamples: int = 1000,
    key: jax.Array | None = None,
    progress: bool | None = None,
) -> dict[str, Estimate]:
    """The metrics of `laplax.evaluation`, each with its standard error over the examples.

    A mean has that of its terms; any other metric (ECE, AURC) is computed on resampled predictions.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        data: Held-out data, arrays or a loader, as for `laplax.evaluation`.
        metrics: As for `laplax.evaluation`; each must be a number.
        num_resamples: As for `bootstrap`.
        key: As for `bootstrap`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.
    """
    recipe = prob_predictive.recipe
    resolved = resolve_metrics(metrics, recipe)
    fields = needed_fields(resolved.values(), recipe)
    checked = prob_predictive.checked(data, progress)
    parts = list(observations(prob_predictive, checked, fields))
    observed = {name: _join(name, [part[name] for part in parts]) for name in parts[0]}
    return {
        name: _with_error(metric, observed, num_resamples, key) for name, metric in resolved.items()
    }


def _num_examples(sample: PyTree) -> int:
    shapes = {x.shape[:1] for x in jax.tree.leaves(sample)}
    if len(shapes) != 1 or shapes <= {(), (0,), (1,)}:
        raise ValueError(
            "the bootstrap needs arrays with the same first axis, at least 2 examples; got first "
            f"axes {sorted(shapes)}"
        )
    return int(shapes.pop()[0])


def _one_per_example(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size < 2:
        raise ValueError(
            f"{name} must hold one number per example, shape (N,) with N at least 2; got shape "
            f"{array.shape}"
        )
    return array


def _join(name: str, parts: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts, axis=_example_axis(name))


def _example_axis(name: str) -> int:
    return 1 if name == "samples" else 0


def _with_error(
    metric: Metric, observed: Mapping[str, jax.Array], num_resamples: int, key: jax.Array | None
) -> Estimate:
    if metric.each is not None:
        return mean_with_error(_mean_of_each(metric, observed))
    axes = {name: _example_axis(name) for name in metric.fields}
    examples = {name: jnp.moveaxis(observed[name], axis, 0) for name, axis in axes.items()}

    def statistic(fields: Mapping[str, jax.Array]) -> jax.Array:
        return metric(*(jnp.moveaxis(fields[name], 0, axis) for name, axis in axes.items()))

    return bootstrap(examples, statistic, num_resamples, key)


def _mean_of_each(metric: Metric, observed: Mapping[str, jax.Array]) -> jax.Array:
    """The terms of a mean, averaged over the entries of one example."""
    assert metric.each is not None
    terms = metric.each(*(observed[name] for name in metric.fields))
    return terms.reshape(terms.shape[0], -1).mean(axis=1)
