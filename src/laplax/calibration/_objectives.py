"""What a search minimises: a pure function of the prior arguments, ready for vmap and grad."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from .._data import Batch
from .._enums import CalibrationObjective, Pushforward, as_member
from .._linalg import diagonal
from .._machine import MEMORY_BUDGET
from .._memo import WeakInside, compiled
from .._model import Model, traced
from .._tree import PyTree, pytree, static
from ..evaluation import (
    NOTHING_LEFT,
    Kept,
    as_metric,
    check_metric,
    kept_entries,
    needed_fields,
    observe,
)
from ..evidence import log_marginal_likelihood
from ..likelihoods import DataFit
from ..metrics import Metric
from ..posterior import PosteriorFn
from ..pushforward import ProbPredictive, SetProbPredictive
from ..pushforward._fields import Moments, Recipe, make_fields
from ..pushforward._moments import chunk_size, jacobian_for
from ..pushforward._predictive import predict
from ..structures import Projection, Structure
from ._table import tabulate

STORE_LIMIT = 4 * MEMORY_BUDGET  # bytes of projected Jacobians that a search may keep


@pytree
class EvidenceObjective(WeakInside):
    """-log p(D): the curvature's eigenvalues suffice, no pushforward and no refit."""

    posterior_fn: PosteriorFn
    fit: DataFit
    model: Model = static()

    def __call__(self, prior_arguments: Mapping[str, Any]) -> jax.Array:
        """The value to be minimised."""
        return -log_marginal_likelihood(self.posterior_fn, prior_arguments, data=self.fit)

    def bytes_per_point(self) -> int:
        """Temporaries of one point of a grid."""
        return 8 * self.posterior_fn.space.size


@pytree
class PredictiveObjective(WeakInside):
    """A metric of the predictions on held-out data.

    For the linear pushforward and a scalar prior the Jacobians are projected on the eigenbasis
    once (`projection`); every further point is a small product.
    """

    predictive: SetProbPredictive
    projection: Projection | None
    output: jax.Array
    input: PyTree
    target: jax.Array
    kept: Kept | None  # by a mask
    metric: Metric = static()
    fields: tuple[str, ...] = static()
    transform: Callable[[jax.Array], jax.Array] = static()

    @property
    def model(self) -> Model:
        """The model whose predictions are judged."""
        return self.predictive.model

    def __call__(self, prior_arguments: Mapping[str, Any]) -> jax.Array:
        """The value to be minimised."""
        recipe = self.predictive.recipe
        observed = observe(recipe, self._predict(prior_arguments), self.target, self.kept)
        return self.transform(self.metric.finalise(self.metric.batch(observed)))

    def _predict(self, prior_arguments: Mapping[str, Any]) -> Mapping[str, jax.Array]:
        p = self.predictive
        arguments = p.posterior_fn.parse(prior_arguments)
        if self.projection is None or arguments.precision.ndim:
            posterior = p.posterior_fn.at(arguments)
            made = ProbPredictive(
                posterior,
                arguments.sigma_squared,
                p.key,
                p.model,
                p.recipe,
                p.posterior_fn.form,
                p.memory_budget,
            )
            return predict(made, self.input, self.fields)
        c, prior = arguments.likelihood_scale, arguments.precision
        f, cov = self.output, None
        if p.recipe.needs_cov(self.fields):
            flat = self.projection.covariance(c, prior).astype(f.dtype)
            var = diagonal(flat)
            cov = flat.reshape(*f.shape, *f.shape[1:])
        else:
            var = self.projection.marginal(c, prior).astype(f.dtype)
        moments = Moments(f, f, var.reshape(f.shape), cov, None)
        return make_fields(p.recipe, moments, arguments.sigma_squared, p.key, self.fields)

    def bytes_per_point(self) -> int:
        """Temporaries of one point of a grid: outputs, covariances, sampled logits."""
        if self.projection is None:
            return MEMORY_BUDGET  # one point at a time: each holds Jacobians or networks
        entries = self.output.size * (2 + self.predictive.recipe.num_samples)
        size = 8 * entries * max(1, math.prod(self.output.shape[1:]) // 8)
        if self.predictive.recipe.needs_cov(self.fields):  # each point scales a copy
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(self.projection))
        return size


