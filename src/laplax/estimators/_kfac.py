"""KFAC, EKFAC and exact block-diagonal curvature, from taps, for any JAX function."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._data import Batch
from .._engine.chunks import Work
from .._engine.linalg import eigh_all
from .._engine.products import batched_matmul, matrix_diagonal, second_moment
from .._enums import check_names
from .._space import ParamSpace
from .._tree import leaf_names
from ..curvature import (
    CurvatureOperator,
    LocalCurvature,
    bytes_per_example,
    leaf_diagonal,
    tap_batch,
)
from ..structures import (
    Block,
    BlockDiagonal,
    ByLeaf,
    DenseBlock,
    DiagonalBlock,
    KroneckerBlock,
    Structure,
)
from ..taps import Coverage, Layer, Program, find_layers
from ._base import Diagnostics, Estimator, by_leaf

Sums = dict[str, list[jax.Array]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaf goes into which block: a static argument, equal if the layers are."""

    layers: tuple[Layer, ...]
    dense: tuple[int, ...]
    diagonal: tuple[int, ...]
    reduce: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class BlockEstimator(Estimator):
    """What the three have in common: a plan, one pass, blocks.

    A leaf that no layer owns keeps an exact dense block up to `max_dense` parameters and an exact
    diagonal beyond; the coverage report says which.
    """

    max_dense: int = 512
    several_passes: ClassVar[bool] = False

    def _plan(
        self, operator: CurvatureOperator, layers: tuple[Layer, ...], reduce: bool = False
    ) -> Plan:
        _require_whole_leaves(operator)
        slices = operator.space.slices
        layers = tuple(layer for layer in layers if all(i in slices for i in layer.leaves))
        owned = {i for layer in layers for i in layer.leaves}
        rest = [i for i in slices if i not in owned]
        dense = tuple(i for i in rest if slices[i][1] <= self.max_dense)
        diagonal = tuple(i for i in rest if i not in dense)
        return Plan(layers, dense, diagonal, reduce)


@dataclasses.dataclass(frozen=True, eq=False)
class KFAC(BlockEstimator):
    """`"kfac"`: per layer a Kronecker product of input and gradient second moments.

    `approx` is `"expand"` or `"reduce"` (how the positions of a shared weight are treated); with
    `joint_bias` a bias is one more input of its layer, otherwise a block of its own.
    """

    approx: str = "expand"
    joint_bias: bool = True

    def __post_init__(self) -> None:
        check_names([self.approx], ("expand", "reduce"), "KFAC approximation")

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """One pass for the factors, one eigendecomposition per factor."""
        _require_rows(operator)
        layers = find_layers(operator.program, self.joint_bias)
        plan = self._plan(operator, layers, self.approx == "reduce")
        sums = operator.sum(_factors_of_batch, _work(operator), plan)
        structure = _assemble(plan, operator, self._layer_blocks(operator, plan, sums), sums)
        return structure, {"coverage": _coverage(operator.program, plan, self._layer_kind)}

    @property
    def _layer_kind(self) -> str:
        return f"Kronecker ({self.approx})"

    def _layer_blocks(
        self, operator: CurvatureOperator, plan: Plan, sums: Sums
    ) -> list[KroneckerBlock]:
        return _kronecker_blocks(plan, operator, sums)


@dataclasses.dataclass(frozen=True, eq=False)
class EKFAC(KFAC):
    """`"ekfac"`: KFAC's eigenbasis with the exact second moments in it; a second pass."""

    several_passes: ClassVar[bool] = True

    @property
    def _layer_kind(self) -> str:
        return "Kronecker eigenbasis, exact second moments"

    def _layer_blocks(
        self, operator: CurvatureOperator, plan: Plan, sums: Sums
    ) -> list[KroneckerBlock]:
        blocks = super()._layer_blocks(operator, plan, sums)
        bases = [(block.left, block.right) for block in blocks]
        moments = operator.sum(_moments_of_batch, _work(operator), plan, bases)
        pairs = zip(blocks, moments, strict=True)
        return [dataclasses.replace(block, values=values) for block, values in pairs]


