"""What users write as arguments: keywords, whole numbers, random keys; and how they are warned."""

import functools
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._enums import FOREIGN, near_miss

P = ParamSpec("P")
R = TypeVar("R")
PACKAGE = os.path.dirname(__file__) + os.sep


class InputWarning(UserWarning):
    """What was given is accepted, and is probably not what was meant.

    The evidence of other data than the fit's; another model than the fit's, with other outputs; a
    model that ignores the parameters, or draws random numbers; a loader whose passes give
    different examples. To be strict: `warnings.simplefilter("error", laplax.InputWarning)`.
    """


def warn(message: str, category: type[Warning] = InputWarning) -> None:
    """Warn where the user called."""
    warnings.warn(message, category, stacklevel=_outside())


def _outside() -> int:
    """The `stacklevel` of the user's call: the first frame that is not this package's.

    Given to `warnings.warn` by the function that asks for it.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    return level


def in_our_words(fn: Callable[P, R]) -> Callable[P, R]:
    """Refuse a keyword that `fn` does not have, with the one that was meant.

    Python's own error does not know the names of other libraries.
    """
    parameters = inspect.signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = frozenset(name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD)
    needed = [
        p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - names:
            missing = any(other not in kwargs for other in needed)
            if not takes_any or (missing and name in FOREIGN):
                raise TypeError(f"{fn.__name__}() has no argument {name!r}{near_miss(name, names)}")
        return fn(*args, **kwargs)

    return call


def whole_number(value: object, name: str, least: int = 1) -> int:
    """A count, as Python's int; those of NumPy and JAX are taken."""
    number = _as_int(value)
    if number is None:
        is_whole = isinstance(value, float) and value.is_integer()
        hint = f"; write {name}={value:.0f}" if is_whole else ""
        raise TypeError(f"{name} must be a whole number; got {value!r}{hint}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def _as_int(value: Any) -> int | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_key(key: Any, name: str = "key") -> None:
    """One random key of JAX, of the new kind or the old."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return
        given = f"an array of {key.size} keys; take one of them: {name}={name}s[0]"
    elif dtype == np.uint32 and len(key.shape) == 1:
        return
    elif _as_int(key) is not None and np.ndim(key) == 0:
        given = f"the number {key}; write {name}=jax.random.key({key})"
    else:
        given = f"{type(key).__name__}; write {name}=jax.random.key(0)"
    raise TypeError(f"{name} must be a random key of JAX; got {given}")
