"""Training by marginal likelihood against plain training of the same network in bare JAX, warm.

    python benchmarks/training.py
The MNIST network 784-200-200-10 on 55,000 images, Adam on batches of 128, KFAC and 100 steps up the
evidence every 5 epochs. A fit sees 10,000 of the images, drawn anew; the second ratio is that of
fits of all. Exits with 1 when the first exceeds its bound.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from core import mlp, model_fn

from laplax.training import marglik_training

IMAGES, BATCH, EPOCHS, FREQUENCY, BOUND = 55_000, 128, 10, 5, 1.5
SEEN = 10_000  # images in a fit
OPTIMIZER = optax.adam(1e-3)


@jax.jit
def bare_epoch(params, state, x, y, rows):
    def loss(params, x, y):
        f = jax.vmap(model_fn, (0, None))(x, params)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(f, y))

    def step(carry, chosen):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, x[chosen], y[chosen])
        updates, state = OPTIMIZER.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, (params, state), rows)


def plain(params, x, y):
    state = OPTIMIZER.init(params)
    steps = IMAGES // BATCH
    for epoch in range(EPOCHS):
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(0), epoch), IMAGES)
        rows = order[: steps * BATCH].reshape(steps, BATCH)
        (params, state), losses = bare_epoch(params, state, x, y, rows)
    return jax.block_until_ready(losses)


def by_evidence(params, x, y, seen=None):
    return marglik_training(
        model_fn,
        params,
        (x, y),
        loss_fn="cross_entropy",
        optimizer=OPTIMIZER,
        num_epochs=EPOCHS,
        batch_size=BATCH,
        key=jax.random.key(0),
        curv_type="kfac",
        frequency=FREQUENCY,
        num_curv_samples=seen,
        hyper_steps=100,
        progress=False,
    )


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main():
    rng = np.random.default_rng(1)
    params = mlp((784, 200, 200, 10))
    x = jnp.asarray(rng.uniform(0, 1, (IMAGES, 784)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, IMAGES))
    of_some = functools.partial(by_evidence, seen=min(SEEN, IMAGES))
    runs = [functools.partial(run, params, x, y) for run in (plain, of_some, by_evidence)]
    first = [seconds(run) for run in runs]
    warm = np.array([[seconds(run) for run in runs] for _ in range(3)])  # in turn
    ratios = np.median(warm[:, 1:] / warm[:, :1], axis=0)
    bare, some, whole = np.median(warm, axis=0)
    print(f"{EPOCHS} epochs of {IMAGES:,} images, seconds; first calls {np.round(first, 1)}")
    print(f"plain {bare:.1f}; by marginal likelihood {some:.1f}, with fits of all {whole:.1f}")
    print(f"ratio {ratios[0]:.2f} (bound {BOUND}), with fits of all {ratios[1]:.2f}")
    return int(ratios[0] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