@dataclasses.dataclass(frozen=True, eq=False)
class ExactBlocks(BlockEstimator):
    """`"block_diagonal"`: an exact dense block per leaf that fits, an exact diagonal beyond."""

    max_dense: int = 2048

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        _require_rows(operator)
        plan = self._plan(operator, ())
        sums = operator.sum(_factors_of_batch, _work(operator), plan)
        structure = _assemble(plan, operator, [], sums)
        return structure, {"coverage": _coverage(operator.program, plan, "")}


def _require_rows(operator: CurvatureOperator) -> None:
    if not operator.has_rows:
        raise ValueError(
            "Kronecker and block curvatures need rows, which the Hessian does not have; use "
            "curvature='ggn', 'fisher_mc' or 'fisher_empirical'"
        )


def _require_whole_leaves(operator: CurvatureOperator) -> None:
    parts = operator.space.parts()
    if parts:
        names = leaf_names(operator.local.params)
        cut = ", ".join(f"{names[i]!r} ({share})" for i, share in parts.items())
        raise ValueError(
            "Kronecker and block curvatures are made of whole leaves; this subset cuts through "
            f"{cut}. Single elements work with curv_type='full', 'diagonal', 'lanczos', "
            "'lobpcg' and 'hutchinson'; for this curv_type select leaves, for example "
            f"subset={names[next(iter(parts))]!r}"
        )


def _work(operator: CurvatureOperator) -> Work:
    columns = operator.rows_per_example
    size = bytes_per_example(operator.program, operator.space, columns)
    return operator.work(size, reread=True)


def _factors_of_batch(batch: Batch, local: LocalCurvature, plan: Plan) -> Sums:
    tapped = tap_batch(local, batch)
    inputs = []
    outputs = []
    counts = []
    for layer in plan.layers:
        a = layer.operand(tapped.operand(layer.tap))
        g = tapped.gradient(layer.tap)
        share = _position_weights(batch, g)
        if plan.reduce:
            own = jnp.sum(share, axis=1, keepdims=True)
            mean = jnp.einsum("nbti,nt->nbi", a, share / jnp.where(own > 0, own, 1))
            a = mean[:, :, None]
            g = jnp.sum(g, axis=3, keepdims=True)
            share = _mean_of_nonzero(share)
        inputs.append(second_moment(a * jnp.sqrt(share)[:, None, :, None], 1))
        outputs.append(second_moment(g, 2))
        counts.append(jnp.sum(share))  # N T without weights, or N if positions become one
    dense = []
    for i in plan.dense:
        rows = tapped.rows(i).reshape(-1, tapped.like(i).size)
        dense.append(rows.T @ rows)
    diagonal = [local.space.placed_leaf(i, leaf_diagonal(tapped, i)) for i in plan.diagonal]
    return {
        "inputs": inputs,
        "outputs": outputs,
        "counts": counts,
        "dense": dense,
        "diagonal": diagonal,
    }


def _position_weights(batch: Batch, g: jax.Array) -> jax.Array:
    """How often a position (n, T) of a layer counts, for its gradients g (n, K, B, T, O).

    A weight w is the example taken w times, or the token where tokens are judged apart: columns
    of token t then flow to position t alone. Elsewhere weights of tokens count by their mean, and
    those that are masked count if other tokens' losses flow through them, as in attention.
    """
    shape = (g.shape[0], g.shape[3])
    columns = g.shape[1]
    if batch.weight is None:
        return jnp.ones(shape, g.dtype)
    weight = batch.weight.reshape(shape[0], -1).astype(g.dtype)
    example = _mean_of_nonzero(weight)
    if weight.shape != shape:
        return jnp.broadcast_to(example, shape)
    flows = jnp.any(g != 0, axis=(2, 4))  # (n, K, T)
    together = jnp.where((weight != 0) | jnp.any(flows, axis=1), example, 0)
    if columns % shape[1]:
        return together
    token = jnp.arange(columns) // (columns // shape[1])
    elsewhere = flows & (token[:, None] != jnp.arange(shape[1])[None])[None]
    apart = ~jnp.any(elsewhere, axis=(1, 2))
    return jnp.where(apart[:, None], weight, together)


