"""Continual learning of permuted MNIST: each posterior is the prior of the next task.

python examples/permuted_mnist.py --data mnist.npz

Ten tasks, each MNIST with its pixels in another order, are learned one after the other by one
network (784-100-100-10, ReLU). The data of a task are gone when the next begins; what stays is a
Gaussian prior, `posterior_fn.as_prior(...)`, whose penalty keeps the weights where earlier data
need them. Compared are structures of the prior, no prior at all (fine-tuning), and training on all
tasks together. The weight of the penalty is chosen on the last 5,000 training images, which are
used for nothing else: `--choose` repeats the choice on the first tasks and prints its table.
"""

import argparse
import functools
import itertools
import json
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import laplax

SIZES = (784, 100, 100, 10)
TASKS = 10
TRAINING_IMAGES = 55_000
BATCH = 500
EPOCHS = 5
LEARNING_RATE = 2e-3
LANCZOS_IMAGES = 5_500  # of every task, for the low-rank curvature
CHOICE_TASKS = 3
WEIGHTS = (1.0, 3.0, 10.0, 30.0, 100.0)


class Method(NamedTuple):
    """How a task's curvature is measured, how it joins the prior, and the penalty's weight."""

    curvature: dict
    merge: dict
    weight: float
    images: int = TRAINING_IMAGES


METHODS = {
    "fine-tuning": Method({}, {}, 0.0),
    "diagonal": Method({"curv_type": "diagonal"}, {}, 30.0),
    "low rank": Method(
        {"curv_type": "lanczos", "rank": 100, "tol": 0.25}, {"rank": 200}, 30.0, LANCZOS_IMAGES
    ),
    "KFAC, nearest": Method({"curv_type": "kfac"}, {"merge": "nearest"}, 10.0),
    "KFAC, all terms": Method({"curv_type": "kfac"}, {"merge": "exact"}, 10.0),
}
PRIOR_PREC = 1.0  # before the first task


def model_fn(input, params):
    for layer in params[:-1]:
        input = jax.nn.relu(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


def initial(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {"w": jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, "b": jnp.zeros(o)}
        for k, i, o in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def load(path):
    """Images as rows of floats, and labels: training, validation and test."""
    with np.load(path) as file:
        data = {
            split: (
                jnp.asarray(file[f"x_{split}"].reshape(-1, 784), jnp.float32) / 255,
                jnp.asarray(file[f"y_{split}"], jnp.int32),
            )
            for split in ("train", "test")
        }
    validation = jax.tree.map(lambda x: x[TRAINING_IMAGES:], data["train"])
    train = jax.tree.map(lambda x: x[:TRAINING_IMAGES], data["train"])
    return train, validation, data["test"]


def permutations(seed, tasks):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([rng.permutation(784) for _ in range(tasks)]))


@functools.partial(jax.jit, static_argnames="epochs")
def train(params, images, labels, orders, prior, weight, key, epochs):
    """Adam on the mean loss of a batch, plus the penalty's share of one image.

    With several pixel orders each image takes one of them at random.
    """
    count = images.shape[0]
    steps = count // BATCH
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, epochs * steps, alpha=1e-3)
    optimizer = optax.adam(schedule)

    def objective(params, batch, batch_labels):
        logits = model_fn(batch, params)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch_labels).mean()
        return loss if prior is None else loss + weight * 0.5 * prior.energy(params) / count

    def step(carry, index):
        params, state, key = carry
        key, own = jax.random.split(key)
        batch = images[index]
        if orders.shape[0] == 1:
            batch = batch[:, orders[0]]
        else:
            order = jax.random.randint(own, (BATCH,), 0, orders.shape[0])
            batch = jnp.take_along_axis(batch, orders[order], axis=1)
        slope = jax.grad(objective)(params, batch, labels[index])
        updates, state = optimizer.update(slope, state)
        return (optax.apply_updates(params, updates), state, key), None

    def epoch(carry, key):
        order = jax.random.permutation(key, count)[: steps * BATCH]
        return jax.lax.scan(step, carry, order.reshape(steps, BATCH))

    keys = jax.random.split(key, epochs + 1)
    carry = (params, optimizer.init(params), keys[0])
    return jax.lax.scan(epoch, carry, keys[1:])[0][0]


@jax.jit
def accuracy(params, images, labels, order):
    guesses = model_fn(images[:, order], params).argmax(-1)
    return jnp.mean((guesses == labels).astype(jnp.float32))


