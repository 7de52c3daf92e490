"""Places where a parameter meets the data, brought into a few canonical forms."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._engine import versions as core
from .._flow import struct_of

Map = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class MatmulUse:
    """out = a W, with a (B, T, I), W (B, I, O) and out (B, T, O) after rearrangement.

    Dense layers, projections and convolutions all are this: T counts the positions at which one
    example uses the weight (tokens, pixels), B independent groups.
    """

    kind: ClassVar[str] = "matmul"
    leaf: int
    matrix_shape: tuple[int, int, int]  # (B, I, O)
    positions: int  # T
    act: Map  # the recorded operand -> (B, T, I)
    weight: Map  # the parameter leaf -> (B, I, O), a rearrangement of it or of a part of it
    out: Map  # the operation's output -> (B, T, O)

    def gradient(self, a: jax.Array, g: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        """The leaf's gradient for one example and one column."""
        matrix = jnp.einsum("bti,bto->bio", self.act(a).astype(g.dtype), self.out(g))
        return transpose_map(self.weight, like, matrix)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearUse:
    """out = apply(leaf, act), linear in the leaf: biases, scales, products that repeat it."""

    kind: ClassVar[str] = "linear"
    leaf: int
    apply: Callable[[jax.Array, jax.Array], jax.Array]
    added_to: int | None = None  # the tap of the product that a bias is added to
    layout: Map | None = None  # that product's output as it is when the bias is added

    def gradient(self, a: jax.Array, g: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        """The leaf's gradient for one example and one column."""
        return transpose_map(lambda w: self.apply(w, a), like, g)


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingUse:
    """Rows of a table (V, D), looked up: an example touches T rows of V and no others."""

    kind: ClassVar[str] = "embedding"
    leaf: int
    shape: tuple[int, int]  # (V, D)
    drop: bool  # whether an index outside of the table reads nothing, or the nearest row
    starts: int = 1  # numbers per lookup; those after the first can only be 0

    def index(self, a: jax.Array) -> jax.Array:
        """The rows that are read, (T,); V stands for none."""
        index = a.reshape(-1, self.starts)[:, 0]
        rows = self.shape[0]
        if not self.drop:
            return jnp.clip(index, 0, rows - 1)
        return jnp.where((index < 0) | (index >= rows), rows, index)

    def rows(self, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradient at the rows that are read, (K, T, D), once for each: repeats are zero.

        The second is the number of each row.
        """
        index = self.index(a)
        same = index[:, None] == index[None, :]
        first = jnp.argmax(same, axis=1) == jnp.arange(index.size)
        summed = jnp.einsum("ts,ksd->ktd", same.astype(g.dtype), g.reshape(-1, *self._out(index)))
        return jnp.where((first & (index < self.shape[0]))[:, None], summed, 0), index

    def gradient(self, a: jax.Array, g: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        """The leaf's gradient for one example and one column."""
        index = self.index(a)
        zeros = jnp.zeros(self.shape, g.dtype)
        table = zeros.at[index].add(g.reshape(self._out(index)), mode="drop")
        return table.reshape(like.shape)

    def _out(self, index: jax.Array) -> tuple[int, int]:
        return index.size, self.shape[1]


Use = MatmulUse | LinearUse | EmbeddingUse


def embedding_use(leaf: int, shape: tuple[int, ...], eqn: "core.JaxprEqn") -> EmbeddingUse | None:
    """A `gather` that reads whole entries of a leaf's first axis."""
    numbers = eqn.params["dimension_numbers"]
    rest = shape[1:]
    out_ndim = len(struct_of(eqn.outvars[0]).shape)
    collapsed = tuple(numbers.collapsed_slice_dims)
    kept = len(shape) - len(collapsed)  # without collapsing, a row comes as (1, D)
    starts = tuple(numbers.start_index_map)
    drop = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    whole = (
        collapsed in ((0,), ())
        and (starts == (0,) or (starts == tuple(range(len(shape))) and not drop))
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(out_ndim - kept, out_ndim))
        and tuple(eqn.params["slice_sizes"]) == (1, *rest)
    )
    if not whole:
        return None
    return EmbeddingUse(leaf, (shape[0], math.prod(rest)), drop, len(starts))


def transpose_map(fn: Map, like: jax.ShapeDtypeStruct, value: jax.Array) -> jax.Array:
    """fn^T value for a linear fn of arrays shaped `like`, in the value's precision.

    The views of a leaf may change its dtype; gradients are kept in that of the output.
    """
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    out = jax.eval_shape(fn, struct)
    return jax.linear_transpose(fn, struct)(value.astype(out.dtype))[0]


def matmul_use(
    leaf: int, view: Map, shapes: list[tuple[int, ...]], which: int, eqn: "core.JaxprEqn"
) -> MatmulUse:
    """A `dot_general` whose operand `which` is a view of a parameter."""
    contract, batch = eqn.params["dimension_numbers"]
    w_shape = shapes[which]
    a_shape = shapes[1 - which]
    wc = tuple(contract[which])
    wb = tuple(batch[which])
    ac = tuple(contract[1 - which])
    ab = tuple(batch[1 - which])
    w_free = [i for i in range(len(w_shape)) if i not in (*wc, *wb)]
    a_free = [i for i in range(len(a_shape)) if i not in (*ac, *ab)]
    size_b = math.prod(w_shape[i] for i in wb)
    size_i = math.prod(w_shape[i] for i in wc)
    size_o = math.prod(w_shape[i] for i in w_free)
    size_t = math.prod(a_shape[i] for i in a_free)

    def act(a: jax.Array) -> jax.Array:
        return a.transpose(*ab, *a_free, *ac).reshape(size_b, size_t, size_i)

    def weight(w: jax.Array) -> jax.Array:
        return view(w).transpose(*wb, *wc, *w_free).reshape(size_b, size_i, size_o)

    def out(g: jax.Array) -> jax.Array:  # dot_general puts batch, then lhs free, then rhs free
        if which == 1:
            return g.reshape(size_b, size_t, size_o)
        return g.reshape(size_b, size_o, size_t).swapaxes(1, 2)

    return MatmulUse(leaf, (size_b, size_i, size_o), size_t, act, weight, out)


def convolution_use(
    leaf: int, view: Map, kernel_shape: tuple[int, ...], eqn: "core.JaxprEqn"
) -> MatmulUse:
    """A convolution as patches times a matrix: any stride, padding, dilation, groups, layout."""
    lhs_spec, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    features, channels, *kernel = (kernel_shape[i] for i in rhs_spec)
    inputs = channels * math.prod(kernel)
    outputs = features // groups
    positions = math.prod(struct_of(eqn.outvars[0]).shape) // features

    def act(a: jax.Array) -> jax.Array:
        patches = _patches(a.transpose(lhs_spec), kernel, eqn.params)  # (K, N, C, *S)
        k, n, c = patches.shape[:3]
        patches = patches.reshape(k, n, groups, c // groups, -1)
        return patches.transpose(2, 1, 4, 3, 0).reshape(groups, -1, inputs)

    def weight(w: jax.Array) -> jax.Array:
        return view(w).transpose(rhs_spec).reshape(groups, outputs, inputs).swapaxes(1, 2)

    def out(g: jax.Array) -> jax.Array:
        g = g.transpose(out_spec)
        g = g.reshape(g.shape[0], groups, outputs, -1)
        return g.transpose(1, 0, 3, 2).reshape(groups, positions, outputs)

    return MatmulUse(leaf, (groups, inputs, outputs), positions, act, weight, out)


def _patches(x: jax.Array, kernel: Sequence[int], params: dict[str, Any]) -> jax.Array:
    """x (N, C, *S) to (K, N, C, *S'): one strided slice of the padded input per kernel entry."""
    padding = [(0, 0, 0), (0, 0, 0)] + [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
    strides = params["window_strides"]
    dilations = params["rhs_dilation"]
    sizes = [
        (x.shape[2 + d] - dilations[d] * (kernel[d] - 1) - 1) // strides[d] + 1
        for d in range(len(kernel))
    ]
    slices = []
    for offset in itertools.product(*(range(k) for k in kernel)):
        start = [dilations[d] * offset[d] for d in range(len(kernel))]
        stop = [start[d] + strides[d] * (sizes[d] - 1) + 1 for d in range(len(kernel))]
        slices.append(jax.lax.slice(x, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *strides)))
    return jnp.stack(slices)
