"""The user's function, seen one example at a time or a batch at a time."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from . import _core as core
from ._flow import reaches
from ._memo import Weak, WeakInside, home
from ._output import output_struct
from ._space import ParamSpace
from ._tree import PyTree, Shapes, shapes_of, structs_of, widen

if TYPE_CHECKING:
    from .taps import Program


@dataclasses.dataclass(frozen=True)
class Model(WeakInside):
    """`model_fn(input, params)`, called with keywords.

    With `vmap_over_data` it sees one example; otherwise a batch, whose examples it must treat
    independently of each other. Outputs in half precision are widened: a loss needs float32.

    What compiled code and traces are found by: the function, by its own `==`, as under `jax.jit`.
    What it reads beside its arguments (globals, a closure, attributes) must not change.
    """

    fn: Callable[..., jax.Array]
    vmap_over_data: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.fn, Weak):
            # Of equal functions the first one, under whose name things are remembered.
            object.__setattr__(self, "fn", home(self.fn).weak.fn)

    @property
    def model(self) -> "Model":
        """Itself: what owns compiled steps has a `model`."""
        return self

    @property
    def memo(self) -> dict[Any, Any]:
        """What is remembered of the function."""
        return home(self.fn).memo

    def weakly(self) -> "Model":
        """The same model for compiled code, which must not keep the function alive."""
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


def check_signature(model_fn: Callable[..., Any]) -> None:
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


def _check_keywords(model_fn: Callable[..., Any]) -> None:
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


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """What one example costs, read off the traced model."""

    activation_bytes: int
    has_convolution: bool
    outputs: int  # C

    def examples_within(self, budget: int) -> int:
        """How many examples a forward pass may see at once, with that many bytes."""
        return max(1, budget // (2 * self.activation_bytes))


DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What the shapes of the parameters and of one input tell about a model.

    Each answer is made when it is first asked for; most take a trace of the model.
    """

    model: Model
    params: PyTree  # `jax.ShapeDtypeStruct` in place of arrays
    example: PyTree

    @functools.cached_property
    def output(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the output for one example."""
        return output_struct(self.model, self.params, self.example)

    @functools.cached_property
    def space(self) -> ParamSpace:
        """The space in which all parameters vary."""
        return ParamSpace.of(self.params)

    @functools.cached_property
    def read_leaves(self) -> tuple[bool, ...]:
        """Which leaves of the parameters the output has a derivative in, as far as can be seen."""
        inputs = len(jax.tree.leaves(self.example))
        count = len(self.jaxpr.invars) - inputs
        reached = reaches(self.jaxpr, derivatives=True)[0] >> inputs
        return tuple(bool(reached >> i & 1) for i in range(count))

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        return any(eqn.primitive.name in DRAWS for eqn in _equations(self.jaxpr))

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The traced model of one example."""
        return jax.make_jaxpr(self.model.one)(self.example, self.params).jaxpr

    @functools.cached_property
    def cost(self) -> ModelCost:
        """Bytes of all intermediate values of one example, and whether there are convolutions."""
        return _model_cost(self.jaxpr)

    @functools.cached_property
    def program(self) -> "Program":
        """The model with taps."""
        from .taps import trace_taps

        return trace_taps(self.model, self.params, self.example)


def traced(model: Model, params: PyTree, example: PyTree) -> Traced:
    """One object for equal shapes: tracing costs more than a small fit."""
    memo = model.memo
    if traced not in memo:
        memo[traced] = functools.lru_cache(maxsize=256)(_traced)
    made: Traced = memo[traced](model.weakly(), shapes_of(params, example), core.trace_settings())
    return made


def _traced(model: Model, shapes: Shapes, settings: tuple[Any, ...]) -> Traced:
    return Traced(model, *structs_of(shapes))


def _model_cost(jaxpr: Any) -> ModelCost:
    equations = list(_equations(jaxpr))
    total = sum(
        math.prod(var.aval.shape) * var.aval.dtype.itemsize
        for eqn in equations
        for var in eqn.outvars
        if hasattr(var.aval, "shape") and hasattr(var.aval.dtype, "itemsize")
    )
    convolution = any(eqn.primitive.name == "conv_general_dilated" for eqn in equations)
    return ModelCost(max(total, 1), convolution, math.prod(jaxpr.outvars[0].aval.shape))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, core.ClosedJaxpr):
                    yield from _equations(part.jaxpr)
                elif isinstance(part, core.Jaxpr):
                    yield from _equations(part)
