"""Which leaves make a layer: a weight with one product, and the bias that is added to it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import kept
from ._program import Program
from ._rearrangement import JoinBias, SplitBias, rearrangements_of_bias, rearrangements_of_view
from ._uses import LinearUse, MatmulUse

Map = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A product W (B, I, O) with the leaves that it owns, weight first; or its bias alone."""

    tap: int
    leaves: tuple[int, ...]
    shape: tuple[int, int, int]  # (B, I, O), the bias included as a row
    to_matrix: Map  # (size,) -> (B, I, O)
    from_matrix: Map  # its inverse
    has_weight: bool = True
    has_bias: bool = False

    def operand(self, a: jax.Array) -> jax.Array:
        """The product's a (n, B, T, I), with a constant one for a bias."""
        ones = jnp.ones((*a.shape[:-1], 1), a.dtype)
        if not self.has_weight:
            return ones
        return jnp.concatenate([a, ones], axis=-1) if self.has_bias else a


@kept
def find_layers(program: Program, joint_bias: bool) -> tuple[Layer, ...]:
    """Every weight all of which is used, in exactly one product; with its bias if it is to join.

    Cached: the view of every weight is traced.
    """
    layers = []
    for i, leaf in enumerate(program.leaves):
        taps = program.uses_of(i)
        if not program.covered(i) or len(taps) != 1:
            continue
        use = program.uses[taps[0]]
        if isinstance(use, MatmulUse) and math.prod(use.matrix_shape(leaf)) == leaf.size:
            bias = find_bias(program, taps[0], use) if joint_bias else None
            layers.append(_make_layer(taps[0], use, i, leaf, bias))
    return tuple(layers)


def find_bias(program: Program, tap: int, use: MatmulUse) -> tuple[int, np.ndarray] | None:
    """The leaf that is added to this product and to nothing else, and its order along O."""
    found = [u for u in program.uses if isinstance(u, LinearUse) and u.added_to == tap]
    if len(found) != 1 or not program.covered(found[0].leaf):
        return None
    if tap not in program.read_once:  # what flows past the bias is not in the bias's gradient
        return None
    bias = found[0]
    if len(program.uses_of(bias.leaf)) != 1:
        return None
    leaf = program.leaves[bias.leaf]
    struct, layout = program.out_structs[tap], bias.layout
    assert layout is not None
    if leaf.size >= 2**24:
        return None
    with jax.ensure_compile_time_eval():  # which entry is added where: known from shapes alone
        numbers: Any = np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)
        added = np.asarray(bias.apply(numbers.astype(leaf.dtype), None), np.float32)
        places: Any = np.arange(math.prod(struct.shape)).reshape(struct.shape)
        where = np.asarray(layout(places))
        if where.shape != added.shape:  # the product is spread over the bias
            return None
        placed = np.empty(where.size, np.float32)
        placed[where.ravel()] = added.ravel()
        values: Any = placed.reshape(struct.shape)
        order = np.asarray(use.out(values))
    if leaf.dtype.itemsize < 4 or order.shape[0] != 1 or order.shape[2] != leaf.size:
        return None
    if not (order == order[:, :1]).all() or sorted(order[0, 0]) != list(range(leaf.size)):
        return None
    return bias.leaf, order[0, 0].astype(int)


def _make_layer(
    tap: int, use: MatmulUse, i: int, leaf: Any, bias: tuple[int, np.ndarray] | None
) -> Layer:
    groups, inputs, outputs = use.matrix_shape(leaf)
    to_matrix, from_matrix = rearrangements_of_view(use.weight, leaf)
    if bias is None:
        return Layer(tap, (i,), (groups, inputs, outputs), to_matrix, from_matrix)
    to_row, from_row = rearrangements_of_bias(bias[1])
    return Layer(
        tap=tap,
        leaves=(i, bias[0]),
        shape=(groups, inputs + 1, outputs),
        to_matrix=JoinBias(to_matrix, to_row, leaf.size),
        from_matrix=SplitBias(from_matrix, from_row),
        has_bias=True,
    )


@kept
def layer_of(program: Program, leaves: tuple[int, ...]) -> Layer | None:
    """The layer that owns exactly these leaves: a weight, a weight and its bias, or a bias."""
    for joint_bias in (False, True):
        layers = find_layers(program, joint_bias)
        for layer in layers:
            if layer.leaves == leaves:
                return layer
    for layer in layers:
        if layer.has_bias and layer.leaves[1:] == leaves:
            return _bias_layer(program, layer)
    return None


def _bias_layer(program: Program, layer: Layer) -> Layer:
    """The bias of a layer alone: a matrix with one row, whose input is the constant one."""
    use = program.uses[layer.tap]
    assert isinstance(use, MatmulUse)
    found = find_bias(program, layer.tap, use)
    assert found is not None
    leaf, order = found
    to_row, from_row = rearrangements_of_bias(order)
    shape = (1, 1, order.size)
    return Layer(layer.tap, (leaf,), shape, to_row, from_row, has_weight=False, has_bias=True)
