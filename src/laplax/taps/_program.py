"""A traced model with taps: what is recorded, what is not covered, and the factors (a, g)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._engine import versions as core
from .._flow import reaches
from .._tree import PyTree, leaf_names
from ._interpret import Cell, Interpreter
from ._origin import Meeting, Origin
from ._uses import Map, Use


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The model's jaxpr for one example, with its taps. Programs are looked up by its identity."""

    jaxpr: "core.ClosedJaxpr"
    uses: tuple[Use, ...]
    out_structs: tuple[jax.ShapeDtypeStruct, ...]
    uncovered: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    last: tuple[Meeting, ...] = ()  # where parameters met the input, from the last products on
    output_tap: int | None = None  # the product that is the output, up to shape and bias
    read_once: frozenset[int] = frozenset()  # products whose value goes to one place only

    @property
    def output_size(self) -> int:
        """The number of outputs of one example, C."""
        return math.prod(self.jaxpr.out_avals[0].shape)

    def uses_of(self, leaf: int) -> list[int]:
        """The taps of one leaf."""
        return [i for i, use in enumerate(self.uses) if use.leaf == leaf]

    def covered(self, leaf: int) -> bool:
        """Whether every use of the leaf is tapped. A leaf without any use is: its block is 0."""
        return leaf not in dict(self.uncovered)

    def run(
        self,
        input: PyTree,
        params: PyTree,
        perturbations: Sequence[jax.Array] | None = None,
        operands: Mapping[int, jax.Array] | None = None,
    ) -> tuple[jax.Array, Interpreter]:
        """The output of one example, and what was recorded on the way."""
        interpreter = Interpreter(perturbations, operands or {})
        cells = [Cell(x, origin=Origin(from_input=True)) for x in jax.tree.leaves(input)]
        for i, leaf in enumerate(jax.tree.leaves(params)):
            cells.append(Cell(leaf, i, origin=Origin(leaves=frozenset({i}))))
        out = interpreter.run(self.jaxpr.jaxpr, self.jaxpr.consts, cells)[0]
        if out.tap is not None:
            interpreter.readers[out.tap] += 1
        if out.leaf is not None:
            interpreter.uncovered.setdefault(out.leaf, "returned as the output")
        interpreter.output = out
        return out.value, interpreter

    def factors(
        self, input: PyTree, params: PyTree, columns_of: Map
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """For one example: recorded operands a, and g (K, *out) at every tap.

        `columns_of(f)` gives the factor S (*f.shape, K); one pull-back serves all taps.
        """

        def tapped(perturbations: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            f, interpreter = self.run(input, params, perturbations)
            return f, interpreter.acts

        zeros = [jnp.zeros(s.shape, s.dtype) for s in self.out_structs]
        f, pull, acts = jax.vjp(tapped, zeros, has_aux=True)
        columns = jnp.moveaxis(columns_of(f), -1, 0)
        return acts, jax.vmap(pull)(columns)[0]


def trace_taps(jaxpr: "core.ClosedJaxpr", params: PyTree, input: PyTree) -> Program:
    """The program of a jaxpr of `fn(input, params)` for one example, from shapes."""
    leaves = tuple(jax.tree.leaves(params))
    empty = Program(jaxpr, (), (), (), tuple(leaf_names(params)), leaves)
    found: dict[str, Any] = {}  # nothing that is traced: it would outlive its trace

    def dry(input: PyTree, params: PyTree) -> list[jax.Array]:
        seen = empty.run(input, params)[1]
        out = seen.output
        assert out is not None
        found["uses"] = tuple(seen.uses)
        found["uncovered"] = _uncovered(jaxpr.jaxpr, seen, len(leaves))
        found["last"] = tuple(sorted(out.origin.met, key=lambda meeting: meeting.leaves))
        found["output_tap"] = out.copy_of
        found["read_once"] = frozenset(tap for tap, n in seen.readers.items() if n == 1)
        return seen.outs

    outs = jax.eval_shape(dry, input, params)
    structs = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs)
    return dataclasses.replace(empty, out_structs=structs, **found)


def _uncovered(
    jaxpr: "core.Jaxpr", interpreter: Interpreter, count: int
) -> tuple[tuple[int, str], ...]:
    """The leaves that need rows: no derivative is zero because nothing was seen of it.

    Of a leaf without any use the output must be known not to depend.
    """
    reached = reaches(jaxpr, derivatives=True)[0] >> (len(jaxpr.invars) - count)
    used = {use.leaf for use in interpreter.uses}
    reasons = {}
    for i in range(count):
        if not reached >> i & 1:
            continue
        if i in interpreter.uncovered:
            reasons[i] = interpreter.uncovered[i]
        elif i not in used:
            reasons[i] = "its way to the output was not followed"
    return tuple(reasons.items())
