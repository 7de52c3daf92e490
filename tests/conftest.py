"""Every test runs in float64 with strict promotion, and a warning is a failure."""

import os
import pathlib

import jax
import pytest

COMPILE_AS_USERS = os.environ.get("LAPLAX_COMPILE_AS_USERS") == "1"
# Without these emitters XLA compiles two to three times as fast. It reads the flags once, before it
# compiles anything; an XLA that no longer has this one ends the process and names it.
QUICK_FLAG = "--xla_cpu_use_fusion_emitters=false"
if not COMPILE_AS_USERS and QUICK_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAG}".strip()

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Programs are kept for the other workers, for processes that tests start and for the next run.
# Most of the time of the tests is spent in the compiler.
if not jax.config.jax_compilation_cache_dir:
    folder = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# A module whose single tests take a minute begins first: at the end of a run, when the workers
# share what is left, only short tests are left.
LONGEST = ("test_user_compilation", "test_devices", "test_experiments")


def pytest_collection_modifyitems(items):
    """The modules of the longest tests first; all others stay as they are."""

    def place(item):
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


def users_environment():
    """That of this process without the flag above: for processes that compile as users do."""
    flags = os.environ.get("XLA_FLAGS", "").replace(QUICK_FLAG, "").strip()
    return {**os.environ, "XLA_FLAGS": flags}


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
    jax.config.update("jax_disable_most_optimizations", not COMPILE_AS_USERS)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
