"""What depends on a unit alone, found out by running the model.

Units have numbers. For every bit of these numbers there are two sets of units: those whose bit is 1
and those whose bit is 0. What depends on one unit answers to one of the two sets for every bit, and
its answers spell the unit's number; what depends on several units answers to both sets of some bit.
So 2 log2(n) runs tell n units apart, whatever the model is made of.

The parameters are drawn: positive, and of a size that keeps activations near the size of the input.
In a trained network units can be dead or saturated, which looks as if nothing depended on them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import kept, model_jit
from .._model import Model, outputs
from .._traced import traced
from .._tree import PyTree, coarsest_eps, is_floating, one_of
from ..taps import MatmulUse, Program, rearrangements_of_view
from ._units import NO_UNIT, Slices

NUM_DRAWS = 2
NUM_EXAMPLES = 4
SILENT = -1  # answers to no set: depends on no unit
SEVERAL = -2  # depends on several units
Members = np.ndarray  # a set of units: a truth value for each
Labels = dict[int, np.ndarray]  # for every entry of some leaves, its unit or a mark above


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A model with parameters and inputs to run it on. Leaves and draws are NumPy arrays."""

    model: Model
    program: Program
    input: PyTree
    draws: tuple[tuple[np.ndarray, ...], ...]  # the leaves, drawn more than once
    treedef: jax.tree_util.PyTreeDef
    readers: dict[int, list[tuple[int, np.ndarray]]]  # by leaf: its taps, its entries as (B, I, O)

    @classmethod
    def of(cls, model: Model, params: PyTree, input: PyTree) -> "Probe":
        """For parameters and inputs of these shapes; whole numbers in the input are kept."""
        rng = np.random.default_rng(0)
        input = jax.tree.map(lambda x: _some(rng, np.asarray(x)[:NUM_EXAMPLES]), input)
        program = traced(model, params, one_of(input)).program
        probe = cls(
            model=model,
            program=program,
            input=input,
            draws=tuple(_draw(rng, program) for _ in range(NUM_DRAWS)),
            treedef=jax.tree.structure(params),
            readers=_readers(program),
        )
        if not np.isfinite(probe.outputs(probe.params)).all():
            raise ValueError(
                "model_fn gives NaN or infinite outputs for small positive parameters and inputs, "
                "with which find_units looks for units: is there a logarithm, a root or a division "
                "that needs other numbers?"
            )
        return probe

    @property
    def params(self) -> PyTree:
        """The first draw."""
        return jax.tree.unflatten(self.treedef, list(self.draws[0]))

    def outputs(self, params: PyTree) -> np.ndarray:
        """The outputs of the model, for parameters of any shapes."""
        return np.asarray(outputs(self.model, params, self.input), np.float64)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the leaves."""
        return [tuple(leaf.shape) for leaf in self.program.leaves]

    @property
    def tolerance(self) -> float:
        """The relative error that sums in another order may make."""
        return coarsest_eps(list(self.draws[0])) ** 0.5

    def read_by(self, leaf: int, axis: int) -> Labels:
        """The weights that read what the slices of a leaf make: for their entries, which slice.

        Weights that depend on no slice are left out. The search ends as soon as no operand depends
        on one slice alone.
        """

        def answers(members: Members) -> list[np.ndarray]:
            changed = [self._changed(draw, leaf, axis, members) for draw in range(NUM_DRAWS)]
            return [np.logical_or.reduce(pair) for pair in zip(*changed, strict=True)]

        numbers = _spell(answers, self.draws[0][leaf].shape[axis])
        found = {reader: self._entries(reader, numbers) for reader in self.readers}
        return {reader: labels for reader, labels in found.items() if (labels != SILENT).any()}

    def _changed(self, draw: int, leaf: int, axis: int, members: Members) -> list[np.ndarray]:
        """Which operands are others once these slices are; (B, I) for every product."""
        leaves = list(self.draws[draw])
        replacement = self.draws[draw - 1][leaf]
        leaves[leaf] = np.where(_along(members, axis, replacement.ndim), replacement, leaves[leaf])
        return [np.asarray(x) for x in _differ(self._drawn_operands(draw), self._operands(leaves))]

    @kept
    def _drawn_operands(self, draw: int) -> list[jax.Array]:
        return self._operands(self.draws[draw])

    def _operands(self, leaves: Sequence[np.ndarray]) -> list[jax.Array]:
        params = jax.tree.unflatten(self.treedef, list(leaves))
        return _operands(self.model, params, self.input)

    def _entries(self, leaf: int, numbers: list[np.ndarray]) -> np.ndarray:
        """What the operands of a weight say of its entries, if all of its uses agree."""
        labels = np.full(self.draws[0][leaf].size, SILENT)
        for tap, matrix in self.readers[leaf]:
            new = np.full(labels.shape, SILENT)
            new[matrix] = numbers[tap][:, :, None]
            agreed = np.where(labels == new, labels, SEVERAL)
            labels = np.where(labels == SILENT, new, np.where(new == SILENT, labels, agreed))
        return labels.reshape(self.draws[0][leaf].shape)

    def used_for(self, outgoing: Sequence[Slices], num_units: int) -> list[np.ndarray]:
        """For every entry of every leaf, the unit without whose readers it has no effect."""

        def answers(members: Members) -> list[np.ndarray]:
            some = [self._with_slope(draw, outgoing, members) for draw in self.draws]
            return [np.logical_or.reduce(pair) for pair in zip(*some, strict=True)]

        return _spell(answers, num_units)

    def _with_slope(
        self, draw: Sequence[np.ndarray], outgoing: Sequence[Slices], members: Members
    ) -> list[np.ndarray]:
        """Where the outputs have a derivative, if only these units are read."""
        leaves = list(draw)
        for slices in outgoing:
            read = _along(slices.kept(members), slices.axis, leaves[slices.leaf].ndim)
            leaf = leaves[slices.leaf]
            leaves[slices.leaf] = np.where(read, leaf, np.zeros((), leaf.dtype))
        params = jax.tree.unflatten(self.treedef, leaves)
        slopes = _slopes(self.model, params, self.input)
        return [np.asarray(x) for x in jax.tree.leaves(slopes)]


def along_axis(labels: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The axis along which labels are told apart, and the unit of every index; None without one.

    An index is a unit's if no entry there is another's; what is silent does not matter.
    """
    found = []
    for axis in range(labels.ndim):
        rows = np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
        highest = rows.max(axis=1, initial=SEVERAL)
        agrees = (rows == highest[:, None]) | (rows == SILENT) | (highest < 0)[:, None]
        if agrees.all() and (highest >= 0).any():
            found.append((axis, np.where(highest < 0, NO_UNIT, highest)))
    return found[0] if len(found) == 1 else None


