"""Which leaves make a layer: a weight with one product, and the bias that is added to it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._program import Program
from ._uses import LinearUse, MatmulUse, transpose_map

Map = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A product W (B, I, O) with the leaves that it owns, weight first."""

    tap: int
    leaves: tuple[int, ...]
    shape: tuple[int, int, int]  # (B, I, O), the bias included as a row
    to_matrix: Map  # (size,) -> (B, I, O)
    from_matrix: Map  # its inverse

    @property
    def has_bias(self) -> bool:
        """Whether a bias joined."""
        return len(self.leaves) == 2


@functools.lru_cache(maxsize=64)
def find_layers(program: Program, joint_bias: bool) -> tuple[Layer, ...]:
    """Every weight that is used in exactly one product, with its bias if it is to join.

    Cached, so that the rearrangements of a layer are the same objects in every fit: they are
    static parts of the structures, and compiled code is found under them.
    """
    layers = []
    for i, leaf in enumerate(program.leaves):
        taps = program.uses_of(i)
        if not program.covered(i) or len(taps) != 1:
            continue
        use = program.uses[taps[0]]
        if isinstance(use, MatmulUse):
            bias = find_bias(program, taps[0], use) if joint_bias else None
            layers.append(_make_layer(taps[0], use, i, leaf, bias))
    return tuple(layers)


def find_bias(program: Program, tap: int, use: MatmulUse) -> tuple[int, np.ndarray] | None:
    """The leaf that is added to this product and to nothing else, and its order along O."""
    found = [u for u in program.uses if isinstance(u, LinearUse) and u.added_to == tap]
    if len(found) != 1 or not program.covered(found[0].leaf):
        return None
    bias = found[0]
    if len(program.uses_of(bias.leaf)) != 1:
        return None
    leaf = program.leaves[bias.leaf]
    with jax.ensure_compile_time_eval():  # which entry is added where: known from shapes alone
        numbers = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
        struct = program.out_structs[tap]
        if leaf.size >= 2**24:
            return None
        placed = use.out(bias.apply(numbers.astype(leaf.dtype), None).reshape(struct.shape))
        order = np.asarray(placed.astype(jnp.float32))
    if leaf.dtype.itemsize < 4 or order.shape[0] != 1 or order.shape[2] != leaf.size:
        return None
    if not (order == order[:, :1]).all() or sorted(order[0, 0]) != list(range(leaf.size)):
        return None
    return bias.leaf, order[0, 0].astype(int)


def _make_layer(
    tap: int, use: MatmulUse, i: int, leaf: Any, bias: tuple[int, np.ndarray] | None
) -> Layer:
    struct = jax.eval_shape(use.weight, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    groups, inputs, outputs = struct.shape

    def weight_matrix(v: jax.Array) -> jax.Array:
        return use.weight(v[: leaf.size].reshape(leaf.shape)).astype(v.dtype)

    def weight_vector(matrix: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(leaf.shape, matrix.dtype)
        return transpose_map(use.weight, like, matrix).reshape(-1)

    if bias is None:
        shape = (groups, inputs, outputs)
        return Layer(tap, (i,), shape, weight_matrix, weight_vector)
    order = bias[1]
    inverse = np.argsort(order)

    def to_matrix(v: jax.Array) -> jax.Array:
        row = v[leaf.size :][order].reshape(1, 1, -1)
        return jnp.concatenate([weight_matrix(v), row], axis=1)

    def from_matrix(matrix: jax.Array) -> jax.Array:
        return jnp.concatenate([weight_vector(matrix[:, :-1]), matrix[0, -1][inverse]])

    return Layer(tap, (i, bias[0]), (groups, inputs + 1, outputs), to_matrix, from_matrix)
