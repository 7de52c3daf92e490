"""A network with its logits divided by a temperature, as a model of its own."""

import dataclasses
import math
from collections.abc import Callable

import jax

from ._model import check_signature
from ._tree import ByValue, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class TemperedModel(ByValue):
    """`model_fn(input, params) / temperature` as a `model_fn`."""

    model_fn: Callable[..., jax.Array]
    temperature: float

    def __call__(self, input: PyTree, params: PyTree) -> jax.Array:
        """The outputs, of an example or of a batch as `model_fn` does."""
        return self.model_fn(input=input, params=params) / self.temperature


def tempered_model(model_fn: Callable[..., jax.Array], temperature: float) -> TemperedModel:
    """A network with its logits divided by a temperature, to be given to `laplace`.

    Weight uncertainty makes a classifier less sure. A network that is not sure enough to begin
    with gains nothing by it. With a temperature of the logits beside the posterior, held-out data
    choose both: try several temperatures, `calibrate` each, and keep the one with the lowest NLL.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplace`.
        temperature: What the logits are divided by; below one the network becomes surer. It is not
            the temperature of `prior_arguments`, which scales the posterior.

    Example:
        >>> import jax.numpy as jnp
        >>> surer_fn = tempered_model(lambda input, params: params * input, 0.5)
        >>> print(surer_fn(jnp.asarray(1.0), jnp.asarray(3.0)))
        6.0
    """
    check_signature(model_fn)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be a positive number; got {temperature!r}. Write float(temperature) "
            "for an array"
        )
    return TemperedModel(model_fn, float(temperature))
