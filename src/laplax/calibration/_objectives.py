"""What a search minimises: a pure function of the prior arguments, ready for vmap and grad."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._data import Batch
from .._engine.chunks import MEMORY_BUDGET, cut
from .._engine.linalg import diagonal
from .._engine.loops import map_parts
from .._engine.memo import WeakInside
from .._engine.samples import take
from .._enums import CalibrationObjective, Pushforward, as_member
from .._model import Model, outputs
from .._traced import traced
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
from ..evidence import log_evidence, prior_offset
from ..likelihoods import DataFit
from ..metrics import Metric, get_metric
from ..posterior import PosteriorFamily
from ..priors import PriorArguments
from ..pushforward import (
    Moments,
    PredictiveFamily,
    TapJacobian,
    make_fields,
    predict,
    prediction_work,
)
from ..structures import Projection
from ._table import prior_variance, tabulate

# Decades of a grid of ratios. The evidence is best at gamma / |theta|^2, gamma from a few to P,
# where the natural scale has P. Predictions: above the natural ratio noise is all there is, and
# below it are the directions that the data determine.
BY_WEIGHTS = (-5.0, 4.0)
BY_OUTPUTS = (-7.0, 2.0)
STORE_LIMIT = 4 * MEMORY_BUDGET  # bytes of projected Jacobians that a search may keep


@pytree
class EvidenceObjective(WeakInside):
    """-log p(D): the curvature's eigenvalues suffice, no pushforward and no refit."""

    posterior_fn: PosteriorFamily
    fit: DataFit
    model: Model = static()

    def __call__(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The value to be minimised."""
        return -log_evidence(self.posterior_fn, prior_arguments, self.fit)

    def bytes_per_point(self) -> int:
        """Temporaries of one point of a grid."""
        return 8 * self.posterior_fn.space.size

    # -- the noise ----------------------------------------------------------------------------
    proportional: ClassVar[bool] = True  # whether one step finds the best noise of a ratio
    decades: ClassVar[tuple[float, float]] = BY_WEIGHTS

    def prior_variance(self) -> float | None:
        """The size of the weights, not of the outputs, bounds the best prior precision."""
        return None

    def squared_residuals(self) -> tuple[float, float]:
        """Their sum, and how many there are."""
        return 2 * float(self.fit.loss), float(self.fit.count)

    def asked_noise(self, prior_arguments: Mapping[str, PyTree], by_ratio: bool) -> jax.Array:
        """The noise that maximises the evidence if it is this one.

        At a fixed ratio, (sum of squares + ratio |theta - mu0|^2) / N, whatever the noise is; at
        a fixed prior precision, (sum of squares + gamma sigma_squared temperature) / N.
        """
        arguments = self.posterior_fn.parse(prior_arguments)
        dtype = arguments.sigma_squared.dtype
        if by_ratio:
            precision = self.posterior_fn.at(arguments).precision
            taken = precision.prior_energy(prior_offset(self.posterior_fn, arguments))
        else:
            taken = self._effective_parameters(arguments)
        squares = 2 * self.fit.loss.astype(dtype)
        return (squares + taken / arguments.likelihood_scale) / self.fit.count.astype(dtype)

    def misfit(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The mean squared residual over what the noise lets expect, gamma of N being fitted.

        Weights that were trained under another prior may have used up less, so that anything
        from there up to the noise itself is right.
        """
        arguments = self.posterior_fn.parse(prior_arguments)
        noise = arguments.sigma_squared
        residual = (2 * self.fit.loss / self.fit.count).astype(noise.dtype)
        fitted = self._effective_parameters(arguments) / self.fit.count.astype(noise.dtype)
        least = noise * jnp.maximum(1 - fitted * arguments.temperature, 0)
        return residual / jnp.clip(residual, least, noise)

    def _effective_parameters(self, arguments: PriorArguments) -> jax.Array:
        """Gamma as the slope of log det Lambda in log c: its diagonal would cost a product."""

        def logdet(log_c: jax.Array) -> jax.Array:
            structure, prior = self.posterior_fn.structure, arguments.precision
            return structure.precision(jnp.exp(log_c), prior).logdet_ratio()

        return jax.grad(logdet)(jnp.log(arguments.likelihood_scale))


@pytree
class PredictiveObjective(WeakInside):
    """A metric of the predictions on held-out data.

    For the linear pushforward and a scalar prior the Jacobians are projected on the eigenbasis
    once (`projection`); every further point is a small product.
    """

    predictive: PredictiveFamily
    projection: Projection | None
    output: jax.Array
    input: PyTree
    target: jax.Array
    kept: Kept | None  # by a mask
    metric: Metric = static()
    fields: tuple[str, ...] = static()
    aims_at_one: bool = (
        static()
    )  # a mean squared standardised residual is right at one, not at zero

    @property
    def model(self) -> Model:
        """The model whose predictions are judged."""
        return self.predictive.model

    def __call__(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The value to be minimised."""
        score = self._score(self.metric, prior_arguments)
        return jnp.abs(score - 1) if self.aims_at_one else score

    def _score(self, metric: Metric, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        recipe = self.predictive.recipe
        prediction = self._predict(prior_arguments, needed_fields([metric], recipe))
        observed = observe(recipe, prediction, self.target, self.kept)
        return metric.finalise(metric.batch(observed))

    def _predict(
        self, prior_arguments: Mapping[str, PyTree], fields: tuple[str, ...]
    ) -> Mapping[str, jax.Array]:
        p = self.predictive
        arguments = p.posterior_fn.parse(prior_arguments)
        if self.projection is None or arguments.precision.ndim:
            posterior = p.posterior_fn.at(arguments)
            return predict(p.at(posterior, arguments.sigma_squared), self.input, fields)
        f = self.output
        cov = None
        if p.recipe.needs_cov(fields):
            flat = self.projection.covariance(arguments.likelihood_scale, arguments.precision)
            cov = flat.astype(f.dtype).reshape(*f.shape, *f.shape[1:])
            var = diagonal(flat)
        else:
            var = self.projection.marginal(arguments.likelihood_scale, arguments.precision)
        moments = Moments(f, f, var.astype(f.dtype).reshape(f.shape), cov, None)
        return make_fields(p.recipe, moments, arguments.sigma_squared, p.key, fields)

    # -- the noise ----------------------------------------------------------------------------
    @property
    def proportional(self) -> bool:
        """Whether one step finds the best noise of a ratio: sampled networks are not linear."""
        return self.predictive.recipe.pushforward is Pushforward.LINEAR

    @property
    def decades(self) -> tuple[float, float]:
        """Of a grid around the natural ratio."""
        return BY_WEIGHTS if self.projection is None else BY_OUTPUTS

    def prior_variance(self) -> float | None:
        """The mean variance of the outputs under the prior of precision one, if it is known."""
        return None if self.projection is None else prior_variance(self.projection)

    def squared_residuals(self) -> tuple[float, float]:
        """Of the MAP: their sum, and how many there are."""
        residual = np.asarray(self.target, np.float64) - np.asarray(self.output, np.float64)
        residual = residual if self.kept is None else residual[tuple(map(np.asarray, self.kept))]
        return float(np.sum(np.square(residual))), float(residual.size)

    def asked_noise(self, prior_arguments: Mapping[str, PyTree], by_ratio: bool) -> jax.Array:
        """The noise at which the squared residuals are the total variances, on average.

        That of the best NLL, too, where all variances are proportional to the noise.
        """
        del by_ratio  # it is the same on every path
        noise = jnp.asarray(prior_arguments["sigma_squared"])
        return noise * self.misfit(prior_arguments).astype(noise.dtype)

    def misfit(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The mean squared standardised residual."""
        return self._score(get_metric("chi_squared", "regression"), prior_arguments)

    def bytes_per_point(self) -> int:
        """Temporaries of one point of a grid: outputs and covariances."""
        if self.projection is None:
            return MEMORY_BUDGET  # one point at a time: each holds Jacobians or networks
        size = 16 * self.output.size * max(1, math.prod(self.output.shape[1:]))
        if self.predictive.recipe.needs_cov(self.fields):  # each point scales a copy
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(self.projection))
        return size


Objective = EvidenceObjective | PredictiveObjective
Target = str | Metric | Callable  # what a user names as the objective of a search


def predictive_objective(
    objective: Target, predictive: PredictiveFamily, data: Batch
) -> PredictiveObjective:
    """Project the Jacobians of the held-out inputs, once."""
    kept = kept_entries(data)
    if kept is not None and not kept[0].size:
        raise ValueError(NOTHING_LEFT)
    if kept is not None and len(kept) == 1:  # a mask of examples, not of tokens
        data = dataclasses.replace(take(data, kept[0]), weight=None)
        kept = None
    recipe = predictive.recipe
    if isinstance(objective, str):
        objective = str(as_member(CalibrationObjective, objective, "calibration_objective"))
    metric = as_metric(objective, recipe)
    check_metric(getattr(objective, "__name__", str(objective)), metric, recipe)
    fields = needed_fields([metric], recipe)
    projection = output = None
    # Sampled functions are drawn as the returned predictive will draw them, not in the eigenbasis.
    if recipe.pushforward is Pushforward.LINEAR and "samples" not in fields:
        spectral = predictive.posterior_fn.spectral()
        predictive = dataclasses.replace(predictive, posterior_fn=spectral)
        projection, output = _project(predictive, data, fields)
    if output is None:
        output = outputs(predictive.model, predictive.posterior_fn.mean, data.input)
    return PredictiveObjective(
        predictive,
        projection,
        output,
        input=data.input,
        target=data.target,
        kept=kept,
        metric=metric,
        fields=fields,
        aims_at_one=objective == CalibrationObjective.CHI_SQUARED,
    )


def _project_chunk(input: PyTree, posterior_fn: PosteriorFamily) -> tuple[Projection, jax.Array]:
    params = posterior_fn.mean
    structure = posterior_fn.structure
    model = posterior_fn.fitted_model
    J = TapJacobian(model, params, posterior_fn.space, input)
    return structure.project(J), model.batch(input, params)


def _project(
    predictive: PredictiveFamily, data: Batch, fields: tuple[str, ...]
) -> tuple[Projection | None, jax.Array | None]:
    """The projection and the outputs, chunk by chunk under the memory budget.

    Where the projections of all examples would not fit, a table of their variances takes their
    place; a covariance has no table, and None says so.
    """
    recipe = predictive.recipe
    posterior_fn = dataclasses.replace(predictive.posterior_fn, model=predictive.model)
    shapes = traced(predictive.model, posterior_fn.mean, data.example()[0])
    work = prediction_work(recipe, posterior_fn.structure, shapes, posterior_fn.space, fields)
    chunks = cut(work, data.num_examples, predictive.memory_budget)
    projections: list[Projection] = []
    outputs: list[jax.Array] = []
    tables = False
    unit = 1.0
    for part, output in map_parts(_project_chunk, data.input, chunks, posterior_fn):
        if not outputs:
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(part))
            tables = held * math.ceil(data.num_examples / chunks.size) > STORE_LIMIT
            if tables and recipe.needs_cov(fields):
                return None, None
            if tables and recipe.likelihood.has_noise:
                unit = prior_variance(part) or 1.0
        projections.append(tabulate(part, unit) if tables else part)
        outputs.append(output)
    if len(outputs) == 1:
        return projections[0], outputs[0]
    return projections[0].join(projections[1:]), jnp.concatenate(outputs)
