"""The tangent of a network at its weights, as a model of its own: linear in its parameters."""

import dataclasses
from collections.abc import Callable

import jax

from ._data import Form
from ._flow import reaches
from ._model import Model, check_signature
from ._problem import check_params
from ._space import ParamSpace
from ._tree import ByValue, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Linearised(ByValue):
    """`f(x, theta) + J(x) (w - theta)` as a `model_fn` of w.

    Leaves that do not vary are taken from theta.
    """

    model_fn: Callable[..., jax.Array]
    params: PyTree  # theta
    space: ParamSpace  # of w

    def __call__(self, input: PyTree, params: PyTree) -> jax.Array:
        """The outputs at the weights `params`, of an example or of a batch as `model_fn` does."""
        point = self.space.varying(self.params)
        weights = self.space.varying(params)

        def run(varied: list[jax.Array]) -> jax.Array:
            return self.model_fn(input=input, params=self.space.merge(self.params, varied))

        # J w - J theta: a parameter that meets the input as it is, unlike w - theta, has a tap.
        f, at_point = jax.jvp(run, (point,), (point,))
        _, at_weights = jax.jvp(run, (point,), (weights,))
        return f + (at_weights - at_point)


def linearise(model_fn: Callable[..., jax.Array], params: PyTree) -> Linearised:
    """The tangent of a network at `params`, as a `model_fn` of its own.

    It is the model that `glm_mode` predicts with, and what `load` needs for a posterior at a GLM
    mode. Outputs cost a forward pass and two Jacobian-vector products.

    Args:
        model_fn: `model_fn(input, params)`, as for `laplace`.
        params: The weights at which the network is linearised.

    Example:
        >>> import jax.numpy as jnp
        >>> tangent_fn = linearise(lambda input, params: input * params**2, jnp.asarray(3.0))
        >>> print(tangent_fn(jnp.asarray(1.0), jnp.asarray(4.0)))
        15.0
    """
    check_signature(model_fn)
    params = check_params(params)
    return Linearised(model_fn, params, ParamSpace.of(params))


def linearised(model: Model, params: PyTree, space: ParamSpace, form: Form) -> Model:
    """The tangent model; the model itself where it is linear in what varies, as a last layer is."""
    if _is_affine(model, params, space, form):
        return model
    return Model(Linearised(model.fn, params, space), model.vmap_over_data)


def tangent(
    model: Model, params: PyTree, space: ParamSpace, input: PyTree
) -> tuple[jax.Array, Callable[[list[jax.Array]], jax.Array]]:
    """The outputs of a batch, and the derivative along the leaves that vary.

    The others have no direction, not one of zeros: that would cost a pass through all layers.
    """
    return jax.linearize(
        lambda leaves: model.batch(input, space.merge(params, leaves)), space.varying(params)
    )


def _is_affine(model: Model, params: PyTree, space: ParamSpace, form: Form) -> bool:
    """Whether the derivative in the parameters that vary does not depend on them."""
    point = space.varying(params)

    def tangent(
        point: list[jax.Array], direction: list[jax.Array], fixed: PyTree, input: PyTree
    ) -> jax.Array:
        def run(varied: list[jax.Array]) -> jax.Array:
            return model.one(input, space.merge(fixed, varied))

        return jax.jvp(run, (point,), (direction,))[1]

    closed = jax.make_jaxpr(tangent)(point, point, params, form.example)
    return not reaches(closed.jaxpr)[0] & ((1 << len(point)) - 1)
