"""Exact diagonal, KFAC and many classes: warm time against one gradient pass, peak memory.

    python benchmarks/structure.py
Every row runs in a process of its own, so that its peak memory is its own. Prints a table; exits
with 1 when a bound is exceeded.
"""

import json
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from core import median_time, mlp, model_fn

from laplax import laplace, predictive

GIB = 2**30
CLASSES = 10


def cnn(seed=0):
    rng = np.random.default_rng(seed)

    def weights(*shape):
        scale = np.prod(shape[:-1]) ** 0.5
        return jnp.asarray(rng.standard_normal(shape) / scale, jnp.float32)

    convolutions = [(weights(3, 3, a, b), jnp.zeros(b)) for a, b in ((3, 16), (16, 32), (32, 64))]
    return {"conv": convolutions, "dense": (weights(4 * 4 * 64, CLASSES), jnp.zeros(CLASSES))}


def halved(x):
    """A 2 x 2 maximum."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def cnn_fn(input, params):
    """Three 3 x 3 convolutions, each followed by pooling, and a dense layer."""
    x = input[None]
    for w, b in params["conv"]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
        x = halved(jax.nn.relu(x + b))
    w, b = params["dense"]
    return x.reshape(-1) @ w + b


def wide_cnn_fn(input, params):
    """The same convolutions at full resolution, pooled once at the end."""
    x = input[None]
    for w, b in params["conv"]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + b)
    x = x.reshape(4, 8, 4, 8, -1).mean(axis=(1, 3))
    w, b = params["dense"]
    return x.reshape(-1) @ w + b


def labelled(*shape):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return x, jnp.asarray(rng.integers(0, CLASSES, shape[0]))


PROBLEMS = {
    "mlp": (model_fn, lambda: mlp((784, 256, 128, CLASSES)), (6000, 784)),
    "cnn": (cnn_fn, cnn, (2000, 32, 32, 3)),
    "wide": (wide_cnn_fn, cnn, (2000, 32, 32, 3)),
}


def gradient_pass(fn, params, x, y):
    """The faster of one call for all examples and of calls of 250."""

    @jax.jit
    def gradient(params, x, y):
        def loss(params):
            logs = jax.nn.log_softmax(jax.vmap(fn, (0, None))(x, params))
            return -jnp.sum(jnp.take_along_axis(logs, y[:, None], axis=1))

        return jax.grad(loss)(params)

    def in_parts():
        return [gradient(params, x[i : i + 250], y[i : i + 250]) for i in range(0, len(x), 250)]

    whole = median_time(lambda: gradient(params, x, y), 5)
    return min(whole, median_time(in_parts, 5))


def fit_row(problem, curv_type):
    fn, make_params, shape = PROBLEMS[problem]
    params, (x, y) = make_params(), labelled(*shape)

    def fit():
        options = {"loss_fn": "cross_entropy", "curv_type": curv_type}
        return laplace(fn, params, (x, y), **options)[1].structure

    ours = median_time(fit, 5)
    peak = peak_bytes()  # before the floor, whose memory is not ours
    return {"floor": gradient_pass(fn, params, x, y), "ours": ours, "peak": peak}


def classes_row(curv_type, features=128, classes=3100, count=1000):
    """Predictive variances of a last layer; the curvature of a few labels is enough to have one."""
    rng = np.random.default_rng(2)
    params = {
        "w": jnp.asarray(rng.standard_normal((features, classes)) / features**0.5, jnp.float32),
        "b": jnp.zeros(classes),
    }
    x = jnp.asarray(rng.standard_normal((count, features)), jnp.float32)
    y = jnp.asarray(rng.integers(0, classes, count))

    def last_layer(input, params):
        return jnp.tanh(input) @ params["w"] + params["b"]

    posterior_fn, _ = laplace(
        last_layer,
        params,
        (x, y),
        loss_fn="cross_entropy",
        curvature="fisher_empirical",
        curv_type=curv_type,
    )
    prob_predictive = predictive(posterior_fn, last_layer)({"prior_prec": 1.0})
    ours = median_time(lambda: prob_predictive(x, ["pred_var"])["pred_var"], 3)
    forward = jax.jit(jax.vmap(last_layer, (0, None)))
    peak = peak_bytes()
    return {"floor": median_time(lambda: forward(x, params), 9), "ours": ours, "peak": peak}


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# name: (function, arguments, bound on the ratio, bound on memory)
ROWS = {
    "diagonal, MLP, N = 6,000": (fit_row, ("mlp", "diagonal"), CLASSES + 2, None),
    "KFAC, MLP, N = 6,000": (fit_row, ("mlp", "kfac"), 2 * (CLASSES + 2), None),
    "diagonal, CNN, N = 2,000": (fit_row, ("cnn", "diagonal"), CLASSES + 2, 3 * GIB),
    "KFAC, CNN, N = 2,000": (fit_row, ("cnn", "kfac"), CLASSES + 2, 3 * GIB),
    "diagonal, wide CNN": (fit_row, ("wide", "diagonal"), CLASSES + 2, 3 * GIB),
    "KFAC, wide CNN": (fit_row, ("wide", "kfac"), CLASSES + 2, 3 * GIB),
    "3,100 classes, diagonal": (classes_row, ("diagonal",), None, GIB),
    "3,100 classes, KFAC": (classes_row, ("kfac",), None, GIB),
}


def measure(name):
    done = subprocess.run(
        [sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def main():
    if len(sys.argv) > 1:
        function, arguments, *_ = ROWS[sys.argv[1]]
        print(json.dumps(function(*arguments)))
        return 0
    print(
        f"{'work':28} {'pass':>9} {'laplax':>9} {'ratio':>6} {'bound':>6} {'peak':>9} {'bound':>9}"
    )
    exceeded = False
    for name, (_, _, most, memory) in ROWS.items():
        row = measure(name)
        ratio = row["ours"] / row["floor"]
        bounds = f"{most or '':>6}", f"{f'{memory / GIB:.0f} GiB' if memory else '':>9}"
        print(
            f"{name:28} {row['floor']:8.4f}s {row['ours']:8.4f}s {ratio:6.2f} {bounds[0]} "
            f"{row['peak'] / GIB:5.2f} GiB {bounds[1]}",
            flush=True,
        )
        exceeded |= (most is not None and ratio > most) or bool(memory and row["peak"] > memory)
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
