"""Fits of the core against bare JAX for the same mathematics, warm, in one run.

    python benchmarks/core.py
Prints a table of medians and ratios; exits with 1 when a ratio exceeds its bound.
"""

import functools
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from laplax import curvature_mv, laplace


def mlp(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (
            jnp.asarray(rng.standard_normal((a, b)) / a**0.5, jnp.float32),
            jnp.asarray(0.1 * rng.standard_normal(b), jnp.float32),
        )
        for a, b in itertools.pairwise(sizes)
    ]


def model_fn(input, params):
    for w, b in params[:-1]:
        input = jnp.tanh(input @ w + b)
    w, b = params[-1]
    return input @ w + b


def median_time(fn, repeats):
    jax.block_until_ready(fn())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@jax.jit
def bare_gram(params, x):
    jacobian = jax.vmap(jax.jacrev(lambda p, x: model_fn(x, p)), in_axes=(None, 0))(params, x)
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(jacobian)]
    rows = jnp.concatenate(rows, axis=1)
    return rows.T @ rows


def full_row(name, sizes, examples, bound):
    rng = np.random.default_rng(1)
    params = mlp(sizes)
    x = jnp.asarray(rng.standard_normal((examples, sizes[0])), jnp.float32)
    y = jnp.asarray(rng.standard_normal((examples, sizes[-1])), jnp.float32)
    floor = median_time(lambda: bare_gram(params, x), 15)

    def fit():
        return laplace(model_fn, params, (x, y), loss_fn="mse", curv_type="full")[1]

    return name, floor, median_time(fit, 15), bound * floor, f"{bound} x bare J^T J"


def lanczos_row(products=50):
    rng = np.random.default_rng(2)
    params = mlp((784, 256, 128, 10))
    x = jnp.asarray(rng.standard_normal((6000, 784)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, 6000))
    mv = curvature_mv(model_fn, params, (x, y), loss_fn="cross_entropy")
    v = jnp.ones(mv.size, jnp.float32)
    floor = median_time(functools.partial(mv, v), 15)

    def fit():
        return laplace(
            model_fn,
            params,
            (x, y),
            loss_fn="cross_entropy",
            curv_type="lanczos",
            rank=45,
            num_products=products,
        )[1]

    limit = 1.5 * products * floor + 0.020
    return "lanczos, 50 products", products * floor, median_time(fit, 5), limit, "1.5 x 50 products"


def main():
    rows = [
        full_row("full, 1-50-50-1, N = 150", (1, 50, 50, 1), 150, 4),
        full_row("full, 8-50-1, N = 10,000", (8, 50, 1), 10_000, 3),
        lanczos_row(),
    ]
    print(f"{'work':28} {'floor':>9} {'laplax':>9} {'ratio':>6} {'bound':>9}  of")
    for name, floor, ours, limit, what in rows:
        print(f"{name:28} {floor:8.4f}s {ours:8.4f}s {ours / floor:6.2f} {limit:8.4f}s  {what}")
    return int(any(ours > limit for _, _, ours, limit, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
