"""What a posterior buys over temperature scaling: three trained networks, judged on real data.

python examples/decisions.py resnet20 --data cifar10.npz --weights cifar10_resnet20.npz
python examples/decisions.py mnist_mlp --data mnist.npz --weights mnist_mlp.npz \
    --ood fashion_mnist.npz kmnist_test.npz notmnist_test.npz
python examples/decisions.py mnist_cnn --data mnist.npz --weights mnist_cnn.npz --ood ...

Data files hold `x_train`, `y_train`, `x_test`, `y_test` (uint8 images, integer labels), files of
`--ood` at least `x_test`. The weights come with github.com/Ludvins/FixedMeanGaussianProcesses and
github.com/Ludvins/sampled-laplace.

Every row has scales to choose: a temperature, a prior precision, or both. They are chosen by the
NLL of one half of the test images and judged on the other half, and the other way round, so that
no image is judged by numbers that its own label chose. Rows whose name ends in `augmented` see no
test image before they are judged: their scales are chosen on 5,000 training images under random
crops, of the strength at which the network has its accuracy on the test images.

The column `vs T` is the NLL minus that of temperature scaling, with its standard error over the
test images. AURC is the area under the risk-coverage curve; AUROC tells the test images from each
set of `--ood` by the entropy. The second table has every AUROC minus that of temperature scaling.
"""

import argparse
import functools
import pathlib
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mnist
import numpy as np
import resnet20

from laplax import (
    CalibrationWarning,
    GridSearch,
    glm_mode,
    judge,
    laplace,
    last_layer_features,
    tempered_model,
)
from laplax.augmentation import augmented_validation, matching_strength, random_crop
from laplax.baselines import map_predictive, temperature_scaling, vector_scaling
from laplax.metrics import accuracy, aurc, brier, ece
from laplax.ood import auroc_difference, auroc_with_error

NUM_POINTS = 512
GRID_SIZE = 12
VALIDATION_IMAGES = 5_000
AUGMENTED_IMAGES = 5_000
MAP, REFERENCE = "MAP", "temperature scaling"
# Of the networks whose curvature is expensive a part of the training images stands for all.
CURVATURE_IMAGES = {"resnet20": 5_000, "mnist_mlp": 55_000, "mnist_cnn": 10_000}
LOGIT_TEMPERATURES = (0.6, 0.75, 1.0)
PENALTIES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
ALL_LAYERS = {
    "all layers, diagonal": {"curv_type": "diagonal"},
    "all layers, KFAC": {"curv_type": "kfac"},
    "all layers, EKFAC": {"curv_type": "ekfac"},
    "all layers, Lanczos 50": {"curv_type": "lanczos", "rank": 50},
}


class Network(NamedTuple):
    """A trained network and its data. A head reads features instead of images."""

    name: str
    model_fn: object
    params: dict
    train: dict
    test: dict
    foreign: dict
    augmented: dict  # training images under random crops


# -- networks -------------------------------------------------------------------------------------
def load_cnn(path):
    state = np.load(path)
    names = sorted({name.rsplit(".", 1)[0] for name in state.files})

    def layer(name):
        w = state[f"{name}.weight"]
        w = w.transpose(2, 3, 1, 0) if w.ndim == 4 else w.T
        return {"w": jnp.asarray(w), "b": jnp.asarray(state[f"{name}.bias"])}

    return {name: layer(name) for name in names}


