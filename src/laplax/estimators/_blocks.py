"""KFAC, EKFAC and exact block-diagonal curvature, from taps, for any JAX function."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._enums import check_names
from .._fold import Zeros, fold
from .._linalg import eigh, eigh_on_host, turn
from .._machine import on_cpu
from .._tree import is_concrete, leaf_names
from ..curvature import (
    CurvatureOperator,
    LocalCurvature,
    Tapped,
    bytes_per_example,
    leaf_diagonal,
    matrix_diagonal,
    tap_batch,
)
from ..structures import BlockDiagonal, DenseBlock, DiagonalBlock, KroneckerBlock, Structure
from ..taps import Coverage, Layer, Program, find_layers
from ._base import Diagnostics, Estimator


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaf goes into which block. Static: it keys compiled code, by the layers themselves."""

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
        sums = _fold(operator, plan, _add_factors, _zero_factors(plan, operator))
        scale = operator.scale_as(operator.space.dtype)
        blocks = _kronecker_blocks(plan, sums, scale)
        structure = _assemble(plan, operator, blocks, sums, scale)
        return structure, {
            "coverage": _coverage(operator.program, plan, f"Kronecker ({self.approx})")
        }


@dataclasses.dataclass(frozen=True, eq=False)
class EKFAC(KFAC):
    """`"ekfac"`: KFAC's eigenbasis with the exact second moments in it; a second pass."""

    several_passes: ClassVar[bool] = True

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """KFAC first, then its eigenvalues replaced."""
        operator.require_passes("curv_type='ekfac'")
        structure, _ = super().estimate(operator)
        assert isinstance(structure, BlockDiagonal)
        layers = find_layers(operator.program, self.joint_bias)
        plan = self._plan(operator, layers)
        kept = structure.blocks[: len(plan.layers)]
        bases = [(block.left, block.right) for block in kept]
        zeros = Zeros.of([block.values.shape for block in kept], operator.space.dtype)
        moments = operator.scaled(_fold(operator, plan, _add_moments, zeros, bases))
        better = [
            dataclasses.replace(block, values=m) for block, m in zip(kept, moments, strict=True)
        ]
        blocks = (*better, *structure.blocks[len(plan.layers) :])
        coverage = _coverage(operator.program, plan, "Kronecker eigenbasis, exact second moments")
        return dataclasses.replace(structure, blocks=blocks), {"coverage": coverage}


@dataclasses.dataclass(frozen=True, eq=False)
class ExactBlocks(BlockEstimator):
    """`"block_diagonal"`: an exact dense block per leaf that fits, an exact diagonal beyond."""

    max_dense: int = 2048

    def estimate(self, operator: CurvatureOperator) -> tuple[Structure, Diagnostics]:
        """One pass."""
        _require_rows(operator)
        plan = self._plan(operator, ())
        sums = _fold(operator, plan, _add_factors, _zero_factors(plan, operator))
        scale = operator.scale_as(operator.space.dtype)
        structure = _assemble(plan, operator, [], sums, scale)
        return structure, {"coverage": _coverage(operator.program, plan, "")}


def _require_rows(operator: CurvatureOperator) -> None:
    if not operator.has_rows:
        raise ValueError(
            "Kronecker and block curvatures need rows, which the Hessian does not have; use "
            "curvature='ggn', 'fisher_mc' or 'fisher_empirical'"
        )


def _require_whole_leaves(operator: CurvatureOperator) -> None:
    names, parts = leaf_names(operator.local.params), operator.space.parts()
    if parts:
        cut = ", ".join(f"{names[i]!r} ({share})" for i, share in parts.items())
        raise ValueError(
            "Kronecker and block curvatures are made of whole leaves; this subset cuts through "
            f"{cut}. Single elements work with curv_type='full', 'diagonal', 'lanczos', "
            "'lobpcg' and 'hutchinson'; for this curv_type select leaves, for example "
            f"subset={names[next(iter(parts))]!r}"
        )


def _fold(operator: CurvatureOperator, plan: Plan, step: Any, carry: Any, *args: Any) -> Any:
    columns = operator.rows_per_example
    cost = bytes_per_example(operator.program, operator.space, columns)
    chunking = operator.chunking(cost, in_cache=True)
    return fold(step, carry, operator.data, chunking, operator.local, plan, *args)


def _zero_factors(plan: Plan, operator: CurvatureOperator) -> Zeros:
    leaves = jax.tree.leaves(operator.local.params)
    shapes = [layer.shape for layer in plan.layers]
    sums = {
        "inputs": [(b, i, i) for b, i, _ in shapes],
        "outputs": [(b, o, o) for b, _, o in shapes],
        "counts": [() for _ in shapes],
        "dense": [(leaves[i].size,) * 2 for i in plan.dense],
        "diagonal": [leaves[i].shape for i in plan.diagonal],
    }
    return Zeros.of(sums, operator.space.dtype)


