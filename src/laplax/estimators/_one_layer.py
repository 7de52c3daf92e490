"""The full curvature of one layer: G = sum_n a a^T (x) h with h = sum_k g g^T, without rows.

Rows a (x) g cost K (I O)^2 per example, this (I O)^2: K times less. With fewer examples than
inputs all a lie in the span of as many directions Q, and G in that of Q (x) 1: its smaller side.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._engine.arrays import is_concrete
from .._engine.chunks import Work
from .._engine.linalg import eigh, numerical_rank
from .._engine.loops import map_over
from .._engine.products import layer_sum
from .._engine.shards import everywhere
from ..curvature import CurvatureOperator, LocalCurvature, tap_batch
from ..structures import LowRank
from ..taps import Layer, MatmulUse, Program, layer_of


def the_layer(operator: CurvatureOperator) -> Layer | None:
    """The layer that all varying parameters make up, if an example uses it once."""
    space = operator.space
    program = operator.program
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
    return use.positions


def layer_curvature(operator: CurvatureOperator, layer: Layer) -> jax.Array:
    """G as a (P, P) array."""
    total = operator.sum(_sum_of_batch, _work(operator, layer), layer)
    return _placed(total, _places(operator, layer))


def _work(operator: CurvatureOperator, layer: Layer) -> Work:
    _, inputs, outputs = layer.shape
    entries = 3 * inputs * outputs + 3 * outputs * (operator.rows_per_example + outputs)
    size = operator.space.dtype.itemsize * entries
    return operator.work(size + operator.cost.activation_bytes)


@jax.jit
def _placed(total: jax.Array, place: jax.Array) -> jax.Array:
    """From (O, I, O, I) to the order of the flat vector."""
    matrix = total.transpose(1, 0, 3, 2).reshape(place.size, place.size)
    rows = matrix.at[place].get(mode="promise_in_bounds", unique_indices=True)
    return rows.at[:, place].get(mode="promise_in_bounds", unique_indices=True)


def _places(operator: CurvatureOperator, layer: Layer) -> np.ndarray:
    """Where the entries of the flat vector lie in the layer's matrix (I, O)."""
    slices = operator.space.slices
    with jax.ensure_compile_time_eval():
        numbers: Any = np.concatenate(
            [np.arange(slices[i][0], sum(slices[i])) for i in layer.leaves]
        )
        return np.argsort(np.asarray(layer.to_matrix(numbers)).reshape(-1))


def _sum_of_batch(batch: Batch, local: LocalCurvature, layer: Layer) -> jax.Array:
    return layer_sum(*_factors(batch, local, layer))


def _factors(batch: Batch, local: LocalCurvature, layer: Layer) -> tuple[jax.Array, jax.Array]:
    """a (n, I) and g (n, K, O)."""
    tapped = tap_batch(local, batch)
    a = layer.operand(tapped.operand(layer.tap))[:, 0, 0]
    return a, tapped.gradient(layer.tap)[:, :, 0, 0]


def layer_eigenpairs(operator: CurvatureOperator, layer: Layer) -> LowRank:
    """G on its smaller side: eigenpairs in the span of the examples' inputs."""
    assert isinstance(operator.data, Batch)
    chunks = operator.chunks(_work(operator, layer))
    a, g = map_over(_factors, operator.data, chunks, operator.local, layer)
    directions, values, turn = _reduced_eigenpairs(*everywhere((a, g)))
    rank = values.size
    if is_concrete(values):
        rank = numerical_rank(np.asarray(values), noise=values.size**0.5)
    basis, values = _in_full(directions, values, turn, _places(operator, layer), rank)
    return LowRank(basis, values, dense_scale=True)


@jax.jit
def _reduced_eigenpairs(a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Q with A^T = Q R, and the eigenpairs of the same sum with the columns of R for a."""
    directions, r = jnp.linalg.qr(a.T)
    small = layer_sum(r.T, g)
    side = small.shape[0] * small.shape[1]
    values, turn = eigh(small.reshape(side, side))
    return directions, jnp.maximum(values[::-1], 0), turn[:, ::-1]


@functools.partial(jax.jit, static_argnums=4)
def _in_full(
    directions: jax.Array, values: jax.Array, turn: jax.Array, places: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array]:
    """(Q (x) 1) V in the order of the flat vector, and its eigenvalues."""
    kept = turn[:, :rank].reshape(-1, directions.shape[1], rank)  # (O, n, R)
    basis = jnp.einsum("in,onr->ior", directions, kept)
    return basis.reshape(places.size, rank)[places], values[:rank]
