"""The curvature G of a model on data, matrix-free: products, and rows where they exist."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch, Data, Loader
from .._fold import Chunking, Zeros, fold
from .._machine import CPU_CACHE, MEMORY_BUDGET, even_size, on_cpu
from .._memo import WeakInside, compiled, kept
from .._model import Model
from .._space import ParamSpace
from .._traced import ModelCost, Traced, traced
from .._tree import (
    ByValue,
    PyTree,
    Shapes,
    is_concrete,
    one_of,
    pytree,
    shapes_of,
    static,
    structs_of,
)
from ..likelihoods import Likelihood, weigh
from ..taps import Program
from ._kinds import Curvature, OuterProductCurvature

Vectors = jax.Array | list[jax.Array]  # (k, P), or leaves (k, *shape)


@pytree
class LocalCurvature(WeakInside):
    """The curvature on one batch. A pytree: compiled steps take it as an argument."""

    params: PyTree
    curvature: Curvature
    model: Model = static()
    likelihood: Likelihood = static()
    space: ParamSpace = static()

    def program(self, batch: Batch) -> Program:
        """The model with taps. Not a field: JAX would keep it, with all constants of the model."""
        return traced(self.model, self.params, one_of(batch.input)).program

    def mm(self, batch: Batch, V: Vectors) -> Vectors:
        """G V for the rows of V, shape (k, P), or for leaves (k, *shape) of all parameters."""
        given = self.model, self.likelihood, self.params, batch
        return self._on_trees(lambda tree: self.curvature.batch_mm(*given, tree), V)

    def linearise(self, batch: Batch) -> PyTree:
        """What products need of the model on a batch: the outputs, and the derivative's program."""
        return jax.linearize(lambda p: self.model.batch(batch.input, p), self.params)

    def linear_mm(self, batch: Batch, linear: PyTree, V: Vectors) -> Vectors:
        """G V, as `mm`, without running the model again."""
        curvature, given = self.curvature, (self.likelihood, self.params, batch, linear)
        assert isinstance(curvature, OuterProductCurvature)
        return self._on_trees(lambda tree: curvature.linear_mm(*given, tree), V)

    def _on_trees(self, product: Callable[[PyTree], PyTree], V: Vectors) -> Vectors:
        if isinstance(V, list):  # no copies to a flat vector and from it
            assert self.space.is_all_leaves
            return jax.tree.leaves(product(jax.tree.unflatten(self.space.treedef, V)))
        return self.space.flatten(product(self.space.unflatten(V)), batch_ndim=1)

    def rows(self, batch: Batch) -> jax.Array:
        """R with R^T R = G on the batch, shape (n K, P)."""
        assert isinstance(self.curvature, OuterProductCurvature)
        curvature = self.curvature

        def one(x: PyTree, y: PyTree, index: jax.Array, weight: jax.Array | None) -> PyTree:
            f, pull = jax.vjp(lambda p: self.model.one(x, p), self.params)
            factor = curvature.factor(self.likelihood, f, y, index)
            if weight is not None:
                factor = weigh(factor, jnp.sqrt(weight))
            return jax.vmap(pull)(jnp.moveaxis(factor, -1, 0))[0]

        axes = (0, 0, 0, None if batch.weight is None else 0)
        tree = jax.vmap(one, in_axes=axes)(batch.input, batch.target, batch.index, batch.weight)
        return self.space.flatten(tree, batch_ndim=2).reshape(-1, self.space.size)


_linearise = compiled(LocalCurvature.linearise)
_linear_mm = compiled(LocalCurvature.linear_mm)


def add_product(total: Vectors, batch: Batch, local: LocalCurvature, V: Vectors) -> Vectors:
    """The step of a product over the data."""
    added: Vectors = jax.tree.map(jnp.add, total, local.mm(batch, V))
    return added


