"""Table 2 of the paper: calibration of a convolutional network on CIFAR-10.

Data: `--data FILE`, an .npz file with four arrays: `x_train` (n, 32, 32, 3) and `x_test`, images of
bytes (uint8), `y_train` (n,) and `y_test`, labels from 0 to 9. All of CIFAR-10 has 50,000 and
10,000 of them. 5,000 training images, drawn by the seed, are held out for validation.

The network has three 3 x 3 convolutions with stride 2 (16, 32 and 64 channels, relu), a 2 x 2 mean
and one dense layer: 26,154 parameters, 2,570 of them in the last layer. It is trained by Adam
without penalty or augmentation, which leaves it overconfident as the paper's network is.

Rows are curvatures of the training images. The prior precision of a row is chosen by the ECE of the
validation images, by a grid (GS) or by gradient descent from 1 (GD); the pushforward is linear. The
predictive of a row, MEAN_FIELD_0 or MEAN_FIELD_1 (those that need variances alone), is the one with
the lower validation ECE on the grid, if its validation accuracy is at most 0.3 points below the
MAP's. Test images are looked at by what was chosen, and by nothing else.

Lanczos passes over the data once per product and takes a part of the training images for that,
counted up to all of them. `--small` takes the first 3,000 training images and 1,000 test images,
and holds 600 of the former out.
"""

import argparse
import csv
import dataclasses
import pathlib
import time
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from laplax import (
    CalibrationWarning,
    GradientDescent,
    GridSearch,
    Predictive,
    evaluation,
    laplace,
    last_layer_features,
    predictive,
)
from laplax._data import as_data
from laplax._engine.samples import whole_batch
from laplax.calibration import Searched
from laplax.calibration._objectives import PredictiveObjective, predictive_objective
from laplax.metrics import get_metric

from . import _cifar10, progress_bar

EPOCHS, BATCH_SIZE, LEARNING_RATE = 20, 100, 2e-3
PREDICTIVES, ACCURACY_MARGIN = ("mean_field_0", "mean_field_1"), 0.003
METHODS = {
    "GS": GridSearch(-1.0, 4.0, grid_size=101),
    "GD": GradientDescent(num_steps=300, learning_rate=0.1),
}
RANK, LANCZOS_IMAGES = 30, 4_500
TEST_BATCH = 100  # images that a call predicts: its Jacobians fit the memory budget at once
METRICS = ("ece", "nll", "accuracy")


@dataclasses.dataclass(frozen=True)
class Row:
    """A curvature: options of `laplace`, the paper's ECE by method, images to measure it on."""

    options: dict[str, Any]
    paper: dict[str, float]
    images: int | None = None

    @property
    def last_layer(self) -> bool:
        """Whether it can work on features that are computed once."""
        return self.options.get("subset") == "last_layer"


ROWS = {
    "full (last layer)": Row(
        {"curv_type": "full", "subset": "last_layer"}, {"GS": 0.0762, "GD": 0.0755}
    ),
    "Lanczos": Row(
        {"curv_type": "lanczos", "rank": RANK}, {"GS": 0.0166, "GD": 0.0754}, LANCZOS_IMAGES
    ),
    "diagonal": Row({"curv_type": "diagonal"}, {"GS": 0.0281, "GD": 0.0754}),
    "KFAC": Row({"curv_type": "kfac"}, {}),
    "EKFAC": Row({"curv_type": "ekfac"}, {}),
    "KFAC (last layer)": Row({"curv_type": "kfac", "subset": "last_layer"}, {}),
}
PAPER_MAP = 0.0755


@dataclasses.dataclass(frozen=True)
class Network:
    """A trained model and its data: images, or the features of the last layer."""

    model_fn: Any
    params: Any
    train: _cifar10.Data
    valid: _cifar10.Data
    test: _cifar10.Data


