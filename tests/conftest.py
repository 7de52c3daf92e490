"""Every test runs in float64 with strict promotion, and a warning is a failure."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module", autouse=True)
def memory_given_back():
    """Compiled programs of a module are not needed by the next: two workers would keep 20 GiB."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which much is compiled and run once, on small arrays: half of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
