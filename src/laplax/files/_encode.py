"""Objects of the library as JSON and arrays.

A value of JSON stands for itself; everything else is an object with one name, its kind. What the
reader has already is not written: the parameters, the model and a likelihood of the user's own.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.shards import to_numpy
from .._model import Model
from .._tree import PyTree
from ..calibration import Calibrated
from ..likelihoods import LIKELIHOODS, Gaussian, Likelihood, as_likelihood
from ._classes import AT_PARAMS, NAMES

PARAMS_FIELD = "mean"  # of a posterior: the parameters
DRAWN_FIELD = "ensemble"  # of a predictive: drawn again from its key, it is many times the rest
PLACES_FIELD = "places"  # of a space: the reader's parameters lie on devices of their own
PARAMS = "params"
Code = Any  # what JSON can hold


class Encoder:
    """Collects the arrays of all that it encodes. `params` are the reader's to bring."""

    def __init__(self, params: PyTree) -> None:
        self.treedef = jax.tree.structure(params)
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: object, where: str) -> Code:
        """A value as JSON; `where` names its arrays, and the value in an error message."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        kind, content = self._kind(value, where)
        return {kind: content}

    def _kind(self, value: Any, where: str) -> tuple[str, Code]:
        if type(value) in (tuple, list):
            return type(value).__name__, self._all(value, where)
        if type(value) is dict:
            keys = self._all(list(value), f"{where}/keys")
            return "dict", [keys, self._all(list(value.values()), where)]
        if isinstance(value, Calibrated):
            parts = (dict(value), value.recipe, value.key)
            return "calibrated", self._all(parts, where)
        if isinstance(value, Model):
            return "model", value.vmap_over_data
        if isinstance(value, Likelihood):
            return _likelihood(value)
        if isinstance(value, jax.Array | np.ndarray | np.generic | bytes):
            return self._array(value, where)
        if isinstance(value, enum.StrEnum):
            return "enum", [type(value).__name__, str(value)]
        if isinstance(value, np.dtype):
            return "dtype", value.name
        if isinstance(value, jax.ShapeDtypeStruct):
            return "struct", [list(value.shape), value.dtype.name]
        if isinstance(value, jax.tree_util.PyTreeDef):
            return "treedef", self.tree(value, where)
        if type(value) in NAMES:
            return "class", [NAMES[type(value)], self._fields(value, where)]
        raise TypeError(_refusal(value, where))

    def _all(self, values: Iterable[object], where: str) -> list[Code]:
        return [self.encode(value, f"{where}/{i}") for i, value in enumerate(values)]

    def _fields(self, value: Any, where: str) -> dict[str, Code]:
        fields = [field for field in dataclasses.fields(value) if field.init]
        left_out = (DRAWN_FIELD, PLACES_FIELD)
        names = [field.name for field in fields if field.name not in left_out]
        return {
            name: {PARAMS: None}
            if name == PARAMS_FIELD and isinstance(value, AT_PARAMS)
            else self.encode(getattr(value, name), f"{where}/{name}")
            for name in names
        }

    def _array(self, value: Any, where: str) -> tuple[str, Code]:
        if isinstance(value, bytes):
            return "bytes", self.put(np.frombuffer(value, np.uint8), where)
        if isinstance(value, np.ndarray):
            return "numpy", self.put(value, where)
        if isinstance(value, np.generic):
            return "scalar", self.put(np.asarray(value), where)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            name = self.put(to_numpy(jax.random.key_data(value)), where)
            return "key", [str(jax.random.key_impl(value)), name]
        return "array", self.put(to_numpy(value), where)

    def put(self, array: np.ndarray, where: str) -> str:
        """Keep an array, and return its name."""
        self.arrays[where] = array
        return where

    def tree(self, treedef: jax.tree_util.PyTreeDef, where: str) -> Code:
        """A pytree of zeros with this structure, unless it is that of the parameters."""
        if treedef == self.treedef:
            return PARAMS
        return self.encode(jax.tree.unflatten(treedef, [0] * treedef.num_leaves), where)


def _likelihood(likelihood: Likelihood) -> tuple[str, str | list[float]]:
    if likelihood.name in LIKELIHOODS and likelihood == as_likelihood(likelihood.name):
        return "likelihood", likelihood.name
    if type(likelihood) is Gaussian:
        return "noise_ratio", list(likelihood.noise_ratio)
    return "own_likelihood", type(likelihood).__name__


def _refusal(value: object, where: str) -> str:
    kind = type(value).__name__
    if callable(value) and not dataclasses.is_dataclass(value):
        what = f"the function {getattr(value, '__name__', kind)}, and a file holds no code"
    else:
        what = f"of the class {kind}, which is not one of the library's nor a dict, list or tuple"
    return f"{where} cannot be saved: it is {what}"