def _spell(answers: Callable[[Members], list[np.ndarray]], num_units: int) -> list[np.ndarray]:
    """The unit that every entry depends on, from its answers to sets of units."""
    units = np.arange(num_units)
    pairs: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for bit in range(max(num_units - 1, 1).bit_length()):
        members = (units >> bit & 1).astype(bool)
        pairs.append(list(zip(answers(members), answers(~members), strict=True)))
        if not any((ones != zeros).any() for ones, zeros in pairs[-1]):
            break  # nothing depends on one unit alone
    return [_number(list(bits), num_units) for bits in zip(*pairs, strict=True)]


def _number(bits: list[tuple[np.ndarray, np.ndarray]], num_units: int) -> np.ndarray:
    ones = np.stack([one for one, _ in bits])
    zeros = np.stack([zero for _, zero in bits])
    weights = (1 << np.arange(len(bits))).reshape(-1, *(1,) * (ones.ndim - 1))
    number = (weights * ones).sum(axis=0)
    single = (ones != zeros).all(axis=0) & (number < num_units)
    silent = ~(ones | zeros).any(axis=0)
    return np.where(silent, SILENT, np.where(single, number, SEVERAL))


def _along(values: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


def _some(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    return rng.uniform(0.1, 0.9, x.shape).astype(x.dtype) if is_floating(x.dtype) else x


def _draw(rng: np.random.Generator, program: Program) -> tuple[np.ndarray, ...]:
    """Positive numbers; those of a weight are divided by the number of inputs that it sums."""
    inputs = {use.leaf: use.matrix_shape[1] for use in program.uses if isinstance(use, MatmulUse)}
    return tuple(
        (rng.uniform(0.5, 1.5, leaf.shape) / inputs.get(i, 1)).astype(leaf.dtype)
        for i, leaf in enumerate(program.leaves)
    )


def _readers(program: Program) -> dict[int, list[tuple[int, np.ndarray]]]:
    """The leaves that do nothing but multiply as matrices, with all their entries."""
    products = _products(program)
    readers: dict[int, list[tuple[int, np.ndarray]]] = {}
    for i, leaf in enumerate(program.leaves):
        uses = [program.uses[tap] for tap in program.uses_of(i)]
        whole = all(
            isinstance(use, MatmulUse) and np.prod(use.matrix_shape) == leaf.size for use in uses
        )
        if uses and whole and program.covered(i):
            readers[i] = [
                (products.index(tap), _matrix(program.uses[tap], leaf))
                for tap in program.uses_of(i)
            ]
    return readers


def _matrix(use: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """The number of each entry in the leaf, as the product has it: (B, I, O)."""
    to_matrix, _ = rearrangements_of_view(use.weight, leaf)
    numbers: Any = np.arange(leaf.size, dtype=np.int32 if leaf.size < 2**31 else np.int64)
    return np.asarray(to_matrix(numbers))


def _products(program: Program) -> list[int]:
    return [i for i, use in enumerate(program.uses) if isinstance(use, MatmulUse)]


@functools.partial(model_jit, static_argnums=(0,))
def _operands(model: Model, params: PyTree, input: PyTree) -> list[jax.Array]:
    """What every product multiplies a weight with, for all examples: (n, B, T, I)."""
    program = traced(model, params, one_of(input)).program

    def one(x: PyTree) -> list[jax.Array]:
        acts = program.run(x, params)[1].acts
        return [_use(program, tap).act(acts[tap]) for tap in _products(program)]

    return jax.vmap(one)(input)


def _use(program: Program, tap: int) -> MatmulUse:
    use = program.uses[tap]
    assert isinstance(use, MatmulUse)
    return use


@jax.jit
def _differ(before: list[jax.Array], after: list[jax.Array]) -> list[jax.Array]:
    """Where operands differ for any example at any position, (B, I)."""
    return [jnp.any(a != b, axis=(0, 2)) for a, b in zip(before, after, strict=True)]


@functools.partial(model_jit, static_argnums=(0,))
def _slopes(model: Model, params: PyTree, input: PyTree) -> PyTree:
    """Whether the outputs have a derivative in each parameter."""

    def total(params: PyTree) -> jax.Array:
        f = model.batch(input, params)
        return jnp.sum(f * jnp.linspace(0.5, 1.5, f.size, dtype=f.dtype).reshape(f.shape))

    return jax.tree.map(lambda slope: slope != 0, jax.grad(total)(params))
