"""What `import laplax` loads, and what it loads when it is asked for."""

import subprocess
import sys

import pytest

import laplax

LATER = ["jax.extend", "laplax.fsp", "laplax._report", "matplotlib", "optax", "scipy.linalg"]


def test_import_leaves_what_not_every_program_needs():
    code = f"import sys, laplax; print([name for name in {LATER} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_loaded_later_looks_like_the_rest():
    assert {"fsp", "fsp_laplace", "report", "Report", "laplace"} <= set(dir(laplax))
    assert laplax.fsp.fsp_laplace is laplax.fsp_laplace
    assert callable(laplax.report)
    with pytest.raises(AttributeError, match="has no attribute 'raport'"):
        laplax.raport  # noqa: B018
