"""Re-interpretation of a model's jaxpr: at each use of a parameter, record and perturb.

No layer classes and no registration: flax, equinox or a bare function look alike here.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from .._engine import versions as core
from .._flow import CALLS, called, passed_through, reached_by, struct_of, unrolled_equations
from .._tree import is_floating
from ._origin import CONSTANT, PRODUCTS, Origin, combined, meets, tapped
from ._uses import LinearUse, Map, MatmulUse, Use, convolution_use, embedding_use, matmul_use

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
RESHAPES = {"reshape", "squeeze", "expand_dims", "convert_element_type", "copy"}
LAYOUTS = RESHAPES | {"transpose"}  # what a product may go through on its way to its bias
# Equations that all unrolled scans of a model may have together. One takes about 10 ms to build;
# the rows of a parameter that is used in many turns cost the same arithmetic as its taps.
UNROLLED = 128


def whole_leaf(leaf: jax.Array) -> jax.Array:
    """The view with which every leaf enters, and the layout with which every product leaves."""
    return leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A value, and the leaf it is a view of, if it is one."""

    value: jax.Array
    leaf: int | None = None
    view: Map = whole_leaf
    tap: int | None = None  # the product it came from, up to its layout
    layout: Map | None = None  # from that product's output to this
    copy_of: int | None = None  # the product it equals up to its shape and an added parameter
    repeats: bool = False  # whether the view has an entry of the leaf in several places
    origin: Origin = CONSTANT


