"""Print versions, devices, default precision, cores and memory: what a bug report needs.

examples:
  laplax info
  JAX_ENABLE_X64=1 laplax info
"""

import argparse
import os
import platform
from importlib import metadata

import jax
import jax.numpy as jnp

from .._engine.chunks import total_memory
from .._report import human_bytes
from ._common import add_traceback

SUMMARY = "versions, devices, precision, memory"
add_arguments = add_traceback
PACKAGES = ("laplax", "jax", "jaxlib", "numpy", "optax", "matplotlib")


def run(args: argparse.Namespace) -> int:
    """Print one fact per line."""
    del args
    facts = {
        **{name: _version(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({platform.system()}, {platform.machine()})",
        "devices": ", ".join(str(device) for device in jax.devices()),
        "precision": jnp.zeros(()).dtype.name,
        "cores": str(os.cpu_count()),
        "memory": human_bytes(total_memory()),
    }
    for name, value in facts.items():
        print(f"{name:12}{value}")
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        extra = " (pip install 'laplax[plot]')" if name == "matplotlib" else ""
        return f"not installed{extra}"
