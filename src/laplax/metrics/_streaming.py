"""What a metric is: statistics of one batch, a way to merge them, and a number at the end.

A metric over a loader must equal the metric over all the data at once, whatever the sizes of the
batches. So a batch never yields a mean, but *sums* that are added over batches; the few metrics
that are not functions of sums (ranks, quantiles) *collect* their per-example values instead.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._tree import is_floating, widen

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric that streams: `metric(...)` is `finalise(statistics(...))`, exactly.

    Attributes:
        statistics: Fields of the predictions of one batch -> a pytree of arrays. Its required
            parameters are named after the fields it reads; those with a default are options.
        finalise: The merged statistics of all batches -> the value.
        collect: Whether statistics are per-example values, concatenated over batches on their
            first axis, instead of sums, added over batches.

    >>> largest = Metric(lambda target: target, jnp.max, collect=True)
    >>> float(largest.stream([{"target": jnp.arange(2.0)}, {"target": jnp.arange(5.0)}]))
    4.0
    """

    statistics: Callable[..., Any]
    finalise: Callable[[Any], jax.Array]
    collect: bool = False
    __name__: ClassVar[str]  # of a metric of the library
    each: ClassVar[Callable[..., jax.Array] | None] = None  # of a mean: the terms, one per entry

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A metric of the library is pickled by its name, any other one by its functions."""
        if hasattr(self, "__name__"):
            return self.__name__
        return Metric, (self.statistics, self.finalise, self.collect)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that the metric reads, in the order of its arguments."""
        return required_parameters(self.statistics)

    def __call__(self, *values: Any, **options: Any) -> jax.Array:
        """The value on one batch, from the fields in order, and the metric's options."""
        return self.finalise(self.statistics(*values, **options))

    def with_options(self, **options: Any) -> "Metric":
        """The same metric for other values of its options."""
        return dataclasses.replace(self, statistics=functools.partial(self.statistics, **options))

    def batch(self, prediction: Mapping[str, Any]) -> Any:
        """The statistics of one batch, from a mapping that holds the metric's fields."""
        missing = [name for name in self.fields if name not in prediction]
        if missing:
            raise ValueError(
                f"the metric needs the field {missing[0]!r}, which the prediction does not have "
                f"(it has: {', '.join(sorted(prediction))})"
            )
        return self.statistics(*(prediction[name] for name in self.fields))

    def merge(self, parts: Sequence[Any]) -> Any:
        """The statistics of all batches together, from those of each."""
        if not parts:
            raise ValueError("no batches: a metric of an empty data set has no value")
        if self.collect:
            return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        return jax.tree.map(lambda *leaves: _pairwise_sum(leaves), *parts)

    def stream(self, predictions: Iterable[Mapping[str, Any]]) -> jax.Array:
        """The value over many batches, equal to that of their concatenation."""
        return self.finalise(self.merge([self.batch(prediction) for prediction in predictions]))


def _pairwise_sum(terms: Sequence[jax.Array]) -> jax.Array:
    """Neighbours are added until one is left: a running sum would stop growing at 2^24."""
    sums = [widen(jnp.asarray(x)) if is_floating(jnp.result_type(x)) else x for x in terms]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + sums[len(sums) // 2 * 2 :]
    return sums[0]


class Mean(NamedTuple):
    """The statistics of a mean: a sum and how many terms it has."""

    total: jax.Array
    terms: jax.Array


def as_real(values: ArrayLike) -> jax.Array:
    """Real numbers that can be summed over data, so in at least float32."""
    array = jnp.asarray(values)
    return widen(array if is_floating(array.dtype) else array.astype(jnp.result_type(float)))


def mean_of(values: jax.Array) -> Mean:
    """Sum and count of all entries of an array, both in at least float32."""
    values = as_real(values)
    return Mean(values.sum(), jnp.asarray(values.size, values.dtype))


def mean_value(mean: Mean) -> jax.Array:
    """The mean itself; 0 / 0, not a number, for no entries."""
    return mean.total / mean.terms


def named_metric(
    statistics: Callable[..., Any], finalise: Callable[[Any], jax.Array], collect: bool = False
) -> Metric:
    """A metric with the name, the signature and the documentation of its statistics."""
    metric = Metric(statistics, finalise, collect)
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    vars(metric).update({x: getattr(statistics, x) for x in names}, __wrapped__=statistics)
    return metric


def mean_metric(
    fn: Callable[..., jax.Array], finalise: Callable[[Mean], jax.Array] = mean_value
) -> Metric:
    """Decorate a function of fields: the mean of its values over all examples, or entries."""

    @functools.wraps(fn)
    def statistics(*values: Any, **options: Any) -> Mean:
        return mean_of(fn(*values, **options))

    metric = named_metric(statistics, finalise)
    if finalise is mean_value:
        vars(metric)["each"] = fn
    return metric


def collected_metric(fn: Callable[..., jax.Array]) -> Metric:
    """Decorate a function that must see the fields of all examples together."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def statistics(*values: Any, **named: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(value) for value in signature.bind(*values, **named).args)

    return named_metric(statistics, lambda fields: fn(*fields), collect=True)


def average(fn: Callable[..., Any]) -> Metric:
    """Turn a plain function of prediction fields into a streaming metric.

    The parameter names of `fn` are fields of the prediction; parameters with a default are left
    alone. If it returns one value per example (first axis = batch), the result is the exact
    mean over all examples; a scalar counts as the mean of its batch and is weighted by its size.

    >>> worst = average(lambda pred_mean, target: jnp.abs(pred_mean - target).max(axis=-1))
    >>> float(worst(jnp.zeros((2, 3)), jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])))
    2.0
    """
    names = required_parameters(fn)

    @functools.wraps(fn)  # with the signature of `fn`, because `Metric.fields` reads it
    def statistics(*values: Any) -> Mean:
        size = _batch_size(names, values)
        result = jnp.asarray(fn(*values))
        if result.ndim == 0:
            mean = mean_of(result)
            return Mean(mean.total * size, mean.terms * size)
        if result.shape[0] != size:
            raise ValueError(
                f"a metric returns a scalar or one value per example; for a batch of {size} it "
                f"returned the shape {result.shape}"
            )
        return mean_of(result)

    return Metric(statistics, mean_value)


def required_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of `fn` without a default: the fields it reads.

    >>> required_parameters(lambda pred_mean, target, level=0.95: None)
    ('pred_mean', 'target')
    """
    parameters = inspect.signature(fn).parameters.values()
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    for parameter in required:
        if parameter.kind not in _POSITIONAL:
            raise TypeError(
                f"a metric reads the prediction's fields by the names of its parameters; "
                f"{parameter} names none. Write them out, for example (pred_mean, target)"
            )
    return tuple(parameter.name for parameter in required)


def _batch_size(names: Sequence[str], values: Sequence[Any]) -> int:
    for name, value in zip(names, values, strict=True):
        axis = 1 if name == "samples" else 0  # samples come with the sample axis first
        if jnp.ndim(value) > axis:
            return int(jnp.shape(value)[axis])
    raise ValueError(f"none of the metric's fields ({', '.join(names)}) has a batch axis")
