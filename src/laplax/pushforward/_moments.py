"""The posterior pushed through the network: moments and samples of the output."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._enums import Predictive, Pushforward
from .._linalg import diagonal
from .._machine import CPU_CACHE, even_size
from .._model import Model
from .._space import ParamSpace
from .._traced import Traced, traced
from .._tree import PyTree, one_of
from ..posterior import Posterior
from ..structures import Precision, Structure
from ._fields import Moments, Recipe
from ._jacobian import jacobian_bytes, jacobian_for


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
    precision: Any = posterior.precision
    J = jacobian_for(precision, model, posterior.mean, posterior.space, input)
    n, out = f.shape[0], f.shape[1:]
    cov = None
    if recipe.needs_cov(fields):
        flat = precision.covariance(J)
        var = diagonal(flat)
        cov = flat.reshape(n, *out, *out).astype(f.dtype)
    else:
        var = precision.marginal(J)
    samples = None
    if "samples" in fields:
        # One set of weights for all inputs: each sample is a function.
        offsets = posterior.offsets(key, recipe.num_samples)
        _, push = jax.linearize(lambda params: model.batch(input, params), posterior.mean)
        samples = f[None] + jax.lax.map(push, offsets)
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
        together = networks_at_once(model, posterior.mean, input, recipe.num_samples)
        samples = jax.lax.map(lambda p: model.batch(input, p), ensemble, batch_size=together)
    mean, cov = jnp.mean(samples, axis=0), None
    centred, freedom = samples - mean[None], recipe.num_samples - 1
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
    space = posterior.space
    bytes_of_all = recipe.num_samples * space.whole.size * space.dtype.itemsize
    if recipe.pushforward is Pushforward.LINEAR or bytes_of_all > memory_budget:
        return None
    return _sample(posterior, key, recipe.num_samples)


def moments_of(recipe: Recipe) -> Callable[..., Moments]:
    """The function that the recipe's pushforward names."""
    linear = recipe.pushforward is Pushforward.LINEAR
    return linear_moments if linear else nonlinear_moments


def chunk_size(
    recipe: Recipe,
    user: Precision | Structure,
    known: Traced,
    space: ParamSpace,
    fields: Sequence[str],
    memory_budget: int,
) -> int:
    """How many inputs at a time: by the temporaries of one, the Jacobian or the forward pass."""
    outputs, activations = known.cost.outputs, known.cost.activation_bytes
    if recipe.pushforward is Pushforward.NONLINEAR:
        each = 2 * activations + recipe.num_samples * outputs * 8
    elif user.factored:
        each = jacobian_bytes(known.program, space, outputs, activations, user.width)
    else:
        each = outputs * (3 * space.whole.size * space.dtype.itemsize + activations)
    if recipe.needs_cov(fields):
        sampled = recipe.num_samples if recipe.predictive is Predictive.MC_BRIDGE else 0
        each += 8 * outputs * (3 * outputs + sampled)
    return max(1, memory_budget // each)


def networks_at_once(model: Model, params: PyTree, input: PyTree, most: int) -> int | None:
    """As many as share a cache and leave room in it. Convolutions get no faster together."""
    cost = traced(model, params, one_of(input)).cost
    held = cost.activation_bytes * jax.tree.leaves(input)[0].shape[0]
    together = 0 if cost.has_convolution else even_size(most, 3 * CPU_CACHE // 8 // held)
    return together if together > 1 else None


def map_chunks(fn: Callable[[PyTree], Any], batch: PyTree, size: int) -> Any:
    """fn on chunks of the first axis, results concatenated; one call where all of it fits."""
    count = jax.tree.leaves(batch)[0].shape[0]
    if count <= size:
        return fn(batch)
    whole = count - count % size
    head = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), batch)
    done = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), jax.lax.map(fn, head))
    if whole == count:
        return done
    rest = fn(jax.tree.map(lambda x: x[whole:], batch))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), done, rest)
