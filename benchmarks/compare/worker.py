"""Times one piece of work of one library and prints what it saw as JSON.

    python worker.py LIBRARY PROBLEM WORK CURVATURE
LIBRARY is ours, floors, laplax, or torch:BACKEND. Only the libraries of this process's environment
are imported.
"""

import contextlib
import json
import os
import sys
import time

import problems
import timing

PATIENCE = 20  # seconds: one call of what takes longer is enough


def make(library, problem, curvature):
    """The library's object for a problem, and its way to wait for results."""
    if library == "ours":
        import ours

        return ours.Ours(problem, curvature), ours.wait
    if library == "floors":
        import floors
        import jax

        return floors.Floors(problem), jax.block_until_ready
    if library == "laplax":
        # Its predictive closes over the posterior's factor, and XLA would multiply that constant
        # by itself while it compiles, for minutes. To its advantage, it may not.
        os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=constant_folding"
        import peer_laplax

        return peer_laplax.PeerLaplax(problem, curvature), peer_laplax.wait
    import peer_torch

    backend = library.removeprefix("torch:")
    return peer_torch.PeerTorch(problem, curvature, backend), peer_torch.wait


def run(library, name, work, curvature):
    """Seconds, memory and answer of one piece of work."""
    problem = problems.make(name)
    subject, wait = make(library, problem, curvature)
    if work == "fit":
        found, fitted = timing.measure(subject.fit, wait, patience=PATIENCE)
        return found | {"answer": subject.answer(fitted)}
    made, share = getattr(subject, work)(), 1
    if work.startswith("part_of"):
        made, share = made
    ways = made if isinstance(made, list) else [made]
    tried = [timing.measure(way, wait, patience=PATIENCE) for way in ways]
    found, result = min(tried, key=lambda pair: pair[0]["warm"])
    if share < 1:
        times = [t / share for t in found["times"]]
        found |= {"cold": None, "warm": found["warm"] / share, "times": times, "share": share}
    if work.endswith("variance"):
        found["answer"] = [float(v) for v in result[:20].ravel()]
    if work in ("grid", "evidence"):
        found["answer"] = [float(result)]
    return found


def main():
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        found = run(*sys.argv[1:])
    found["seconds"] = time.perf_counter() - start
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of a library that linger do not count


if __name__ == "__main__":
    main()