# -- one seed -------------------------------------------------------------------------------------
def trained(arrays: dict[str, np.ndarray], seed: int, progress: bool | None) -> Network:
    """The MAP of this seed."""
    count = len(arrays["y_train"])
    train, valid, test = _cifar10.split(arrays, min(5000, count // 5), seed)
    params = _cifar10.train(
        _cifar10.init_params(seed),
        train,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=seed,
        progress=progress,
    )
    return Network(_cifar10.model_fn, params, train, valid, test)


def on_features(network: Network, progress: bool | None) -> Network:
    """The last layer as a network of its own."""
    parts = [
        last_layer_features(network.model_fn, network.params, data, progress=progress)
        for data in (network.train, network.valid, network.test)
    ]
    return Network(parts[0][0], network.params, *(data for _, data in parts))


def fit(row: Row, network: Network, progress: bool | None) -> Any:
    """The posterior of a row. Training images are in random order: a part is a sample."""
    data, options = network.train, dict(row.options)
    total = len(data["target"])
    if row.images is not None and row.images < total:
        data = {name: x[: row.images] for name, x in data.items()}
        options["num_total_samples"] = total
    posterior_fn, _ = laplace(
        network.model_fn,
        network.params,
        data,
        loss_fn="cross_entropy",
        progress=progress,
        **options,
    )
    return posterior_fn


def validation_ece(posterior_fn: Any, network: Network) -> PredictiveObjective:
    """The ECE of the validation images as a function of the prior precision.

    Both predictives and both methods search it, so that the Jacobians are computed once.
    """
    set_prob_predictive = predictive(posterior_fn, network.model_fn)
    return predictive_objective("ece", set_prob_predictive, whole_batch(as_data(network.valid)))


def with_predictive(objective: PredictiveObjective, name: str) -> PredictiveObjective:
    """The same Jacobians, another way from logits to probabilities."""
    recipe = dataclasses.replace(objective.predictive.recipe, predictive=Predictive(name))
    changed = dataclasses.replace(objective.predictive, recipe=recipe)
    return dataclasses.replace(objective, predictive=changed)


def search(objective: PredictiveObjective, method: str, progress: bool | None) -> dict[str, float]:
    """The prior precision with the lowest validation ECE; ECE and accuracy there."""
    start = {"prior_prec": jnp.ones(())}
    best, trace = METHODS[method].search(Searched(objective, start), start, progress)
    accuracy = dataclasses.replace(objective, metric=get_metric("accuracy", "classification"))
    return {
        "prior_prec": float(best["prior_prec"]),
        "valid_ece": float(trace.values.min()),
        "valid_accuracy": float(accuracy(best)),
    }


def choose_predictive(
    objective: PredictiveObjective, map_accuracy: float, progress: bool | None
) -> tuple[str, dict[str, float]]:
    """By grid search: the lowest ECE among those that keep the MAP's accuracy, or the nearest."""
    grids = {p: search(with_predictive(objective, p), "GS", progress) for p in PREDICTIVES}
    floor = map_accuracy - ACCURACY_MARGIN
    kept = [p for p in grids if grids[p]["valid_accuracy"] >= floor]
    if kept:
        name = min(kept, key=lambda p: grids[p]["valid_ece"])
    else:
        name = max(grids, key=lambda p: grids[p]["valid_accuracy"])
    return name, grids[name]


def judge(
    posterior_fn: Any,
    network: Network,
    prior_prec: float,
    predictive_type: str,
    progress: bool | None,
) -> dict[str, float]:
    """Metrics on the test images, batch by batch."""
    batches = [
        {name: x[i : i + TEST_BATCH] for name, x in network.test.items()}
        for i in range(0, len(network.test["target"]), TEST_BATCH)
    ]
    return evaluation(
        posterior_fn,
        network.model_fn,
        network.params,
        {"prior_prec": prior_prec},
        batches,
        metrics=METRICS,
        predictive_type=predictive_type,
        progress=progress,
    )[0]


def one_row(
    name: str, network: Network, map_accuracy: float, progress: bool | None
) -> list[dict[str, Any]]:
    """A line for each method."""
    start = time.perf_counter()
    posterior_fn = fit(ROWS[name], network, progress)
    fitted = time.perf_counter() - start
    objective = validation_ece(posterior_fn, network)
    predictive_type, grid = choose_predictive(objective, map_accuracy, progress)
    descent = search(with_predictive(objective, predictive_type), "GD", progress)
    searched = time.perf_counter() - start - fitted
    lines = []
    for method, optimum in (("GS", grid), ("GD", descent)):
        results = judge(posterior_fn, network, optimum["prior_prec"], predictive_type, progress)
        line: dict[str, Any] = {"row": name, "method": method, "predictive": predictive_type}
        line |= {**optimum, **results, "fit_seconds": fitted, "search_seconds": searched}
        lines.append({**line, "seconds": time.perf_counter() - start})
    return lines


def map_line(features: Network) -> dict[str, Any]:
    """The network as it is, on validation and test images."""
    posterior_fn = fit(ROWS["KFAC (last layer)"], features, False)  # any would do: it is not read
    results = [
        judge(posterior_fn, dataclasses.replace(features, test=data), 1.0, "map", False)
        for data in (features.valid, features.test)
    ]
    line: dict[str, Any] = {"row": "MAP", "method": "", "predictive": "map"}
    line |= {"prior_prec": float("nan"), "valid_ece": results[0]["ece"]}
    return {**line, "valid_accuracy": results[0]["accuracy"], **results[1]}


def one_seed(
    arrays: dict[str, np.ndarray], seed: int, progress: bool | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of the table, the MAP first, and what searches warned of."""
    start = time.perf_counter()
    network = trained(arrays, seed, progress)
    print(f"seed {seed}: trained in {time.perf_counter() - start:.0f} s", flush=True)
    features = on_features(network, progress)
    lines, noted = [map_line(features)], []
    show_line(lines[0])
    for name in progress_bar(list(ROWS), len(ROWS), "rows", progress):
        where = features if ROWS[name].last_layer else network
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CalibrationWarning)
            row_lines = one_row(name, where, lines[0]["valid_accuracy"], progress)
        noted += [f"{name}: {w.message}" for w in caught]
        lines += row_lines
        for line in row_lines:
            show_line(line)
    return [{"seed": seed, **line} for line in lines], noted


# -- what is printed ------------------------------------------------------------------------------
def show_line(line: dict[str, Any]) -> None:
    """ECE on the validation images; ECE, NLL and accuracy on the test images; the paper's ECE."""
    row, method = line["row"], line["method"]
    paper = ROWS[row].paper.get(method) if row in ROWS else PAPER_MAP
    numbers = " ".join(f"{line[name]:8.4f}" for name in ("valid_ece", *METRICS))
    prior = " " * 9 if np.isnan(line["prior_prec"]) else f"{line['prior_prec']:9.3g}"
    published = " " * 8 if paper is None else f"{paper:8.4f}"
    seconds = f"{line['seconds']:8.0f}" if "seconds" in line else ""
    text = f"{row:18} {method:3} {line['predictive']:12} {prior} {numbers} {published} {seconds}"
    print(text.rstrip(), flush=True)


def show_mean(lines: list[dict[str, Any]]) -> None:
    """Means over seeds; predictives may differ between them."""
    keys = list(dict.fromkeys((line["row"], line["method"]) for line in lines))
    for row, method in keys:
        same = [line for line in lines if (line["row"], line["method"]) == (row, method)]
        names = {line["predictive"] for line in same}
        mean = {name: float(np.mean([line[name] for line in same])) for name in METRICS}
        mean["valid_ece"] = float(np.mean([line["valid_ece"] for line in same]))
        mean["prior_prec"] = float(np.exp(np.mean([np.log(line["prior_prec"]) for line in same])))
        predictive = names.pop() if len(names) == 1 else "(by seed)"
        show_line({"row": row, "method": method, "predictive": predictive, **mean})


def show_best(lines: list[dict[str, Any]]) -> None:
    """The line that the validation images recommend, and the best test ECE beside the paper's."""
    rows = [line for line in lines if line["row"] != "MAP"]
    picked = min(rows, key=lambda line: line["valid_ece"])
    best = min(rows, key=lambda line: line["ece"])
    for text, line in (("lowest validation ECE", picked), ("lowest test ECE", best)):
        drop = 100 * (lines[0]["accuracy"] - line["accuracy"])
        print(
            f"{text}: {line['row']} {line['method']}, test ECE {line['ece']:.4f} (paper's best "
            f"0.0166), accuracy {drop:.2f} points below the MAP's"
        )


def write(lines: list[dict[str, Any]], out: pathlib.Path) -> None:
    """All lines of all seeds, as a table for other programs."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "table2.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[-1]))  # the MAP's line has fewer fields
        writer.writeheader()
        writer.writerows(lines)
    print(out / "table2.csv")


# -- the command ----------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `laplax reproduce table2`."""
    parser.add_argument(
        "--data", type=pathlib.Path, required=True, metavar="FILE", help=_cifar10.FORMAT
    )
    parser.add_argument(
        "--small", action="store_true", help="3,000 training and 1,000 test images: minutes"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default 1)")


def run(args: argparse.Namespace) -> int:
    """Train, calibrate and judge for every seed; print the table and write `table2.csv`."""
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {args.seeds}")
    arrays = _cifar10.load(args.data)
    if args.small:
        limits = {"train": 3000, "test": 1000}
        arrays = {name: x[: limits[name.split("_")[1]]] for name, x in arrays.items()}
    start, lines, noted = time.perf_counter(), [], []
    names = " ".join(f"{name:>8}" for name in ("valid", *METRICS, "paper", "seconds"))
    print(f"{'':22} {'predictive':12} {'prior':>9} {names}")
    for seed in range(args.seed, args.seed + args.seeds):
        seed_lines, caught = one_seed(arrays, seed, args.progress)
        lines += seed_lines
        noted += [f"seed {seed}, {text}" for text in caught]
    if args.seeds > 1:
        print(f"mean over {args.seeds} seeds")
        show_mean(lines)
    else:
        show_best(lines)
    for text in noted:
        print(text)
    print(f"{time.perf_counter() - start:.0f} s")
    write(lines, pathlib.Path(args.out))
    return 0
