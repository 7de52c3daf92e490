"""The negative log joint density over two parameters, for the figure of it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import leaf_names
from ..evidence import data_fit
from ._fit import Fitted
from ._setting import Setting


def two_names(fitted: Fitted) -> tuple[str, ...]:
    """What the two parameters are called: by their leaves, and by number within a leaf."""
    posterior_fn = fitted.posterior_fn
    leaves = leaf_names(posterior_fn.mean)
    return tuple(
        leaves[i] if size == 1 else f"{leaves[i]}[{k}]"
        for i, (_, size) in posterior_fn.space.slices.items()
        for k in range(size)
    )


def energy_of(setting: Setting, fitted: Fitted) -> Callable[[np.ndarray], np.ndarray]:
    """-log p(D, theta) at the chosen hyperparameters, for parameters (n, 2)."""
    posterior_fn = fitted.posterior_fn
    space = posterior_fn.space
    centre = space.flatten(posterior_fn.mean)
    arguments = posterior_fn.parse(fitted.prior_arguments)

    def energy(flat: jax.Array) -> jax.Array:
        offset = space.unflatten(flat - centre)
        params = jax.tree.map(jnp.add, posterior_fn.mean, offset)
        fit = data_fit(**{**setting.problem, "params": params})
        noise = arguments.sigma_squared.astype(fit.loss.dtype)
        log_likelihood = posterior_fn.likelihood.log_likelihood(fit, noise).astype(flat.dtype)
        return 0.5 * jnp.sum(arguments.precision * jnp.square(flat)) - log_likelihood

    energies = jax.jit(jax.vmap(energy))
    return lambda points: np.asarray(energies(jnp.asarray(points, space.dtype)))
