"""What can be wrong with the inputs of a prediction, said with what the training data were."""

from typing import Any

import jax
import numpy as np

from .._data import Form, to_array
from .._engine.shards import needs_automatic_axes, on_automatic_axes
from .._model import Model
from .._output import describe
from .._traced import traced
from .._tree import PyTree, one_of


def as_inputs(model: Model, params: PyTree, input: PyTree, form: Form) -> tuple[PyTree, bool]:
    """A checked batch, and whether it was one input."""
    if needs_automatic_axes(params):
        input = on_automatic_axes(input)
    arrays = check_input(input, form)
    more = [x.ndim - s.ndim for x, s in zip(arrays, form.structs, strict=True)]
    single = not any(more)
    batch = [x[None] for x in arrays] if single else arrays
    tree = jax.tree.unflatten(form.treedef, batch)
    check_shapes(model, params, tree, form)
    return tree, single


def check_input(input: PyTree, form: Form) -> list[jax.Array]:
    """The leaves of one input, or of a batch of them, as arrays."""
    treedef: Any = jax.tree.structure(input)
    if treedef != form.treedef:
        raise TypeError(_other_tree(input, form))
    leaves = jax.tree.leaves(input)
    arrays = [to_array("input", leaf) for leaf in leaves]
    axes = {x.ndim - struct.ndim for x, struct in zip(arrays, form.structs, strict=True)}
    if axes not in ({0}, {1}):
        given = ", ".join(str(x.shape) for x in arrays)
        one = ", ".join(str(struct.shape) for struct in form.structs)
        raise ValueError(
            f"input has shape {given}; one input of the training data has shape {one}, a batch of "
            "them one axis more"
        )
    if axes == {1}:
        lengths = {x.shape[0] for x in arrays}
        if lengths == {0}:
            raise ValueError("input is an empty batch")
        if len(lengths) > 1:
            raise ValueError(
                "the arrays of input differ in their number of examples: "
                f"{', '.join(str(x.shape[0]) for x in arrays)}"
            )
    return arrays


def _other_tree(input: PyTree, form: Form) -> str:
    expected = f"the training data's is {describe(form.example)} for one example"
    single = len(form.structs) == 1 and jax.tree_util.treedef_is_leaf(form.treedef)
    leaves = jax.tree.leaves(input)
    hint = "; it must be the same pytree"
    if single and isinstance(input, list | tuple) and leaves:
        hint = "; wrap it: np.asarray(input)"
        if any(np.ndim(leaf) for leaf in leaves):
            hint = "; pass the inputs alone, one array (of data=(input, target): data[0])"
    elif single and isinstance(input, dict) and "input" in input:
        hint = "; pass the inputs alone: data['input']"
    elif single:
        hint = "; it must be one array"
    return f"input is a {type(input).__name__}; {expected}{hint}"


def check_shapes(model: Model, params: PyTree, batch: PyTree, form: Form) -> None:
    """Inputs of other shapes than the training data's are taken where the model takes them."""
    example = one_of(batch)
    leaves = jax.tree.leaves(example)
    if all(x.shape == struct.shape for x, struct in zip(leaves, form.structs, strict=True)):
        return
    try:
        traced(model, params, example)
    except ValueError as error:
        given = describe(example)
        hint = "; transpose it: input.T" if _is_transposed(batch, form) else ""
        raise ValueError(
            f"one input is {given}; in the training data it is {describe(form.example)}{hint}. "
            f"{error}"
        ) from error


def _is_transposed(batch: PyTree, form: Form) -> bool:
    first = jax.tree.leaves(batch)[0]
    return first.ndim == 2 and first.shape[:1] == form.structs[0].shape
