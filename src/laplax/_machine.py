"""What is assumed of the machine, and how work is cut for it."""

import jax

MEMORY_BUDGET = 2**29  # bytes of temporaries that a step over the data may hold
CPU_CACHE = 2**25  # what is written and read again at once should stay in the last-level cache


def on_cpu() -> bool:
    """Whether arrays live where caches are small and XLA's loops and convolutions are slow."""
    return jax.default_backend() == "cpu"


def even_size(count: int, most: int) -> int:
    """At most `most` examples at once; if it costs little, a divisor: no rest to compile for."""
    most = min(count, most)
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)
