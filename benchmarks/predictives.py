"""What an integral over the logits costs in a search, beside a closed form, in one run.

    python benchmarks/predictives.py

A grid of 50 prior precisions by NLL on 5,000 held-out inputs, ten classes, the last layer of a
64-feature network with full curvature, float32: `"mc_bridge"` at 512 points against
`"mean_field_2"`, compilation excluded. Exits with 1 when the ratio is above 3.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from core import median_time

from laplax import CalibrationWarning, calibration, laplace

INPUTS, FEATURES, CLASSES, POINTS = 5_000, 64, 10, 512
BOUND = 3.0


def model_fn(input, params):
    return input @ params["weight"] + params["bias"]


def data(count, params, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((count, FEATURES)), jnp.float32)
    y = jax.random.categorical(jax.random.key(seed), model_fn(x, params))
    return x, y


def main():
    rng = np.random.default_rng(0)
    params = {
        "weight": jnp.asarray(rng.standard_normal((FEATURES, CLASSES)) / 4, jnp.float32),
        "bias": jnp.zeros(CLASSES, jnp.float32),
    }
    training = data(1_000, params, 1)
    held_out = data(INPUTS, params, 2)
    posterior_fn, _ = laplace(model_fn, params, training, loss_fn="cross_entropy", curv_type="full")

    def search(predictive_type):
        return calibration(
            posterior_fn,
            model_fn,
            params,
            held_out,
            calibration_objective="nll",
            predictive_type=predictive_type,
            num_samples=POINTS,
        )[1].trace

    warnings.simplefilter("ignore", CalibrationWarning)
    names = ("mean_field_2", "mc_bridge")
    times = {name: median_time(lambda name=name: search(name), 3) for name in names}
    ratio = times["mc_bridge"] / times["mean_field_2"]
    for name, seconds in times.items():
        print(f"{name:14} {seconds:8.2f} s")
    print(f"ratio {ratio:.2f}, bound {BOUND}")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