def _same(value: jax.Array) -> jax.Array:
    return value


def _distance_from_one(value: jax.Array) -> jax.Array:
    return jnp.abs(value - 1)


def predictive_objective(
    objective: Any, predictive: SetProbPredictive, data: Batch
) -> PredictiveObjective:
    """Project the Jacobians of the held-out inputs, once."""
    kept = kept_entries(data)
    if kept is not None and not kept[0].size:
        raise ValueError(NOTHING_LEFT)
    recipe, model = predictive.recipe, predictive.model
    metric, transform = resolve_objective(objective, recipe)
    fields = needed_fields([metric], recipe)
    projection = output = None
    # Sampled functions are drawn as the returned predictive will draw them, not in the eigenbasis.
    if recipe.pushforward is Pushforward.LINEAR and "samples" not in fields:
        spectral = predictive.posterior_fn.spectral()
        predictive = dataclasses.replace(predictive, posterior_fn=spectral)
        projection, output = _project(predictive, model, data, fields)
    if output is None:
        output = _outputs(model, predictive.posterior_fn.mean, data.input)
    return PredictiveObjective(
        predictive, projection, output, data.input, data.target, kept, metric, fields, transform
    )


def resolve_objective(
    objective: Any, recipe: Recipe
) -> tuple[Metric, Callable[[jax.Array], jax.Array]]:
    """The metric behind an objective, and how its value becomes something to minimise."""
    transform = _same
    if isinstance(objective, str):
        objective = str(as_member(CalibrationObjective, objective, "calibration_objective"))
        # The mean squared standardised residual is right at one, not at zero.
        transform = _distance_from_one if objective == "chi_squared" else _same
    metric = as_metric(objective, recipe)
    check_metric(getattr(objective, "__name__", str(objective)), metric, recipe)
    return metric, transform


@functools.partial(compiled, static_argnums=(0,))
def _outputs(model: Model, params: PyTree, input: PyTree) -> jax.Array:
    return model.batch(input, params)


@functools.partial(compiled, static_argnums=(0,))
def _project_chunk(
    model: Model, posterior_fn: PosteriorFn, structure: Structure, input: PyTree
) -> tuple[Projection, jax.Array]:
    params, project = posterior_fn.mean, cast(Any, structure).project
    jacobian = jacobian_for(structure, model, params, posterior_fn.space, input)
    return project(jacobian), model.batch(input, params)


def _project(
    predictive: SetProbPredictive, model: Model, data: Batch, fields: tuple[str, ...]
) -> tuple[Projection | None, jax.Array | None]:
    """The projection and the outputs, chunk by chunk under the memory budget.

    Where the projections of all examples would not fit, a table of their variances takes their
    place; a covariance has no table, and None says so.
    """
    posterior_fn = predictive.posterior_fn
    structure, input, count = posterior_fn.structure, data.input, data.num_examples
    parts, outputs, tables = [], [], False
    known = traced(model, posterior_fn.mean, data.example()[0])
    budget = predictive.memory_budget
    size = chunk_size(predictive.recipe, structure, known, posterior_fn.space, fields, budget)
    for start in range(0, count, size):
        chunk = jax.tree.map(lambda x, s=start: x[s : s + size], input)
        part, output = _project_chunk(model, posterior_fn, structure, chunk)
        if start == 0:
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(part))
            tables = held * math.ceil(count / size) > STORE_LIMIT
            if tables and predictive.recipe.needs_cov(fields):
                return None, None
        parts.append(tabulate(part) if tables else part)
        outputs.append(output)
    if len(parts) == 1:
        return parts[0], outputs[0]
    return parts[0].join(parts[1:]), jnp.concatenate(outputs)
