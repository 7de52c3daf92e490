"""LeNet on Fashion-MNIST, pruned by its posterior: whole filters and neurons, or single weights.

python examples/pruning.py --data fashion_mnist.npz --folder out/pruning

The data file holds `x_train`, `y_train`, `x_test`, `y_test` (uint8 images of 28 x 28, integer
labels). The network is that of Dhahri et al. (2024), arXiv:2402.15978. It is trained on 55,000
images with one prior precision for each unit, which the evidence chooses during training, and with
a weak fixed prior. The 5,000 other training images choose what ranks the units; the test
images are used for the tables alone. Trained networks are kept in the folder, and read from there
by the next run. Seconds include compilation.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from laplax import laplace
from laplax.pruning import (
    find_units,
    kept_units,
    masked,
    parameter_mask,
    parameter_scores,
    shrink,
    unit_mask,
    unit_scores,
)

SIZES = {
    "conv1": (5, 5, 1, 6),
    "conv2": (3, 3, 6, 16),
    "conv3": (5, 5, 16, 120),
    "fc": (120, 84),
    "out": (84, 10),
}
TRAINING_IMAGES = 55_000
CURVATURE_IMAGES = {"during training": 2_000, "for the scores": 10_000}
BATCH = 128
EPOCHS = 10
BURN_IN = 2  # epochs with the first prior
FREQUENCY = 2  # epochs between two updates of the prior
TUNING_EPOCHS = 2
FIXED_PRIOR = 1.0
SPARSITIES = (0.4, 0.6, 0.8, 0.9, 0.95)
FINE_SPARSITIES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99)

NETWORKS = {
    "unit": "one prior precision per unit, by evidence",
    "fixed": "fixed prior precision",
}

# Accuracies of the structured networks with KFAC and one prior precision per parameter, as
# published, by the stated sparsity.
PUBLISHED = {0.0: 0.880, 0.4: 0.877, 0.6: 0.861, 0.8: 0.843, 0.9: 0.810, 0.95: 0.779}


# -- network and training -------------------------------------------------------------------------
def init(key):
    def layer(key, shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        return {"w": scale * jax.random.normal(key, shape), "b": jnp.zeros(shape[-1])}

    keys = jax.random.split(key, len(SIZES))
    return {name: layer(k, shape) for k, (name, shape) in zip(keys, SIZES.items(), strict=True)}


def convolve(x, layer):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "VALID", dimension_numbers=numbers)
    return jax.nn.relu(x + layer["b"])


def pool(x):
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def batch_fn(input, params):
    """LeNet: three convolutions and two dense layers, of the sizes that `params` have."""
    x = pool(convolve(input[..., None], params["conv1"]))
    x = pool(convolve(x, params["conv2"]))
    x = convolve(x, params["conv3"])
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["fc"]["w"] + params["fc"]["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


def model_fn(input, params):
    return batch_fn(input[None], params)[0]


def load(path):
    arrays = np.load(path)

    def part(name, where):
        images = arrays[f"x_{name}"][where].astype(np.float32) / 255
        return jnp.asarray(images), jnp.asarray(arrays[f"y_{name}"][where].astype(np.int32))

    train = part("train", slice(None, TRAINING_IMAGES))
    return train, part("train", slice(TRAINING_IMAGES, None)), part("test", slice(None))


def make_step(optimizer):
    """One step on the mean loss and the prior's share. Python drives the steps: XLA's CPU backend
    runs convolutions several times slower inside a loop."""

    @jax.jit
    def step(params, state, prior_prec, data, index):
        def loss(params):
            images, labels = (x[index] for x in data)
            f = batch_fn(images, params)
            nll = optax.softmax_cross_entropy_with_integer_labels(f, labels).mean()
            energy = jax.tree.map(lambda x, t: jnp.sum(t * x**2), params, prior_prec)
            return nll + 0.5 * sum(jax.tree.leaves(energy)) / TRAINING_IMAGES

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    return step


def epochs(params, data, rate, count, prior_prec, update=None, seed=0):
    """Adam with a cosine schedule; `update(params, prior_prec)` after every `FREQUENCY` epochs."""
    steps = len(data[0]) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, count * steps))
    step = make_step(optimizer)
    state = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for epoch in range(count):
        order = rng.permutation(len(data[0]))[: steps * BATCH].reshape(steps, BATCH)
        for index in order:
            params, state = step(params, state, prior_prec, data, index)
        since = epoch + 1 - BURN_IN
        if update is not None and since >= 0 and since % FREQUENCY == 0:
            prior_prec = update(params, prior_prec)
    return params, prior_prec


@jax.jit
def num_correct(params, images, labels):
    return jnp.sum(batch_fn(images, params).argmax(axis=1) == labels)


def accuracy(params, data):
    parts = [slice(i, i + 1_000) for i in range(0, len(data[0]), 1_000)]
    return sum(int(num_correct(params, *(x[p] for x in data))) for p in parts) / len(data[0])


# -- the prior by the evidence --------------------------------------------------------------------
def fit(params, data, images, **options):
    """The diagonal of the GGN from a part of the images."""
    posterior_fn, _ = laplace(
        model_fn,
        params,
        tuple(x[:images] for x in data),
        loss_fn="cross_entropy",
        curv_type="diagonal",
        num_total_samples=len(data[0]),
        **options,
    )
    return posterior_fn


def sums_of(tree, units):
    """Sums over units, and over the layer that makes the outputs."""
    sums = unit_scores(tree, units)
    return {**sums, "out": sum(jnp.sum(x) for x in jax.tree.leaves(tree["out"]))}


def spread(values, units, params):
    """Numbers per unit as a pytree like `params`."""
    leaves, treedef = jax.tree.flatten(
        jax.tree.map(lambda x: jnp.full_like(x, values["out"]), params)
    )
    for group in units.groups:
        for part in group.incoming:
            shape = [1] * leaves[part.leaf].ndim
            shape[part.axis] = -1
            new = values[group.name][part.units].reshape(shape)
            leaves[part.leaf] = jnp.broadcast_to(new, leaves[part.leaf].shape)
    return jax.tree.unflatten(treedef, leaves)


def evidence_prior(posterior_fn, units, params, prior_prec, iterations=10):
    """MacKay's fixed point: the effective number of parameters over the sum of their squares."""
    squares = sums_of(jax.tree.map(jnp.square, params), units)
    for _ in range(iterations):
        variance = posterior_fn({"prior_prec": prior_prec}).variance()
        gamma = jax.tree.map(lambda t, v: 1 - t * v, prior_prec, variance)
        effective = sums_of(gamma, units)
        values = {n: jnp.clip(effective[n] / squares[n], 1e-2, 1e6) for n in squares}
        prior_prec = spread(values, units, params)
    return prior_prec


