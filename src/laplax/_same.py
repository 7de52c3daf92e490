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
    if any(getattr(model.fn, "is_part", False) for model in (fitted, given)):
        return True
    input = jax.tree.unflatten(form.treedef, [_some(struct) for struct in form.structs])
    expected = np.asarray(outputs(fitted, params, input), np.float64)
    try:
        found = np.asarray(outputs(given, params, input), np.float64)
    except (TypeError, ValueError, IndexError):  # it does not even take such inputs
        return False
    if found.shape != expected.shape:
        return False
    size = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    allowed = 10 * coarsest_eps(params) ** 0.5 * size
    return np.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True)


def _some(struct: jax.ShapeDtypeStruct) -> np.ndarray:
    """Numbers that every model takes: small, positive, and 0 or 1 where they are whole."""
    rng = np.random.default_rng(0)
    shape = (EXAMPLES, *struct.shape)
    if is_floating(struct.dtype):
        return rng.uniform(0.1, 0.9, shape).astype(struct.dtype)
    return rng.integers(0, 2, shape).astype(struct.dtype)
