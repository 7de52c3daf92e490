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
from .._engine.loops import map_over, map_parts
from .._engine.memo import WeakInside
from .._engine.samples import take
from .._enums import CalibrationObjective, Predictive, Pushforward, as_member
from .._model import Model, outputs
from .._traced import traced
from .._tree import PyTree, one_of, pytree, static
from ..evaluation import (
    NOTHING_LEFT,
    Kept,
    as_metric,
    check_metric,
    kept_entries,
    needed_fields,
    observe,
)
from ..evidence import determined_by_data, log_evidence, prior_offset
from ..likelihoods import Bernoulli, DataFit, Gaussian, HeteroscedasticGaussian
from ..metrics import Metric, get_metric
from ..posterior import PosteriorFamily
from ..priors import is_scalar
from ..pushforward import (
    Moments,
    PredictiveFamily,
    ProbPredictive,
    TapJacobian,
    make_fields,
    predict,
    prediction_work,
    with_output_scale,
)
from ..structures import Projection
from ._leave_out import Training, leave_out, training
from ._table import prior_variances, tabulate

# Decades of a grid of ratios. The evidence is best at gamma / |theta|^2, gamma from a few to P,
# where the natural scale has P. Predictions: above the natural ratio noise is all there is, and
# below it are the directions that the data determine.
BY_WEIGHTS = (-5.0, 4.0)
BY_OUTPUTS = (-7.0, 2.0)
BY_LOGITS = (-6.0, 4.0)  # at the upper end their standard deviation is a hundredth
ROUGH_POINTS = 128  # of integrals that only show where the best temperature lies
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
            taken = determined_by_data(self.posterior_fn, arguments)
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
        fitted = determined_by_data(self.posterior_fn, arguments) / self.fit.count.astype(
            noise.dtype
        )
        least = noise * jnp.maximum(1 - fitted * arguments.temperature, 0)
        return residual / jnp.clip(residual, least, noise)


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
    training: Training | None = None  # of which every example is left out in turn

    @property
    def model(self) -> Model:
        """The model whose predictions are judged."""
        return self.predictive.model

    def __call__(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The value to be minimised."""
        return self._aimed(self._score(self.metric, prior_arguments))

    def _aimed(self, score: jax.Array) -> jax.Array:
        return jnp.abs(score - 1) if self.aims_at_one else score

    def value_of(self, moments: Moments, noise: jax.Array) -> jax.Array:
        """The value to be minimised, of outputs with these moments."""
        p = self.predictive
        prediction = make_fields(p.recipe, moments, noise, p.key, self.fields)
        return self._aimed(self._judge(self.metric, prediction))

    def cheaper(self, closed_form: bool) -> "PredictiveObjective":
        """The same with fewer points of integrals over logits, or with a closed form for them."""
        recipe = self.predictive.recipe
        points = min(recipe.num_samples, ROUGH_POINTS)
        kind = recipe.predictive
        if closed_form and kind is Predictive.MC_BRIDGE and "log_pred_act" in self.fields:
            binary = isinstance(recipe.likelihood, Bernoulli)
            kind = Predictive.PROBIT if binary else Predictive.MEAN_FIELD_2
        rough = dataclasses.replace(recipe, num_samples=points, predictive=kind)
        return dataclasses.replace(
            self, predictive=dataclasses.replace(self.predictive, recipe=rough)
        )

    def _score(self, metric: Metric, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        fields = needed_fields([metric], self.predictive.recipe)
        return self._judge(metric, self._predict(prior_arguments, fields))

    def _judge(self, metric: Metric, prediction: Mapping[str, jax.Array]) -> jax.Array:
        observed = observe(self.predictive.recipe, prediction, self.target, self.kept)
        return metric.finalise(metric.batch(observed))

    def _predict(
        self, prior_arguments: Mapping[str, PyTree], fields: tuple[str, ...]
    ) -> Mapping[str, jax.Array]:
        p = self.predictive
        arguments = p.posterior_fn.parse(prior_arguments)
        vector = not is_scalar(arguments.precision)
        if self.projection is None or vector or arguments.structured is not None:
            posterior = p.posterior_fn.at(arguments)
            if self.training is not None:
                cov = covariances(p.at(posterior, arguments), self.input)
                moments = self._left_out(cov, arguments.likelihood_scale, arguments.precision)
                moments = with_output_scale(moments, arguments.output_scale)
                return make_fields(p.recipe, moments, arguments.sigma_squared, p.key, fields)
            return predict(p.at(posterior, arguments), self.input, fields)
        moments = self.moments(arguments.likelihood_scale, arguments.precision)
        moments = with_output_scale(moments, arguments.output_scale)
        return make_fields(p.recipe, moments, arguments.sigma_squared, p.key, fields)

    def moments(self, c: jax.Array, precision: jax.Array) -> Moments:
        """Of the outputs under c G + precision, through the projection."""
        assert self.projection is not None
        f = self.output
        if not self._needs_cov:
            var = self.projection.marginal(c, precision)
            return Moments(f, f, var.astype(f.dtype).reshape(f.shape), None, None)
        flat = self.projection.covariance(c, precision).astype(f.dtype)
        if self.training is not None:
            return self._left_out(flat, c, precision)
        cov = flat.reshape(*f.shape, *f.shape[1:])
        return Moments(f, f, diagonal(flat).reshape(f.shape), cov, None)

    @property
    def _needs_cov(self) -> bool:
        return self.training is not None or self.predictive.recipe.needs_cov(self.fields)

    def _left_out(self, flat: jax.Array, c: jax.Array, precision: jax.Array) -> Moments:
        """Of the outputs of every example under the posterior of the others."""
        assert self.training is not None
        f = self.output
        p = self.predictive
        posterior_fn = dataclasses.replace(p.posterior_fn, model=p.model)
        mean, cov = leave_out(posterior_fn, self.training, self.input, f, flat, c, precision)
        var = diagonal(cov).reshape(f.shape)
        return Moments(f, mean.reshape(f.shape), var, cov.reshape(*f.shape, *f.shape[1:]), None)

    def value_without_variance(self, moments: Moments, noise: jax.Array) -> jax.Array:
        """The value if the means were certain."""
        return self.value_of(scaled(moments, jnp.zeros((), self.output.dtype)), noise)

    # -- scales -------------------------------------------------------------------------------
    def typical_variance(self, variance: jax.Array) -> jax.Array:
        """The mean of variances of the outputs, each in the unit that the likelihood gives it."""
        return jnp.mean(variance.reshape(self.output.shape) / self._units())

    def _units(self) -> jax.Array:
        """What a variance of each output is compared with.

        Logits have a unit. A mean does not: it is compared with the noise.
        """
        f = self.output
        likelihood = self.predictive.recipe.likelihood
        if isinstance(likelihood, Gaussian):
            return likelihood.ratios(f)
        if not isinstance(likelihood, HeteroscedasticGaussian):
            return jnp.ones_like(f)
        return jnp.stack([jnp.exp(f[..., 1]), jnp.ones_like(f[..., 1])], axis=-1)

    # -- the noise ----------------------------------------------------------------------------
    @property
    def proportional(self) -> bool:
        """Whether one step finds the best noise of a ratio: sampled networks are not linear."""
        return self.predictive.recipe.pushforward is Pushforward.LINEAR

    @property
    def decades(self) -> tuple[float, float]:
        """Of a grid around the natural ratio."""
        if self.projection is None:
            return BY_WEIGHTS
        return BY_OUTPUTS if self.predictive.recipe.likelihood.has_noise else BY_LOGITS

    def prior_variance(self) -> float | None:
        """The mean variance of the outputs under the prior of precision one, if it is known."""
        if self.projection is None:
            return None
        return float(self.typical_variance(prior_variances(self.projection)))

    def squared_residuals(self) -> tuple[float, float]:
        """Of the MAP, in units of each output's noise ratio: their sum, and how many there are."""
        residual = np.asarray(self.target, np.float64) - np.asarray(self.output, np.float64)
        residual = residual / np.sqrt(np.asarray(self._units(), np.float64))
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
        if self._needs_cov:  # each point scales a copy
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(self.projection))
        return size


