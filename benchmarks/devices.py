"""Two processes on one core each against one process on one core: how fits of many hosts scale.

    python benchmarks/devices.py                  # MLP (c) and CNN (d), under 10 minutes

Each fit is called twice; the second call counts. The answers of both runs are compared.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "compare"))

FITS = {"diagonal": {}, "kfac": {}, "lanczos": {"rank": 3, "num_products": 4}}
EXAMPLES = {"c": 240_000, "d": 16_000}
ENTRIES = 5  # of a product with the covariance that are compared


def worker(name, rank, count, port):
    """Fit on this process's share of the examples, and print seconds and a few numbers."""
    import jax
    import jax.numpy as jnp
    import networks
    import numpy as np
    import problems

    import laplax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, rank)
    problem = problems.make(name, EXAMPLES[name])
    model_fn = networks.NETWORKS[problem.kind]
    params = networks.as_params(problem)
    mesh = jax.make_mesh((count,), ("data",))
    own = slice(rank * len(problem.x) // count, (rank + 1) * len(problem.x) // count)
    data = laplax.shard((problem.x[own], problem.y[own]), mesh)
    results = {}
    for curv_type, options in FITS.items():
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            posterior_fn, _ = laplax.laplace(
                model_fn, params, data, loss_fn=problem.loss, curv_type=curv_type, **options
            )
            jax.block_until_ready(posterior_fn.structure)
            seconds.append(time.perf_counter() - start)
        vector = jnp.linspace(0.5, 1, posterior_fn.space.size, dtype=jnp.float32)
        product = posterior_fn({"prior_prec": 1.0}).cov_mv(vector)
        step = max(1, product.size // ENTRIES)
        results[curv_type] = (seconds[-1], np.asarray(product)[::step].tolist())
    if rank == 0:
        print(json.dumps(results))


def run(name, count):
    """All processes of one run, each on a core of its own."""
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port = opened.getsockname()[1]
    flags = "--xla_cpu_multi_thread_eigen=false"

    def numbers(rank):
        return [str(number) for number in (rank, count, port)]

    started = [
        subprocess.Popen(
            [
                "taskset",
                "-c",
                str(rank),
                sys.executable,
                __file__,
                "--worker",
                name,
                *numbers(rank),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a process of ({name}) failed")
    return json.loads(outputs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs=4)
    parser.add_argument("--only", default="cd", help="which problems: c, d or cd")
    args = parser.parse_args()
    if args.worker:
        name, *numbers = args.worker
        worker(name, *map(int, numbers))
        return
    print("| fit | one process, s | two processes, s | faster | largest difference |")
    print("|---|---|---|---|---|")
    for name in args.only:
        alone, together = run(name, 1), run(name, 2)
        for fit in FITS:
            first, second = alone[fit], together[fit]
            largest = max(abs(x) for x in first[1])
            apart = max(abs(x - y) for x, y in zip(first[1], second[1], strict=True)) / largest
            ratio = first[0] / second[0]
            seconds = f"{first[0]:.2f} | {second[0]:.2f}"
            print(f"| ({name}) {fit} | {seconds} | {ratio:.2f}x | {apart:.0e} |")


if __name__ == "__main__":
    main()
