"""The Jacobian of a network: whole, or from its taps, a (x) g for a layer and rows elsewhere."""

import math

import jax
import jax.numpy as jnp

from .._engine.memo import kept
from .._model import Model
from .._space import ParamSpace
from .._traced import traced
from .._tree import PyTree, one_of
from ..curvature import Tapped, bytes_per_example, run_taps
from ..structures import Group, Jacobian, Outer, SparseCoordinates
from ..taps import EmbeddingUse, MatmulUse, Program, layer_of


def jacobian(model: Model, params: PyTree, space: ParamSpace, input: PyTree) -> jax.Array:
    """J of n inputs, shape (n, C, P): C vector-Jacobian products share one forward pass."""

    def one(x: PyTree) -> jax.Array:
        f, pull = jax.vjp(lambda p: model.one(x, p), params)
        basis = jnp.eye(f.size, dtype=f.dtype).reshape(f.size, *f.shape)
        return space.flatten(jax.vmap(pull)(basis)[0], batch_ndim=1)

    return jax.vmap(one)(input)


class TapJacobian(Jacobian):
    """J of a batch. Lives within one traced function: what is not asked for costs nothing."""

    def __init__(self, model: Model, params: PyTree, space: ParamSpace, input: PyTree) -> None:
        self.model = model
        self.params = params
        self.space = space
        self.input = input
        self.program = traced(model, params, one_of(input)).program
        self.shape = (jax.tree.leaves(input)[0].shape[0], self.program.output_size)

    @property
    def array(self) -> jax.Array:
        """By reverse mode: no taps are needed for all of J."""
        return jacobian(self.model, self.params, self.space, self.input)

    @property
    @kept
    def tapped(self) -> Tapped:
        """Every output's gradient, pulled back to the taps."""
        return run_taps(self.model, self.params, self.space, self.input, _one_hot_columns)

    def rows(self, group: Group) -> jax.Array:
        """Columns of J, (n, C, size)."""
        parts = [
            self.space.flatten_leaf(i, self._leaf_rows(i), batch_ndim=2)
            for i in self._numbers(group)
        ]
        return jnp.concatenate(parts, axis=-1)

    def _leaf_rows(self, i: int) -> jax.Array:
        rows = self.tapped.rows(i)
        return jnp.broadcast_to(rows, (*self.shape, *rows.shape[2:]))

    def outer(self, group: Group) -> Outer | None:
        """a and g of the layer that owns these leaves, if one does."""
        leaves = self._numbers(group)
        layer = layer_of(self.program, leaves)
        if layer is None or any(self.space.elements[i] is not None for i in leaves):
            return None
        a = layer.operand(self.tapped.operand(layer.tap))
        if layer.tap != self.program.output_tap:
            return Outer(a, self.tapped.gradient(layer.tap), layer.to_matrix)
        return Outer(a, self._output_gradient(layer.tap), layer.to_matrix, shared=True)

    def sparse(self, group: Group) -> SparseCoordinates | None:
        """The rows of a table that each example looks up."""
        leaf, *others = self._numbers(group)
        taps = self.program.uses_of(leaf)
        use = self.program.uses[taps[0]] if len(taps) == 1 and not others else None
        if not isinstance(use, EmbeddingUse) or self.space.elements[leaf] is not None:
            return None
        if not self.program.covered(leaf):
            return None
        rows, index = self.tapped.embedding_rows(taps[0])  # (n, C, T, D), (n, T)
        width = use.shape[1]
        columns = index[:, :, None] * width + jnp.arange(width, dtype=index.dtype)[None, None]
        count = index.shape[0]
        return SparseCoordinates(rows.reshape(*rows.shape[:2], -1), columns.reshape(count, -1))

    def _output_gradient(self, tap: int) -> jax.Array:
        """The product is the output: every example has the same g, the identity."""
        use = self.program.uses[tap]
        struct = self.program.out_structs[tap]
        assert isinstance(use, MatmulUse)
        size = math.prod(struct.shape)
        identity = jnp.eye(size, dtype=self.space.dtype).reshape(size, *struct.shape)
        return jax.vmap(use.out)(identity)[None]

    def leaves(self, group: Group) -> Group:
        return tuple(self.space.slices[i] for i in self._numbers(group))

    def _numbers(self, group: Group) -> tuple[int, ...]:
        """The leaves that lie within these slices."""
        slices = self.space.slices.items()
        return tuple(
            i for first, size in group for i, (start, _) in slices if first <= start < first + size
        )


def _one_hot_columns(f: jax.Array) -> jax.Array:
    return jnp.eye(f.size, dtype=f.dtype).reshape(*f.shape, f.size)


def jacobian_bytes(
    program: Program, space: ParamSpace, outputs: int, activations: int, width: int
) -> int:
    """Temporaries of one input: gradients at the taps, or the features of the last layer alone.

    J may meet a matrix of `width` columns, a factor of J at a time.
    """
    product = 2 * outputs * width * space.dtype.itemsize
    if all(_in_output_layer(program, i) for i in space.slices):
        return product + 2 * activations + 4 * outputs * space.dtype.itemsize
    product += _widest_layer(program) * width * space.dtype.itemsize
    return product + activations + bytes_per_example(program, space.whole, outputs)


def _widest_layer(program: Program) -> int:
    """The most outputs of a weight that an example uses once."""
    once = [use for use in program.uses if isinstance(use, MatmulUse) and use.positions == 1]
    return max((use.matrix_shape[0] * use.matrix_shape[2] for use in once), default=0)


def _in_output_layer(program: Program, leaf: int) -> bool:
    layer = layer_of(program, (leaf,))
    return layer is not None and layer.tap == program.output_tap
