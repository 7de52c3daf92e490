"""What a grid costs beyond its first point, warm, in one run.

    python benchmarks/calibration.py
NLL by the linear pushforward on 50 held-out points, full curvature of a 1-50-50-1 MLP (P = 2,701,
N = 150). Exits with 1 when 50 points cost more than 2 x, or 1,000 more than 4 x, the cost of one.
"""

import sys
import warnings

import jax.numpy as jnp
import numpy as np
from core import median_time, mlp, model_fn

from laplax import CalibrationWarning, GridSearch, calibration, laplace

BOUNDS = {1: 1.0, 50: 2.0, 1000: 4.0}


def data(count, seed):
    rng = np.random.default_rng(seed)
    x = np.sign(rng.standard_normal((count, 1))) * rng.uniform(0.5, 1.0, (count, 1))
    y = np.sin(2 * np.pi * x) + 0.2 * rng.standard_normal((count, 1))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def main():
    params = mlp((1, 50, 50, 1))
    posterior_fn, _ = laplace(model_fn, params, data(150, 0), loss_fn="mse", curv_type="full")
    held_out = data(50, 1)

    def search(size):
        return calibration(
            posterior_fn,
            model_fn,
            params,
            held_out,
            calibration_objective="nll",
            calibration_method=GridSearch(grid_size=size),
        )[1].trace

    warnings.simplefilter("ignore", CalibrationWarning)  # the weights are random: edges are fine
    times = {size: median_time(lambda size=size: search(size), 15) for size in BOUNDS}
    print(f"{'points':>7} {'seconds':>9} {'ratio':>6} {'bound':>6}")
    for size, bound in BOUNDS.items():
        print(f"{size:7} {times[size]:9.4f} {times[size] / times[1]:6.2f} {bound:6.1f}")
    return int(any(times[size] > bound * times[1] for size, bound in BOUNDS.items() if size > 1))


if __name__ == "__main__":
    sys.exit(main())
