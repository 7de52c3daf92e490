"""What the shapes of parameters and inputs tell about a model, before anything is computed."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from ._engine import versions as core
from ._engine.chunks import Work
from ._flow import reaches
from ._model import Model
from ._output import output_struct
from ._space import ParamSpace
from ._tree import PyTree, Shapes, shapes_of, structs_of
from .taps import Program, trace_taps


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """What one example costs, read off the traced model."""

    activation_bytes: int
    has_convolution: bool
    outputs: int  # C

    @property
    def forward_work(self) -> Work:
        """A step that runs the model forward."""
        return Work(2 * self.activation_bytes, self.has_convolution)


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
    def program(self) -> Program:
        """The model with taps."""
        return trace_taps(self.model.one, self.params, self.example)


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
