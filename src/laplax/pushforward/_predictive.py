"""`set_prob_predictive(prior_arguments) -> prob_predictive(input) -> Prediction`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._data import Form
from .._engine.arrays import is_concrete
from .._engine.chunks import MEMORY_BUDGET, cut
from .._engine.loops import map_over
from .._engine.memo import WeakInside, model_jit
from .._model import Model
from .._traced import traced
from .._tree import PyTree, one_of, pytree, static
from ..posterior import Posterior, PosteriorFamily
from ._fields import Recipe, make_fields
from ._input import check_input, check_shapes
from ._jacobian import jacobian
from ._moments import draw_ensemble, moments_of, prediction_work
from ._prediction import Prediction


@pytree
class ProbPredictive(WeakInside):
    """The predictive distribution for fixed hyperparameters. A pytree: it jits and vmaps."""

    posterior: Posterior
    sigma_squared: jax.Array
    key: jax.Array
    model: Model = static()
    recipe: Recipe = static()
    form: Form = static()  # one input of the training data
    memory_budget: int = static(default=MEMORY_BUDGET)
    ensemble: PyTree = None  # sampled networks, drawn once for all calls if they can be kept

    def __call__(self, input: PyTree, fields: Sequence[str] | None = None) -> Prediction:
        """Fields of the prediction for one input or a batch of them.

        Only `fields` are computed; by default those that cost no more than the variance.
        """
        chosen = self.recipe.default_fields if fields is None else fields
        names = self.recipe.check_fields(chosen)
        batch, single = self._as_batch(input)
        prediction = predict(self, batch, names)
        if not single:
            return prediction
        return Prediction(
            {name: x[:, 0] if name == "samples" else x[0] for name, x in prediction.items()}
        )

    def kernel(self, input: PyTree, other: PyTree | None = None) -> jax.Array:
        """k(x, x') = J(x) Lambda^-1 J(x')^T over batches, shape (n, C, m, C).

        With one argument it is the joint covariance of the outputs at several inputs.
        """
        first = self._as_batch(input)[0]
        second = first if other is None else self._as_batch(other)[0]
        return _kernel(self, first, second)

    def _as_batch(self, input: PyTree) -> tuple[PyTree, bool]:
        arrays = check_input(input, self.form)
        more = [x.ndim - s.ndim for x, s in zip(arrays, self.form.structs, strict=True)]
        single = not any(more)
        batch = [x[None] for x in arrays] if single else arrays
        tree = jax.tree.unflatten(self.form.treedef, batch)
        check_shapes(self.model, self.posterior.mean, tree, self.form)
        return tree, single


def predict(predictive: ProbPredictive, batch: PyTree, fields: tuple[str, ...]) -> Prediction:
    """Checked fields of a batch, in chunks that fit the memory budget."""
    posterior = predictive.posterior
    if predictive.ensemble is None:
        ensemble = draw_ensemble(
            posterior, predictive.recipe, predictive.memory_budget, predictive.key
        )
        predictive = dataclasses.replace(predictive, ensemble=ensemble)
    shapes = traced(predictive.model, posterior.mean, one_of(batch))
    precision = posterior.precision
    work = prediction_work(predictive.recipe, precision, shapes, posterior.space, fields)
    count = jax.tree.leaves(batch)[0].shape[0]
    in_trace = not is_concrete(predictive, batch)
    chunks = cut(work, count, predictive.memory_budget, in_trace=in_trace)
    prediction = map_over(_predict_chunk, batch, chunks, predictive, static=fields)
    return _with_samples_axis(prediction, 1, 0)


def _predict_chunk(part: PyTree, p: ProbPredictive, fields: tuple[str, ...]) -> Prediction:
    moments = moments_of(p.recipe)(p.recipe, p.model, p.posterior, p.key, p.ensemble, part, fields)
    prediction = make_fields(p.recipe, moments, p.sigma_squared, p.key, fields)
    return _with_samples_axis(prediction, 0, 1)


def _with_samples_axis(prediction: Prediction, source: int, target: int) -> Prediction:
    """Chunks are joined on the first axis, so the axis of samples has to step aside."""
    fields = dict(prediction)
    if "samples" in fields:
        fields["samples"] = jnp.moveaxis(fields["samples"], source, target)
    return Prediction(fields)


@model_jit
def _kernel(predictive: ProbPredictive, first: PyTree, second: PyTree) -> jax.Array:
    posterior = predictive.posterior
    J1 = jacobian(predictive.model, posterior.mean, posterior.space, first)
    J2 = jacobian(predictive.model, posterior.mean, posterior.space, second)
    # Both sides through the root: positive semi-definite, and a weak prior costs no digits.
    half1, half2 = (
        posterior.precision.scale_t_mv(J.reshape(-1, posterior.space.size).T) for J in (J1, J2)
    )
    return (half1.T @ half2).reshape(*J1.shape[:2], *J2.shape[:2])


@pytree
class PredictiveFamily(WeakInside):
    """Every predictive distribution of one posterior and one pushforward.

    A function of the hyperparameters. `trace` is the record of the search that made it, if there
    was one.
    """

    posterior_fn: PosteriorFamily
    key: jax.Array
    model: Model = static()
    recipe: Recipe = static()
    memory_budget: int = static(default=MEMORY_BUDGET)
    trace: Any = None

    def __call__(self, prior_arguments: Mapping[str, Any]) -> ProbPredictive:
        """The predictive distribution under these hyperparameters; nothing is refitted."""
        arguments = self.posterior_fn.parse(prior_arguments)
        posterior = self.posterior_fn.sound(arguments)
        ensemble = draw_ensemble(posterior, self.recipe, self.memory_budget, self.key)
        return self.at(posterior, arguments.sigma_squared, ensemble)

    def at(
        self, posterior: Posterior, sigma_squared: jax.Array, ensemble: PyTree = None
    ) -> ProbPredictive:
        """The predictive distribution of one posterior."""
        return ProbPredictive(
            posterior=posterior,
            sigma_squared=sigma_squared,
            key=self.key,
            model=self.model,
            recipe=self.recipe,
            form=self.posterior_fn.form,
            memory_budget=self.memory_budget,
            ensemble=ensemble,
        )
