"""A batch run through the taps, and the exact diagonal of R^T R from them: no rows of length P."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._engine.memo import kept
from .._engine.products import joined, matrix_diagonal
from .._engine.vectors import Leaves
from .._model import Model
from .._space import ParamSpace
from .._traced import traced
from .._tree import PyTree, one_of
from ..likelihoods import weigh
from ..taps import Coverage, EmbeddingUse, LinearUse, MatmulUse, Program, transpose_map
from ._kinds import OuterProductCurvature
from ._operator import LocalCurvature

Seeds = Callable[[jax.Array], jax.Array]  # an example's output to columns (*f.shape, K)


@dataclasses.dataclass(frozen=True, eq=False)
class Tapped:
    """A batch with its taps: operands a (n, ...), gradients g (n, K, ...), rows of the rest."""

    program: Program
    acts: list[PyTree]
    gs: list[jax.Array]
    plain_rows: dict[int, jax.Array]  # of the leaves that no tap covers
    dtype: np.dtype

    def operand(self, tap: int) -> jax.Array:
        """a of a product, (n, B, T, I)."""
        use = self.program.uses[tap]
        assert isinstance(use, MatmulUse)
        return jax.vmap(use.act)(self.acts[tap]).astype(self.dtype)

    def gradient(self, tap: int) -> jax.Array:
        """g of a product, (n, K, B, T, O)."""
        use = self.program.uses[tap]
        assert isinstance(use, MatmulUse)
        return jax.vmap(jax.vmap(use.out))(self.gs[tap]).astype(self.dtype)

    def embedding_rows(self, tap: int) -> tuple[jax.Array, jax.Array]:
        """Gradients of the rows that were looked up, (n, K, T, D), and their numbers, (n, T)."""
        use = self.program.uses[tap]
        assert isinstance(use, EmbeddingUse)
        return jax.vmap(use.rows)(self.acts[tap], self.gs[tap].astype(self.dtype))

    def like(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one row of a leaf."""
        return jax.ShapeDtypeStruct(self.program.leaves[leaf].shape, self.dtype)

    def rows(self, leaf: int) -> jax.Array:
        """Rows of one leaf, (n, K, *leaf shape), summed over its uses; without one a zero row."""
        if leaf in self.plain_rows:
            return self.plain_rows[leaf].astype(self.dtype)
        like = self.like(leaf)
        parts = []
        for tap in self.program.uses_of(leaf):
            gradient = functools.partial(self.program.uses[tap].gradient, like=like)
            rows = jax.vmap(jax.vmap(gradient, (None, 0)))
            parts.append(rows(self.acts[tap], self.gs[tap].astype(self.dtype)))
        return sum(parts[1:], parts[0]) if parts else jnp.zeros((1, 1, *like.shape), like.dtype)


def tap_batch(local: LocalCurvature, batch: Batch) -> Tapped:
    """Run a batch through the taps, its gradients seeded with the columns of the factor."""
    curvature = local.curvature
    assert isinstance(curvature, OuterProductCurvature)

    def columns_of(
        f: jax.Array, y: PyTree, index: jax.Array, weight: jax.Array | None
    ) -> jax.Array:
        factor = curvature.factor(local.likelihood, f, y, index)
        return factor if weight is None else weigh(factor, jnp.sqrt(weight))

    about = (batch.target, batch.index, batch.weight)
    return run_taps(local.model, local.params, local.space, batch.input, columns_of, about)


def run_taps(
    model: Model,
    params: PyTree,
    space: ParamSpace,
    input: PyTree,
    columns_of: Callable[..., jax.Array],
    about: tuple = (),
) -> Tapped:
    """Run inputs through the taps; `columns_of(f, *about)` gives S (*f.shape, K) of an example."""
    program = traced(model, params, one_of(input)).program

    def one(x: PyTree, about: tuple) -> PyTree:
        def seeds(f: jax.Array) -> jax.Array:
            return columns_of(f, *about)

        acts, gs = program.factors(x, params, seeds)
        return acts, gs, _uncovered_rows(program, model, params, space, x, seeds)

    acts, gs, rows = jax.vmap(one)(input, about)
    return Tapped(program, acts, gs, rows, space.dtype)


