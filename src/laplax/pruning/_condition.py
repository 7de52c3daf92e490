"""What the other parameters should be once some are zero."""

import jax
import jax.numpy as jnp

from .._tree import PyTree
from ..posterior import Posterior
from ..structures import Precision
from ._masks import masked

MAX_STEPS = 500  # of conjugate gradients


def conditional_mean(posterior: Posterior, mask: PyTree) -> PyTree:
    """The mean of the posterior given that what the mask removes is zero.

    The other parameters move to compensate for those that go, as far as the posterior knows how
    they are correlated: the nearest point to the mean in the metric of the precision `Lambda`, as
    in the optimal brain surgeon (Hassibi and Stork, 1992). With a diagonal posterior nothing moves;
    with `"kfac"`, the weights that are left reconstruct what the next layer has lost. For a linear
    model and its full posterior this is the fit without the features that go.

    Args:
        posterior: `posterior_fn(prior_arguments)`, of any structure.
        mask: A pytree of booleans and boolean arrays that matches `params` from the top, True for
            what stays.

    Returns:
        A pytree like `params`, with zeros where the mask is False.
    """
    space = posterior.space
    # As numbers, 1 for what stays.
    ones = jax.tree.map(lambda x: jnp.ones(jnp.shape(x), space.dtype), posterior.mean)
    stays = space.flatten(masked(ones, mask))
    offset = _offset(posterior.precision, space.flatten(posterior.mean), stays)
    return masked(jax.tree.map(jnp.add, posterior.mean, space.unflatten(offset)), mask)


@jax.jit
def _offset(precision: Precision, mean: jax.Array, stays: jax.Array) -> jax.Array:
    """`Lambda_ss^-1 Lambda_sr theta_r` for what stays (s) and what is removed (r)."""

    def product(v: jax.Array) -> jax.Array:
        return stays * precision.mv(stays * v) + (1 - stays) * v

    scale = precision.diagonal()
    right = stays * precision.mv((1 - stays) * mean)
    tolerance = float(jnp.finfo(mean.dtype).eps) ** 0.6
    solution, _ = jax.scipy.sparse.linalg.cg(
        product, right, tol=tolerance, maxiter=MAX_STEPS, M=lambda v: v / scale
    )
    return stays * solution
