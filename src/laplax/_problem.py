"""What every entry point starts from: a checked model, its parameters, data and likelihood."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._batching import check_independent
from ._data import Batch, Data, Loader, as_data
from ._engine import versions
from ._engine.arrays import all_finite, is_concrete, owned
from ._engine.shards import needs_automatic_axes, on_automatic_axes, to_numpy
from ._model import Model, check_signature
from ._output import describe
from ._placement import check_placement
from ._traced import Traced, traced
from ._tree import PyTree, is_floating, leaf_names, one_of, same_structure
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
    versions.check_compiler()
    likelihood = as_likelihood(loss_fn)
    check_signature(model_fn)
    params = check_params(params)
    model = Model(model_fn, vmap_over_data)
    checked = as_data(data, progress)
    if needs_automatic_axes(params):
        params = on_automatic_axes(params)
        checked = checked.on_automatic_axes()
    first = checked.peek()
    known = check_form(model, params, likelihood, first)
    if isinstance(checked, Loader):
        # Shapes now; values, as the batches come.
        checked.validate = functools.partial(_check_batch, checked, known, likelihood, first)
    else:
        _check_values(likelihood, known.output, checked)
    check_placement(params, first)
    check_independent(known, params, first)
    return Problem(model, params, checked, likelihood, first, known)


def check_form(model: Model, params: PyTree, likelihood: Likelihood, batch: Batch) -> Traced:
    """The model takes the inputs, and the targets belong to its outputs; or what would help."""
    try:
        return _fitting(model, params, likelihood, batch)
    except Exception as error:
        cure = _cure(model, params, likelihood, batch)
        if cure is None:
            raise
        raise ValueError(f"{str(error).rstrip('.')}. {cure}") from error


def _fitting(model: Model, params: PyTree, likelihood: Likelihood, batch: Batch) -> Traced:
    known = traced(model, params, one_of(batch.input))
    _check_shapes(likelihood, known.output, batch)
    return known


def _cure(model: Model, params: PyTree, likelihood: Likelihood, batch: Batch) -> str | None:
    """What of the usual mistakes explains that model and data do not fit, if one does."""
    swapped = dataclasses.replace(batch, input=batch.target, target=batch.input)
    batched = (
        "model_fn takes a batch of examples, it seems: write vmap_over_data=False"
        if model.vmap_over_data
        else "model_fn takes one example, it seems, and vmap_over_data=False calls it with a "
        "batch: leave vmap_over_data=False out"
    )
    cures = (
        (Model(model.fn, not model.vmap_over_data), batch, batched),
        (
            model,
            swapped,
            "Input and target are in each other's place, it seems: data is (input, target)",
        ),
    )
    for other, given, cure in cures:
        try:
            _fitting(other, params, likelihood, given)
        except Exception:  # noqa: BLE001  whatever the user's function raises, it does not fit
            continue
        return cure
    return None


def _check_batch(
    loader: Loader, known: Traced, likelihood: Likelihood, first: Batch, batch: Batch, number: int
) -> None:
    """One batch of a loader, against the model and the first batch."""
    seen = known
    if batch.example() != first.example():
        seen = _check_another(known, first, batch, number)
        if loader.one_form and seen is not known:
            raise ValueError(
                f"{_differs(known, batch, number)}. A fit needs inputs of one shape and dtype: "
                "pad them, or cast them"
            )
    _check_shapes(likelihood, seen.output, batch)
    _check_values(likelihood, seen.output, batch)


def _check_another(known: Traced, first: Batch, batch: Batch, number: int) -> Traced:
    """A batch of another form than the first: the model may take it, as with other lengths."""
    differs = _differs(known, batch, number)
    if not same_structure(batch.example(), first.example()):
        raise ValueError(f"{differs}; every batch must be the same pytree")
    try:
        return traced(known.model, known.params, one_of(batch.input))
    except ValueError as error:
        raise ValueError(f"{differs}; {error}") from error


def _differs(known: Traced, batch: Batch, number: int) -> str:
    return (
        f"batch {number} of the data differs from the first: one input is "
        f"{describe(batch.example()[0])}, and {describe(known.example)} in the first"
    )


def _check_values(likelihood: Likelihood, output: jax.ShapeDtypeStruct, batch: Batch) -> None:
    if is_concrete(batch):
        target = jax.tree.map(to_numpy, batch.target)
        likelihood.check_target_values(output.shape, target)


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
    target = one_of(batch.target)
    if not isinstance(likelihood, Custom) and not isinstance(target, jax.ShapeDtypeStruct):
        raise TypeError(
            f"loss_fn={likelihood.name!r} takes one array as target; got a pytree "
            f"({jax.tree.structure(target)}). A callable loss(f, y) takes any."
        )
    likelihood.check_target_shape(output, target)
    if batch.weight is None:
        return
    given = tuple(batch.weight.shape[1:])
    events = likelihood.batch_shape(output.shape)
    if given != events[: len(given)]:
        raise ValueError(
            f"the weight of one example has shape {given}; it must be a number or match the "
            f"leading axes of the observations of one example, {events}"
        )
