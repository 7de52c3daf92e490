"""A trained ResNet-20 on CIFAR-10: last-layer Laplace on top of features computed once.

python examples/resnet20.py --data cifar10.npz --weights cifar10_resnet20.npz
python examples/resnet20.py --data part.npz --weights cifar10_resnet20.npz --prior evidence

The data file holds `x_train`, `y_train`, `x_test`, `y_test` (uint8 images of 32 x 32 x 3, integer
labels), the weights file the arrays of a PyTorch state_dict: here those that come with
github.com/Ludvins/FixedMeanGaussianProcesses, whose authors publish last-layer results for them.

A Laplace approximation of the last layer never looks below that layer. The 50,000 images
therefore go through the convolutions once; fit, evidence and evaluation then work on a linear model
of 64 features, with 650 parameters. The prior precision is chosen by the evidence and compared with
the published one, at which the predictives are judged unless `--prior evidence` is given.

Which predictive a number belongs to matters here. Softmax does not see a shift common to all
logits, so the data leave that direction at its prior variance. MC_BRIDGE and MEAN_FIELD_2 use the
whole covariance of the logits and are blind to the shift as well; what reads the variances alone
counts it as uncertainty, which happens to calibrate this network better.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from laplax import calibration, evaluation, laplace, last_layer_features
from laplax.metrics import accuracy, brier, ece, nll_from_log_probs
from laplax.predictives import log_mc_bridge

PIXEL_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
PIXEL_STD = np.array([0.2023, 0.1994, 0.2010], np.float32)
BATCH_NORM_EPS = 1e-5
NUM_SAMPLES = 2048

METRICS = ("accuracy", "nll", "ece", "brier")
VARIANCES_ALONE = "mc, variances alone"
PREDICTIVES = ("mc_bridge", "mean_field_2", "mean_field_0", "mean_field_1", "laplace_bridge")
APPROXIMATIONS = {
    "full": {"curv_type": "full"},
    "KFAC": {"curv_type": "kfac", "joint_bias": False},
}

# NLL and ECE to compare with. The published ones are for all 50,000 images at the published prior
# precisions, with 2,048 samples of the logits. The others were recomputed in float64 at the same
# precisions: the published values lie between those of the whole covariance and of its diagonal.
PUBLISHED_PRIOR_PREC = {"full": 1.917, "KFAC": 2.283}
PUBLISHED = {"MAP": (0.2815, 0.0390), "full": (0.2566, 0.0204), "KFAC": (0.2659, 0.0239)}
RECOMPUTED = {
    ("MAP", ""): (0.2815, 0.0390),
    ("full", "mc_bridge"): (0.2707, 0.0347),
    ("full", "mean_field_0"): (0.2384, 0.0228),
    ("full", VARIANCES_ALONE): (0.2353, 0.0157),
    ("KFAC", "mc_bridge"): (0.2732, 0.0353),
    ("KFAC", "mean_field_0"): (0.2414, 0.0240),
}


# -- the network ----------------------------------------------------------------------------------
def load_params(path):
    """The state_dict as {"body": {layer: {"w", "b"}}, "head": {"w", "b"}}."""
    state = np.load(path)
    layers = [name.removesuffix(".weight") for name in state.files if state[name].ndim == 4]
    body = {layer: fold_batch_norm(state, layer) for layer in layers}
    head = {"w": state["fc.weight"].T, "b": state["fc.bias"]}
    return jax.tree.map(jnp.asarray, {"body": body, "head": head})


def fold_batch_norm(state, layer):
    """A convolution and the batch norm behind it are one convolution with a bias."""
    norm = layer.replace("conv", "bn").replace("downsample.0", "downsample.1")
    scale = state[f"{norm}.weight"] / np.sqrt(state[f"{norm}.running_var"] + BATCH_NORM_EPS)
    kernel = state[f"{layer}.weight"].transpose(2, 3, 1, 0)  # PyTorch: output channels first
    return {
        "w": kernel * scale,
        "b": state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale,
    }


def convolve(x, layer, stride=1):
    pad = layer["w"].shape[0] // 2
    out = jax.lax.conv_general_dilated(
        x[None],
        layer["w"],
        (stride, stride),
        [(pad, pad), (pad, pad)],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return out[0] + layer["b"]


def block(x, body, name, stride):
    out = jax.nn.relu(convolve(x, body[f"{name}.conv1"], stride))
    out = convolve(out, body[f"{name}.conv2"])
    shortcut = f"{name}.downsample.0"
    return jax.nn.relu(out + (convolve(x, body[shortcut], stride) if shortcut in body else x))


def model_fn(input, params):
    """Logits of one image of bytes."""
    body = params["body"]
    x = (input.astype(jnp.float32) / 255 - PIXEL_MEAN) / PIXEL_STD
    x = jax.nn.relu(convolve(x, body["conv1"]))
    for stage in (1, 2, 3):
        for i in (0, 1, 2):
            x = block(x, body, f"layer{stage}.{i}", stride=2 if stage > 1 and i == 0 else 1)
    return x.mean(axis=(0, 1)) @ params["head"]["w"] + params["head"]["b"]


# -- data -----------------------------------------------------------------------------------------
def load_data(path):
    """Training and test images."""
    arrays = np.load(path)
    return [
        {"input": arrays[f"x_{part}"], "target": jnp.asarray(arrays[f"y_{part}"])}
        for part in ("train", "test")
    ]


# -- Laplace --------------------------------------------------------------------------------------
def fit(name, head_fn, params, train):
    posterior_fn, _ = laplace(
        head_fn,
        params,
        train,
        loss_fn="cross_entropy",
        subset="last_layer",
        **APPROXIMATIONS[name],
    )
    return posterior_fn


def by_evidence(posterior_fn, head_fn, params, train):
    """The prior precision with the largest evidence, and that evidence."""
    prior_arguments, search = calibration(
        posterior_fn,
        head_fn,
        params,
        train,
        calibration_objective="marginal_log_likelihood",
        calibration_method="gradient_descent",
    )
    return float(prior_arguments["prior_prec"]), -float(search.trace.values.min())


def judge(posterior_fn, head_fn, params, prior_prec, test):
    """Metrics by predictive."""
    rows, prior_arguments = {}, {"prior_prec": prior_prec}
    for predictive_type in PREDICTIVES:
        rows[predictive_type], prob_predictive = evaluation(
            posterior_fn,
            head_fn,
            params,
            prior_arguments,
            test,
            metrics=METRICS,
            predictive_type=predictive_type,
            num_samples=NUM_SAMPLES,
        )
    prediction = prob_predictive(test["input"], ["pred_mean", "pred_var"])
    log_probs = sampled_from_variances(prediction.pred_mean, prediction.pred_var)
    rows[VARIANCES_ALONE] = metrics_of(log_probs, test["target"])
    return rows


@jax.jit
def sampled_from_variances(mean, var):
    """What MC_BRIDGE would say if the logits were independent of each other."""
    noise = jax.random.normal(jax.random.key(0), (NUM_SAMPLES, mean.shape[-1]), mean.dtype)
    # One example after the other: all at once they would fill a gigabyte.
    return jax.lax.map(
        lambda moments: log_mc_bridge(moments[0] + noise * jnp.sqrt(moments[1])),
        (mean, var),
        batch_size=100,
    )


def metrics_of(log_probs, target):
    probs = jnp.exp(log_probs)
    values = (
        accuracy(probs, target),
        nll_from_log_probs(log_probs, target),
        ece(probs, target),
        brier(probs, target),
    )
    return dict(zip(METRICS, map(float, values), strict=True))


# -- what is printed ------------------------------------------------------------------------------
def show(rows, compare):
    numbers = " ".join(f"{name:>8}" for name in METRICS)
    print(f"\n{'':26} {numbers}" + f" | {'recomputed':>15} | {'published':>15}" * compare)
    for (name, predictive), row in rows.items():
        line = f"{name:5} {predictive:20} " + " ".join(f"{row[m]:8.4f}" for m in METRICS)
        if compare:
            line += f" | {pair(RECOMPUTED.get((name, predictive)))}"
            sampled = name == "MAP" or predictive in ("mc_bridge", VARIANCES_ALONE)
            line += f" | {pair(PUBLISHED[name] if sampled else None)}"
        print(line)
    if compare:
        print("recomputed and published: nll, ece")


def pair(values):
    return " " * 15 if values is None else " ".join(f"{v:7.4f}" for v in values)


class Clock:
    """Seconds by step."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, step, fn, *args):
        start = time.perf_counter()
        out = fn(*args)
        jax.block_until_ready([x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)])
        self.seconds[step] = self.seconds.get(step, 0) + time.perf_counter() - start
        return out


