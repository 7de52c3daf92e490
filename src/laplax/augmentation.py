"""Held-out data where there are none: training data under random transformations.

A network has learnt its training examples by heart, so they cannot choose how uncertain it should
be. Transformed ones it has not seen. How strongly they are transformed decides the answer: the
weaker, the surer the predictions. `matching_strength` finds the strength at which the network is as
good as it is expected to be on new data.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._arguments import check_key, whole_number
from ._data import Batch, DataLike, as_data
from ._engine.samples import draw, whole_batch
from ._tree import PyTree
from .evaluation import Judged, judge

Transform = Callable[[jax.Array, PyTree, float], PyTree]
HALVINGS = 12  # of the range of strengths


def augmented_validation(
    data: DataLike,
    transform: Transform,
    strength: float,
    *,
    num_examples: int | None = None,
    key: jax.Array | None = None,
) -> dict[str, Any]:
    """Training examples under a random transformation, as data for `calibration`.

    Args:
        data: The training data, as for `laplace`.
        transform: `transform(key, input, strength)`: one input under a random transformation,
            for example `random_crop`.
        strength: How far it goes. It decides what a search on these data chooses, more than the
            approximation does; `matching_strength` finds it.
        num_examples: How many, drawn without replacement; by default all.
        key: Which examples, and how each is transformed; by default `jax.random.key(0)`.

    Returns:
        A dict with `"input"`, `"target"` and, if the data have one, `"weight"`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def transform(key, input, strength):
        ...     return input + strength * jax.random.normal(key, input.shape)
        >>> train = (jnp.zeros((100, 2)), jnp.arange(100) % 2)
        >>> made = augmented_validation(train, transform, 0.1, num_examples=50)
        >>> print(made["input"].shape, f"{made['input'].std():.2f}")
        (50, 2) 0.10
    """
    transformed = _transformed_by(transform, data, num_examples, key)
    return transformed(_checked(strength))


def matching_strength(
    prob_predictive: Judged,
    data: DataLike,
    transform: Transform,
    value: float,
    *,
    metric: str = "accuracy",
    most: float = 1.0,
    num_examples: int | None = None,
    key: jax.Array | None = None,
) -> float:
    """The strength at which a predictive is as good as it is expected to be on new data.

    Args:
        prob_predictive: The network, for example `baselines.map_predictive(...)`.
        data: The training data.
        transform: As for `augmented_validation`; the metric must get worse with its strength.
        value: The metric that is expected on new data.
        metric: Its name.
        most: The largest strength that is tried.
        num_examples: How many examples each strength is judged on; by default all.
        key: As for `augmented_validation`. With the same key the examples are the same.
    """
    transformed = _transformed_by(transform, data, num_examples, key)

    def at(strength: float) -> float:
        results = judge(prob_predictive, transformed(strength), metrics=[metric], progress=False)
        return float(results[metric])

    low, high = 0.0, _checked(most)
    first, last = at(low), at(high)
    if not min(first, last) <= value <= max(first, last):
        raise ValueError(
            f"no strength from 0 to {most:g} has {metric}={value:g}: it is {first:.4g} without the "
            f"transformation and {last:.4g} at {most:g}. Expect another value, or pass most=..."
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        on_the_way = (at(middle) - value) * (first - value) > 0
        low, high = (middle, high) if on_the_way else (low, middle)
    return (low + high) / 2


def random_crop(key: jax.Array, input: ArrayLike, strength: float) -> jax.Array:
    """A random part of an image, resized to the size of the image.

    Args:
        key: Where the part lies, and how large it is.
        input: One image (H, W) or (H, W, channels).
        strength: The part has between `1 - strength` and all of the area, and the shape of the
            image.
    """
    image = jnp.asarray(input)
    if image.ndim not in (2, 3) or not jnp.issubdtype(image.dtype, jnp.floating):
        raise ValueError(
            "random_crop takes one floating-point image (H, W) or (H, W, channels); got "
            f"{image.dtype} {image.shape}"
        )
    area_key, place_key = jax.random.split(key)
    area = 1 - strength * jax.random.uniform(area_key, dtype=image.dtype)
    side = jnp.sqrt(area)
    size = jnp.asarray(image.shape[:2], image.dtype)
    corner = jax.random.uniform(place_key, (2,), image.dtype) * (1 - side) * size
    flat = image.reshape(*image.shape[:2], -1)
    cropped = jax.image.scale_and_translate(
        flat,
        flat.shape,
        spatial_dims=(0, 1),
        scale=jnp.full(2, 1 / side),
        translation=-corner / side,
        method="linear",
    )
    return cropped.reshape(image.shape)


def _transformed_by(
    transform: Transform, data: DataLike, num_examples: int | None, key: jax.Array | None
) -> Callable[[float], dict[str, Any]]:
    """The chosen examples as a function of the strength: one program serves all strengths."""
    key = jax.random.key(0) if key is None else key
    check_key(key)
    choice_key, transform_key = jax.random.split(key)
    batch = _chosen(whole_batch(as_data(data, False)), num_examples, choice_key)
    keys = jax.random.split(transform_key, batch.num_examples)
    run = jax.jit(jax.vmap(transform, in_axes=(0, 0, None)))

    def at(strength: float) -> dict[str, Any]:
        made = {"input": run(keys, batch.input, strength), "target": batch.target}
        return made if batch.weight is None else {**made, "weight": batch.weight}

    return at


def _chosen(batch: Batch, num_examples: int | None, key: jax.Array) -> Batch:
    if num_examples is None:
        return batch
    count = whole_number(num_examples, "num_examples")
    if count > batch.num_examples:
        raise ValueError(
            f"num_examples is {count}, but the data have {batch.num_examples} examples"
        )
    chosen: Batch = draw(batch, count, key)
    return chosen


def _checked(strength: float) -> float:
    if not (isinstance(strength, int | float) and 0 <= strength < math.inf):
        raise ValueError(f"strength must be a number from 0 on; got {strength!r}")
    return float(strength)
