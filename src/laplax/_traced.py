"""What the shapes of parameters and inputs tell about a model, before anything is computed."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax

from ._engine import versions as core
from ._engine.chunks import Work
from ._engine.memo import kept
from ._flow import reaches, struct_of
from ._model import Model
from ._output import check_output
from ._space import ParamSpace
from ._tree import PyTree, Shapes, shapes_of, structs_of
from .taps import Program, trace_taps

DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


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


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What the shapes of the parameters and of one input tell about a model."""

    model: Model
    params: PyTree  # `jax.ShapeDtypeStruct` in place of arrays
    example: PyTree
    space: ParamSpace  # in which all parameters vary
    jaxpr: "core.ClosedJaxpr"  # of the model for one example
    output: jax.ShapeDtypeStruct  # of one example
    cost: ModelCost
    draws: bool  # whether the model draws random numbers
    read_leaves: tuple[bool, ...]  # of the parameters: has the output a derivative in it?
    checked: set[str] = dataclasses.field(default_factory=set)  # what was looked at, with values

    @property
    @kept
    def program(self) -> Program:
        """The model with taps."""
        return trace_taps(self.jaxpr, self.params, self.example)


def traced(model: Model, params: PyTree, example: PyTree) -> Traced:
    """One object for equal shapes and settings: tracing costs more than a small fit.

    Raises what is wrong with the model's output.
    """
    memo = model.memo
    if traced not in memo:
        memo[traced] = functools.lru_cache(maxsize=256)(_traced)
    result: Traced = memo[traced](model.weakly(), shapes_of(params, example), core.trace_settings())
    return result


def _traced(model: Model, shapes: Shapes, settings: tuple[object, ...]) -> Traced:
    params, example = structs_of(shapes)
    check_output(model, params, example)
    jaxpr = jax.make_jaxpr(model.one)(example, params)
    output = jaxpr.out_avals[0]
    equations = list(_equations(jaxpr.jaxpr))
    primitives = {eqn.primitive.name for eqn in equations}
    # The parameters come after the leaves of the input.
    reached = reaches(jaxpr.jaxpr, derivatives=True)[0] >> len(jax.tree.leaves(example))
    return Traced(
        model=model,
        params=params,
        example=example,
        space=ParamSpace.of(params),
        jaxpr=jaxpr,
        output=jax.ShapeDtypeStruct(output.shape, output.dtype),
        cost=ModelCost(
            activation_bytes=max(_bytes(equations), 1),
            has_convolution="conv_general_dilated" in primitives,
            outputs=math.prod(output.shape),
        ),
        draws=not primitives.isdisjoint(DRAWS),
        read_leaves=tuple(bool(reached >> i & 1) for i in range(len(jax.tree.leaves(params)))),
    )


def _bytes(equations: "list[core.JaxprEqn]") -> int:
    """Of all intermediate values."""
    values = [struct_of(var) for eqn in equations for var in eqn.outvars]
    return sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in values
        if hasattr(x, "shape") and hasattr(x.dtype, "itemsize")
    )


def _equations(jaxpr: "core.Jaxpr") -> "Iterator[core.JaxprEqn]":
    """All equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, core.ClosedJaxpr):
                    yield from _equations(part.jaxpr)
                elif isinstance(part, core.Jaxpr):
                    yield from _equations(part)