def cnn_fn(input, params):
    """5 x 5 convolutions with max-pooling, then two dense layers; the input is one image."""
    x = (input[..., None] - 0.1307) / 0.3081
    for name in ("conv1", "conv2"):
        w = params[name]["w"]
        x = jax.lax.conv_general_dilated(
            x[None], w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )[0]
        height, width, channels = x.shape
        x = (x + params[name]["b"]).reshape(height // 2, 2, width // 2, 2, channels)
        x = jax.nn.relu(x.max(axis=(1, 3)))
    x = x.transpose(2, 0, 1).reshape(-1)  # PyTorch flattens channels first
    x = jax.nn.relu(x @ params["fc1"]["w"] + params["fc1"]["b"])
    return x @ params["fc2"]["w"] + params["fc2"]["b"]


def load(name, data, weights, ood):
    if name == "resnet20":
        train, test = resnet20.load_data(data)
        return with_augmented(
            Network(name, resnet20.model_fn, resnet20.load_params(weights), train, test, {}, {})
        )
    train, test = (mnist.load_images(data, part) for part in ("train", "test"))
    foreign = {pathlib.Path(path).stem: mnist.load_images(path, "test")["input"] for path in ood}
    if name == "mnist_cnn":
        return with_augmented(Network(name, cnn_fn, load_cnn(weights), train, test, foreign, {}))
    train = part_of(train, slice(None, -VALIDATION_IMAGES))
    params = mnist.load_params(weights)
    return with_augmented(Network(name, mnist.model_fn, params, train, test, foreign, {}))


def with_augmented(network):
    """Crops of training images on which the network is as accurate as on the test images."""
    predictive = map_predictive(network.model_fn, network.params, loss_fn="cross_entropy")
    expected = judge(predictive, network.test, metrics=["accuracy"])["accuracy"]
    images = {"num_examples": AUGMENTED_IMAGES}
    strength = matching_strength(predictive, network.train, crop, expected, **images)
    print(f"random crops of strength {strength:.3f} have accuracy {expected:.4f}")
    return network._replace(augmented=augmented_validation(network.train, crop, strength, **images))


def crop(key, input, strength):
    return random_crop(key, input.astype(jnp.float32), strength)


def head_of(network):
    """The last layer on features that are computed once, and the seconds for them."""
    start = time.perf_counter()
    features = functools.partial(last_layer_features, network.model_fn, network.params)
    head_fn, train = features(network.train)
    _, test = features(network.test)
    _, augmented = features(network.augmented)
    label = jnp.zeros(1, jnp.int32)
    foreign = {
        name: features({"input": x, "target": jnp.broadcast_to(label, len(x))})[1]["input"]
        for name, x in network.foreign.items()
    }
    jax.block_until_ready((train, test, foreign, augmented))
    head = Network(network.name, head_fn, network.params, train, test, foreign, augmented)
    return head, time.perf_counter() - start


def part_of(data, index):
    return {name: x[index] for name, x in data.items()}


# -- rows: from a network to a function that chooses scales on held-out data ----------------------
def map_row(network):
    baseline = map_predictive(network.model_fn, network.params, loss_fn="cross_entropy")
    return lambda held_out: baseline


def temperature_row(network):
    return lambda held_out: temperature_scaling(network.model_fn, network.params, held_out)


def vector_row(network):
    return lambda held_out: vector_scaling(network.model_fn, network.params, held_out)


def fit(network, images, **options):
    train = part_of(network.train, slice(None, images))
    posterior_fn, _ = laplace(
        network.model_fn,
        network.params,
        train,
        loss_fn="cross_entropy",
        num_total_samples=len(network.train["target"]),
        **options,
    )
    return posterior_fn


def evidence_row(network):
    """The last layer as it is published: by evidence, without a label of the test images."""
    posterior_fn = fit(network, None, curv_type="full", subset="last_layer")
    chosen, _ = posterior_fn.calibrate(network.train)
    set_prob_predictive = posterior_fn.predictive(
        predictive_type="mc_bridge", num_samples=NUM_POINTS
    )
    return lambda held_out: set_prob_predictive(dict(chosen))


def tempered(posterior_fn, predictive_type):
    """Prior precision and temperature by the NLL of held-out data."""
    set_prob_predictive = posterior_fn.predictive(
        predictive_type=predictive_type, num_samples=NUM_POINTS
    )

    def choose(held_out):
        method = GridSearch(grid_size=GRID_SIZE)
        chosen, searched = set_prob_predictive.calibrate(
            held_out, calibration_objective="nll", calibration_method=method
        )
        return searched(chosen)

    return choose


def last_layer_row(network, curv_type, predictive_type="mc_bridge"):
    return tempered(fit(network, None, curv_type=curv_type, subset="last_layer"), predictive_type)


def glm_row(network):
    """The last layer at the mode of its convex problem, for each penalty; NLL chooses one."""
    posterior_fn = fit(network, None, curv_type="full", subset="last_layer")
    candidates = [
        glm_mode(posterior_fn, {"prior_prec": penalty}, network.train) for penalty in PENALTIES
    ]
    maps = [posterior.predictive(predictive_type="map") for posterior in candidates]

    def choose(held_out):
        arguments = [{"prior_prec": penalty} for penalty in PENALTIES]
        values = [
            family.evaluate(argument, held_out, metrics=["nll"])[0]["nll"]
            for family, argument in zip(maps, arguments, strict=True)
        ]
        best = int(np.argmin(values))
        return maps[best](arguments[best])

    return choose


def all_layers_row(network, options):
    posterior_fn = fit(network, CURVATURE_IMAGES[network.name], **options)
    return tempered(posterior_fn, "mean_field_0")


def scaled_row(network, options):
    """Logits divided by a temperature, beside a posterior of all layers; NLL chooses both."""
    images = CURVATURE_IMAGES[network.name]
    models = [tempered_model(network.model_fn, t) for t in LOGIT_TEMPERATURES]
    fits = [fit(network._replace(model_fn=model_fn), images, **options) for model_fn in models]
    rows = [tempered(posterior_fn, "mean_field_2") for posterior_fn in fits]

    def choose(held_out):
        made = [choose_scales(held_out) for choose_scales in rows]
        return min(made, key=lambda x: judge(x, held_out, metrics=["nll"])["nll"])

    return choose


def augmented_row(network, make_row):
    """A row whose scales no test image chooses."""
    prob_predictive = make_row(network)(network.augmented)
    return lambda held_out: prob_predictive


def rows_of(network, head):
    """Name, network and the function that makes the row, the cheap ones first."""
    full = functools.partial(last_layer_row, curv_type="full")
    yield MAP, head, map_row
    yield REFERENCE, head, temperature_row
    yield "vector scaling", head, vector_row
    yield "last layer, full, evidence", head, evidence_row
    yield "last layer, full", head, full
    yield "last layer, KFAC", head, functools.partial(last_layer_row, curv_type="kfac")
    yield "last layer, GLM mode", head, glm_row
    for name, make_row in {
        "temperature, augmented": temperature_row,
        "last layer, full, augmented": full,
        "last layer, GLM, augmented": glm_row,
    }.items():
        yield name, head, functools.partial(augmented_row, make_row=make_row)
    scaled = functools.partial(scaled_row, options=ALL_LAYERS["all layers, KFAC"])
    yield "scaled logits, KFAC", network, scaled
    for name, options in ALL_LAYERS.items():
        yield name, network, functools.partial(all_layers_row, options=options)


# -- judging --------------------------------------------------------------------------------------
def cross_fitted(choose, network, seed=0):
    """Log probabilities of every test image by scales of the other half, and all entropies."""
    count = len(network.test["target"])
    order = np.random.default_rng(seed).permutation(count)
    halves = order[: count // 2], order[count // 2 :]
    log_probs = np.zeros((count, 10))
    entropies = []
    for judged, chosen in (halves, halves[::-1]):
        prob_predictive = choose(part_of(network.test, chosen))
        part = part_of(network.test, judged)["input"]
        log_probs[judged] = prob_predictive(part, ["log_pred_act"])["log_pred_act"]
        entropies.append(
            {
                name: np.asarray(prob_predictive(x, ["entropy"])["entropy"])
                for name, x in {"": part, **network.foreign}.items()
            }
        )
    return log_probs, entropies


def aurocs(entropies):
    """By set of foreign images, the mean over both halves."""
    return {
        name: np.mean([auroc_with_error(half[""], half[name]).value for half in entropies])
        for name in entropies[0]
        if name
    }


def auroc_gains(entropies, reference):
    """AUROC minus that of the reference, and its standard error, by set of foreign images."""
    gains = {}
    for name in entropies[0]:
        if not name:
            continue
        both = [
            auroc_difference((ours[""], ours[name]), (theirs[""], theirs[name]))
            for ours, theirs in zip(entropies, reference, strict=True)
        ]
        # The foreign images are the same in both halves: this error is the upper bound.
        gains[name] = tuple(np.mean([[x.value, x.standard_error] for x in both], axis=0))
    return gains


def summary(log_probs, target, reference):
    """Metrics of one row, and its NLL minus that of temperature scaling."""
    nll = -log_probs[np.arange(len(target)), target]
    probs = jnp.asarray(np.exp(log_probs))
    difference = nll - (nll if reference is None else reference)
    row = {
        "nll": nll.mean(),
        "vs T": difference.mean(),
        "+-": difference.std() / len(target) ** 0.5,
        "acc": accuracy(probs, target),
        "ece": ece(probs, target),
        "brier": brier(probs, target),
        "aurc": aurc(probs, target),
    }
    return nll, row


def show(name, row, seconds):
    numbers = " ".join(f"{float(x):8.4f}" for x in row.values())
    print(f"{name:28}{numbers} {seconds:8.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("network", choices=tuple(CURVATURE_IMAGES))
    parser.add_argument("--data", required=True, help="images and labels as .npz")
    parser.add_argument("--weights", required=True, help="the state_dict as .npz")
    parser.add_argument("--ood", nargs="*", default=[], help="images of something else, .npz each")
    parser.add_argument(
        "--rows", nargs="*", help="only rows whose name contains one of these; the first two stay"
    )
    parser.add_argument("--test-images", type=int, help="judge the first so many test images")
    args = parser.parse_args()
    warnings.simplefilter("ignore", CalibrationWarning)  # the table shows where a search ended
    network = load(args.network, args.data, args.weights, args.ood)
    network = network._replace(test=part_of(network.test, slice(None, args.test_images)))
    head, seconds = head_of(network)
    target = np.asarray(network.test["target"]).astype(int)
    print(f"features: {seconds:.1f} s")
    columns = ("nll", "vs T", "+-", "acc", "ece", "brier", "aurc", *network.foreign, "seconds")
    print(" " * 28 + " ".join(f"{name[:8]:>8}" for name in columns), flush=True)
    reference = None
    entropies = {}
    for name, source, make_row in rows_of(network, head):
        wanted = not args.rows or any(part in name for part in args.rows)
        if not wanted and name not in (MAP, REFERENCE):
            continue
        start = time.perf_counter()
        log_probs, entropies[name] = cross_fitted(make_row(source), source)
        seconds = time.perf_counter() - start
        nll, row = summary(log_probs, target, reference)
        if name == REFERENCE:
            reference = nll
            row["vs T"] = row["+-"] = 0.0
        show(name, {**row, **aurocs(entropies[name])}, seconds)
    if network.foreign:
        show_gains(entropies, network.foreign)


def show_gains(entropies, foreign):
    print(f"\n{'AUROC minus that of T':28}" + "".join(f" {name[:13]:>20}" for name in foreign))
    for name, rows in entropies.items():
        gains = auroc_gains(rows, entropies[REFERENCE]).values()
        print(f"{name:28}" + "".join(f" {gain:10.4f} +- {error:6.4f}" for gain, error in gains))


if __name__ == "__main__":
    main()