def learn(method, data, judged, seed, tasks, weight=None):
    """Accuracies on the tasks seen so far after each task, (tasks, tasks), and the seconds."""
    images, labels = data
    weight = jnp.float32(method.weight if weight is None else weight)
    key = jax.random.key(seed)
    params = initial(key)
    prior = laplax.gaussian_prior(params, {"prior_prec": PRIOR_PREC})
    orders = permutations(seed, tasks)
    scores = np.full((tasks, tasks), np.nan)
    start = time.perf_counter()
    for task, order in enumerate(orders):
        own = jax.random.fold_in(key, task)
        penalty = prior if method.curvature or task == 0 else None
        own_weight = weight if task else jnp.float32(1)  # the first prior is no memory
        params = train(params, images, labels, order[None], penalty, own_weight, own, EPOCHS)
        scores[task, : task + 1] = [accuracy(params, *judged, o) for o in orders[: task + 1]]
        if method.curvature and task + 1 < tasks:
            prior = remember(method, params, images[: method.images, order], labels, prior)
    return scores, time.perf_counter() - start


def remember(method, params, images, labels, prior):
    """The posterior of this task as the prior of the next."""
    data = (images, labels[: method.images])
    options = {} if method.images == TRAINING_IMAGES else {"num_total_samples": TRAINING_IMAGES}
    posterior_fn, _ = laplax.laplace(
        model_fn, params, data, loss_fn="cross_entropy", **method.curvature, **options
    )
    return posterior_fn.as_prior({"prior": prior}, **method.merge)


def learn_together(data, judged, seed, tasks):
    """All tasks at once, with as many steps as all of them take one after the other."""
    key = jax.random.key(seed)
    orders = permutations(seed, tasks)
    start = time.perf_counter()
    params = initial(key)
    prior = laplax.gaussian_prior(params, {"prior_prec": PRIOR_PREC})
    weight = jnp.float32(1 / tasks)  # of a loss that is the mean over ten times the images
    params = train(params, *data, orders, prior, weight, key, EPOCHS * tasks)
    return [float(accuracy(params, *judged, order)) for order in orders], (
        time.perf_counter() - start
    )


def choose(data, validation, names):
    """The mean validation accuracy after the first tasks for every weight of the penalty."""
    for name in names:
        for weight in WEIGHTS:
            method = METHODS[name]
            scores, seconds = learn(method, data, validation, 100, CHOICE_TASKS, weight)
            print(f"{name:16} {weight:6g} {scores[-1].mean():.4f} {seconds:6.0f} s", flush=True)


def draw(results, path):
    """The mean accuracy over the tasks seen so far."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 4))
    for name, runs in results.items():
        curves = np.asarray([run["seen"] for run in runs.values()])
        x = np.arange(1, TASKS + 1)
        if curves.shape[1] == 1:
            ax.axhline(curves.mean(), color="0.4", linestyle="--", label=name)
            continue
        ax.plot(x, curves.mean(0), marker="o", markersize=3, label=name)
        ax.fill_between(x, curves.min(0), curves.max(0), alpha=0.2)
    ax.set(xlabel="tasks learned", ylabel="mean test accuracy over them", ylim=(0.5, 1.0))
    ax.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Continual learning of permuted MNIST.")
    parser.add_argument("--data", required=True, help="MNIST as .npz")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="*", default=[*METHODS, "all together"])
    parser.add_argument("--choose", action="store_true", help="choose the penalty's weight")
    parser.add_argument("--figure", default="permuted_mnist.png")
    parser.add_argument("--results", default="permuted_mnist.json", help="read, extended, written")
    args = parser.parse_args()
    data, validation, test = load(args.data)
    if args.choose:
        choose(data, validation, args.methods)
        return
    file = pathlib.Path(args.results)
    results = json.loads(file.read_text()) if file.exists() else {}
    for seed, name in itertools.product(args.seeds, args.methods):
        if name == "all together":
            scores, seconds = learn_together(data, test, seed, TASKS)
            seen = [float(np.mean(scores))]
        else:
            scores, seconds = learn(METHODS[name], data, test, seed, TASKS)
            seen = [float(np.nanmean(row)) for row in scores]
            scores = scores[-1].tolist()
        run = {"seen": seen, "last": scores, "seconds": seconds}
        results.setdefault(name, {})[str(seed)] = run
        print(f"{name:16} seed {seed}: {seen[-1]:.4f} {seconds / 60:6.1f} min", flush=True)
        file.write_text(json.dumps(results))
    show(results)
    draw(results, args.figure)


def show(results):
    print(f"\n{'':16} mean accuracy after {TASKS} tasks (all seeds), worst task, minutes per seed")
    for name, by_seed in results.items():
        runs = by_seed.values()
        finals = [run["seen"][-1] for run in runs]
        worst = min(min(run["last"]) for run in runs)
        minutes = np.mean([run["seconds"] for run in runs]) / 60
        spread = f"{min(finals):.4f} to {max(finals):.4f}"
        print(f"{name:16} {np.mean(finals):.4f} ({spread})  {worst:.4f}  {minutes:.1f}")


if __name__ == "__main__":
    main()
