"""One network: the MAP, and its outputs scaled and shifted."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._arguments import in_our_words
from .._data import DataLike, Form
from .._model import Model, check_signature
from .._problem import check_params, make_problem
from .._tree import PyTree, pytree, static
from ..likelihoods import as_likelihood
from ..pushforward import Recipe
from ._base import Baseline
from ._noise import positive_noise, residual_variance
from ._recipe import LossFn, member_recipe

ModelFn = Callable[..., jax.Array]


@pytree
class PointPredictive(Baseline):
    """The prediction of one network, from the outputs `scale * f + bias`.

    `map` is f itself; every other field is made of the scaled outputs.
    """

    params: PyTree
    sigma_squared: jax.Array  # of the noise, one number or one per output
    scale: jax.Array
    bias: jax.Array
    model: Model = static()
    recipe: Recipe = static()
    form: Form | None = static(default=None)

    @property
    def temperature(self) -> jax.Array:
        """1 / scale."""
        return 1 / self.scale

    @property
    def one_params(self) -> PyTree:
        return self.params

    def outputs(self, input: PyTree) -> tuple[jax.Array, jax.Array]:
        f = self.model.batch(input, self.params)
        scaled = f * self.scale.astype(f.dtype) + self.bias.astype(f.dtype)
        return f, scaled[None]


@in_our_words
def map_predictive(
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike | None = None,
    *,
    loss_fn: LossFn,
    sigma_squared: ArrayLike | None = None,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> PointPredictive:
    """The network as it was trained, without uncertainty in its weights.

    For `loss_fn="mse"` the observation noise is chosen by the NLL of held-out `data`: the mean
    squared residual of every output. No other likelihood has noise to choose, and `data` only show
    the shape of one input.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplax.laplace`.
        params: The weights.
        data: Held-out data, arrays or a loader.
        loss_fn: The likelihood, as for `laplax.laplace`.
        sigma_squared: The noise, instead of that of `data`; one number, or one per output.
        vmap_over_data: Whether `model_fn` takes one example, as for `laplax.laplace`.
        progress: Show a bar while a loader is read; by default when a terminal is attached.

    Example:
        >>> import jax.numpy as jnp
        >>> model_fn = lambda input, params: params["a"] * input
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> baseline = map_predictive(
        ...     model_fn, {"a": jnp.asarray(2.0)}, (x, 2 * x + 0.5), loss_fn="mse"
        ... )
        >>> baseline.evaluate((x, 2 * x + 0.5), metrics=["rmse", "chi_squared"])
        {'rmse': 0.5, 'chi_squared': 1.0}
    """
    likelihood = as_likelihood(loss_fn)
    if likelihood.has_noise and data is None and sigma_squared is None:
        raise ValueError(
            f"loss_fn={likelihood.name!r} has observation noise: pass held-out data=(input, "
            "target), on which it is chosen, or sigma_squared"
        )
    baseline = unit_predictive("the MAP", model_fn, params, data, loss_fn, vmap_over_data)
    if sigma_squared is not None:
        return with_noise(baseline, positive_noise(sigma_squared))
    if not likelihood.has_noise or data is None:
        return baseline
    checked = baseline.checked(data, progress)
    return with_noise(baseline, residual_variance(baseline, checked))


def unit_predictive(
    name: str,
    model_fn: ModelFn,
    params: PyTree,
    data: DataLike | None,
    loss_fn: LossFn,
    vmap_over_data: bool,
) -> PointPredictive:
    """The network's outputs as they are, with unit noise."""
    check_signature(model_fn)
    recipe = member_recipe(name, loss_fn)
    checked = check_params(params)
    form = None
    if data is not None:
        problem = make_problem(
            model_fn, checked, data, recipe.likelihood, vmap_over_data=vmap_over_data
        )
        form = Form.of(problem.first.example()[0])
    one = jnp.ones(())
    return PointPredictive(
        params=checked,
        sigma_squared=one,
        scale=one,
        bias=jnp.zeros(()),
        model=Model(model_fn, vmap_over_data),
        recipe=recipe,
        form=form,
    )


def with_noise(baseline: PointPredictive, sigma_squared: jax.Array) -> PointPredictive:
    """The same network with other observation noise."""
    return dataclasses.replace(baseline, sigma_squared=sigma_squared)
