"""The curvature G of a model on data, matrix-free: products, and rows where they exist."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._data import Batch, Data, Loader
from .._engine.arrays import is_concrete
from .._engine.chunks import MEMORY_BUDGET, Chunks, Work, cut
from .._engine.loops import map_over, sum_over
from .._engine.memo import WeakInside, kept
from .._engine.shards import Shards, all_devices
from .._linearised import tangent
from .._model import Model
from .._space import ParamSpace
from .._traced import ModelCost, Traced
from .._tree import ByValue, PyTree, Shapes, pytree, shapes_of, static, structs_of
from ..likelihoods import Likelihood, weigh
from ..structures import Structure
from ..taps import Program
from ._kinds import Curvature, Leaves, OuterProductCurvature

Vectors = jax.Array | Leaves  # (k, P), or leaves (k, *shape)


@pytree
class LocalCurvature(WeakInside):
    """The curvature on one batch. A pytree, so that it can be an argument of programs."""

    params: PyTree
    curvature: Curvature
    model: Model = static()
    likelihood: Likelihood = static()
    space: ParamSpace = static()

    def mm(self, batch: Batch, V: Vectors) -> Vectors:
        """G V for the rows of V, shape (k, P), or for leaves (k, *shape) of all that vary."""

        def outputs(leaves: Leaves) -> jax.Array:
            return self.model.batch(batch.input, self.space.merge(self.params, leaves))

        def product(leaves: Leaves) -> Leaves:
            return self.curvature.batch_mm(outputs, self.likelihood, self.point, batch, leaves)

        return self._by_leaf(product, V)

    def linearise(self, batch: Batch) -> PyTree:
        """What products need of the model on a batch: the outputs, and the derivative's program."""
        return tangent(self.model, self.params, self.space, batch.input)

    @property
    def point(self) -> Leaves:
        """The leaves that vary: nothing is differentiated along the others."""
        return self.space.varying(self.params)

    def linear_mm(self, batch: Batch, linear: PyTree, V: Vectors) -> Vectors:
        """G V, as `mm`, without running the model again."""
        curvature = self.curvature
        assert isinstance(curvature, OuterProductCurvature)

        def product(leaves: Leaves) -> Leaves:
            return curvature.linear_mm(self.likelihood, self.point, batch, linear, leaves)

        return self._by_leaf(product, V)

    def _by_leaf(self, product: Callable[[Leaves], Leaves], V: Vectors) -> Vectors:
        if isinstance(V, list):  # no copies to a flat vector and from it
            image = product(self.space.narrow(V))
            return self.space.placed([part.astype(self.space.dtype) for part in image])
        return self.space.join(product(self.space.split(V)), batch_ndim=1)

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


def _linearised(batch: Batch, local: LocalCurvature) -> PyTree:
    """What `linearise` leaves, with one more axis, along which devices are joined."""
    return jax.tree.map(lambda x: x[None], local.linearise(batch))


def _linear_product(part: tuple[Batch, PyTree], local: LocalCurvature, V: Vectors) -> Vectors:
    batch, linear = part
    return local.linear_mm(batch, jax.tree.map(lambda x: x[0], linear), V)


def product_of_batch(batch: Batch, local: LocalCurvature, V: Vectors) -> Vectors:
    """G V on one batch: what a product sums over the data."""
    return local.mm(batch, V)


