"""What every entry point starts from: a checked model, its parameters, data and likelihood."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._data import Batch, Data, Loader, as_data
from ._model import Model, Traced, check_signature, traced
from ._tree import PyTree, all_finite, is_concrete, is_floating, leaf_names, owned
from .likelihoods import Custom, Likelihood, as_likelihood


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Checked inputs. `first` is a batch that shows shapes; `traced`, what they tell."""

    model: Model
    params: PyTree
    data: Data
    likelihood: Likelihood
    first: Batch
    traced: Traced

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The output of one example."""
        return self.traced.output


def make_problem(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    loss_fn: str | Likelihood | Callable,
    *,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> Problem:
    """Check everything that can be seen before work starts."""
    likelihood = as_likelihood(loss_fn)
    check_signature(model_fn)
    params = check_params(params)
    model = Model(model_fn, vmap_over_data)
    checked = as_data(data, progress)
    first = checked.peek()
    known = traced(model, params, first.example()[0])
    output = known.output

    def validate(batch: Batch) -> None:
        _check_shapes(likelihood, output, batch)
        if is_concrete(batch):
            # On the host, where looking at values compiles nothing.
            likelihood.check_target_values(output.shape, jax.tree.map(np.asarray, batch.target))

    if isinstance(checked, Loader):
        _check_shapes(likelihood, output, first)  # now; values, as the batches come
        checked.validate = validate
    else:
        validate(checked)
    return Problem(model, params, checked, likelihood, first, known)


def check_params(params: PyTree) -> PyTree:
    """A non-empty pytree of finite floating-point arrays."""
    leaves, treedef = jax.tree.flatten(params)
    if all(getattr(leaf, "size", 1) == 0 for leaf in leaves):
        raise ValueError("params holds no arrays: there is nothing to be uncertain about")
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and is_floating(leaf.dtype):
            continue
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise TypeError(
                f"params must be a pytree of arrays; the leaf {leaf_names(params)[i]!r} is a "
                f"{type(leaf).__name__}. Wrap numbers with jnp.asarray, and keep functions out "
                "(equinox: params, static = eqx.partition(model, eqx.is_inexact_array))"
            )
        if np.issubdtype(leaf.dtype, np.complexfloating):
            raise TypeError(
                f"params must be real; the leaf {leaf_names(params)[i]!r} is {leaf.dtype}. Write "
                "it as two real leaves and join them in the model: jax.lax.complex(real, imag)"
            )
        if not is_floating(leaf.dtype):
            raise TypeError(
                f"params must be floating point; the leaf {leaf_names(params)[i]!r} is "
                f"{leaf.dtype}. Close over "
                "what is not differentiated: model_fn = lambda input, params: f(input, params, n)"
            )
    arrays = [owned(x) for x in leaves]  # the posterior's mean, whatever becomes of what was given
    if is_concrete(arrays) and not all_finite(arrays):
        name = leaf_names(params)[[all_finite(x) for x in arrays].index(False)]
        raise ValueError(f"params holds NaN or infinite values in the leaf {name!r}")
    return jax.tree.unflatten(treedef, arrays)


def _check_shapes(likelihood: Likelihood, output: jax.ShapeDtypeStruct, batch: Batch) -> None:
    target = batch.example()[1]
    if not isinstance(likelihood, Custom) and not isinstance(target, jax.ShapeDtypeStruct):
        raise TypeError(
            f"loss_fn={likelihood.name!r} takes one array as target; got a pytree "
            f"({jax.tree.structure(target)}). A callable loss(f, y) takes any."
        )
    likelihood.check_target_shape(output, target)
    if batch.weight is None:
        return
    given, events = tuple(batch.weight.shape[1:]), likelihood.batch_shape(output.shape)
    if given != events[: len(given)]:
        raise ValueError(
            f"the weight of one example has shape {given}; it must be a number or match the "
            f"leading axes of the observations of one example, {events}"
        )
