"""`jax.extend.core`, loaded when a model is first traced: it brings Pallas, which takes a while."""

from typing import Any


def __getattr__(name: str) -> Any:
    from jax.extend import core

    return getattr(core, name)
