"""`jax.extend.core`, loaded when a model is first traced: Pallas comes with it, a tenth of an import."""

from typing import Any


def __getattr__(name: str) -> Any:
    from jax.extend import core

    return getattr(core, name)