def _add_factors(
    sums: dict[str, Any], batch: Batch, local: LocalCurvature, plan: Plan
) -> dict[str, Any]:
    tapped = tap_batch(local, batch)
    leaves = jax.tree.leaves(local.params)
    inputs, outputs, counts = [], [], []
    for layer in plan.layers:
        a, g = layer.operand(tapped.operand(layer.tap)), tapped.gradient(layer.tap)
        share = _position_weights(batch, g)
        if plan.reduce:
            own = jnp.sum(share, axis=1, keepdims=True)
            mean = jnp.einsum("nbti,nt->nbi", a, share / jnp.where(own > 0, own, 1))
            a, g = mean[:, :, None], jnp.sum(g, axis=3, keepdims=True)
            share = _mean_of_nonzero(share)
        inputs.append(second_moment(a * jnp.sqrt(share)[:, None, :, None], 1))
        outputs.append(second_moment(g, 2))
        counts.append(jnp.sum(share))  # N T without weights, or N if positions become one
    dense = []
    for i in plan.dense:
        rows = _leaf_rows(tapped, i, leaves[i])
        dense.append(rows.T @ rows)
    diagonal = [leaf_diagonal(tapped, i, leaves[i]) for i in plan.diagonal]
    new = {"inputs": inputs, "outputs": outputs, "counts": counts}
    return jax.tree.map(jnp.add, sums, {**new, "dense": dense, "diagonal": diagonal})


def _position_weights(batch: Batch, g: jax.Array) -> jax.Array:
    """How often a position (n, T) of a layer counts, for its gradients g (n, K, B, T, O).

    A weight w is the example taken w times, or the token where tokens are judged apart: columns
    of token t then flow to position t alone. Elsewhere weights of tokens count by their mean, and
    those that are masked count if other tokens' losses flow through them, as in attention.
    """
    shape, columns = (g.shape[0], g.shape[3]), g.shape[1]
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


def second_moment(x: jax.Array, axis: int) -> jax.Array:
    """Sum over all but groups b (at `axis`) and entries i of x_bi x_bj, shape (b, i, i)."""
    if x.shape[axis] == 1:  # a plain GEMM: XLA would copy a transpose for a batch of one
        rows = x.reshape(-1, x.shape[-1])
        return jax.lax.dot_general(rows, rows, (((0,), (0,)), ((), ())))[None]
    groups = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1, x.shape[-1])
    return jnp.einsum("bmi,bmj->bij", groups, groups)


def _add_moments(
    sums: list[jax.Array], batch: Batch, local: LocalCurvature, plan: Plan, bases: Any
) -> list[jax.Array]:
    tapped = tap_batch(local, batch)
    new = []
    for total, layer, (left, right) in zip(sums, plan.layers, bases, strict=True):
        a = turn(layer.operand(tapped.operand(layer.tap)), left)  # where it is masked, g is zero
        g = turn(tapped.gradient(layer.tap), right)
        new.append(total + matrix_diagonal(a, g))
    return new


def _leaf_rows(tapped: Tapped, i: int, leaf: jax.Array) -> jax.Array:
    if tapped.program.covered(i) and not tapped.program.uses_of(i):
        return jnp.zeros((1, leaf.size), tapped.dtype)
    like = jax.ShapeDtypeStruct(leaf.shape, tapped.dtype)
    return tapped.rows(i, like).reshape(-1, leaf.size)


def _kronecker_blocks(plan: Plan, sums: dict[str, Any], scale: jax.Array) -> list[KroneckerBlock]:
    pairs = list(zip(sums["inputs"], sums["outputs"], strict=True))
    large = max((x.shape[-1] for pair in pairs for x in pair), default=0) > LARGE_FACTOR
    on_host = large and on_cpu() and is_concrete(sums)
    decompose = _decompose_on_host if on_host else _decompose
    parts = decompose(pairs, scale, sums["counts"])
    return [
        KroneckerBlock(values, left, right, layer.to_matrix, layer.from_matrix)
        for layer, (values, left, right) in zip(plan.layers, parts, strict=True)
    ]


LARGE_FACTOR = 256  # beyond, a decomposition takes longer than the overhead of the host
_eigen = jax.jit(eigh)


@jax.jit
def _decompose(
    pairs: list[tuple[jax.Array, jax.Array]], scale: jax.Array, counts: list[jax.Array]
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Eigenvalues and eigenvectors of every a (x) g: all layers in one compiled call."""
    each = zip(pairs, counts, strict=True)
    return [_kronecker_parts(eigh(a), eigh(g), scale / count) for (a, g), count in each]


def _decompose_on_host(pairs: list, scale: Any, counts: list) -> list:
    """The same by SciPy, one after the other: nothing is compiled, and each has all cores."""
    factors = [np.asarray(scale) / np.asarray(count) for count in counts]
    each = zip(pairs, factors, strict=True)
    parts = [_kronecker_parts(eigh_on_host(a), eigh_on_host(g), f) for (a, g), f in each]
    return jax.device_put(parts)  # `jnp.asarray` would compile a program for every shape


def _kronecker_parts(of_inputs: tuple, of_outputs: tuple, factor: Any) -> tuple[Any, Any, Any]:
    (ea, left), (eg, right) = of_inputs, of_outputs
    return factor * ea.clip(min=0)[:, :, None] * eg.clip(min=0)[:, None, :], left, right


def _assemble(
    plan: Plan, operator: CurvatureOperator, blocks: list, sums: dict[str, Any], scale: jax.Array
) -> BlockDiagonal:
    slices = operator.space.slices
    groups = [tuple(slices[i] for i in layer.leaves) for layer in plan.layers]
    for i, matrix in zip(plan.dense, sums["dense"], strict=True):
        values, vectors = _eigen(scale * matrix)
        blocks.append(DenseBlock(jnp.maximum(values, 0), vectors))
        groups.append((slices[i],))
    for i, values in zip(plan.diagonal, sums["diagonal"], strict=True):
        blocks.append(DiagonalBlock(scale * values.reshape(-1)))
        groups.append((slices[i],))
    return BlockDiagonal(tuple(blocks), tuple(groups))


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