def run(data_path, weights_path, prior):
    """Rows of the table, prior precisions by evidence, and the seconds of every step."""
    clock = Clock()
    params = load_params(weights_path)
    images, test_images = load_data(data_path)
    head_fn, train = clock("training features", last_layer_features, model_fn, params, images)
    head_fn, test = clock("test features", last_layer_features, model_fn, params, test_images)
    logits = jax.vmap(head_fn, (0, None))(test["input"], params)
    rows, found = {("MAP", ""): metrics_of(jax.nn.log_softmax(logits), test["target"])}, {}
    for name in APPROXIMATIONS:
        posterior_fn = clock(f"fit {name}", fit, name, head_fn, params, train)
        found[name] = clock(f"evidence {name}", by_evidence, posterior_fn, head_fn, params, train)
        prior_prec = found[name][0] if prior == "evidence" else PUBLISHED_PRIOR_PREC[name]
        judged = clock(f"evaluation {name}", judge, posterior_fn, head_fn, params, prior_prec, test)
        rows.update({(name, predictive): row for predictive, row in judged.items()})
    return rows, found, clock.seconds


def main():
    parser = argparse.ArgumentParser(description="Last-layer Laplace of a ResNet-20 on CIFAR-10.")
    parser.add_argument("--data", required=True, help="CIFAR-10, or a part of it, as .npz")
    parser.add_argument("--weights", required=True, help="the state_dict as .npz")
    parser.add_argument(
        "--prior",
        choices=("published", "evidence"),
        default="published",
        help="the prior precision at which predictives are judged",
    )
    args = parser.parse_args()
    rows, found, seconds = run(args.data, args.weights, args.prior)
    for name, (prior_prec, evidence) in found.items():
        published = PUBLISHED_PRIOR_PREC[name]
        print(
            f"{name:5} prior precision by evidence {prior_prec:.4f} "
            f"(published, all of CIFAR-10: {published}), log evidence {evidence:.3f}"
        )
    show(rows, compare=args.prior == "published")
    print("\nseconds")
    for step, value in seconds.items():
        print(f"{step:20} {value:7.1f}")
    counted = sum(v for k, v in seconds.items() if k.startswith(("training", "fit", "evidence")))
    print(f"{'features to evidence':20} {counted:7.1f}")


if __name__ == "__main__":
    main()
