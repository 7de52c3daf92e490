"""How a piece of work is timed, in every library the same way."""

import resource
import statistics
import time


def measure(run, wait, *, seconds=3.0, most=51, least=3, patience=float("inf")):
    """First call, median of the calls after it, and the process's peak memory in MB.

    A first call that took longer than `patience` stands for the others: compiling is little of it.
    """
    start = time.perf_counter()
    result = wait(run())
    cold = time.perf_counter() - start
    times, most = ([cold], 0) if cold > patience else ([], most)
    begin = time.perf_counter()
    while len(times) < most and (len(times) < least or time.perf_counter() - begin < seconds):
        if times and time.perf_counter() - begin > 5 * seconds:
            break  # work of a quarter of a minute and more: once is enough
        result = None  # so that no call sees the memory of two
        start = time.perf_counter()
        result = wait(run())
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"cold": cold, "warm": statistics.median(times), "peak": peak, "times": times}
    return found, result


def pooled(first, second):
    """One piece of work measured twice, in two processes: all calls count."""
    times = first["times"] + second["times"]
    return first | {
        "cold": statistics.median([first["cold"], second["cold"]]),
        "warm": statistics.median(times),
        "peak": max(first["peak"], second["peak"]),
        "times": times,
    }