def diagonal_of_batch(batch: Batch, local: LocalCurvature) -> jax.Array:
    """Column sums of the squared rows, shape (P,)."""
    tapped = tap_batch(local, batch)
    space = local.space
    return joined([space.flatten_leaf(i, leaf_diagonal(tapped, i)) for i in space.slices])


def leaves_of_diagonal(batch: Batch, local: LocalCurvature) -> Leaves:
    """The same, leaf by leaf, on the devices that hold the leaf."""
    tapped = tap_batch(local, batch)
    space = local.space
    return space.placed([leaf_diagonal(tapped, i).astype(space.dtype) for i in space.slices])


def leaf_diagonal(tapped: Tapped, i: int) -> jax.Array:
    """The diagonal of one leaf's block."""
    program = tapped.program
    taps = program.uses_of(i)
    use = program.uses[taps[0]] if program.covered(i) and len(taps) == 1 else None
    if isinstance(use, EmbeddingUse):
        rows, index = tapped.embedding_rows(taps[0])
        squares = jnp.sum(jnp.square(rows), axis=1)  # (n, T, D)
        table = jnp.zeros(use.shape, tapped.dtype).at[index].add(squares, mode="drop")
        return table.reshape(tapped.like(i).shape)
    if isinstance(use, MatmulUse):
        matrix = matrix_diagonal(tapped.operand(taps[0]), tapped.gradient(taps[0]))
        return transpose_map(use.weight, tapped.like(i), matrix)
    return jnp.sum(jnp.square(tapped.rows(i)), axis=(0, 1))


def _uncovered_rows(
    program: Program, model: Model, params: PyTree, space: ParamSpace, x: PyTree, columns_of: Seeds
) -> dict[int, jax.Array]:
    """Rows (K, *leaf) of the leaves that no tap covers, by a plain pull-back."""
    missing = [i for i, _ in program.uncovered if space.selected[i]]
    if not missing:
        return {}
    leaves, treedef = jax.tree.flatten(params)

    def output(some: list[jax.Array]) -> jax.Array:
        full = list(leaves)
        for i, leaf in zip(missing, some, strict=True):
            full[i] = leaf
        return model.one(x, jax.tree.unflatten(treedef, full))

    f, pull = jax.vjp(output, [leaves[i] for i in missing])
    rows = jax.vmap(pull)(jnp.moveaxis(columns_of(f), -1, 0))[0]
    return dict(zip(missing, rows, strict=True))


@kept
def bytes_per_example(program: Program, space: ParamSpace, columns: int) -> int:
    """Temporaries of one example: output gradients of every tap, gradients of shared weights."""
    outs = 0
    for tap, out in zip(program.uses, program.out_structs, strict=True):
        # What flows into a bias is what flows into the product that it is added to.
        counted = isinstance(tap, LinearUse) and tap.added_to is not None
        outs += 0 if counted else math.prod(out.shape)
    widest = 0
    for i, (_, size) in space.slices.items():
        own = program.uses_of(i)
        use = program.uses[own[0]] if len(own) == 1 else None
        if isinstance(use, MatmulUse):
            widest = max(widest, size if use.positions > 1 else 0)
        elif not isinstance(use, EmbeddingUse):
            widest = max(widest, size * max(len(own), 1))
    return columns * space.dtype.itemsize * (3 * outs + 2 * widest)


@kept
def coverage_of(program: Program, space: ParamSpace) -> Coverage:
    """How the diagonal of every leaf is computed."""
    rows = []
    reasons = dict(program.uncovered)
    some = space.parts()
    for i, name in enumerate(program.names):
        taps = program.uses_of(i)
        if not space.selected[i]:
            rows.append((name, "fixed", "outside of the subset"))
        elif i in reasons:
            rows.append((name, "rows", reasons[i]))
        elif not taps:
            rows.append((name, "zero", "the output does not depend on it"))
        else:
            kinds = {program.uses[t].kind for t in taps}
            uses = "" if len(taps) == 1 else f"{len(taps)} uses, summed before squaring"
            rows.append((name, f"taps ({', '.join(sorted(kinds))})", uses))
        if i in some:
            _, how, why = rows[-1]
            rows[-1] = (name, how, f"{some[i]}; {why}" if why else some[i])
    return Coverage(tuple(rows))
