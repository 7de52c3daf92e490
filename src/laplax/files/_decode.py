"""From JSON and arrays to objects of the library; a closed list of kinds and classes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._model import Model
from .._space import ParamSpace
from ..calibration import Calibrated
from ..likelihoods import LIKELIHOODS, Gaussian, Likelihood, as_likelihood
from ._classes import CLASSES, ENUMS
from ._encode import PARAMS, Code
from ._safetensors import DTYPES, FileError

_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """The arrays of a file, and what its reader brings."""

    arrays: Mapping[str, np.ndarray]
    params: Any = None
    model_fn: Callable[..., Any] | None = None
    likelihood: Likelihood | None = None  # that of `loss_fn`

    def decode(self, code: Code) -> Any:
        """The value that `Encoder.encode` wrote."""
        if code is None or isinstance(code, bool | int | float | str):
            return code
        if not isinstance(code, dict) or len(code) != 1:
            raise FileError(f"a value is neither plain nor of one kind: {str(code)[:80]}")
        ((kind, content),) = code.items()
        if kind not in _KINDS:
            raise FileError(f"the kind {kind[:80]!r} is not known")
        return _KINDS[kind](self, content)

    def _all(self, codes: list[Code]) -> list[Any]:
        if not isinstance(codes, list):
            raise FileError(f"a list was expected, not {str(codes)[:80]}")
        return [self.decode(code) for code in codes]

    def _dict(self, content: Code) -> dict[Any, Any]:
        keys, values = content
        return dict(zip(self._all(keys), self._all(values), strict=True))

    def _class(self, content: Code) -> Any:
        name, codes = content
        if name not in CLASSES:
            raise FileError(f"the class {str(name)[:80]!r} is not one of the library's")
        value = CLASSES[name](**{field: self.decode(code) for field, code in codes.items()})
        return value.at(self.params) if isinstance(value, ParamSpace) else value

    def _model(self, vmap_over_data: bool) -> Model:
        if self.model_fn is None:
            raise FileError("a model is written where none can be")
        return Model(self.model_fn, vmap_over_data)

    def _likelihood(self, name: str) -> Likelihood:
        if name not in LIKELIHOODS:
            raise FileError(f"the likelihood {name[:80]!r} is not known")
        likelihood = as_likelihood(name)
        if self.likelihood is not None and self.likelihood != likelihood:
            raise FileError(f"the posterior was fitted with loss_fn={name!r}; leave loss_fn out")
        return likelihood

    def _noise_ratio(self, ratio: Code) -> Likelihood:
        likelihood = Gaussian(noise_ratio=tuple(ratio))
        if self.likelihood is not None and self.likelihood != likelihood:
            raise FileError(f"the posterior was fitted with {likelihood}; leave loss_fn out")
        return likelihood

    def _own_likelihood(self, name: str) -> Likelihood:
        if self.likelihood is None:
            raise FileError(
                f"the posterior was fitted with a loss function of its own ({name}), and a file "
                "holds no code; pass it: load(..., loss_fn=...)"
            )
        given = type(self.likelihood).__name__
        if given != name:
            raise FileError(f"loss_fn is a {given}; the file has a {name}")
        return self.likelihood

    def numpy(self, name: str) -> np.ndarray:
        """An array of the file."""
        if name not in self.arrays:
            raise FileError(f"the array {str(name)[:80]!r} is missing")
        return self.arrays[name]

    def array(self, name: str) -> jax.Array:
        """An array of the file for JAX, with its own dtype."""
        x = self.numpy(name)
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            raise FileError(
                f"{name} is of {x.dtype}, which this process would round; call "
                "jax.config.update('jax_enable_x64', True) first"
            )
        return jnp.asarray(x)

    def _key(self, content: Code) -> jax.Array:
        implementation, name = content
        return jax.random.wrap_key_data(self.array(name), impl=implementation)

    def treedef(self, code: Code) -> Any:
        """The structure of a pytree."""
        return jax.tree.structure(self.params if code == PARAMS else self.decode(code))


def _enum(_: Decoder, content: Code) -> Any:
    name, value = content
    return ENUMS[name](value)


def _struct(_: Decoder, content: Code) -> jax.ShapeDtypeStruct:
    shape, dtype = content
    return jax.ShapeDtypeStruct(tuple(shape), _DTYPES[dtype])


_KINDS: dict[str, Callable[[Decoder, Code], Any]] = {
    "tuple": lambda d, content: tuple(d._all(content)),
    "list": Decoder._all,
    "dict": Decoder._dict,
    "calibrated": lambda d, content: Calibrated(*d._all(content)),
    "class": Decoder._class,
    "model": Decoder._model,
    "likelihood": Decoder._likelihood,
    "noise_ratio": Decoder._noise_ratio,
    "own_likelihood": Decoder._own_likelihood,
    "params": lambda d, _: d.params,
    "array": Decoder.array,
    "numpy": Decoder.numpy,
    "scalar": lambda d, name: d.numpy(name)[()],
    "bytes": lambda d, name: d.numpy(name).tobytes(),
    "key": Decoder._key,
    "enum": _enum,
    "dtype": lambda _, name: _DTYPES[name],
    "struct": _struct,
    "treedef": Decoder.treedef,
}
