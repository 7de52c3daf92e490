"""How work is cut: the one planner for every loop over examples."""

import dataclasses
import os

import jax

MEMORY_BUDGET = 2**29  # bytes of temporaries that a step over the data may hold
CPU_CACHE = 2**25  # what is written and read again right away should stay in the last-level cache


@dataclasses.dataclass(frozen=True)
class Work:
    """What a loop does for one example.

    Args:
        bytes_per_example: Temporaries of one example.
        has_convolution: XLA's CPU backend runs convolutions about ten times slower inside `scan`,
            so Python drives those loops, and every step is a compiled call of its own.
        cache_floor: If given, the temporaries are read again right away. On a CPU a chunk then
            holds no more than its cache, or than this many bytes if that is more: weights that no
            cache holds are read for every chunk, which should do as much work for each reading.
    """

    bytes_per_example: int
    has_convolution: bool = False
    cache_floor: int | None = None


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many examples a step sees, and whether Python drives the loop."""

    size: int
    by_python: bool = False


def cut(
    work: Work,
    count: int | None,
    memory_budget: int = MEMORY_BUDGET,
    batch_size: int | None = None,
    *,
    in_trace: bool = False,
) -> Chunks:
    """Chunks of `count` examples (None: not known yet) that fit the memory budget.

    Convolutions inside a trace, where Python drives no loop, are cut as little as memory allows.
    """
    budget = memory_budget
    loops_convolutions = in_trace and work.has_convolution
    if work.cache_floor is not None and on_cpu() and not loops_convolutions:
        budget = min(budget, max(CPU_CACHE, work.cache_floor))
    fits = max(1, budget // max(work.bytes_per_example, 1))
    size = batch_size or even_size(count or fits, fits)
    return Chunks(size, by_python=work.has_convolution and on_cpu())


def total_memory() -> int:
    """Bytes of physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def on_cpu() -> bool:
    """Whether arrays live where caches are small and XLA's loops and convolutions are slow."""
    return jax.default_backend() == "cpu"


def even_size(count: int, most: int) -> int:
    """At most `most` examples at once; if it costs little, a divisor: no rest to compile for."""
    most = min(count, most)
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)


def networks_at_once(bytes_per_network: int, has_convolution: bool, count: int) -> int | None:
    """How many sampled networks share a CPU's cache and leave room in it; None is one.

    Convolutions get no faster together.
    """
    together = 0 if has_convolution else even_size(count, 3 * CPU_CACHE // 8 // bytes_per_network)
    return together if together > 1 else None
