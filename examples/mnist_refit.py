"""The last layer of a trained MNIST network moved to its mode, the prior by held-out images.

python examples/mnist_refit.py --data mnist.npz --weights mnist_mlp.npz

The files are those of examples/mnist.py. The network was trained with dropout, so that its weights
are not at a mode of the training loss: `mode_distance` says by how many nats. The last layer is
refitted on the first 55,000 training images for every prior precision, and the 5,000 others choose
among them. Features are computed once. Seconds include compilation.
"""

import argparse
import time

import jax
from mnist import TRAINING_IMAGES, load_images, load_params, model_fn

from laplax import glm_mode, laplace, last_layer_features

METRICS = ("accuracy", "nll", "ece", "brier")
PRIOR_PRECS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def split(data):
    """The training images, and those that choose the prior precision."""
    return (
        jax.tree.map(lambda x: x[:TRAINING_IMAGES], data),
        jax.tree.map(lambda x: x[TRAINING_IMAGES:], data),
    )


def judge(posterior_fn, prior_arguments, data, predictive_type):
    set_prob_predictive = posterior_fn.predictive(predictive_type=predictive_type)
    return set_prob_predictive.evaluate(prior_arguments, data, metrics=METRICS)[0]


def show(name, row, seconds):
    numbers = " ".join(f"{row[m]:8.4f}" for m in METRICS)
    print(f"{name:34} {numbers} {seconds:7.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="The GLM mode of an MNIST network's last layer.")
    parser.add_argument("--data", required=True, help="MNIST as .npz")
    parser.add_argument("--weights", required=True, help="the state_dict as .npz")
    args = parser.parse_args()
    params = load_params(args.weights)
    images, held_out = split(load_images(args.data, "train"))
    test_images = load_images(args.data, "test")
    start = time.perf_counter()
    parts = [last_layer_features(model_fn, params, d) for d in (images, held_out, test_images)]
    head_fn = parts[0][0]
    train, validation, test = (features for _, features in parts)
    posterior_fn, _ = laplace(
        head_fn, params, train, loss_fn="cross_entropy", subset="last_layer", curv_type="kfac"
    )
    print(f"{'':34} {' '.join(f'{m:>8}' for m in METRICS)} seconds")
    first = {"prior_prec": PRIOR_PRECS[0]}
    show("the network", judge(posterior_fn, first, test, "map"), time.perf_counter() - start)
    refits = {}
    glm_fn = posterior_fn
    for prior_prec in PRIOR_PRECS:
        arguments = {"prior_prec": prior_prec}
        distance = posterior_fn.mode_distance(arguments, train)
        begin = time.perf_counter()
        glm_fn = glm_mode(glm_fn, arguments, train)  # from the mode of the prior before
        seconds = time.perf_counter() - begin
        row = judge(glm_fn, arguments, validation, "map")
        refits[prior_prec] = (row["nll"], glm_fn)
        left = glm_fn.mode_distance(arguments, train)
        name = f"prior {prior_prec:5.1f}: {distance:6.1f} nats -> {left:.1e}"
        show(name, row, seconds)
    best = min(refits, key=lambda prior_prec: refits[prior_prec][0])
    print(f"chosen on the validation images: prior_prec {best:g}")
    seconds = time.perf_counter() - start
    for name in ("map", "mean_field_0", "mc_bridge"):
        row = judge(refits[best][1], {"prior_prec": best}, test, name)
        show(f"test, refitted, {name}", row, seconds)


if __name__ == "__main__":
    main()
