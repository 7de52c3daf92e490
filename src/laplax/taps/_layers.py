"""Which leaves make a layer: a weight with one product, and the bias that is added to it."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import kept
from ._program import Program
from ._rearrangement import JoinBias, SplitBias, rearrangements_of_bias, rearrangements_of_view
from ._uses import LinearUse, Map, MatmulUse


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


def find_layers(program: Program, joint_bias: bool) -> tuple[Layer, ...]:
    """Every weight all of which is used, in exactly one product; with its bias if it is to join."""
    apart, joint, _ = _all_layers(program)
    return joint if joint_bias else apart


def layer_of(program: Program, leaves: tuple[int, ...]) -> Layer | None:
    """The layer that owns exactly these leaves: a weight, a weight and its bias, or a bias."""
    layers = itertools.chain(*_all_layers(program))
    return next((layer for layer in layers if layer.leaves == leaves), None)


@kept
def _all_layers(program: Program) -> tuple[tuple[Layer, ...], ...]:
    """Weights alone, weights with the biases that they have, and those biases alone.

    Remembered, as the view of every weight is traced.
    """
    apart = []
    joint = []
    biases = []
    for i, leaf in enumerate(program.leaves):
        taps = program.uses_of(i)
        if not program.covered(i) or len(taps) != 1:
            continue
        tap = taps[0]
        use = program.uses[tap]
        if not isinstance(use, MatmulUse) or math.prod(use.matrix_shape) != leaf.size:
            continue
        weight = _weight_layer(tap, use, i, leaf)
        bias = _bias_layer(program, tap, use)
        apart.append(weight)
        joint.append(weight if bias is None else _joint_layer(weight, bias, leaf.size))
        biases += [] if bias is None else [bias]
    return tuple(apart), tuple(joint), tuple(biases)


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
    struct = program.out_structs[tap]
    layout = bias.layout
    assert layout is not None
    # float32 holds the numbers of fewer entries exactly, and a narrower type none of them.
    if leaf.size >= 2**24 or leaf.dtype.itemsize < 4:
        return None
    with jax.ensure_compile_time_eval():  # which entry is added where: known from shapes alone
        numbers: Any = np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        added = np.asarray(bias.apply(numbers, numbers), np.float32)
        places: Any = np.arange(math.prod(struct.shape)).reshape(struct.shape)
        where = np.asarray(layout(places))
        if where.shape != added.shape:  # the product is spread over the bias
            return None
        placed = np.empty(where.size, np.float32)
        placed[where.ravel()] = added.ravel()
        values: Any = placed.reshape(struct.shape)
        order = np.asarray(use.out(values))
    if order.shape[0] != 1 or order.shape[2] != leaf.size:
        return None
    if not (order == order[:, :1]).all() or sorted(order[0, 0]) != list(range(leaf.size)):
        return None
    return bias.leaf, order[0, 0].astype(int)


def _weight_layer(tap: int, use: MatmulUse, i: int, leaf: jax.ShapeDtypeStruct) -> Layer:
    to_matrix, from_matrix = rearrangements_of_view(use.weight, leaf)
    return Layer(tap, (i,), use.matrix_shape, to_matrix, from_matrix)


def _bias_layer(program: Program, tap: int, use: MatmulUse) -> Layer | None:
    """The bias of a product alone: a matrix with one row, whose input is the constant one."""
    found = find_bias(program, tap, use)
    if found is None:
        return None
    leaf, order = found
    to_row, from_row = rearrangements_of_bias(order)
    shape = (1, 1, order.size)
    return Layer(tap, (leaf,), shape, to_row, from_row, has_weight=False, has_bias=True)


def _joint_layer(weight: Layer, bias: Layer, size: int) -> Layer:
    """A weight of `size` entries, with its bias as the last row."""
    groups, inputs, outputs = weight.shape
    return Layer(
        tap=weight.tap,
        leaves=weight.leaves + bias.leaves,
        shape=(groups, inputs + 1, outputs),
        to_matrix=JoinBias(weight.to_matrix, bias.to_matrix, size),
        from_matrix=SplitBias(weight.from_matrix, bias.from_matrix),
        has_bias=True,
    )
