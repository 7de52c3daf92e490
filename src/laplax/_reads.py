"""Which inputs of a traced function its output has a derivative in, as far as its form tells."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import _core as core

BLIND = frozenset({"stop_gradient", "sign", "round", "floor", "ceil"})  # no derivative anywhere
CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})


def read_inputs(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Inputs from which a path of numbers with derivatives leads to an output that is wanted.

    What is inside of loops and branches, or has a derivative of the user's, counts as read.
    """
    live = {
        v for v, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted and _moves(v)
    }
    for eqn in reversed(jaxpr.eqns):
        outs = [v in live for v in eqn.outvars]
        if not any(outs) or eqn.primitive.name in BLIND:
            continue
        read = [True] * len(eqn.invars)
        if eqn.primitive.name in CALLS:
            inner = eqn.params["jaxpr"]
            read = read_inputs(getattr(inner, "jaxpr", inner), outs)
        live.update(v for v, is_read in zip(eqn.invars, read, strict=True) if is_read and _moves(v))
    return [v in live for v in jaxpr.invars]


def _moves(variable: Any) -> bool:
    """Whether a variable can have a derivative: no literal, no whole number."""
    if isinstance(variable, core.Literal):
        return False
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))
