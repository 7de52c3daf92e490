"""Re-interpretation of a model's jaxpr: at each use of a parameter, record and perturb.

No layer classes and no registration: flax, equinox or a bare function look alike here.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _core as core
from ._uses import LinearUse, MatmulUse, Use, convolution_use, embedding_use, matmul_use

VIEWS = {
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "convert_element_type",
    "squeeze",
    "expand_dims",
    "copy",
    "slice",
    "rev",
}
PRODUCTS = {"dot_general", "conv_general_dilated"}
RESHAPES = {"reshape", "squeeze", "expand_dims", "convert_element_type", "copy"}
LAYOUTS = RESHAPES | {"transpose"}  # what a product may go through on its way to its bias
# Not the calls with a derivative of their own (`custom_jvp`, `custom_vjp`): it would be lost.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def whole_leaf(leaf: jax.Array) -> jax.Array:
    """The view with which every leaf enters."""
    return leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A value, and the leaf it is a view of, if it is one."""

    value: Any
    leaf: int | None = None
    view: Callable[[jax.Array], jax.Array] | None = None
    tap: int | None = None  # the product it came from, up to its layout
    layout: Callable[[Any], Any] | None = None  # from that product's output to this
    products: frozenset[int] = frozenset()  # the last parametrised products it depends on
    copy_of: int | None = None  # the product it equals up to its shape and an added parameter
    repeats: bool = False  # whether the view has an entry of the leaf in several places


@dataclasses.dataclass(eq=False)
class Interpreter:
    """One evaluation. `perturbations` are added to the outputs of the taps, in their order.

    `operands` replace what the model itself would multiply a parameter with, by tap.
    """

    perturbations: Sequence[jax.Array] | None = None
    operands: Mapping[int, jax.Array] = dataclasses.field(default_factory=dict)
    uses: list[Use] = dataclasses.field(default_factory=list)
    acts: list[Any] = dataclasses.field(default_factory=list)
    outs: list[Any] = dataclasses.field(default_factory=list)
    uncovered: dict[int, str] = dataclasses.field(default_factory=dict)
    last_products: tuple[int, ...] = ()
    output_tap: int | None = None
    readers: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Cell]) -> list[Cell]:
        """Evaluate a jaxpr on cells."""
        env: dict[Any, Cell] = {}

        def read(atom: Any) -> Cell:
            return Cell(atom.val) if isinstance(atom, core.Literal) else env[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Cell(const)
        for var, cell in zip(jaxpr.invars, args, strict=True):
            env[var] = cell
        for eqn in jaxpr.eqns:
            outs = self._equation(jaxpr, eqn, [read(atom) for atom in eqn.invars])
            for var, cell in zip(eqn.outvars, outs, strict=True):
                env[var] = cell
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, jaxpr: Any, eqn: Any, cells: list[Cell]) -> list[Cell]:
        name = eqn.primitive.name
        held = [i for i, cell in enumerate(cells) if cell.leaf is not None]
        inlined = held and (name in CALLS or name == "scan")
        if name not in LAYOUTS and not inlined:  # those who come after are counted instead
            self.readers.update(cell.tap for cell in cells if cell.tap is not None)
        if not held:
            return self._without_parameters(jaxpr, eqn, cells)
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            closed = isinstance(inner, core.ClosedJaxpr)
            body, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
            return self.run(body, consts, cells)
        if name == "scan":
            return self._scan(eqn, cells)
        if name in VIEWS and len(cells) == 1:
            return [self._view(eqn, cells[0])]
        use = self._use(eqn, cells, held)
        if use is not None:
            if len(self.uses) in self.operands:
                cells[1 - held[0]] = Cell(self.operands[len(self.uses)])
            value = evaluate(jaxpr, eqn, cells)[0]
            return [self._tap(value, cells, held[0], use, name)]
        for i in held:
            self._uncover(cells[i].leaf, f"used by `{name}`")
        reached = _products(cells)
        return [Cell(value, products=reached) for value in evaluate(jaxpr, eqn, cells)]

    def _without_parameters(self, jaxpr: Any, eqn: Any, cells: list[Cell]) -> list[Cell]:
        name, reached = eqn.primitive.name, _products(cells)
        values = evaluate(jaxpr, eqn, cells)
        if name not in LAYOUTS:
            return [Cell(value, products=reached) for value in values]
        cell = cells[0]
        kept = cell.copy_of if name in RESHAPES else None
        return [Cell(values[0], None, None, cell.tap, _laid_out(eqn, cell), reached, kept)]

    def _uncover(self, leaf: int | None, why: str) -> None:
        assert leaf is not None
        self.uncovered.setdefault(leaf, why)

    def _view(self, eqn: Any, cell: Cell) -> Cell:
        before, params = cell.view, eqn.params
        assert before is not None

        def view(leaf: jax.Array) -> jax.Array:
            return eqn.primitive.bind(before(leaf), **params)

        value = eqn.primitive.bind(cell.value, **params)
        repeats = cell.repeats or (
            eqn.primitive.name == "broadcast_in_dim" and value.size != cell.value.size
        )
        return Cell(value, cell.leaf, view, repeats=repeats)

    def _use(self, eqn: Any, cells: list[Cell], held: list[int]) -> Use | None:
        if len(held) != 1:
            return None
        which, name = held[0], eqn.primitive.name
        leaf, view = cells[which].leaf, cells[which].view
        assert leaf is not None
        assert view is not None
        shapes = [tuple(getattr(cell.value, "shape", ())) for cell in cells]
        product = name == "dot_general" or (
            name == "conv_general_dilated" and which == 1 and eqn.params["batch_group_count"] == 1
        )
        if product and not cells[which].repeats:  # the leaf's entries are those of a matrix
            if name == "dot_general":
                return matmul_use(leaf, view, shapes, which, eqn.params["dimension_numbers"])
            return convolution_use(leaf, view, shapes, eqn.params)
        if name == "gather" and which == 0 and view is whole_leaf:
            use = embedding_use(leaf, shapes[0], eqn)
            if use is not None:
                return use
        affine = name in ("add", "sub", "add_any")
        if affine or product or name == "mul" or (name in ("gather", "div") and which == 0):
            other = cells[1 - which] if name == "add" else Cell(None)
            part = _linear_part(eqn, view, which, affine)
            return LinearUse(leaf, part, other.tap, other.layout)
        return None

    def _tap(self, value: jax.Array, cells: list[Cell], which: int, use: Use, name: str) -> Cell:
        others = [cell.value for i, cell in enumerate(cells) if i != which]
        if self.perturbations is not None:
            value = value + self.perturbations[len(self.uses)].astype(value.dtype)
        self.uses.append(use)
        self.acts.append(others[0])
        self.outs.append(value)
        if name not in PRODUCTS:
            # A parameter that is added to a product leaves its derivative alone.
            added = name in ("add", "add_any") or (name == "sub" and which == 1)
            other = cells[1 - which] if added else Cell(value)
            kept = other.copy_of if other.value.shape == value.shape else None
            return Cell(value, products=_products(cells), copy_of=kept)
        tap = len(self.uses) - 1
        kept = tap if isinstance(use, MatmulUse) else None
        return Cell(value, None, None, tap, lambda out: out, frozenset({tap}), kept)

    def _scan(self, eqn: Any, cells: list[Cell]) -> list[Cell]:
        """Unrolled, so that each turn's use of a weight is a tap of its own."""
        p = eqn.params
        consts, carry = cells[: p["num_consts"]], cells[p["num_consts"] :][: p["num_carry"]]
        xs = cells[p["num_consts"] + p["num_carry"] :]
        turns, stacked = range(p["length"]), []
        for i in reversed(turns) if p["reverse"] else turns:
            slices = [_index(x, i) for x in xs]
            outs = self.run(p["jaxpr"].jaxpr, p["jaxpr"].consts, [*consts, *carry, *slices])
            carry = outs[: p["num_carry"]]
            stacked.append(outs[p["num_carry"] :])
        if p["reverse"]:
            stacked.reverse()
        for cell in carry:
            if cell.leaf is not None:
                self._uncover(cell.leaf, "carried out of a `scan`")
        ys = [
            Cell(jnp.stack([cell.value for cell in column]), products=_products(column))
            for column in zip(*stacked, strict=True)
        ]
        return [*(Cell(cell.value, products=cell.products) for cell in carry), *ys]


