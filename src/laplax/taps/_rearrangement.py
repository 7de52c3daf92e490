"""Where the parameters of a layer lie in its matrix: data, which can be hashed and written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._flow import CALLS, opened
from ._uses import Map

Step = tuple[str, tuple[int, ...] | bytes]
# Views that move no entry: of a leaf all of whose entries are there once, they change the shape.
SHAPE_ONLY = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice"}
SAME = {"convert_element_type", "copy"}


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """Reshapes, transposes, reversals and permutations (of the last axis), in their order."""

    steps: tuple[Step, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        for name, numbers in self.steps:
            x = _STEPS[name](x, numbers)
        return x


def _permute(x: Any, order: bytes) -> Any:
    return x[..., np.frombuffer(order, np.int64)]


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, axes: x.transpose(axes),
    "reverse": jnp.flip,
    "permute": _permute,
}


@dataclasses.dataclass(frozen=True)
class JoinBias:
    """The entries of a weight, then those of its bias, as the matrix with the bias as last row."""

    weight: Map
    bias: Map
    weight_size: int

    def __call__(self, v: jax.Array) -> jax.Array:
        parts = [self.weight(v[: self.weight_size]), self.bias(v[self.weight_size :])]
        return jnp.concatenate(parts, axis=1)


@dataclasses.dataclass(frozen=True)
class SplitBias:
    """The inverse of `JoinBias`."""

    weight: Map
    bias: Map

    def __call__(self, matrix: jax.Array) -> jax.Array:
        return jnp.concatenate([self.weight(matrix[:, :-1]), self.bias(matrix[:, -1:])])


def rearrangements_of_view(view: Map, leaf: Any) -> tuple[Rearrangement, Rearrangement]:
    """A flat leaf to what `view` makes of it, and back, for a view of every entry of the leaf.

    A change of dtype in the view is left out: it is the model's, and no rearrangement.
    """
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    jaxpr = jax.make_jaxpr(view)(struct).jaxpr
    forth: list[Step] = [("reshape", leaf.shape)]
    back: list[Step] = [("reshape", (leaf.size,))]
    _follow(jaxpr, forth, back)
    return Rearrangement(tuple(forth)), Rearrangement(tuple(reversed(back)))


def _follow(jaxpr: Any, forth: list[Step], back: list[Step]) -> None:
    """Append the steps of a chain of equations, and those that undo them."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        before = eqn.invars[0].aval.shape
        after = eqn.outvars[0].aval.shape
        if name in CALLS:
            _follow(opened(eqn.params[CALLS[name]])[0], forth, back)
        elif name == "transpose":
            axes = tuple(eqn.params["permutation"])
            forth.append(("transpose", axes))
            back.append(("transpose", tuple(int(i) for i in np.argsort(axes))))
        elif name == "rev":
            step: Step = ("reverse", tuple(eqn.params["dimensions"]))
            forth.append(step)
            back.append(step)
        elif name not in SAME:
            assert name in SHAPE_ONLY, name
            forth.append(("reshape", after))
            back.append(("reshape", before))


def rearrangements_of_bias(order: np.ndarray) -> tuple[Rearrangement, Rearrangement]:
    """A flat bias to a row (1, 1, O) whose entry o is number `order[o]`, and back.

    Most biases lie in order, and nothing is gathered for them.
    """
    row: Step = ("reshape", (1, 1, order.size))
    flat: Step = ("reshape", (order.size,))
    if np.array_equal(order, np.arange(order.size)):
        return Rearrangement((row,)), Rearrangement((flat,))
    forth = np.asarray(order, np.int64).tobytes()
    back = np.argsort(order).astype(np.int64).tobytes()
    return Rearrangement((("permute", forth), row)), Rearrangement((flat, ("permute", back)))
