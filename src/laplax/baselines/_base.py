"""What all baselines share: inputs, chunks, fields, and judging."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._data import Data, DataLike, Form, to_array
from .._engine.arrays import is_concrete
from .._engine.chunks import Work, cut
from .._engine.loops import map_over
from .._engine.memo import WeakInside
from .._model import Model
from .._problem import make_problem
from .._traced import traced
from .._tree import PyTree, one_of
from ..evaluation import Metrics, Results, judge
from ..pushforward import (
    Moments,
    Prediction,
    Recipe,
    as_inputs,
    make_fields,
    of_first,
    with_samples_axis,
)


class Baseline(WeakInside, abc.ABC):
    """A predictive that needs no curvature. A pytree: it jits and vmaps.

    A mixture of the outputs of its members, all of equal weight. Its variances are those of the
    mixture, with 1 / (number of members).
    """

    if TYPE_CHECKING:  # fields of the subclasses
        sigma_squared: jax.Array
        model: Model
        recipe: Recipe
        form: Form | None

    @property
    @abc.abstractmethod
    def one_params(self) -> PyTree:
        """Parameters of one network, or their shapes."""

    @abc.abstractmethod
    def outputs(self, input: PyTree) -> tuple[jax.Array, jax.Array]:
        """The outputs of a batch at the MAP, and those of the members, members first."""

    def __call__(self, input: PyTree, fields: Sequence[str] | None = None) -> Prediction:
        """Fields of the prediction for a batch of inputs.

        A single input is accepted where the baseline was made with data, which show its shape.
        """
        names = self.recipe.check_fields(self.recipe.default_fields if fields is None else fields)
        batch, single = self._as_batch(input)
        cost = traced(self.model, self.one_params, one_of(batch)).cost
        size = 2 * cost.activation_bytes + self.recipe.num_samples * cost.outputs * 8
        count = jax.tree.leaves(batch)[0].shape[0]
        chunks = cut(Work(size, cost.has_convolution), count, in_trace=not is_concrete(self, batch))
        prediction = map_over(_predict_chunk, batch, chunks, self, static=names)
        prediction = with_samples_axis(prediction, 1, 0)
        return of_first(prediction) if single else prediction

    def evaluate(
        self, data: DataLike, metrics: Metrics = None, progress: bool | None = None
    ) -> Results:
        """Metrics over a data set, with the meaning that they have in `laplax.evaluation`."""
        return judge(self, data, metrics, progress)

    def checked(self, data: DataLike, progress: bool | None = None) -> Data:
        """Held-out data that were compared with the model and the likelihood."""
        vmap = self.model.vmap_over_data
        likelihood = self.recipe.likelihood
        return make_problem(
            self.model.fn,
            self.one_params,
            data,
            likelihood,
            vmap_over_data=vmap,
            progress=progress,
        ).data

    def _as_batch(self, input: PyTree) -> tuple[PyTree, bool]:
        if self.form is not None:
            return as_inputs(self.model, self.one_params, input, self.form)
        batch = jax.tree.map(lambda x: to_array("input", x), input)
        shapes = {x.shape[:1] for x in jax.tree.leaves(batch)}
        if len(shapes) != 1 or shapes == {()}:
            raise ValueError(
                "input must be a batch, whose arrays have one first axis that counts the examples "
                f"(one input: input[None]); got first axes {sorted(shapes)}"
            )
        return batch, False


def _predict_chunk(part: PyTree, baseline: Baseline, fields: tuple[str, ...]) -> Prediction:
    at_map, samples = baseline.outputs(part)
    moments = _moments(at_map, samples, with_cov="pred_cov" in fields)
    no_key = jax.random.key(0)  # the members are there: nothing is drawn
    prediction = make_fields(baseline.recipe, moments, baseline.sigma_squared, no_key, fields)
    return with_samples_axis(prediction, 0, 1)


def _moments(at_map: jax.Array, samples: jax.Array, with_cov: bool) -> Moments:
    """Those of the mixture of all members."""
    mean = jnp.mean(samples, axis=0)
    centred = samples - mean[None]
    cov = None
    if with_cov:
        flat = centred.reshape(*samples.shape[:2], -1)
        out = samples.shape[2:]
        cov = jnp.einsum("snc,snd->ncd", flat, flat).reshape(-1, *out, *out) / samples.shape[0]
    return Moments(
        map=at_map,
        mean=mean,
        var=jnp.mean(jnp.square(centred), axis=0),
        cov=cov,
        samples=samples,
    )
