"""Every training example predicted without itself, with no refit.

The loss is replaced by its second-order expansion in the outputs, and the outputs by theirs of
first order in the weights: what the GGN stands for. In that model the mode under any prior, and the
mode and the covariance without one example, follow from solves with Lambda. For a linear model with
Gaussian noise it is the model itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._data import Batch
from .._engine.chunks import cut
from .._engine.loops import map_over, sum_over
from .._engine.vectors import Vector, each
from .._linearised import tangent
from .._traced import traced
from .._tree import PyTree, pytree
from ..curvature import subset_scale
from ..posterior import PosteriorFamily


@pytree
class Training:
    """What the loss of the training data says at the weights of the fit."""

    gradient: Vector  # of the whole loss in the weights
    offset: Vector  # of the weights from the prior's mean
    error: jax.Array  # of the loss of each example in its outputs, (n, C)
    factor: jax.Array  # S with S S^T = H, (n, C, K)


class LeftOut(NamedTuple):
    """The outputs of every example under the posterior of all others."""

    mean: jax.Array  # (n, C)
    cov: jax.Array  # (n, C, C)


def training(
    posterior_fn: PosteriorFamily, batch: Batch, output: jax.Array, offset: jax.Array
) -> Training:
    """One pass over the training data; `posterior_fn` has the model that predicts."""
    likelihood = posterior_fn.likelihood
    count = output.shape[0]
    error = jax.vmap(jax.grad(likelihood.loss))(output, batch.target)
    factor = jax.vmap(likelihood.hessian_factor)(output, batch.target)
    shapes = traced(posterior_fn.fitted_model, posterior_fn.mean, batch.example()[0])
    chunks = cut(shapes.cost.forward_work, count)
    gradient = sum_over(_gradient, batch, chunks, posterior_fn)
    if posterior_fn.num_total_samples is not None:
        scale = subset_scale(posterior_fn.num_total_samples, count)
        gradient = each(lambda g: jnp.asarray(scale, g.dtype) * g, gradient)
    outputs = output[0].size
    return Training(
        gradient, offset, error.reshape(count, outputs), factor.reshape(count, outputs, -1)
    )


def _gradient(batch: Batch, fit: PosteriorFamily) -> Vector:
    model = fit.fitted_model

    def loss(params: PyTree) -> jax.Array:
        f = model.batch(batch.input, params)
        return jnp.sum(jax.vmap(fit.likelihood.loss)(f, batch.target))

    return fit.space.vector(jax.grad(loss)(fit.mean), fit.structure.by_leaf)


def leave_out(
    posterior_fn: PosteriorFamily,
    data: Training,
    input: PyTree,
    output: jax.Array,
    cov: jax.Array,
    c: jax.Array,
    prior: Vector,
) -> LeftOut:
    """Mean and covariance of each example's outputs if it had not been seen.

    `cov` are V = J Lambda^-1 J^T, (n, C, C). An example whose leverage c S^T V S reaches one, which
    an approximate curvature may claim, has no posterior without it: its numbers are NaN.
    """
    precision = posterior_fn.structure.precision(c, prior)
    slope = each(lambda g, t, v: c * g + t * v, data.gradient, prior, data.offset)
    step = each(jnp.negative, precision.solve(slope))
    moved = _push(posterior_fn, input, output.shape[0], step).astype(cov.dtype)
    moved = moved.reshape(data.error.shape)
    scale = c.astype(cov.dtype)
    inner = jnp.einsum("ncd,ndk->nck", cov, data.factor)  # V S
    leverage = scale * jnp.einsum("nck,ncl->nkl", data.factor, inner)
    rest = jnp.eye(leverage.shape[-1], dtype=cov.dtype) - leverage
    root = jnp.linalg.cholesky(rest)
    half = jax.scipy.linalg.solve_triangular(root, jnp.swapaxes(inner, 1, 2), lower=True)
    without = cov + scale * jnp.einsum("nkc,nkd->ncd", half, half)
    # The loss at the mode under this prior, to second order: e + H J step.
    bend = jnp.einsum("nck,ndk,nd->nc", data.factor, data.factor, moved)
    pull = jnp.einsum("ncd,nd->nc", without, data.error + bend)
    return LeftOut(output.reshape(moved.shape) + moved + scale * pull, without)


def _push(posterior_fn: PosteriorFamily, input: PyTree, count: int, direction: Vector) -> jax.Array:
    """J times a direction in the weights, for every input."""
    example = jax.tree.map(lambda x: x[0], input)
    shapes = traced(posterior_fn.fitted_model, posterior_fn.mean, example)
    chunks = cut(shapes.cost.forward_work, count, in_trace=True)
    pushed: jax.Array = map_over(_push_chunk, input, chunks, posterior_fn, direction)
    return pushed


def _push_chunk(part: PyTree, fit: PosteriorFamily, direction: Vector) -> jax.Array:
    _, push = tangent(fit.fitted_model, fit.mean, fit.space, part)
    return push(fit.space.varying(fit.space.tree(direction)))
