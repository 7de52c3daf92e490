"""A trained MNIST network: every curvature by evidence, judged in and out of distribution.

python examples/mnist.py --data mnist.npz --ood fashion_mnist.npz --weights mnist_mlp.npz

The data files hold `x_train`, `y_train`, `x_test`, `y_test` (uint8 images of 28 x 28, integer
labels), the weights file the arrays of a PyTorch state_dict of a 784-200-200-10 tanh network: here
those that come with github.com/Ludvins/sampled-laplace, for which the authors of VaLLA (ICML 2024)
publish results.

As there: the curvature of the first 55,000 training images, the prior precision with the largest
evidence, probit-scaled logits (MEAN_FIELD_0), Fashion-MNIST as what the network has never seen, and
the entropy of the prediction as the score that tells it apart. Seconds are for fit and evidence.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from laplax import calibration, evaluation, laplace
from laplax.metrics import auroc

TRAINING_IMAGES = 55_000
METRICS = ("accuracy", "nll", "ece", "brier")
APPROXIMATIONS = {
    "diagonal": {"curv_type": "diagonal"},
    "KFAC": {"curv_type": "kfac"},
    "EKFAC": {"curv_type": "ekfac"},
    "last layer, diagonal": {"curv_type": "diagonal", "subset": "last_layer"},
    "last layer, KFAC": {"curv_type": "kfac", "subset": "last_layer"},
    "last layer, full": {"curv_type": "full", "subset": "last_layer"},
}
PREDICTIVES = ("mean_field_0", "mean_field_1", "mean_field_2")

# Accuracy, NLL, ECE, Brier, AUC and seconds of the authors of VaLLA, as published.
PUBLISHED = {
    "MAP": (0.9759, 0.0759, 0.0078, 0.0365, 0.9047, 0),
    "diagonal": (0.9736, 0.1430, 0.0716, 0.0533, 0.9221, 327),
    "KFAC": (0.9750, 0.0945, 0.0286, 0.0406, 0.9488, 985),
    "last layer, diagonal": (0.9757, 0.0800, 0.0126, 0.0373, 0.9040, 48),
    "last layer, KFAC": (0.9758, 0.0811, 0.0147, 0.0372, 0.9087, 52),
    "last layer, full": (0.9759, 0.0814, 0.0152, 0.0371, 0.9094, 33591),
}


def load_params(path):
    state = np.load(path)
    layers = sorted({int(name.split(".")[0]) for name in state.files})
    return {
        f"layer_{i}": {
            "w": jnp.asarray(state[f"{number}.weight"].T),
            "b": jnp.asarray(state[f"{number}.bias"]),
        }
        for i, number in enumerate(layers)
    }


def model_fn(input, params):
    x = input.reshape(-1)
    for name in sorted(params)[:-1]:
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    last = params[sorted(params)[-1]]
    return x @ last["w"] + last["b"]


def load_images(path, part):
    arrays = np.load(path)
    images = arrays[f"x_{part}"].astype(np.float32) / 255
    return {"input": jnp.asarray(images), "target": jnp.asarray(arrays[f"y_{part}"])}


def fit(options, params, train):
    """The posterior, its prior precision by evidence, and the seconds for both."""
    start = time.perf_counter()
    posterior_fn, _ = laplace(model_fn, params, train, loss_fn="cross_entropy", **options)
    prior_arguments, _ = calibration(
        posterior_fn,
        model_fn,
        params,
        train,
        calibration_objective="marginal_log_likelihood",
        calibration_method="gradient_descent",
    )
    jax.block_until_ready(prior_arguments)
    return posterior_fn, prior_arguments, time.perf_counter() - start


def judge(posterior_fn, params, prior_arguments, predictive_type, test, strange):
    results, prob_predictive = evaluation(
        posterior_fn,
        model_fn,
        params,
        prior_arguments,
        test,
        metrics=METRICS,
        predictive_type=predictive_type,
    )
    scores = [prob_predictive(x, ["entropy"])["entropy"] for x in (test["input"], strange)]
    return {**results, "auc": float(auroc(*scores))}


def show(name, predictive_type, row, prior_prec=None, seconds=0.0):
    numbers = " ".join(f"{row[m]:8.4f}" for m in (*METRICS, "auc"))
    prior = " " * 8 if prior_prec is None else f"{prior_prec:8.3f}"
    published = PUBLISHED.get(name) if predictive_type in ("", "mean_field_0") else None
    line = f"{name:21} {predictive_type:12} {prior} {numbers} {seconds:7.1f}"
    if published is not None:
        line += " |" + " ".join(f"{x:7.4f}" for x in published[:-1]) + f" {published[-1]:6}"
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description="Laplace approximations of an MNIST network.")
    parser.add_argument("--data", required=True, help="MNIST as .npz")
    parser.add_argument("--ood", required=True, help="images of something else, as .npz")
    parser.add_argument("--weights", required=True, help="the state_dict as .npz")
    args = parser.parse_args()
    params = load_params(args.weights)
    train = {k: x[:TRAINING_IMAGES] for k, x in load_images(args.data, "train").items()}
    test = load_images(args.data, "test")
    strange = load_images(args.ood, "test")["input"]
    names = " ".join(f"{m:>8}" for m in ("prior", *METRICS, "auc"))
    print(f"{'':21} {'':12} {names} {'seconds':>7} | as published")
    for i, (name, options) in enumerate(APPROXIMATIONS.items()):
        posterior_fn, prior_arguments, seconds = fit(options, params, train)
        prior_prec = float(prior_arguments["prior_prec"])
        if i == 0:  # the network as it is: any posterior gives the same
            row = judge(posterior_fn, params, prior_arguments, "map", test, strange)
            show("MAP", "", row)
        for predictive_type in PREDICTIVES:
            row = judge(posterior_fn, params, prior_arguments, predictive_type, test, strange)
            show(name, predictive_type, row, prior_prec, seconds)


if __name__ == "__main__":
    main()
