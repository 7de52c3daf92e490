"""The posterior pushed through the network: moments and samples of the output."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._enums import Pushforward
from .._model import Model
from .._tree import ParamSpace, PyTree
from ..posterior import Posterior
from ._fields import Moments, Recipe


def jacobian(model: Model, params: PyTree, space: ParamSpace, input: PyTree) -> jax.Array:
    """J of n inputs, shape (n, C, P): C vector-Jacobian products share one forward pass."""

    def one(x: PyTree) -> jax.Array:
        f, pull = jax.vjp(lambda p: model.one(x, p), params)
        basis = jnp.eye(f.size, dtype=f.dtype).reshape(f.size, *f.shape)
        return space.flatten(jax.vmap(pull)(basis)[0], batch_ndim=1)

    return jax.vmap(one)(input)


def linear_moments(
    recipe: Recipe,
    model: Model,
    posterior: Posterior,
    key: jax.Array,
    input: PyTree,
    fields: Sequence[str],
) -> Moments:
    """f ~ N(f(x, theta*), J Lambda^-1 J^T): one Jacobian and one GEMM per structure."""
    f = model.batch(input, posterior.mean)
    J = jacobian(model, posterior.mean, posterior.space, input)
    n, out = f.shape[0], f.shape[1:]
    cov = None
    if recipe.needs_cov(fields):
        flat = posterior.precision.covariance(J)
        var = jnp.diagonal(flat, axis1=1, axis2=2)
        cov = flat.reshape(n, *out, *out).astype(f.dtype)
    else:
        var = posterior.precision.marginal(J)
    samples = None
    if "samples" in fields:
        # One set of weights for all inputs: each sample is a function.
        draws = posterior.sample(key, recipe.num_samples)
        space = posterior.space
        offset = space.flatten(draws, batch_ndim=1) - space.flatten(posterior.mean)
        samples = f + jnp.einsum("ncp,sp->snc", J, offset).reshape(-1, *f.shape).astype(f.dtype)
    return Moments(f, f, var.reshape(f.shape).astype(f.dtype), cov, samples)


def nonlinear_moments(
    recipe: Recipe,
    model: Model,
    posterior: Posterior,
    key: jax.Array,
    input: PyTree,
    fields: Sequence[str],
) -> Moments:
    """Empirical moments of an ensemble; variances with S - 1."""
    draws = posterior.sample(key, recipe.num_samples)
    samples = jax.lax.map(lambda p: model.batch(input, p), draws)
    mean, cov = jnp.mean(samples, axis=0), None
    centred, freedom = samples - mean, recipe.num_samples - 1
    if "pred_cov" in fields:
        flat = centred.reshape(*samples.shape[:2], -1)
        out = samples.shape[2:]
        cov = jnp.einsum("snc,snd->ncd", flat, flat).reshape(-1, *out, *out) / freedom
    var = jnp.sum(jnp.square(centred), axis=0) / freedom
    return Moments(model.batch(input, posterior.mean), mean, var, cov, samples)


def moments_of(recipe: Recipe) -> Callable[..., Moments]:
    """The function that the recipe's pushforward names."""
    linear = recipe.pushforward is Pushforward.LINEAR
    return linear_moments if linear else nonlinear_moments


def bytes_per_example(
    recipe: Recipe, space: ParamSpace, activation_bytes: int, out: Sequence[int]
) -> int:
    """Temporaries of one input: the Jacobian and a copy of it, or one forward pass."""
    if recipe.pushforward is Pushforward.NONLINEAR:
        return 2 * activation_bytes + recipe.num_samples * math.prod(out) * 8
    return math.prod(out) * (3 * space.size * space.dtype.itemsize + activation_bytes)


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