def _mean_of_nonzero(weight: jax.Array) -> jax.Array:
    """The weight (n, 1) of an example from those of its positions (n, T)."""
    taking_part = jnp.sum((weight != 0).astype(weight.dtype), axis=1, keepdims=True)
    return jnp.sum(weight, axis=1, keepdims=True) / jnp.maximum(taking_part, 1)


def _moments_of_batch(
    batch: Batch, local: LocalCurvature, plan: Plan, bases: list[tuple[jax.Array, jax.Array]]
) -> list[jax.Array]:
    tapped = tap_batch(local, batch)
    moments = []
    for layer, (left, right) in zip(plan.layers, bases, strict=True):
        operand = layer.operand(tapped.operand(layer.tap))  # where it is masked, g is zero
        a = batched_matmul(operand, left)
        g = batched_matmul(tapped.gradient(layer.tap), right)
        moments.append(matrix_diagonal(a, g))
    return moments


def _kronecker_blocks(plan: Plan, operator: CurvatureOperator, sums: Sums) -> list[KroneckerBlock]:
    pairs = eigh_all([*sums["inputs"], *sums["outputs"]], operator.devices)
    of_inputs = pairs[: len(plan.layers)]
    of_outputs = pairs[len(plan.layers) :]
    products = _eigenvalues_of_products(
        [values for values, _ in of_inputs], [values for values, _ in of_outputs], sums["counts"]
    )
    return [
        KroneckerBlock(values, left, right, layer.to_matrix, layer.from_matrix)
        for layer, values, (_, left), (_, right) in zip(
            plan.layers, products, of_inputs, of_outputs, strict=True
        )
    ]


@jax.jit
def _eigenvalues_of_products(
    inputs: list[jax.Array], outputs: list[jax.Array], counts: list[jax.Array]
) -> list[jax.Array]:
    """Of every A (x) B / count, shape (b, I, O), without the negative ones that rounding leaves."""
    return [
        a.clip(min=0)[:, :, None] * b.clip(min=0)[:, None, :] / count
        for a, b, count in zip(inputs, outputs, counts, strict=True)
    ]


def _assemble(
    plan: Plan, operator: CurvatureOperator, blocks: list[KroneckerBlock], sums: Sums
) -> Structure:
    slices = operator.space.slices
    leaves = [layer.leaves for layer in plan.layers]
    leaves += [(i,) for i in (*plan.dense, *plan.diagonal)]
    pairs = eigh_all(sums["dense"], operator.devices)
    dense = [DenseBlock(jnp.maximum(values, 0), vectors) for values, vectors in pairs]
    if operator.space.by_leaf:
        diagonal = [DiagonalBlock(values) for values in sums["diagonal"]]
        return _divided(operator.space, [*blocks, *dense, *diagonal], leaves)
    diagonal = [DiagonalBlock(values.reshape(-1)) for values in sums["diagonal"]]
    groups = tuple(tuple(slices[i] for i in own) for own in leaves)
    return BlockDiagonal((*blocks, *dense, *diagonal), groups)


def _divided(
    space: ParamSpace, blocks: Sequence[Block], leaves: Sequence[tuple[int, ...]]
) -> ByLeaf:
    """Blocks over leaves that devices divide."""
    places = {leaf: place for place, leaf in enumerate(space.slices)}
    own = [tuple(places[i] for i in group) for group in leaves]
    return by_leaf(space, blocks, own)


def _coverage(program: Program, plan: Plan, layer_kind: str) -> Coverage:
    reasons = dict(program.uncovered)
    how: dict[int, tuple[str, str]] = {}
    for layer in plan.layers:
        joined = ", bias joint" if layer.has_bias else ""
        for i in layer.leaves:
            how[i] = (layer_kind + joined, "")
    for i in (*plan.dense, *plan.diagonal):
        uses = program.uses_of(i)
        why = reasons.get(i) or ("no use" if not uses else f"{len(uses)} use(s), no single product")
        how[i] = ("exact dense block" if i in plan.dense else "exact diagonal", why)
    fixed = ("fixed", "outside of the subset")
    return Coverage(tuple((name, *how.get(i, fixed)) for i, name in enumerate(program.names)))