@dataclasses.dataclass(eq=False)
class Interpreter:
    """One evaluation. `perturbations` are added to the outputs of the taps, in their order.

    `operands` replace what the model itself would multiply a parameter with, by tap.
    """

    perturbations: Sequence[jax.Array] | None = None
    operands: Mapping[int, jax.Array] = dataclasses.field(default_factory=dict)
    uses: list[Use] = dataclasses.field(default_factory=list)
    acts: list[jax.Array] = dataclasses.field(default_factory=list)
    outs: list[jax.Array] = dataclasses.field(default_factory=list)
    uncovered: dict[int, str] = dataclasses.field(default_factory=dict)
    readers: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    unrolled: int = 0  # equations of the scans so far
    within_scan: bool = False  # whose equations are counted already
    output: Cell | None = None  # of the whole model

    def run(
        self,
        jaxpr: "core.Jaxpr",
        consts: Sequence[jax.Array],
        args: Sequence[Cell],
    ) -> list[Cell]:
        """Evaluate a jaxpr on cells."""
        env: dict[core.Var, Cell] = {}

        def read(atom: "core.Var | core.Literal") -> Cell:
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

    def _equation(self, jaxpr: "core.Jaxpr", eqn: "core.JaxprEqn", cells: list[Cell]) -> list[Cell]:
        name = eqn.primitive.name
        held = [i for i, cell in enumerate(cells) if cell.leaf is not None]
        if name in CALLS and (held or meets(_origins(cells))):
            return self.run(*called(eqn), cells)
        if name == "scan" and held:
            if self._unrolls(eqn):
                return self._scan(eqn, cells)
            steps = f"used inside a `scan` of {eqn.params['length']:,} steps"
            return self._opaque(jaxpr, eqn, cells, steps)
        if held and _has_complex(eqn):
            return self._opaque(jaxpr, eqn, cells, "meets complex numbers")
        if held and name in VIEWS and len(cells) == 1 and _is_floating(eqn):
            return [self._view(eqn, cells[0])]
        if not held and name in LAYOUTS and _is_floating(eqn):
            return [self._layout(jaxpr, eqn, cells[0])]
        use = self._use(eqn, cells, held)
        if use is None:
            return self._opaque(jaxpr, eqn, cells, f"used by `{name}`")
        self._read(cells)
        if len(self.uses) in self.operands:
            operand = cells[1 - held[0]]
            cells[1 - held[0]] = Cell(self.operands[len(self.uses)], origin=operand.origin)
        value = evaluate(jaxpr, eqn, cells)[0]
        return [self._tap(value, cells, held[0], use, name)]

    def _opaque(
        self, jaxpr: "core.Jaxpr", eqn: "core.JaxprEqn", cells: list[Cell], why: str
    ) -> list[Cell]:
        """An equation as it is. The parameters that it reads are no longer followed."""
        self._read(cells)
        values = evaluate(jaxpr, eqn, cells)
        name = eqn.primitive.name
        if not any(cell.origin.leaves for cell in cells):
            origin = combined(_origins(cells), name)
            return [Cell(value, origin=origin) for value in values]
        through = passed_through(eqn)
        outs = []
        for i, (value, bits) in enumerate(zip(values, reached_by(eqn), strict=True)):
            if i in through:
                outs.append(cells[through[i]])
                continue
            read = [cell for j, cell in enumerate(cells) if bits >> j & 1]
            outs.append(self._made_of(value, read, name, why))
        return outs

    def _made_of(self, value: jax.Array, cells: Sequence[Cell], name: str, why: str) -> Cell:
        """A value made of others. The one place where a parameter is lost sight of."""
        for cell in cells:
            if cell.leaf is not None:
                self.uncovered.setdefault(cell.leaf, why)
        return Cell(value, origin=combined(_origins(cells), name))

    def _read(self, cells: Sequence[Cell]) -> None:
        self.readers.update(cell.tap for cell in cells if cell.tap is not None)

    def _layout(self, jaxpr: "core.Jaxpr", eqn: "core.JaxprEqn", cell: Cell) -> Cell:
        """Of a product: those who come after are counted as its readers."""
        value = evaluate(jaxpr, eqn, [cell])[0]
        kept = cell.copy_of if eqn.primitive.name in RESHAPES else None
        layout = _laid_out(eqn, cell)
        return Cell(value, tap=cell.tap, layout=layout, copy_of=kept, origin=cell.origin)

    def _view(self, eqn: "core.JaxprEqn", cell: Cell) -> Cell:
        def view(leaf: jax.Array) -> jax.Array:
            return bind(eqn, cell.view(leaf))

        value = bind(eqn, cell.value)
        repeats = cell.repeats or (
            eqn.primitive.name == "broadcast_in_dim" and value.size != cell.value.size
        )
        return Cell(value, cell.leaf, view, repeats=repeats, origin=cell.origin)

    def _use(self, eqn: "core.JaxprEqn", cells: list[Cell], held: list[int]) -> Use | None:
        if len(held) != 1:
            return None
        which = held[0]
        name = eqn.primitive.name
        leaf = cells[which].leaf
        view = cells[which].view
        assert leaf is not None
        shapes = [jnp.shape(cell.value) for cell in cells]
        product = name == "dot_general" or (
            name == "conv_general_dilated" and which == 1 and eqn.params["batch_group_count"] == 1
        )
        if product and not cells[which].repeats:  # the leaf's entries are those of a matrix
            if name == "dot_general":
                return matmul_use(leaf, view, shapes, which, eqn)
            return convolution_use(leaf, view, shapes[1], eqn)
        if name == "gather" and which == 0 and view is whole_leaf:
            use = embedding_use(leaf, shapes[0], eqn)
            if use is not None:
                return use
        affine = name in ("add", "sub", "add_any")
        if affine or product or name == "mul" or (name in ("gather", "div") and which == 0):
            part = _linear_part(eqn, view, which, affine)
            if name != "add":
                return LinearUse(leaf, part)
            other = cells[1 - which]
            return LinearUse(leaf, part, other.tap, other.layout)
        return None

    def _tap(self, value: jax.Array, cells: list[Cell], which: int, use: Use, name: str) -> Cell:
        tap = len(self.uses)
        if self.perturbations is not None:
            value = value + self.perturbations[tap].astype(value.dtype)
        other = cells[1 - which]
        self.uses.append(use)
        self.acts.append(other.value)
        self.outs.append(value)
        origin = tapped(_origins(cells), name, use.leaf, tap)
        if name in PRODUCTS:
            kept = tap if isinstance(use, MatmulUse) else None
            return Cell(value, tap=tap, layout=whole_leaf, copy_of=kept, origin=origin)
        # A parameter that is added to a product leaves its derivative alone.
        added = name in ("add", "add_any") or (name == "sub" and which == 1)
        kept = other.copy_of if added and other.value.shape == value.shape else None
        return Cell(value, copy_of=kept, origin=origin)

    def _unrolls(self, eqn: "core.JaxprEqn") -> bool:
        if self.within_scan:
            return eqn.params["length"] > 0
        work = unrolled_equations(eqn)
        fits = 0 < work <= UNROLLED - self.unrolled
        self.unrolled += work if fits else 0
        return fits

    def _scan(self, eqn: "core.JaxprEqn", cells: list[Cell]) -> list[Cell]:
        """Unrolled, so that each turn's use of a weight is a tap of its own."""
        p = eqn.params
        outermost = not self.within_scan
        num_fixed = p["num_consts"] + p["num_carry"]
        consts = cells[: p["num_consts"]]
        carry = cells[p["num_consts"] : num_fixed]
        xs = cells[num_fixed:]
        self._read(xs)
        self.within_scan = True
        stacked = []
        turns = range(p["length"])
        for i in reversed(turns) if p["reverse"] else turns:
            slices = [_index(x, i) for x in xs]
            outs = self.run(p["jaxpr"].jaxpr, p["jaxpr"].consts, [*consts, *carry, *slices])
            carry = outs[: p["num_carry"]]
            stacked.append(outs[p["num_carry"] :])
        self.within_scan = not outermost
        if p["reverse"]:
            stacked.reverse()
        columns = list(zip(*stacked, strict=True))
        return [*carry, *(self._stacked(column) for column in columns)]

    def _stacked(self, column: Sequence[Cell]) -> Cell:
        self._read(column)
        value = jnp.stack([cell.value for cell in column])
        return self._made_of(value, column, "scan", "stacked by a `scan`")


