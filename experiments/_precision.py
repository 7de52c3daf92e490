"""float64 for as long as an experiment runs."""

import contextlib
import importlib
from typing import Any

import jax


def float64() -> contextlib.AbstractContextManager[Any]:
    """float64 inside, what was there before outside; `jax.config` is left alone."""
    enable: Any = getattr(jax, "enable_x64", None)
    if enable is None:  # its place in older versions of JAX
        enable = importlib.import_module("jax.experimental").enable_x64
    manager: contextlib.AbstractContextManager[Any] = enable(True)
    return manager