@dataclasses.dataclass(frozen=True, eq=False)
class CurvatureOperator:
    """G summed over a data set.

    Estimators see this: products `mv` and `mm`, `sum` over the data, and the sizes that they need.
    What a part of the data stands for, `scale`, multiplies the structure that they return.
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
        linear = map_over(_linearised, self.data, self._one_chunk, self.local)
        return dataclasses.replace(self, linear=linear)

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
        """The number of parameters that vary, P."""
        return self.space.size

    @property
    def has_rows(self) -> bool:
        """Whether G is a sum of outer products of rows."""
        return self.local.curvature.has_rows

    @property
    def rows_per_example(self) -> int:
        """K, the number of rows of one example."""
        curvature = self.local.curvature
        target = self.data.peek().example()[1]
        assert isinstance(curvature, OuterProductCurvature)
        # What is equal by value is found again in the next fit.
        count = _known_num_rows if isinstance(curvature, ByValue) else _num_rows
        likelihood = self.local.likelihood.weakly()  # the memo must not hold a user's loss
        return count(self.traced, curvature, likelihood, shapes_of(target))

    @property
    def devices(self) -> Shards | None:
        """Where the data or the parameters lie, if that is on several devices."""
        return all_devices(self.data.peek(), self.local.params)

    @property
    def num_examples(self) -> int | None:
        """The number of examples, if it is known before the data are read."""
        return None if isinstance(self.data, Loader) else self.data.num_examples

    @property
    def scale(self) -> float | jax.Array:
        """num_total_samples / num_curv_samples."""
        if self.num_total_samples is None:
            return 1.0
        seen = self.num_curv_samples or self.data.num_counted
        return subset_scale(self.num_total_samples, seen)

    def scaled(self, structure: Structure) -> Structure:
        """The structure that stands for all `num_total_samples` examples."""
        return structure if self.num_total_samples is None else structure.times(self.scale)

    def require_passes(self, why: str) -> None:
        """Refuse one-shot data before work starts."""
        if isinstance(self.data, Loader):
            self.data.require_passes(why)

    def work(self, bytes_per_example: int, reread: bool = False) -> Work:
        """A step over this data; see `Work`."""
        weights = self.space.whole.size * self.space.dtype.itemsize
        return Work(bytes_per_example, self.cost.has_convolution, weights if reread else None)

    def chunks(self, work: Work) -> Chunks:
        """How a loop over this data is cut."""
        return cut(work, self.num_examples, self.memory_budget, self.batch_size)

    def sum(self, fn: Callable[..., PyTree], work: Work, *args: PyTree) -> PyTree:
        """The sum of `fn(batch, local, *args)` over the data; `fn` is a module-level function."""
        return sum_over(fn, self.data, self.chunks(work), self.local, *args)

    @property
    def row_work(self) -> Work:
        """A step that forms the rows of an example."""
        row = 2 * self.space.whole.size * self.space.dtype.itemsize + self.cost.activation_bytes
        return self.work(row * self.rows_per_example, reread=True)

    def product_work(self, vectors: int) -> Work:
        """A step of a product: a linearised model's activations, and two more sets per vector.

        Convolutions wait for their arithmetic, not for memory.
        """
        size = self.cost.activation_bytes * (1 + 2 * vectors)
        return self.work(size, reread=not self.cost.has_convolution)

    def mm(self, V: Vectors) -> PyTree:
        """G V for the rows of V, shape (k, P): one pass over the data.

        V may be a list of the leaves that vary, (k, *shape) each.
        """
        vectors = jax.tree.leaves(V)[0].shape[0]
        if self.linear is not None and self._fits_at_once(vectors):
            data = (self.data, self.linear)
            return sum_over(_linear_product, data, self._one_chunk, self.local, V)
        return self.sum(product_of_batch, self.product_work(vectors), V)

    @property
    def _one_chunk(self) -> Chunks:
        assert isinstance(self.data, Batch)
        return Chunks(self.data.num_examples)

    def _fits_at_once(self, vectors: int) -> bool:
        assert isinstance(self.data, Batch)
        size = self.product_work(vectors).bytes_per_example
        return size * self.data.num_examples <= self.memory_budget

    def mv(self, v: jax.Array) -> jax.Array:
        """G v for a flat v, shape (P,)."""
        return self.mm(v[None])[0]

    def __call__(self, v: PyTree) -> PyTree:
        """G v for a pytree like `params` or a flat vector; the same form comes back."""
        return self.space.apply(self.mv, v)


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