def train(name, data, units, key, folder):
    """A network and its prior precision; kept in a file for the next run."""
    params = init(key)
    prior_prec = jax.tree.map(lambda x: jnp.full_like(x, FIXED_PRIOR), params)
    treedef = jax.tree.structure((params, prior_prec))
    path = folder / f"{name}.npz"
    if path.exists():
        stored = np.load(path)
        return jax.tree.unflatten(treedef, [jnp.asarray(stored[n]) for n in stored.files])

    def update(params, prior_prec):
        posterior_fn = fit(params, data, CURVATURE_IMAGES["during training"])
        return evidence_prior(posterior_fn, units, params, prior_prec)

    start = time.perf_counter()
    trained = epochs(params, data, 1e-3, EPOCHS, prior_prec, None if name == "fixed" else update)
    np.savez(path, *(np.asarray(x) for x in jax.tree.leaves(trained)))
    print(f"{name}: trained in {time.perf_counter() - start:.0f} s", flush=True)
    return trained


# -- pruning --------------------------------------------------------------------------------------
RULES = {
    "incoming weights": {"outgoing": False, "per_parameter": False},
    "incoming weights, per parameter": {"outgoing": False, "per_parameter": True},
    "all weights": {"outgoing": True, "per_parameter": False},
    "all weights, per parameter": {"outgoing": True, "per_parameter": True},
}


def choose_units(scores, units, sparsity, outgoing, per_parameter):
    by_unit = unit_scores(scores, units, outgoing=outgoing)
    return kept_units(by_unit, units, sparsity, per_parameter=per_parameter)


def choose_rule(params, scores, units, held_out):
    """The rule with the best mean accuracy on held-out images, over the sparsities, not tuned."""
    means = {}
    for name, rule in RULES.items():
        masks = [unit_mask(units, choose_units(scores, units, s, **rule)) for s in SPARSITIES]
        accuracies = [accuracy(masked(params, mask), held_out) for mask in masks]
        means[name] = np.mean(accuracies)
        print(f"  {name:32} " + " ".join(f"{x:.4f}" for x in accuracies), flush=True)
    return max(means, key=means.get)