def scaled(moments: Moments, factor: jax.Array) -> Moments:
    """The same outputs, with `factor` times their variances."""

    def times(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else factor.astype(x.dtype) * x

    return dataclasses.replace(moments, var=times(moments.var), cov=times(moments.cov))


Objective = EvidenceObjective | PredictiveObjective
Target = str | Metric | Callable  # what a user names as the objective of a search


def left_out_objective(
    predictive: PredictiveFamily, data: Batch, prior_mean: PyTree
) -> PredictiveObjective:
    """The NLL of every training example under the posterior of the others."""
    if predictive.recipe.pushforward is not Pushforward.LINEAR:
        raise ValueError(
            "calibration_objective='leave_one_out' needs pushforward_type='linear': it has no "
            "refits, and sampled networks cannot do without an example otherwise"
        )
    if predictive.posterior_fn.structure.own_prior:
        raise ValueError(
            "calibration_objective='leave_one_out' is for a prior on the weights; a prior on "
            "functions has 'marginal_log_likelihood', or 'nll' on held-out data"
        )
    objective = predictive_objective(CalibrationObjective.NLL, predictive, data, ("pred_cov",))
    if objective.kept is not None:
        raise ValueError(
            "calibration_objective='leave_one_out' leaves whole examples out: it takes a mask of "
            "examples, not one of their outputs"
        )
    searched = objective.predictive
    posterior_fn = dataclasses.replace(searched.posterior_fn, model=searched.model)
    given = {} if prior_mean is None else {"prior_mean": prior_mean}
    offset = prior_offset(posterior_fn, posterior_fn.parse({"prior_prec": 1.0, **given}))
    batch = dataclasses.replace(data, input=objective.input, target=objective.target, weight=None)
    seen = training(posterior_fn, batch, objective.output, offset)
    return dataclasses.replace(objective, training=seen)


def predictive_objective(
    objective: Target, predictive: PredictiveFamily, data: Batch, more: tuple[str, ...] = ()
) -> PredictiveObjective:
    """Project the Jacobians of the held-out inputs, once; `more` fields are prepared for."""
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
        projection, output = _project(predictive, data, (*fields, *more))
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


def covariances(predictive: ProbPredictive, input: PyTree) -> jax.Array:
    """J Lambda^-1 J^T of every input, (n, C, C), in chunks that fit the memory budget."""
    posterior = predictive.posterior
    shapes = traced(predictive.model, posterior.mean, one_of(input))
    fields = ("pred_cov",)
    precision = posterior.precision
    work = prediction_work(predictive.recipe, precision, shapes, posterior.space, fields)
    count = jax.tree.leaves(input)[0].shape[0]
    chunks = cut(work, count, predictive.memory_budget, in_trace=True)
    found: jax.Array = map_over(_covariance_chunk, input, chunks, predictive)
    return found


def _covariance_chunk(part: PyTree, predictive: ProbPredictive) -> jax.Array:
    posterior = predictive.posterior
    J = TapJacobian(predictive.model, posterior.mean, posterior.space, part)
    return posterior.precision.covariance(J)


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
            if tables:
                unit = float(jnp.mean(prior_variances(part))) or 1.0
        projections.append(tabulate(part, unit) if tables else part)
        outputs.append(output)
    if len(outputs) == 1:
        return projections[0], outputs[0]
    return projections[0].join(projections[1:]), jnp.concatenate(outputs)
