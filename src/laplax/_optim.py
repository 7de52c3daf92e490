"""Steps of an optax optimiser. optax is imported when one is taken: it takes long to load."""

import functools
from typing import TYPE_CHECKING, Any

import jax

from ._tree import PyTree

if TYPE_CHECKING:
    from optax import GradientTransformation


@functools.cache
def default_optimizer(learning_rate: float, num_steps: int) -> "GradientTransformation":
    """Adam with a cosine decay to zero; one object per setting, as programs are looked up by it."""
    import optax

    return optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))


def start(optimizer: "GradientTransformation", params: PyTree) -> Any:
    """The optimiser's state before the first step."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        return optimizer.init(params)


def step(
    optimizer: "GradientTransformation", gradient: PyTree, state: Any, params: PyTree
) -> tuple[PyTree, Any]:
    """Parameters and state after a step."""
    import optax

    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state
