"""The objective of training with a prior on the function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._arguments import whole_number
from .._data import Batch, as_batch
from .._engine.arrays import is_concrete
from .._engine.memo import WeakInside
from .._model import Model
from .._tree import PyTree, pytree, static
from ..likelihoods import Likelihood, as_likelihood
from ._kernels import KernelFn
from ._prior import GPPrior, as_prior


class Parts(NamedTuple):
    """The two terms of the objective."""

    nll: jax.Array
    norm: jax.Array

    @property
    def value(self) -> jax.Array:
        """The objective: the sum of both terms."""
        return self.nll + self.norm


@pytree
class FSPObjective(WeakInside):
    """-(n/b) sum_batch log p(y | f) + 1/2 |f - m|^2 in the RKHS norm at the context points.

    Call it as `objective(params, batch, context)`; it is a pure function, ready for `jax.grad`.
    """

    prior: GPPrior
    sigma_squared: ArrayLike
    model: Model = static()
    likelihood: Likelihood = static()
    num_total_samples: int = static()

    def __call__(self, params: PyTree, batch: Any, context: PyTree) -> jax.Array:
        """The scalar to be minimised."""
        return self.parts(params, batch, context).value

    def parts(self, params: PyTree, batch: Any, context: PyTree) -> Parts:
        """The scaled negative log-likelihood, and half the squared RKHS norm."""
        examples = batch if isinstance(batch, Batch) else as_batch(batch)
        f = self.model.batch(examples.input, params)
        fits = jax.vmap(self.likelihood.data_fit)(f, examples.target, examples.weight)
        fit = jax.tree.map(jnp.sum, fits)
        noise = jnp.asarray(self.sigma_squared).astype(f.dtype)
        nll = -self.batch_scale(examples).astype(f.dtype) * self.likelihood.log_likelihood(
            fit, noise
        )
        return Parts(nll, self.energy(params, context))

    def batch_scale(self, batch: Batch) -> jax.Array:
        """What the sum over a batch is multiplied with to stand for all data."""
        return jnp.asarray(self.num_total_samples / batch.num_counted)

    def energy(self, params: PyTree, context: PyTree) -> jax.Array:
        """1/2 (f(C) - m(C))^T (K + jitter)^-1 (f(C) - m(C)); NaN if the kernel is not definite."""
        f = self.model.batch(context, params)
        residual = f - self.prior.mean_at(context, f.shape[1:], f.dtype)
        white = self.prior.whitened(residual.reshape(f.shape[0], -1), context)
        return 0.5 * jnp.sum(jnp.square(white))


def value_and_parts(
    params: PyTree, objective: FSPObjective, batch: Batch, context: PyTree
) -> tuple[jax.Array, Parts]:
    """The objective as a loss with a record, for the steps of an optimiser."""
    parts = objective.parts(params, batch, context)
    return parts.value, parts


def fsp_objective(
    model_fn: Callable[..., jax.Array],
    prior: GPPrior | KernelFn,
    *,
    loss_fn: str | Likelihood | Callable,
    num_total_samples: int,
    sigma_squared: ArrayLike = 1.0,
    vmap_over_data: bool = True,
) -> FSPObjective:
    """The objective of FSP training, `(params, batch, context) -> scalar`.

    Args:
        model_fn: `model_fn(input, params)`.
        prior: A `GPPrior`, or a kernel.
        loss_fn: As in `laplace`.
        num_total_samples: n, the size of the whole data set; a batch of b counts n/b times.
        sigma_squared: The noise variance of `"mse"`; a traced value differentiates.
        vmap_over_data: Whether `model_fn` sees one example.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax.fsp import RBF
        >>> model_fn = lambda input, params: params * input
        >>> objective = fsp_objective(model_fn, RBF(), loss_fn="mse", num_total_samples=2)
        >>> x = jnp.asarray([0.0, 1.0])
        >>> print(f"{objective(jnp.asarray(1.0), (x, x), x):.3f}")
        2.629
    """
    likelihood = as_likelihood(loss_fn)
    check_noise(likelihood, sigma_squared)
    return FSPObjective(
        prior=as_prior(prior),
        sigma_squared=sigma_squared,
        model=Model(model_fn, vmap_over_data),
        likelihood=likelihood,
        num_total_samples=whole_number(num_total_samples, "num_total_samples"),
    )


def check_noise(likelihood: Likelihood, sigma_squared: ArrayLike) -> None:
    """A noise variance is positive, and belongs to a likelihood that has noise."""
    if not is_concrete(sigma_squared):
        return
    value = float(jnp.asarray(sigma_squared))
    if not value > 0:
        raise ValueError(f"sigma_squared must be positive; got {value}")
    if value != 1.0 and not likelihood.has_noise:
        raise ValueError(
            f"sigma_squared is the noise variance of loss_fn='mse'; this likelihood "
            f"({likelihood.name}) has none"
        )