def _products(cells: Sequence[Cell]) -> frozenset[int]:
    return frozenset().union(*(cell.products for cell in cells))


def evaluate(jaxpr: Any, eqn: Any, cells: Sequence[Cell]) -> list[Any]:
    """One equation, through JAX's own evaluator: how a primitive binds differs by release."""
    given = {
        atom: cell.value
        for atom, cell in zip(eqn.invars, cells, strict=True)
        if not isinstance(atom, core.Literal)
    }
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=list(eqn.outvars), eqns=[eqn])
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values()))


def _laid_out(eqn: Any, cell: Cell) -> Callable[[Any], Any] | None:
    before = cell.layout
    if before is None or eqn.primitive.name in ("convert_element_type", "copy"):
        return before
    return lambda out: eqn.primitive.bind(before(out), **eqn.params)


def _index(cell: Cell, i: int) -> Cell:
    if cell.leaf is None:
        return Cell(cell.value[i], products=cell.products)
    before = cell.view
    assert before is not None
    return Cell(cell.value[i], cell.leaf, lambda leaf: before(leaf)[i], repeats=cell.repeats)


def _linear_part(
    eqn: Any, view: Callable[[jax.Array], jax.Array], which: int, affine: bool
) -> Callable[[jax.Array, Any], jax.Array]:
    sign = -1 if eqn.primitive.name == "sub" and which == 1 else 1
    shape = eqn.outvars[0].aval.shape

    def apply(leaf: jax.Array, other: Any) -> jax.Array:
        if affine:
            return jnp.broadcast_to(sign * view(leaf), shape)
        operands = (view(leaf), other) if which == 0 else (other, view(leaf))
        return eqn.primitive.bind(*operands, **eqn.params)

    return apply
