"""The user's function, seen one example at a time or a batch at a time."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ._engine.memo import Weak, WeakInside, home, model_jit
from ._tree import PyTree, widen


@dataclasses.dataclass(frozen=True)
class Model(WeakInside):
    """`model_fn(input, params)`, called with keywords.

    With `vmap_over_data` it sees one example; otherwise a batch, whose examples it must treat
    independently of each other. Outputs in half precision are widened: a loss needs float32.

    A model is identified by its function, by the function's own `==`, as under `jax.jit`. What the
    function reads besides its arguments (globals, a closure, attributes) must not change.
    """

    fn: Callable[..., jax.Array]
    vmap_over_data: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.fn, Weak):
            # Of equal functions the first one, under whose name things are remembered.
            object.__setattr__(self, "fn", home(self.fn).weak.fn)

    @property
    def model(self) -> "Model":
        """Itself: every owner of programs has a `model`."""
        return self

    @property
    def memo(self) -> dict[Hashable, Any]:
        """What is remembered of the function."""
        return home(self.fn).memo

    def weakly(self) -> "Model":
        """The same model for JAX's programs, which must not keep the function alive."""
        return self if isinstance(self.fn, Weak) else Model(home(self.fn).weak, self.vmap_over_data)

    def one(self, input: PyTree, params: PyTree) -> jax.Array:
        """Output for one example."""
        if self.vmap_over_data:
            return widen(self.fn(input=input, params=params))
        single = jax.tree.map(lambda x: x[None], input)
        return widen(self.fn(input=single, params=params))[0]

    def batch(self, input: PyTree, params: PyTree) -> jax.Array:
        """Outputs for a batch of examples along the first axis."""
        if self.vmap_over_data:
            return jax.vmap(self.one, in_axes=(0, None))(input, params)
        return widen(self.fn(input=input, params=params))


@functools.partial(model_jit, static_argnums=(0,))
def outputs(model: Model, params: PyTree, input: PyTree) -> jax.Array:
    """Outputs for a batch, as one program."""
    return model.batch(input, params)


def check_signature(model_fn: Callable[..., object]) -> None:
    """`model_fn` must take keywords `input` and `params`."""
    if not callable(model_fn):
        raise TypeError(
            f"model_fn must be callable; got {type(model_fn).__name__} (model_fn comes before "
            "params, and after posterior_fn)"
        )
    checked = home(model_fn).memo
    if _check_keywords not in checked:
        _check_keywords(model_fn)
        checked[_check_keywords] = True


def _check_keywords(model_fn: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # builtins without a signature: the call itself will tell
        return
    try:
        signature.bind(input=None, params=None)
    except TypeError:
        given = ", ".join(signature.parameters)
        raise TypeError(
            f"model_fn is called as model_fn(input=..., params=...); its parameters are ({given}). "
            "Wrap it: model_fn = lambda input, params: my_model(params, input)"
        ) from None
