"""The first and the hundredth prediction of the process that fitted and of one with JAX alone.

    python benchmarks/serving.py

A diagonal posterior of a CNN (10,790 parameters, 10 classes, 28 x 28 images), batches of 16 images.
The first prediction is measured from the moment at which the predictive, or the bytes of its
program, are there; it compiles. Imports are not part of it.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

LAYOUT = ("NHWC", "HWIO", "NHWC")
BATCH = 16


def model_fn(input, params):
    x = input[None]
    for kernel, bias in params["convolutions"]:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=LAYOUT)
        x = jax.nn.relu(x + bias)
    return x.mean((1, 2))[0] @ params["w"] + params["b"]


def make_params(rng):
    sizes = [(3, 3, 1, 16), (3, 3, 16, 32), (3, 3, 32, 20)]
    arrays = [(rng.normal(size=s) / np.sqrt(np.prod(s[:3])), np.zeros(s[3])) for s in sizes]
    params = {"convolutions": arrays, "w": rng.normal(size=(20, 10)) / 4, "b": np.zeros(10)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def times(predict, batch):
    """Seconds of the first prediction, and the median of the 90th to the 110th."""
    seconds = []
    for _ in range(110):
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(predict(batch)))
        seconds.append(time.perf_counter() - start)
    return seconds[0], float(np.median(seconds[90:]))


def serve(path):
    """What a process without laplax does."""
    from jax import export

    batch = np.load(path.with_suffix(".npy"))
    start = time.perf_counter()
    predict = jax.jit(export.deserialize(path.read_bytes()).call)
    reading = time.perf_counter() - start
    first, hundredth = times(predict, batch)
    assert "laplax" not in sys.modules
    print(reading + first, hundredth)


def main():
    import laplax

    rng = np.random.default_rng(0)
    images = rng.normal(size=(64, 28, 28, 1)).astype(np.float32)
    data = (images, rng.integers(0, 10, 64))
    params = make_params(rng)
    posterior_fn, _ = laplax.laplace(
        model_fn, params, data, loss_fn="cross_entropy", curv_type="diagonal"
    )
    prob_predictive = posterior_fn.predictive()({"prior_prec": 1.0})
    batch = images[:BATCH]
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    rows = {"process of the fit": times(prob_predictive, batch)}
    with tempfile.TemporaryDirectory() as folder:
        for symbolic, name in ((True, "exported, any batch"), (False, "exported, batch of 16")):
            path = pathlib.Path(folder) / f"{symbolic}.bin"
            path.write_bytes(prob_predictive.export(batch, symbolic_batch=symbolic))
            np.save(path.with_suffix(".npy"), batch)
            command = [sys.executable, __file__, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[name] = tuple(float(x) for x in done.stdout.split())
            print(f"{name}: {path.stat().st_size:,} bytes")
    for name, (first, hundredth) in rows.items():
        print(f"{name:22} first {first:6.2f} s   hundredth {1e3 * hundredth:7.2f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(pathlib.Path(sys.argv[1]))
    else:
        main()
