"""Several networks: a deep ensemble, or one network with dropout."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._arguments import check_key, in_our_words, whole_number
from .._batching import CHECK
from .._data import Data, DataLike, Form, as_data
from .._model import Model, check_signature
from .._problem import check_params
from .._traced import traced
from .._tree import PyTree, leaf_names, one_of, pytree, same_structure, static, widen
from ..pushforward import Recipe
from ._base import Baseline
from ._noise import held_out_noise, positive_noise
from ._point import ModelFn
from ._recipe import LossFn, member_recipe


@pytree
class DeepEnsemble(Baseline):
    """The mixture of several networks of one architecture, all of equal weight."""

    members: PyTree  # parameters, members on the first axis
    sigma_squared: jax.Array
    model: Model = static()
    recipe: Recipe = static()
    form: Form | None = static(default=None)

    @property
    def one_params(self) -> PyTree:
        return jax.tree.map(lambda x: x[0], self.members)

    def outputs(self, input: PyTree) -> tuple[jax.Array, jax.Array]:
        samples = jax.lax.map(lambda params: self.model.batch(input, params), self.members)
        return samples[0], samples


@pytree
class MCDropout(Baseline):
    """One network that draws random numbers, called with several keys."""

    params: PyTree
    keys: jax.Array
    sigma_squared: jax.Array
    model: Model = static()
    recipe: Recipe = static()
    form: Form | None = static(default=None)

    @property
    def one_params(self) -> PyTree:
        return self.params

    def outputs(self, input: PyTree) -> tuple[jax.Array, jax.Array]:
        samples = jax.lax.map(functools.partial(self._drawn, input), self.keys)
        return samples[0], samples

    def checked(self, data: DataLike, progress: bool | None = None) -> Data:
        """Held-out data that were compared with the model and the likelihood."""
        held_out = as_data(data, progress)
        example = one_of(held_out.peek().input)
        # The masks of a batch differ from example to example: that is no dependence of examples.
        traced(self.model, self.params, example).checked.add(CHECK)
        return super().checked(held_out, progress)

    def _drawn(self, input: PyTree, key: jax.Array) -> jax.Array:
        def call(input: PyTree) -> jax.Array:
            return widen(self.model.fn(input=input, params=self.params, key=key))

        return jax.vmap(call)(input) if self.model.vmap_over_data else call(input)


@dataclasses.dataclass(frozen=True)
class Keyed:
    """A function of a key, with a fixed key where none is given: to read off its shapes."""

    fn: Callable[..., jax.Array]

    def __call__(self, input: PyTree, params: PyTree, key: jax.Array | None = None) -> jax.Array:
        key = jax.random.key(0) if key is None else key
        return self.fn(input=input, params=params, key=key)


@in_our_words
def deep_ensemble(
    model_fn: ModelFn,
    params: Sequence[PyTree],
    data: DataLike | None = None,
    *,
    loss_fn: LossFn,
    sigma_squared: ArrayLike | None = None,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> DeepEnsemble:
    """A mixture of networks that were trained from different starting points.

    Class probabilities are averaged. For regression the mean is that of the members and
    `pred_var` their variance, with 1 / M; the NLL is that of the Gaussian with the moments of the
    mixture. The ensemble has no MAP, hence no field `map`.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplax.laplace`.
        params: A list of the weights of at least two networks.
        data: Held-out data. For `loss_fn="mse"` they choose the noise of every output, by the NLL
            of the ensemble.
        loss_fn: The likelihood, as for `laplax.laplace`.
        sigma_squared: The noise, instead of that of `data`; one number, or one per output.
        vmap_over_data: Whether `model_fn` takes one example, as for `laplax.laplace`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Reference: Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation
    using deep ensembles.
    """
    check_signature(model_fn)
    members = stacked_members(params)
    count = len(params)
    recipe = member_recipe("deep ensemble", loss_fn, count, excluded=("map",))
    _need_noise(recipe, data, sigma_squared)
    ensemble = DeepEnsemble(
        members=members,
        sigma_squared=jnp.ones(()),
        model=Model(model_fn, vmap_over_data),
        recipe=recipe,
    )
    return _fitted(ensemble, data, sigma_squared, progress)


@in_our_words
def mc_dropout(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    num_samples: int = 100,
    key: jax.Array | None = None,
    data: DataLike | None = None,
    *,
    loss_fn: LossFn,
    sigma_squared: ArrayLike | None = None,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> MCDropout:
    """A mixture of a network with dropout over its random masks, as `deep_ensemble` mixes.

    The keys are drawn once, so that a second call gives the same prediction. With
    `vmap_over_data=True` all inputs see the same masks: every sample is a function. A model of
    batches draws masks for a whole batch, so that the draw for an input depends on its place in it.

    Args:
        model_fn: `model_fn(input, params, key)`, called with keywords; dropout is on.
        params: The weights.
        num_samples: How many masks are drawn, at least two.
        key: The random key of the masks; by default `jax.random.key(0)`.
        data: As for `deep_ensemble`.
        loss_fn: The likelihood, as for `laplax.laplace`.
        sigma_squared: As for `deep_ensemble`.
        vmap_over_data: Whether `model_fn` takes one example, as for `laplax.laplace`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Reference: Gal and Ghahramani (2016), Dropout as a Bayesian approximation.
    """
    _check_keyed(model_fn)
    count = whole_number(num_samples, "num_samples", least=2)
    key = jax.random.key(0) if key is None else key
    check_key(key)
    recipe = member_recipe("MC dropout", loss_fn, count, excluded=("map",))
    _need_noise(recipe, data, sigma_squared)
    ensemble = MCDropout(
        params=check_params(params),
        keys=jax.random.split(key, count),
        sigma_squared=jnp.ones(()),
        model=Model(Keyed(model_fn), vmap_over_data),
        recipe=recipe,
    )
    return _fitted(ensemble, data, sigma_squared, progress)


Members = TypeVar("Members", DeepEnsemble, MCDropout)


def _fitted(
    ensemble: Members, data: DataLike | None, sigma_squared: ArrayLike | None, progress: bool | None
) -> Members:
    """With the shape of an input, and the noise that is given or that the data ask for."""
    noise = ensemble.sigma_squared if sigma_squared is None else positive_noise(sigma_squared)
    if data is None:
        return dataclasses.replace(ensemble, sigma_squared=noise)
    checked = ensemble.checked(data, progress)
    if ensemble.recipe.likelihood.has_noise and sigma_squared is None:
        noise = held_out_noise(ensemble, checked)
    form = Form.of(checked.peek().example()[0])
    return dataclasses.replace(ensemble, sigma_squared=noise, form=form)


def _need_noise(recipe: Recipe, data: DataLike | None, sigma_squared: ArrayLike | None) -> None:
    if recipe.likelihood.has_noise and data is None and sigma_squared is None:
        raise ValueError(
            f"loss_fn={recipe.likelihood.name!r} has observation noise: pass held-out data=(input, "
            "target), on which it is chosen, or sigma_squared"
        )


def stacked_members(params: Sequence[PyTree]) -> PyTree:
    """The weights of all members on one more axis; another tree or shape is refused by its path."""
    if not isinstance(params, list | tuple) or len(params) < 2:
        raise ValueError(
            "an ensemble needs a list of the weights of at least two networks, [params_1, params_2]"
            f"; got {type(params).__name__}"
            + (f" of length {len(params)}" if isinstance(params, list | tuple) else "")
        )
    checked = [check_params(member) for member in params]
    for number, member in enumerate(checked[1:], 2):
        _check_same(checked[0], member, number)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *checked)


def _check_same(first: PyTree, member: PyTree, number: int) -> None:
    shapes, others = (
        dict(zip(leaf_names(tree), map(_kind, jax.tree.leaves(tree)), strict=True))
        for tree in (first, member)
    )
    for path in [*shapes, *others]:
        if shapes.get(path) != others.get(path):
            raise ValueError(
                f"the members of an ensemble are networks of one architecture; the leaf {path!r} "
                f"is {shapes.get(path, 'not there')} in the first, and "
                f"{others.get(path, 'not there')} in member {number}"
            )
    if not same_structure(first, member):
        raise ValueError(
            "the members of an ensemble must be the same pytree; the first is "
            f"{jax.tree.structure(first)}, member {number} is {jax.tree.structure(member)}"
        )


def _kind(leaf: jax.Array) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _check_keyed(model_fn: object) -> None:
    if not callable(model_fn):
        raise TypeError(f"model_fn must be callable; got {type(model_fn).__name__}")
    try:
        inspect.signature(model_fn).bind(input=None, params=None, key=None)
    except TypeError:
        raise TypeError(
            "mc_dropout calls model_fn(input=..., params=..., key=...), with dropout on; wrap the "
            "network: model_fn = lambda input, params, key: net.apply(params, input, "
            "deterministic=False, rngs={'dropout': key})"
        ) from None
