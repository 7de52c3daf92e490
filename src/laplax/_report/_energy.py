"""The negative log joint density over two parameters, for the figure of it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._tree import leaf_names
from ._fit import Fitted
from ._setting import Setting


def is_two_dimensional(setting: Setting, fitted: Sequence[Fitted]) -> bool:
    """Whether all that varies is two parameters, and the data are at hand to draw their energy."""
    in_memory = isinstance(setting.problem.data, Batch)
    return in_memory and all(x.posterior_fn.space.size == 2 for x in fitted)


def two_names(fitted: Fitted) -> tuple[str, str]:
    """What the two parameters are called: by their leaves, and by number within a leaf."""
    posterior_fn = fitted.posterior_fn
    leaves = leaf_names(posterior_fn.mean)
    first, second = (
        leaves[i] if size == 1 else f"{leaves[i]}[{k}]"
        for i, (_, size) in posterior_fn.space.slices.items()
        for k in range(size)
    )
    return first, second


def energy_of(setting: Setting, fitted: Fitted) -> Callable[[np.ndarray], np.ndarray]:
    """-log p(D, theta) at the chosen hyperparameters, for parameters (n, 2)."""
    problem = setting.problem
    posterior_fn = fitted.posterior_fn
    space = posterior_fn.space
    batch = problem.data
    assert isinstance(batch, Batch)
    arguments = posterior_fn.parse(fitted.prior_arguments)
    centre = space.flatten(posterior_fn.mean)

    def energy(flat: jax.Array) -> jax.Array:
        offset = space.unflatten(flat - centre)
        params = jax.tree.map(jnp.add, posterior_fn.mean, offset)
        f = problem.model.batch(batch.input, params)
        fits = jax.vmap(problem.likelihood.data_fit)(f, batch.target, batch.weight)
        fit = jax.tree.map(jnp.sum, fits)
        noise = arguments.sigma_squared.astype(fit.loss.dtype)
        likelihood = problem.likelihood.log_likelihood(fit, noise).astype(flat.dtype)
        return 0.5 * jnp.sum(arguments.precision * jnp.square(flat)) - likelihood

    energies = jax.jit(jax.vmap(energy))
    return lambda points: np.asarray(energies(jnp.asarray(points, space.dtype)))