def structured(name, params, prior_prec, units, data, held_out, test):
    """Accuracy by sparsity of smaller networks, as they are and after a few epochs."""
    start = time.perf_counter()
    posterior_fn = fit(params, data, CURVATURE_IMAGES["for the scores"])
    posterior = posterior_fn({"prior_prec": prior_prec})
    scores = parameter_scores(posterior)
    print(f"{name}: fit and scores {time.perf_counter() - start:.0f} s", flush=True)
    print("held-out accuracy, not tuned, at " + " ".join(f"{s:.0%}" for s in SPARSITIES))
    rule = choose_rule(params, scores, units, held_out)
    print(f"{name}: the score of a unit is {rule!r}", flush=True)
    rows = []
    for sparsity in SPARSITIES:
        kept = choose_units(scores, units, sparsity, **RULES[rule])
        small = shrink(params, units, kept)
        before = accuracy(small, test)
        rest = shrink(prior_prec, units, kept)
        tuned, _ = epochs(small, data, 1e-3, TUNING_EPOCHS, rest, seed=1)
        left = {n: int(k.sum()) for n, k in kept.items()}
        row = (sparsity, units.num_parameters(kept), before, accuracy(tuned, test), left)
        rows.append(row)
        print_row(name, row)
    return scores, rows


def print_row(name, row):
    sparsity, size, before, after, left = row
    numbers = "-".join(str(n) for n in left.values())
    print(
        f"{name:9} {sparsity:5.0%} {size:7,} parameters  {numbers:14} not tuned {before:.4f}  "
        f"tuned {after:.4f}  published {PUBLISHED[sparsity]:.3f}",
        flush=True,
    )


def unstructured(params, scores, test):
    """Accuracy without single weights, not tuned, for several sparsities."""
    masks = [parameter_mask(scores, s) for s in FINE_SPARSITIES]
    return [accuracy(masked(params, mask), test) for mask in masks]


def main():
    parser = argparse.ArgumentParser(description="Pruning LeNet by its posterior.")
    parser.add_argument("--data", required=True, help="Fashion-MNIST as .npz")
    parser.add_argument("--folder", default="out/pruning", help="for networks and the picture")
    args = parser.parse_args()
    folder = pathlib.Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    data, held_out, test = load(args.data)
    units = find_units(model_fn, init(jax.random.key(0)), data[0][:1])
    print(units, flush=True)
    structured_rows, curves = {}, {}
    for name in NETWORKS:
        params, prior_prec = train(name, data, units, jax.random.key(0), folder)
        print(
            f"{name}: test accuracy {accuracy(params, test):.4f}, {units.num_parameters():,} "
            "parameters",
            flush=True,
        )
        scores, structured_rows[name] = structured(
            name, params, prior_prec, units, data, held_out, test
        )
        curves[name, "posterior"] = unstructured(params, scores, test)
        curves[name, "magnitude"] = unstructured(params, jax.tree.map(jnp.square, params), test)
        print("single weights, not tuned: " + " ".join(f"{s:.1%}" for s in FINE_SPARSITIES))
        for how in ("posterior", "magnitude"):
            values = " ".join(f"{x:.4f}" for x in curves[name, how])
            print(f"{name:9} {how:15} {values}", flush=True)
    draw(structured_rows, curves, folder / "pruning.png")


def draw(structured_rows, curves, path):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True, sharey=True)
    percent = [100 * s for s in SPARSITIES]
    for i, (name, rows) in enumerate(structured_rows.items()):
        label = NETWORKS[name]
        axes[0].plot(percent, [row[3] for row in rows], "o-", color=f"C{i}", label=label)
        axes[0].plot(percent, [row[2] for row in rows], "o:", color=f"C{i}", mfc="white")
    published = [PUBLISHED[s] for s in SPARSITIES]
    axes[0].plot(percent, published, "kx", label="published")
    for (name, how), values in curves.items():
        color = f"C{list(NETWORKS).index(name)}"
        style = {"posterior": "-", "magnitude": "--"}[how]
        axes[1].plot([100 * s for s in FINE_SPARSITIES], values, style, color=color)
    axes[1].plot([], [], "k-", label="ranked by the posterior")
    axes[1].plot([], [], "k--", label="ranked by magnitude")
    axes[0].set_title("filters and neurons: tuned (solid), not tuned (dotted)")
    axes[1].set_title("single weights, not tuned")
    for axis in axes:
        axis.set(xlabel="parameters removed, %", ylim=(0.0, 0.95))
        axis.legend(loc="lower left", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
