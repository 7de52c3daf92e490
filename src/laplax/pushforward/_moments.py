"""The posterior pushed through the network: moments and samples of the output."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .._engine.chunks import CPU_CACHE, Work, networks_at_once
from .._engine.linalg import diagonal
from .._enums import Pushforward
from .._linearised import tangent
from .._model import Model
from .._space import ParamSpace
from .._traced import Traced, traced
from .._tree import PyTree, one_of
from ..posterior import Posterior
from ..structures import Precision, Structure
from ._fields import Moments, Recipe
from ._jacobian import TapJacobian, jacobian_bytes


def linear_moments(
    recipe: Recipe,
    model: Model,
    posterior: Posterior,
    key: jax.Array,
    ensemble: PyTree,
    input: PyTree,
    fields: Sequence[str],
) -> Moments:
    """f ~ N(f(x, theta*), J Lambda^-1 J^T): one Jacobian and one GEMM per structure."""
    del ensemble
    f = model.batch(input, posterior.mean)
    precision = posterior.precision
    J = TapJacobian(model, posterior.mean, posterior.space, input)
    cov = None
    if recipe.needs_cov(fields):
        flat = precision.covariance(J)
        var = diagonal(flat)
        cov = flat.reshape(*f.shape, *f.shape[1:]).astype(f.dtype)
    else:
        var = precision.marginal(J)
    samples = None
    if "samples" in fields:
        # One set of weights for all inputs: each sample is a function.
        offsets = posterior.offsets(key, recipe.num_samples)
        _, push = tangent(model, posterior.mean, posterior.space, input)
        samples = f[None] + jax.lax.map(push, posterior.space.varying(offsets))
    return Moments(f, f, var.reshape(f.shape).astype(f.dtype), cov, samples)


def nonlinear_moments(
    recipe: Recipe,
    model: Model,
    posterior: Posterior,
    key: jax.Array,
    ensemble: PyTree,
    input: PyTree,
    fields: Sequence[str],
) -> Moments:
    """Empirical moments of an ensemble; variances with S - 1."""
    if ensemble is None:
        keys = jax.random.split(key, recipe.num_samples)
        samples = jax.lax.map(lambda k: model.batch(input, posterior.draw(k)), keys)
    else:
        cost = traced(model, posterior.mean, one_of(input)).cost
        size = cost.activation_bytes * jax.tree.leaves(input)[0].shape[0]
        together = networks_at_once(size, cost.has_convolution, recipe.num_samples)
        samples = jax.lax.map(lambda p: model.batch(input, p), ensemble, batch_size=together)
    mean = jnp.mean(samples, axis=0)
    cov = None
    centred = samples - mean[None]
    freedom = recipe.num_samples - 1
    if "pred_cov" in fields:
        flat = centred.reshape(*samples.shape[:2], -1)
        out = samples.shape[2:]
        cov = jnp.einsum("snc,snd->ncd", flat, flat).reshape(-1, *out, *out) / freedom
    var = jnp.sum(jnp.square(centred), axis=0) / freedom
    return Moments(model.batch(input, posterior.mean), mean, var, cov, samples)


_sample = jax.jit(Posterior.sample, static_argnums=2)


def draw_ensemble(
    posterior: Posterior, recipe: Recipe, memory_budget: int, key: jax.Array
) -> PyTree:
    """The sampled networks; None if the pushforward has none, or they are too large to keep."""
    network = sum(x.nbytes for x in jax.tree.leaves(posterior.mean))  # fixed leaves are copied, too
    bytes_of_all = recipe.num_samples * network
    if recipe.pushforward is Pushforward.LINEAR or bytes_of_all > memory_budget:
        return None
    return _sample(posterior, key, recipe.num_samples)


def moments_of(recipe: Recipe) -> Callable[..., Moments]:
    """The function that the recipe's pushforward names."""
    linear = recipe.pushforward is Pushforward.LINEAR
    return linear_moments if linear else nonlinear_moments


def prediction_work(
    recipe: Recipe,
    curvature: Precision | Structure,
    shapes: Traced,
    space: ParamSpace,
    fields: Sequence[str],
) -> Work:
    """The temporaries of one input: of its Jacobian, as `curvature` reads it, or a forward pass."""
    outputs = shapes.cost.outputs
    activations = shapes.cost.activation_bytes
    linear = recipe.pushforward is Pushforward.LINEAR
    if not linear:
        size = 2 * activations + recipe.num_samples * outputs * 8
    elif curvature.width is not None:
        size = jacobian_bytes(shapes.program, space, outputs, activations, curvature.width)
    else:
        size = outputs * (3 * space.whole.size * space.dtype.itemsize + activations)
    if recipe.needs_cov(fields):
        sampled = recipe.num_samples if "samples" in fields else 0
        size += 8 * outputs * (3 * outputs + sampled)
    convolution = shapes.cost.has_convolution
    # Gradients at the taps of a convolution are read again right away.
    return Work(size, convolution, cache_floor=2 * CPU_CACHE if convolution and linear else None)
