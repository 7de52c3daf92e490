"""Every test runs in float64 with strict promotion, and a warning is a failure."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Programs are kept for the other workers, for processes that tests start and for the next run.
# Most of the time of the tests is spent in the compiler.
if not jax.config.jax_compilation_cache_dir:
    folder = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back():
    """Compiled programs of a module are not needed by the next: two workers would keep 20 GiB."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which much is compiled and run once, on small arrays: a third of the time.

    `tests/test_user_compilation.py` compares its numbers with those that users get. With
    LAPLAX_COMPILE_AS_USERS=1 every module compiles as users do.
    """
    quick = os.environ.get("LAPLAX_COMPILE_AS_USERS") != "1"
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
