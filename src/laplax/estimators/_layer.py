"""The full curvature of one layer: G = sum_n a a^T (x) h with h = sum_k g g^T, without rows.

Rows a (x) g cost K (I O)^2 per example, this (I O)^2: K times less.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch, Zeros
from ..curvature import CurvatureOperator
from ..curvature._operator import LocalCurvature
from ..taps import Program
from ..taps._batch import tap_batch
from ..taps._layers import Layer, layer_of
from ..taps._uses import MatmulUse


def the_layer(operator: CurvatureOperator) -> Layer | None:
    """The layer that all varying parameters make up, if an example uses it once."""
    space, program = operator.space, operator.program
    leaves = tuple(space.slices)
    if len(leaves) > 2 or space.whole != space:
        return None
    for order in itertools.permutations(leaves):
        layer = layer_of(program, order)
        if layer is not None and layer.shape[0] == 1 and _positions(program, layer) == 1:
            return layer
    return None


def _positions(program: Program, layer: Layer) -> int:
    use = program.uses[layer.tap]
    assert isinstance(use, MatmulUse)
    return jax.eval_shape(use.out, program.out_structs[layer.tap]).shape[1]


def layer_curvature(operator: CurvatureOperator, layer: Layer) -> jax.Array:
    """G as a (P, P) array."""
    _, inputs, outputs = layer.shape
    columns, dtype = operator.rows_per_example, operator.space.dtype
    each = dtype.itemsize * (3 * inputs * outputs + 3 * outputs * (columns + outputs))
    chunking = operator.chunking(each + operator.cost.activation_bytes)
    zeros = Zeros.of((outputs, inputs, outputs, inputs), dtype)
    total = operator.fold(_add_layer, zeros, chunking, operator.program, layer)
    return _placed(total, np.argsort(_order(operator, layer)))


@jax.jit
def _placed(total: jax.Array, place: jax.Array) -> jax.Array:
    """From (O, I, O, I) to the order of the flat vector."""
    matrix = total.transpose(1, 0, 3, 2).reshape(place.size, place.size)
    return matrix[place][:, place]


def _order(operator: CurvatureOperator, layer: Layer) -> np.ndarray:
    """Where the entries of the layer's matrix (I, O) lie in the flat vector."""
    slices = operator.space.slices
    with jax.ensure_compile_time_eval():
        numbers: Any = np.concatenate(
            [np.arange(slices[i][0], sum(slices[i])) for i in layer.leaves]
        )
        return np.asarray(layer.to_matrix(numbers)).reshape(-1)


def _add_layer(
    total: jax.Array, batch: Batch, local: LocalCurvature, program: Program, layer: Layer
) -> jax.Array:
    tapped = tap_batch(program, local, batch)
    a = layer.operand(tapped.operand(layer.tap))[:, 0, 0]
    g = tapped.gradient(layer.tap)[:, :, 0, 0]
    h = jnp.einsum("nko,nkp->nop", g, g)

    def one_output(_: None, weights: jax.Array) -> tuple[None, jax.Array]:
        weighted = weights[:, :, None] * a[:, None, :]  # (n, O, I)
        return None, jnp.tensordot(a, weighted, axes=(0, 0))

    return total + jax.lax.scan(one_output, None, h.swapaxes(0, 1))[1]
