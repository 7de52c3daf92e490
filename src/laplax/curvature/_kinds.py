"""What is measured: GGN, Hessian, Monte-Carlo Fisher, empirical Fisher.

GGN and the Fishers are sums of outer products of rows r = J^T s, where the columns s of a factor
come from the output space; a kind is therefore little more than its `factor`. The Hessian has no
rows and is known by its products alone.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._arguments import check_key, whole_number
from .._data import Batch
from .._engine.arrays import is_concrete
from .._engine.samples import spread
from .._enums import CurvatureType, check_names
from .._problem import Problem
from .._registry import Registry
from .._tree import ByValue, PyTree, pytree, static
from ..likelihoods import POLICIES, Custom, Likelihood, weigh

Leaves = list[jax.Array]  # those of the parameters that vary
Outputs = Callable[[Leaves], jax.Array]  # of the model on a batch


@dataclasses.dataclass(frozen=True, eq=False)
class Curvature(abc.ABC):
    """A curvature of the loss, as products with J^T (.) J or of its own making."""

    has_rows: ClassVar[bool] = False  # whether it is a sum of outer products

    @property
    def negative_eigenvalues(self) -> str:
        """`"clip"` or `"error"`. Those of a positive semi-definite curvature are rounding."""
        return "clip"

    def check(self, problem: Problem) -> None:
        """Raise before work starts if this curvature does not exist for the likelihood."""
        return

    @abc.abstractmethod
    def batch_mm(
        self, outputs: Outputs, likelihood: Likelihood, point: Leaves, batch: Batch, V: Leaves
    ) -> Leaves:
        """G V on one batch; the leaves of V have a leading axis of vectors."""


@dataclasses.dataclass(frozen=True, eq=False)
class OuterProductCurvature(Curvature):
    """G = sum_n J_n^T (S_n S_n^T) J_n with a factor S_n of shape (*f.shape, K)."""

    has_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def factor(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array
    ) -> jax.Array:
        """S of one example."""

    def output_mv(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array, v: jax.Array
    ) -> jax.Array:
        """S S^T v of one example."""
        factor = self.factor(likelihood, f, y, index)
        inner = jnp.tensordot(v, factor, axes=f.ndim)
        return factor @ inner

    def batch_mm(
        self, outputs: Outputs, likelihood: Likelihood, point: Leaves, batch: Batch, V: Leaves
    ) -> Leaves:
        """One linearisation of the batch serves all vectors, forward and back."""
        linear = jax.linearize(outputs, point)
        return self.linear_mm(likelihood, point, batch, linear, V)

    def linear_mm(
        self, likelihood: Likelihood, point: Leaves, batch: Batch, linear: PyTree, V: Leaves
    ) -> Leaves:
        """G V from a linearisation of the model on the batch, (f, push)."""
        f, push = linear
        pull = jax.linear_transpose(push, point)

        # The root of the weight on either side: S S^T couples events whose weights differ.
        root = None if batch.weight is None else jnp.sqrt(batch.weight)
        output_mv = jax.vmap(functools.partial(self.output_mv, likelihood))

        def one(v: Leaves) -> Leaves:
            Hv = output_mv(f, batch.target, batch.index, weigh(push(v), root))
            return pull(weigh(Hv, root))[0]

        return jax.vmap(one)(V)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class GGN(ByValue, OuterProductCurvature):
    """Generalised Gauss-Newton: S S^T = H, the likelihood's Hessian in f."""

    def check(self, problem: Problem) -> None:
        """A callable loss must be convex in the output, or say what to do where it is not."""
        likelihood = problem.likelihood
        first = problem.first
        if not isinstance(likelihood, Custom) or likelihood.indefinite != "error":
            return
        if not is_concrete(problem.params, first):
            return
        few = spread(first, 64)
        f = problem.model.batch(few.input, problem.params)
        smallest = float(jnp.min(jax.vmap(likelihood.smallest_eigenvalue)(f, few.target)))
        if smallest < -1e-4:
            raise ValueError(
                "the Hessian of loss_fn in the output has negative eigenvalues (smallest "
                f"{smallest:.3g} of the largest), so the GGN is not positive semi-definite. Choose "
                "what that means: loss_fn=Custom(loss, indefinite='clip') counts them as zero."
            )

    def factor(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array
    ) -> jax.Array:
        """The likelihood's factor."""
        return likelihood.hessian_factor(f, y)

    def output_mv(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array, v: jax.Array
    ) -> jax.Array:
        """H v, without the factor."""
        return likelihood.hessian_mv(f, y, v)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class FisherEmpirical(ByValue, OuterProductCurvature):
    """Outer products of the gradients at the observed targets."""

    def factor(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array
    ) -> jax.Array:
        """grad_f l(f, y), one column."""
        return jax.grad(likelihood.loss)(f, y)[..., None]


@pytree
class FisherMC(OuterProductCurvature):
    """Monte-Carlo Fisher: gradients at targets drawn from the model; the GGN in expectation.

    The draws of an example depend on `key` and on its number in the data set alone, so that the
    answer does not depend on the batch size.
    """

    key: jax.Array
    mc_samples: int = static(default=1)

    def __post_init__(self) -> None:
        whole_number(self.mc_samples, "mc_samples")

    def check(self, problem: Problem) -> None:
        """The likelihood must be able to sample."""
        check_key(self.key)
        jax.eval_shape(problem.likelihood.sample, jax.random.key(0), problem.output)

    def factor(
        self, likelihood: Likelihood, f: jax.Array, y: PyTree, index: jax.Array
    ) -> jax.Array:
        """grad_f l(f, y_m) / sqrt(M), one column per draw."""

        def column(key: jax.Array) -> jax.Array:
            return jax.grad(likelihood.loss)(f, likelihood.sample(key, f))

        keys = jax.random.split(jax.random.fold_in(self.key, index), self.mc_samples)
        return jnp.moveaxis(jax.vmap(column)(keys), 0, -1) / self.mc_samples**0.5


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Hessian(ByValue, Curvature):
    """The Hessian of the loss in the parameters.

    `indefinite` says what its negative eigenvalues mean: `"error"` or `"clip"` (they count as 0).
    """

    indefinite: str = "error"

    def __post_init__(self) -> None:
        check_names([self.indefinite], POLICIES, "policy for an indefinite Hessian")

    @property
    def negative_eigenvalues(self) -> str:
        """The user's choice: here they are information."""
        return self.indefinite

    def batch_mm(
        self, outputs: Outputs, likelihood: Likelihood, point: Leaves, batch: Batch, V: Leaves
    ) -> Leaves:
        """Forward over reverse: the gradient is linearised once for all vectors."""

        def loss(p: Leaves) -> jax.Array:
            f = outputs(p)
            if batch.weight is None:
                return jnp.sum(jax.vmap(likelihood.loss)(f, batch.target))
            return jnp.sum(jax.vmap(likelihood.loss)(f, batch.target, batch.weight))

        push = jax.linearize(jax.grad(loss), point)[1]
        return jax.vmap(push)(V)


CURVATURES = Registry[Curvature](
    "curvature",
    Curvature,
    {
        CurvatureType.GGN: GGN,
        CurvatureType.HESSIAN: Hessian,
        CurvatureType.FISHER_MC: FisherMC,
        CurvatureType.FISHER_EMPIRICAL: FisherEmpirical,
    },
)
