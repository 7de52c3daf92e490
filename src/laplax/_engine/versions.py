"""What differs between releases of JAX, in one place.

`jax.extend.core` is loaded when a model is first traced: it brings Pallas, which takes a while.
"""

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version

from .._arguments import warn

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
    from jax.extend.core import Jaxpr as Jaxpr
    from jax.extend.core import JaxprEqn as JaxprEqn
    from jax.extend.core import Literal as Literal
    from jax.extend.core import Var as Var
    from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

# Settings that decide which program a model is traced to. JAX keys its own traces by them, too.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
)

# Sums of matrix products may be wrong, without a message: https://github.com/jax-ml/jax/issues/39103
# 0.10.1 and 0.11.0 are right.
WRONG_ON_CPU = ("0.10.2",)
CURE = "--xla_cpu_experimental_ynn_fusion_type="


@functools.cache
def check_compiler() -> None:
    """Warn, once, of a compiler that is known to return wrong numbers."""
    known = jaxlib.version.__version__ in WRONG_ON_CPU and jax.default_backend() == "cpu"
    if known and CURE not in os.environ.get("XLA_FLAGS", ""):
        warn(
            f"jaxlib {jaxlib.version.__version__} returns wrong sums of matrix products on CPUs "
            "(https://github.com/jax-ml/jax/issues/39103). Install another version, for example "
            f"jax==0.10.1, or set XLA_FLAGS={CURE} before Python starts"
        )


def reshard(x: jax.Array, place: jax.sharding.NamedSharding) -> jax.Array:
    """The array on explicit axes, divided as `place` says."""
    home: Any = jax
    if not hasattr(jax, "reshard"):  # before 0.9
        home = importlib.import_module("jax.experimental.shard")
    moved: jax.Array = home.reshard(x, place)
    return moved


def constrain(x: jax.Array, place: jax.sharding.NamedSharding | None) -> jax.Array:
    """The array, its last axes divided as `place` says, also inside a `jax.shard_map`."""
    if place is None:
        return x
    inside = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual in inside.axis_types
    spec = jax.sharding.PartitionSpec(*(None,) * (x.ndim - len(place.spec)), *place.spec)
    full = jax.sharding.NamedSharding(inside if manual else place.mesh, spec)
    return jax.lax.with_sharding_constraint(x, full)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes of a `jax.shard_map` with `check_vma=True` along which a traced array varies."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # `vma` before 0.10
    axes: frozenset[str] = getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return axes


def __getattr__(name: str) -> Any:
    from jax.extend import core

    if name == "get_opaque_trace_state" and not hasattr(core, name):
        return jax.core.get_opaque_trace_state  # before 0.10
    return getattr(core, name)


def trace_settings() -> tuple[object, ...]:
    """The user's settings that a remembered trace belongs to, as they are now in this thread."""
    return tuple([getattr(jax.config, name) for name in SETTINGS])
