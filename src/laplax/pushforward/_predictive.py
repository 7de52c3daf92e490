"""`set_prob_predictive(prior_arguments) -> prob_predictive(input) -> Prediction`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._data import Data, DataLike, Form
from .._engine.arrays import is_concrete
from .._engine.chunks import MEMORY_BUDGET, Chunks, cut
from .._engine.loops import map_over
from .._engine.memo import WeakInside, model_jit
from .._model import Model
from .._problem import make_problem
from .._traced import traced
from .._tree import PyTree, one_of, pytree, static
from ..posterior import Posterior, PosteriorFamily
from ..priors import PriorArguments
from ._export import any_batch, exported, fixed_batch, in_chunks
from ._fields import Recipe, make_fields, output_roots, with_output_scale
from ._input import as_inputs
from ._jacobian import jacobian
from ._moments import draw_ensemble, moments_of, prediction_work
from ._prediction import Prediction, of_first, with_samples_axis


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
    output_scale: jax.Array | None = None  # of the variances: a number, or one for every output

    def __call__(self, input: PyTree, fields: Sequence[str] | None = None) -> Prediction:
        """Fields of the prediction for one input or a batch of them.

        Only `fields` are computed; by default those that cost no more than the variance.
        """
        chosen = self.recipe.default_fields if fields is None else fields
        names = self.recipe.check_fields(chosen)
        batch, single = self._as_batch(input)
        prediction = predict(self, batch, names)
        return of_first(prediction) if single else prediction

    def checked(self, data: DataLike, progress: bool | None = None) -> Data:
        """Held-out data that were compared with the model and the likelihood."""
        likelihood = self.recipe.likelihood
        vmap = self.model.vmap_over_data
        mean = self.posterior.mean
        return make_problem(
            self.model.fn, mean, data, likelihood, vmap_over_data=vmap, progress=progress
        ).data

    def kernel(self, input: PyTree, other: PyTree | None = None) -> jax.Array:
        """k(x, x') = J(x) Lambda^-1 J(x')^T over batches, shape (n, C, m, C).

        With one argument it is the joint covariance of the outputs at several inputs.
        """
        first = self._as_batch(input)[0]
        second = first if other is None else self._as_batch(other)[0]
        return _kernel(self, first, second)

    def export(
        self,
        example_input: PyTree,
        fields: Sequence[str] | None = None,
        *,
        symbolic_batch: bool = True,
        include_arrays: bool = True,
        platforms: Sequence[str] | None = None,
    ) -> bytes:
        """This predictive as a program of `jax.export`, for processes without this library.

        There, `jax.export.deserialize(program).call(batch)` returns a dict of fields. A random key
        is part of the program: every call has the same draws, as here.

        Args:
            example_input: A batch as the program will get it, or one input. Its length is that of
                the chunks in which the program works, or less if the memory budget asks for it.
            fields: As for a call.
            symbolic_batch: Accept batches of every length, in a loop over chunks. A program for
                batches of the example's length alone has no loop: on a CPU, convolutions are
                several times faster in it.
            include_arrays: Whether weights and posterior are part of the program. Otherwise it is
                called with them, `call(arrays, batch)`, as `prob_predictive.arrays` lists them.
            platforms: Where it will run, such as `["cpu", "cuda"]`; this platform by default.
        """
        names = self.recipe.check_fields(self.recipe.default_fields if fields is None else fields)
        batch, _ = self._as_batch(example_input)
        leaves, treedef = jax.tree.flatten(self)
        size = _chunks(self, batch, names).size

        def program(*given: Any) -> dict[str, jax.Array]:
            rest = iter(() if include_arrays else given[0])
            known = [x if include_arrays or _is_key(x) else next(rest) for x in leaves]
            predictive = jax.tree.unflatten(treedef, known)

            def step(part: PyTree) -> dict[str, jax.Array]:
                return dict(_predict_chunk(part, predictive, names))

            predicted = in_chunks(step, size, given[-1]) if symbolic_batch else step(given[-1])
            return dict(with_samples_axis(Prediction(predicted), 1, 0))

        shapes = any_batch(batch) if symbolic_batch else fixed_batch(batch)
        return exported(program, shapes, None if include_arrays else self.arrays, platforms)

    @property
    def arrays(self) -> list[jax.Array]:
        """Weights and posterior, as an exported program without them takes them."""
        return [x for x in jax.tree.leaves(self) if not _is_key(x)]

    def _as_batch(self, input: PyTree) -> tuple[PyTree, bool]:
        return as_inputs(self.model, self.posterior.mean, input, self.form)


def predict(predictive: ProbPredictive, batch: PyTree, fields: tuple[str, ...]) -> Prediction:
    """Checked fields of a batch, in chunks that fit the memory budget."""
    posterior = predictive.posterior
    if predictive.ensemble is None:
        ensemble = draw_ensemble(
            posterior, predictive.recipe, predictive.memory_budget, predictive.key
        )
        predictive = dataclasses.replace(predictive, ensemble=ensemble)
    chunks = _chunks(predictive, batch, fields, in_trace=not is_concrete(predictive, batch))
    prediction = map_over(_predict_chunk, batch, chunks, predictive, static=fields)
    return with_samples_axis(prediction, 1, 0)


def _chunks(
    predictive: ProbPredictive, batch: PyTree, fields: tuple[str, ...], in_trace: bool = True
) -> Chunks:
    posterior = predictive.posterior
    shapes = traced(predictive.model, posterior.mean, one_of(batch))
    precision = posterior.precision
    work = prediction_work(predictive.recipe, precision, shapes, posterior.space, fields)
    count = jax.tree.leaves(batch)[0].shape[0]
    return cut(work, count, predictive.memory_budget, in_trace=in_trace)


def _is_key(x: jax.Array) -> bool:
    """A key that is an array of numbers counts as one of them."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _predict_chunk(part: PyTree, p: ProbPredictive, fields: tuple[str, ...]) -> Prediction:
    moments = moments_of(p.recipe)(p.recipe, p.model, p.posterior, p.key, p.ensemble, part, fields)
    moments = with_output_scale(moments, p.output_scale)
    prediction = make_fields(p.recipe, moments, p.sigma_squared, p.key, fields)
    return with_samples_axis(prediction, 0, 1)


@model_jit
def _kernel(predictive: ProbPredictive, first: PyTree, second: PyTree) -> jax.Array:
    posterior = predictive.posterior
    J1 = jacobian(predictive.model, posterior.mean, posterior.space, first)
    J2 = jacobian(predictive.model, posterior.mean, posterior.space, second)
    # Both sides through the root: positive semi-definite, and a weak prior costs no digits.
    half1, half2 = (posterior.halves(J.reshape(-1, posterior.space.size)) for J in (J1, J2))
    kernel = (half1 @ half2.T).reshape(*J1.shape[:2], *J2.shape[:2])
    if predictive.output_scale is None:
        return kernel
    f = jax.eval_shape(predictive.model.batch, first, posterior.mean)
    root = output_roots(predictive.output_scale, f).reshape(-1)
    return root[:, None, None] * kernel * root


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
        return self.at(posterior, arguments, ensemble)

    def at(
        self, posterior: Posterior, arguments: PriorArguments, ensemble: PyTree = None
    ) -> ProbPredictive:
        """The predictive distribution of one posterior."""
        return ProbPredictive(
            posterior=posterior,
            sigma_squared=arguments.sigma_squared,
            key=self.key,
            model=self.model,
            recipe=self.recipe,
            form=self.posterior_fn.form,
            memory_budget=self.memory_budget,
            ensemble=ensemble,
            output_scale=arguments.output_scale,
        )