def _origins(cells: Sequence[Cell]) -> list[Origin]:
    return [cell.origin for cell in cells]


def _is_floating(eqn: "core.JaxprEqn") -> bool:
    """Whether a value stays a real number, and so keeps its derivative."""
    return is_floating(struct_of(eqn.outvars[0]).dtype)


def _has_complex(eqn: "core.JaxprEqn") -> bool:
    """Whether complex numbers go in or out: a transpose would keep their real part alone."""
    structs = [struct_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    return any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in structs if hasattr(x, "dtype"))


def evaluate(jaxpr: "core.Jaxpr", eqn: "core.JaxprEqn", cells: Sequence[Cell]) -> list[jax.Array]:
    """One equation, through JAX's own evaluator: how a primitive binds differs by release."""
    given = {
        atom: cell.value
        for atom, cell in zip(eqn.invars, cells, strict=True)
        if not isinstance(atom, core.Literal)
    }
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=list(eqn.outvars), eqns=[eqn])
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values()))


def bind(eqn: "core.JaxprEqn", *operands: jax.Array) -> jax.Array:
    """The operation of an equation on other operands."""
    result: jax.Array = eqn.primitive.bind(*operands, **eqn.params)
    return result


def _laid_out(eqn: "core.JaxprEqn", cell: Cell) -> Map | None:
    before = cell.layout
    if before is None or eqn.primitive.name in ("convert_element_type", "copy"):
        return before
    return lambda out: bind(eqn, before(out))


def _index(cell: Cell, i: int) -> Cell:
    def entry(x: jax.Array) -> jax.Array:
        return jax.lax.index_in_dim(x, i, keepdims=False)

    value = entry(cell.value)
    if cell.leaf is None:
        return Cell(value, origin=cell.origin)

    def view(leaf: jax.Array) -> jax.Array:
        return entry(cell.view(leaf))

    return Cell(value, cell.leaf, view, repeats=cell.repeats, origin=cell.origin)


def _linear_part(
    eqn: "core.JaxprEqn", view: Map, which: int, affine: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    sign = -1 if eqn.primitive.name == "sub" and which == 1 else 1
    shape = struct_of(eqn.outvars[0]).shape

    def apply(leaf: jax.Array, other: jax.Array) -> jax.Array:
        if affine:
            return jnp.broadcast_to(sign * view(leaf), shape)
        operands = (view(leaf), other) if which == 0 else (other, view(leaf))
        return bind(eqn, *operands)

    return apply
