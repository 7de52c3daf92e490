"""Arrays whose values can be looked at: whether they can, and what is seen."""

import functools
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._tree import PyTree, is_floating
from . import versions


def is_concrete(*trees: PyTree) -> bool:
    """Whether the values can be looked at now: nothing is traced, and no trace is under way.

    Inside `jax.jit` even an operation on known arrays is staged, so its result has no value.
    """
    trace_state, none = _no_trace()
    if trace_state() == none:
        return True
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees)):
        return False
    return not isinstance(jnp.zeros(()), jax.core.Tracer)  # `grad` alone stages nothing


@functools.cache
def _no_trace() -> tuple[Callable[[], object], object]:
    """The function that tells the state of tracing, and what it says where nothing is traced."""
    trace_state = versions.get_opaque_trace_state
    with jax.core.eval_context():
        return trace_state, trace_state()


def owned(x: ArrayLike) -> jax.Array:
    """A JAX array that keeps its values: made of a NumPy array, it may share memory with it."""
    return x if isinstance(x, jax.Array) else jax.device_put(np.array(x))


def _is_here(x: jax.Array) -> bool:
    """Whether NumPy can read an array in place."""
    return x.devices() <= cpus() and x.is_fully_replicated


def all_finite(tree: PyTree) -> bool:
    """Whether every floating-point number of a pytree is finite.

    JAX's arrays do not change: one that was looked at is not looked at again.
    """
    floating = [x for x in jax.tree.leaves(tree) if is_floating(x.dtype)]
    leaves = [x for x in floating if _KNOWN_FINITE.get(id(x)) is not x]
    if all(isinstance(x, np.ndarray) or _is_here(x) for x in leaves):
        finite = all(bool(np.isfinite(np.asarray(x)).all()) for x in leaves)  # compiles nothing
    else:
        finite = bool(_all_finite(leaves))
    if finite:
        for x in leaves:
            if isinstance(x, jax.Array):
                _KNOWN_FINITE[id(x)] = x
    return finite


_KNOWN_FINITE: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def cpus() -> frozenset[jax.Device]:
    """The CPU devices of this process, whose arrays NumPy can read in place."""
    return frozenset(jax.local_devices(backend="cpu"))


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(x)) for x in leaves]))
