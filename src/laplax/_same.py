"""Whether two functions are one model: equal outputs, where they are not one object."""

import jax
import numpy as np

from ._data import Form
from ._model import Model, outputs
from ._tree import PyTree, coarsest_eps, is_floating

EXAMPLES = 2


def same_outputs(fitted: Model, given: Model, params: PyTree, form: Form) -> bool:
    """Whether both give the same for inputs like the training data's, up to rounding.

    A function defined again, wrapped or under `jax.jit` is another object and the same model: only
    its outputs can tell. A last layer cut from a model stands for the whole of it.
    """
    if is_part(fitted) or is_part(given):
        return True
    return gives(given, sample_outputs(fitted, params, form), params, form)


def is_part(model: Model) -> bool:
    """Whether the function is a part of a model, which stands for the whole."""
    return getattr(model.fn, "is_part", False)


def sample_outputs(model: Model, params: PyTree, form: Form) -> np.ndarray:
    """What the model gives for a few fixed inputs like the training data's."""
    input = jax.tree.unflatten(form.treedef, [_some(struct) for struct in form.structs])
    return np.asarray(outputs(model, params, input), np.float64)


def gives(model: Model, expected: np.ndarray, params: PyTree, form: Form, step: int = 1) -> bool:
    """Whether the model gives these outputs, or every `step`-th of them, up to rounding."""
    try:
        found = sample_outputs(model, params, form)
    except (TypeError, ValueError, IndexError):  # it does not even take such inputs
        return False
    found = every(found, step)
    if found.shape != expected.shape:
        return False
    size = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    allowed = 10 * coarsest_eps(params) ** 0.5 * size
    return np.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True)


def every(values: np.ndarray, step: int) -> np.ndarray:
    """Every `step`-th value of an array."""
    return values if step == 1 else values.reshape(-1)[::step]


def _some(struct: jax.ShapeDtypeStruct) -> np.ndarray:
    """Numbers that every model takes: small, positive, and 0 or 1 where they are whole."""
    rng = np.random.default_rng(0)
    shape = (EXAMPLES, *struct.shape)
    if is_floating(struct.dtype):
        return rng.uniform(0.1, 0.9, shape).astype(struct.dtype)
    return rng.integers(0, 2, shape).astype(struct.dtype)
