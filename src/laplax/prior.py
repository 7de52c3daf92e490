"""The Gaussian prior as an object: its density, which is the penalty of any training loop."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ._arguments import in_our_words
from ._engine.arrays import is_concrete
from ._engine.vectors import Vector, each
from ._prior_precision import DiagonalPriorPrecision, PriorPrecision
from ._problem import check_params
from ._space import ParamSpace
from ._tree import PyTree, pytree, static, tree_difference
from .priors import gaussian_arguments, process_variance
from .subset import Subset, select_leaves

LOG_2PI = math.log(2 * math.pi)


@pytree
class Prior:
    """A Gaussian prior `N(mean, T^-1)` on the parameters that vary. A pytree of its numbers.

    `neg_log_prob(params)` is the penalty that belongs to the posterior and to the evidence under
    the same prior arguments. For a sum of losses over the data it is added once. A step on a part
    of the data keeps the proportion, for example with the mean loss of a batch of n of N examples:

        loss = mean_of_batch + prior.neg_log_prob(params) / N

    `mean_of_batch` is the mean of negative log-likelihoods: under `"mse"`,
    `|f - y|^2 / (2 sigma_squared)`. The optimiser then needs no weight decay.
    """

    precision: PriorPrecision
    mean: Vector | None  # None for zero
    space: ParamSpace = static()
    by_leaf: bool = static(default=False)  # whether vectors are lists of leaves

    def offset(self, params: PyTree) -> Vector:
        """How far parameters lie from the mean, shape (P,)."""
        vector = self._vector(params)
        return vector if self.mean is None else each(jnp.subtract, vector, self.mean)

    def energy(self, params: PyTree) -> jax.Array:
        """`(params - mean)^T T (params - mean)`."""
        return self.precision.energy(self.offset(params))

    def neg_log_prob(self, params: PyTree) -> jax.Array:
        """Minus the log density at `params`, a pytree like those of the prior or a flat vector.

        Differentiable in the parameters and, through `gaussian_prior`, in the prior arguments. The
        constant, `P/2 log 2 pi - 1/2 log det T`, is part of it.
        """
        constant = self.space.size * LOG_2PI
        return 0.5 * (self.energy(params) - self.precision.logdet() + constant)

    def log_prob(self, params: PyTree) -> jax.Array:
        """The log density at `params`."""
        return -self.neg_log_prob(params)

    def decayed(self, factor: float | jax.Array) -> "Prior":
        """The prior with `factor` times its precision, 0 < factor <= 1: older data count for less.

        With a factor of 0.9 after every update, data from k updates ago count 0.9^k times.
        """
        if jnp.ndim(factor) != 0:
            raise ValueError(f"factor must be a number; got an array of shape {jnp.shape(factor)}")
        if is_concrete(factor) and not 0 < float(factor) <= 1:
            raise ValueError(
                f"factor must be above 0 and at most 1, the share of the precision that is kept; "
                f"got {factor}"
            )
        precision = self.precision.decayed(jnp.asarray(factor, self.space.dtype))
        return dataclasses.replace(self, precision=precision)

    def diffused(self, process_noise: PyTree) -> "Prior":
        """The prior after the parameters have moved by noise: covariance `T^-1 + Q`.

        Args:
            process_noise: The variances of Q, zero or more: a number, or a pytree that matches the
                parameters from the top, as for `prior_prec`. Blocks that mix the parameters of a
                layer need one number per layer.

        A diagonal stays diagonal, a low rank beside a diagonal stays one, and blocks keep their
        eigenvectors. A sum of Kronecker products has no such form: `as_prior(merge="nearest")`.
        """
        noise, sources = process_variance(process_noise, self.space, self.by_leaf)
        starts = {start: sources[i] for i, (start, _) in self.space.slices.items()}
        precision = self.precision.diffused(noise, starts)
        return dataclasses.replace(self, precision=precision)

    def _vector(self, params: PyTree) -> Vector:
        space = self.space
        is_leaf = space.treedef == jax.tree.structure(0)
        if not is_leaf and isinstance(params, jax.Array) and params.shape == (space.size,):
            return space.read(params, self.by_leaf)
        difference = tree_difference(params, space.template)
        if difference:
            raise ValueError(
                f"params are not the pytree that this prior is for: {difference}. A prior is made "
                "for one tree: laplax.gaussian_prior(params, prior_arguments)"
            )
        return space.vector(params, self.by_leaf)


@in_our_words
def gaussian_prior(
    params: PyTree, prior_arguments: Mapping[str, PyTree], subset: Subset = None
) -> Prior:
    """The prior that prior arguments describe, as an object: a penalty for any training loop.

    Args:
        params: Parameters, of which only the tree, shapes and dtypes are read.
        prior_arguments: `prior_prec`, and `prior_mean` if it is not zero. Each is a number, or a
            pytree that matches `params` from the top and holds numbers, or arrays of as many axes
            as the leaf, of its length or of length one: `{"w": jnp.ones((1, 50)), "b": 2.0}` has
            one precision for each of the 50 columns of `w`. The other two, `sigma_squared` and
            `temperature`, belong to the likelihood.
        subset: The parameters that have this prior, as for `laplace`; the others have none. For
            `"last_layer"`, which the model decides, write `posterior_fn.prior(prior_arguments)`.

    Returns:
        A `Prior`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
        >>> prior = gaussian_prior(params, {"prior_prec": {"w": 4.0, "b": 1.0}})
        >>> print(f"{prior.neg_log_prob(params):.3f}")
        16.112
    """
    checked = check_params(params)
    space = select_leaves(subset, checked).at(checked)
    precision, mean = gaussian_arguments(prior_arguments, space, space.by_leaf)
    return Prior(DiagonalPriorPrecision.of(precision, space), mean, space, space.by_leaf)