@dataclasses.dataclass(frozen=True, eq=False)
class CurvatureOperator:
    """G summed over a data set, times `num_total_samples / num_curv_samples`.

    Estimators see this: `mv`, `mm`, `fold` over rows, and the sizes they need to plan.
    """

    local: LocalCurvature
    data: Data
    traced: Traced
    num_total_samples: int | None = None
    num_curv_samples: int | None = None
    batch_size: int | None = None
    memory_budget: int = MEMORY_BUDGET
    progress: bool | None = None
    linear: PyTree = None  # of the model on all data, if products keep it

    def linearised(self) -> "CurvatureOperator":
        """The same operator for many products: the model runs once, if what it leaves fits."""
        if isinstance(self.data, Loader) or not self.has_rows or self.batch_size is not None:
            return self
        if not self._fits_at_once(1):
            return self
        return dataclasses.replace(self, linear=_linearise(self.local, self.data))

    @property
    def cost(self) -> ModelCost:
        """What one example costs."""
        return self.traced.cost

    @property
    def program(self) -> Program:
        """The model with taps."""
        return self.traced.program

    @property
    def space(self) -> ParamSpace:
        """The space of the parameters."""
        return self.local.space

    @property
    def size(self) -> int:
        """P."""
        return self.space.size

    @property
    def has_rows(self) -> bool:
        """Whether G is a sum of outer products of rows."""
        return self.local.curvature.has_rows

    @functools.cached_property
    def rows_per_example(self) -> int:
        """K, the number of rows of one example."""
        curvature, target = self.local.curvature, self.data.peek().example()[1]
        assert isinstance(curvature, OuterProductCurvature)
        # What is equal by value is found again in the next fit.
        count = _known_num_rows if isinstance(curvature, ByValue) else _num_rows
        return count(self.traced, curvature, self.local.likelihood, shapes_of(target))

    @property
    def num_examples(self) -> int | None:
        """The number of examples, if it is known before the data are read."""
        return None if isinstance(self.data, Loader) else self.data.num_examples

    @property
    def scale(self) -> Any:
        """num_total_samples / num_curv_samples."""
        if self.num_total_samples is None:
            return 1.0
        seen = self.num_curv_samples or self.data.num_counted
        return subset_scale(self.num_total_samples, seen)

    def scale_as(self, dtype: Any) -> Any:
        """The scale as an array; from numbers, without a compiled conversion."""
        scale = self.scale
        return np.asarray(scale, dtype) if isinstance(scale, float) else jnp.asarray(scale, dtype)

    def require_passes(self, why: str) -> None:
        """Refuse one-shot data before work starts."""
        if isinstance(self.data, Loader):
            self.data.require_passes(why)

    def chunking(self, bytes_per_example: int, in_cache: bool = False) -> Chunking:
        """As many examples at once as the memory budget allows, or a CPU's cache."""
        budget = self.memory_budget
        if in_cache and on_cpu():
            # Weights that no cache holds are read for every chunk: as much work for each reading.
            weights = self.space.whole.size * self.space.dtype.itemsize
            budget = min(budget, max(CPU_CACHE, weights))
        fits = max(1, budget // max(bytes_per_example, 1))
        return Chunking(
            self.batch_size or even_size(self.num_examples or fits, fits),
            host_loop=self.cost.has_convolution and on_cpu(),
        )

    def mm(self, V: Vectors) -> Any:
        """G V for the rows of V, shape (k, P): one pass over the data.

        Where `space.is_all_leaves`, V may be a list of leaves, (k, *shape) each.
        """
        vectors = jax.tree.leaves(V)[0].shape[0]
        if self.linear is not None and self._fits_at_once(vectors):
            return self.scaled(_linear_mm(self.local, self.data, self.linear, V))
        in_cache = not self.cost.has_convolution  # those wait for their arithmetic, not for memory
        chunking = self.chunking(self.product_bytes(vectors), in_cache)
        zeros = Zeros.of(jax.tree.map(jnp.shape, V), self.space.dtype)
        return self.scaled(fold(add_product, zeros, self.data, chunking, self.local, V))

    def product_bytes(self, vectors: int) -> int:
        """Of one example: a linearised model's activations, and two more sets for every vector."""
        return self.cost.activation_bytes * (1 + 2 * vectors)

    def _fits_at_once(self, vectors: int) -> bool:
        assert isinstance(self.data, Batch)
        return self.product_bytes(vectors) * self.data.num_examples <= self.memory_budget

    def mv(self, v: jax.Array) -> jax.Array:
        """G v for a flat v, shape (P,)."""
        return self.mm(v[None])[0]

    def __call__(self, v: PyTree) -> PyTree:
        """G v for a pytree like `params` or a flat vector; the same form comes back."""
        return self.space.apply(self.mv, v)

    def fold_rows(self, step: Any, carry: Any) -> jax.Array:
        """carry <- step(carry, batch, local) with chunks sized for rows; scaled at the end."""
        itemsize = self.space.dtype.itemsize
        per_row = self.space.whole.size * itemsize * 2 + self.cost.activation_bytes
        chunking = self.chunking(per_row * self.rows_per_example, in_cache=True)
        return self.fold(step, carry, chunking)

    def fold(
        self, step: Any, carry: Any, chunking: Chunking, *args: PyTree, then: Any = None
    ) -> Any:
        """carry <- step(carry, batch, local, *args) over the data, `then(carry)`; scaled."""
        return self.scaled(fold(step, carry, self.data, chunking, self.local, *args, then=then))

    def scaled(self, total: Any) -> Any:
        """Sums over the data times the scale."""
        if self.num_total_samples is None:
            return total
        return _times(total, self.scale)


@jax.jit
def _times(total: PyTree, scale: float | jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), total)


def _num_rows(
    known: Traced, curvature: OuterProductCurvature, likelihood: Likelihood, target: Shapes
) -> int:
    """K: columns of the factor."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    factor = functools.partial(curvature.factor, likelihood)
    return jax.eval_shape(factor, known.output, *structs_of(target), index).shape[-1]


_known_num_rows = kept(_num_rows)


def subset_scale(total: int, seen: int | jax.Array) -> float | jax.Array:
    """What a sum over `seen` examples is multiplied with to stand for `total`."""
    if is_concrete(seen) and int(seen) == 0:
        raise ValueError("every example has weight 0: there is nothing to scale up")
    if is_concrete(seen) and total < int(seen):
        raise ValueError(
            f"num_total_samples ({total}) must not be smaller than the number of examples that it "
            f"stands for ({int(seen)}, those of weight 0 not counted): it is the size of the whole "
            "data set, of which the data are a part"
        )
    return total / seen
