"""Table 1 of the paper: test NLL for four curvatures and eight ways to calibrate.

With `--seeds 5` it is the median over seeds 0 to 4, as in docs/results.md.

Sinusoid y = sin(2 pi x) with noise 0.2. 150 training and 50 validation points lie on [-1, -0.5] and
[0.5, 1], half in each; 300 test points, noisy as the others, lie on (-2, 2). Rows are curvatures.
Columns are {LML, NLL} x {grid search (GS), gradient descent (GD)} x {linear (L), nonlinear (NL)}:
LML is the evidence of the training data, NLL is measured on the validation data. GD tunes the prior
precision and the noise variance; GS tunes the prior precision and keeps the noise variance at the
mean squared training residual of the MAP.

The same for all cells, and needing no test data (docs/results.md says how it was arrived at):
- MAP: Adam, 3,000 full-batch steps, mean squared error plus an L2 penalty. Of four strengths of the
  penalty, each seed takes the one whose network has the highest evidence on its training data.
- Start of training: LeCun-normal weights; the units of the first layer switch at points drawn
  uniformly from the domain (-2, 2).
- Grid: 50 prior precisions from 1e-3 to 1e3, the range of the authors' public script.
- Gradient descent: 300 steps of Adam in log space, the library's default, from prior precision 1
  and the noise variance that the grid columns use.
- Lanczos: rank 50. Nonlinear: 100 sampled networks. All in float64.
"""

import argparse
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from laplax import (
    CalibrationWarning,
    GridSearch,
    PosteriorFn,
    calibration,
    evaluation,
    laplace,
)

from . import progress_bar
from ._precision import float64

HIDDEN, NOISE, DOMAIN = 50, 0.2, 2.0
STEPS, LEARNING_RATE, PENALTIES = 3000, 1e-2, (1e-5, 1e-4, 3e-4, 1e-3)
OBJECTIVES = {"LML": "marginal_log_likelihood", "NLL": "nll"}
METHODS: dict[str, Any] = {"GS": GridSearch(-3.0, 3.0), "GD": "gradient_descent"}
PUSHFORWARDS = {"L": "linear", "NL": "nonlinear"}
COLUMNS = [
    (o, m, p) for p, m, o in itertools.product(PUSHFORWARDS, METHODS, OBJECTIVES)
]  # the order of the paper
ROWS = ("full (last layer)", "full", "diagonal", "Lanczos")
PAPER = np.array(
    [
        [1.5283, 1.2843, 0.4799, 0.4482, 1.8311, 1.4998, 0.5480, 0.5400],
        [0.8457, 1.4409, 0.8988, 0.5104, 4.2959, 2.1243, 4.3586, 3.4363],
        [0.7687, 2.1212, 2.2358, 2.5784, 1.0230, 1.6201, 2.5373, 2.4986],
        [0.9437, 1.3771, 0.5109, 0.5008, 2.4008, 2.4717, 2.3857, 2.8676],
    ]
)

Data = dict[str, jax.Array]
PyTree = Any
Column = tuple[str, str, str]
Noted = tuple[str, str, warnings.WarningMessage]  # row, column, what was warned of


def observe(key: jax.Array, x: jax.Array) -> Data:
    """The data set at the inputs x."""
    y = jnp.sin(2 * jnp.pi * x) + NOISE * jax.random.normal(key, x.shape)
    return {"input": x, "target": y}


def two_intervals(key: jax.Array, n: int) -> Data:
    """Half of n points on [-1, -0.5], half on [0.5, 1]."""
    x_key, noise_key = jax.random.split(key)
    x = jax.random.uniform(x_key, (n, 1), minval=0.5, maxval=1.0)
    return observe(noise_key, x * jnp.where(jnp.arange(n) < n // 2, -1.0, 1.0)[:, None])


def init_params(key: jax.Array) -> PyTree:
    """Three layers; the units of the first switch at points drawn from the domain."""
    w_keys, c_key = jax.random.split(key, 3), jax.random.fold_in(key, 3)
    shapes = [(1, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
    layers = [
        {"w": jax.random.normal(k, s) / jnp.sqrt(s[0]), "b": jnp.zeros(s[1])}
        for k, s in zip(w_keys, shapes, strict=True)
    ]
    switch = jax.random.uniform(c_key, (HIDDEN,), minval=-DOMAIN, maxval=DOMAIN)
    layers[0]["b"] = -layers[0]["w"][0] * switch
    return layers


def affine(x: jax.Array, layer: PyTree) -> jax.Array:
    """One layer."""
    return x @ layer["w"] + layer["b"]


def features(input: jax.Array, layers: PyTree) -> jax.Array:
    """The hidden layers."""
    for layer in layers:
        input = jnp.tanh(affine(input, layer))
    return input


def model_fn(input: jax.Array, params: PyTree) -> jax.Array:
    """The network."""
    return affine(features(input, params[:-1]), params[-1])


@jax.jit
def train(params: PyTree, data: Data, penalty: float) -> PyTree:
    """The MAP: mean squared error plus `penalty` times the squared norm of the weights."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))

    def loss(params: PyTree) -> jax.Array:
        residual = model_fn(data["input"], params) - data["target"]
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return jnp.mean(residual**2) + penalty * squares

    def step(carry: tuple[PyTree, Any], _: None) -> tuple[tuple[PyTree, Any], None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), None, length=STEPS)[0][0]


def evidence(params: PyTree, data: Data) -> float:
    """The highest log evidence over prior precision and noise variance."""
    posterior_fn, _ = laplace(model_fn, params, data, loss_fn="mse", progress=False)
    _, set_prob_predictive = calibration(
        posterior_fn,
        model_fn,
        params,
        data,
        calibration_method="gradient_descent",
        progress=False,
    )
    return -float(set_prob_predictive.trace.values.min())


def map_by_evidence(key: jax.Array, data: Data) -> tuple[PyTree, float]:
    """One MAP per penalty from the same start; the evidence decides."""
    start = init_params(key)
    trained = [train(start, data, penalty) for penalty in PENALTIES]
    values = [evidence(params, data) for params in trained]
    best = int(np.argmax(values))
    return trained[best], PENALTIES[best]


def approximations(params: PyTree, data: Data) -> Iterator[tuple[str, Any, PyTree, PosteriorFn]]:
    """For each row: its name, its model, its parameters, its posterior."""
    hidden, last = params[:-1], params[-1]

    def last_layer(input: jax.Array, params: PyTree) -> jax.Array:
        return affine(features(input, hidden), params)

    rows: tuple[tuple[str, Any, PyTree, dict[str, Any]], ...] = (
        (ROWS[0], last_layer, last, {"curv_type": "full"}),
        (ROWS[1], model_fn, params, {"curv_type": "full"}),
        (ROWS[2], model_fn, params, {"curv_type": "diagonal"}),
        (ROWS[3], model_fn, params, {"curv_type": "lanczos", "rank": 50}),
    )
    for name, model, free, options in rows:
        yield (
            name,
            model,
            free,
            laplace(model, free, data, loss_fn="mse", progress=False, **options)[0],
        )


def cell(
    posterior_fn: PosteriorFn,
    model: Any,
    params: PyTree,
    column: Column,
    train_data: Data,
    valid_data: Data,
    tests: Sequence[Data],
    residual: float,
) -> list[float]:
    """Calibrate as the column says; the NLL on each test set."""
    objective, method, pushforward = column
    prior_arguments, _ = calibration(
        posterior_fn,
        model,
        params,
        train_data if objective == "LML" else valid_data,
        calibration_objective=OBJECTIVES[objective],
        calibration_method=METHODS[method],
        pushforward_type=PUSHFORWARDS[pushforward],
        prior_arguments={"prior_prec": 1.0, "sigma_squared": residual},
        progress=False,
    )
    return [
        evaluation(
            posterior_fn,
            model,
            params,
            prior_arguments,
            test,
            metrics=["nll"],
            progress=False,
            pushforward_type=PUSHFORWARDS[pushforward],
        )[0]["nll"]
        for test in tests
    ]


def one_seed(seed: int, progress: bool | None) -> tuple[np.ndarray, list[Noted]]:
    """NLLs (test set, row, column) and the calibration warnings as (row, column, text)."""
    keys = jax.random.split(jax.random.key(seed), 4)
    train_data, valid_data = two_intervals(keys[0], 150), two_intervals(keys[1], 50)
    test = observe(keys[2], jnp.linspace(-DOMAIN, DOMAIN, 302)[1:-1, None])
    inside = jnp.abs(test["input"][:, 0]) < 1
    tests = [test, {name: x[inside] for name, x in test.items()}]
    params, penalty = map_by_evidence(keys[3], train_data)
    errors = [model_fn(d["input"], params) - d["target"] for d in (train_data, valid_data, test)]
    train_mse, valid_mse, test_mse = (float(jnp.mean(e**2)) for e in errors)
    print(
        f"seed {seed}: penalty {penalty:g}; mean squared error {train_mse:.4f} training, "
        f"{valid_mse:.4f} validation, {test_mse:.2f} test",
        flush=True,
    )
    nll = np.zeros((len(tests), len(ROWS), len(COLUMNS)))
    noted: list[Noted] = []
    rows = progress_bar(approximations(params, train_data), len(ROWS), "rows", progress)
    for i, (name, model, free, posterior_fn) in enumerate(rows):
        for j, column in enumerate(COLUMNS):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                nll[:, i, j] = cell(
                    posterior_fn, model, free, column, train_data, valid_data, tests, train_mse
                )
            noted += [(name, "-".join(column), w) for w in caught]
    return nll, noted


def show(title: str, nll: np.ndarray) -> None:
    """Ours over the paper's, and where the best of a linear column stands."""
    print(f"\n{title}")
    print(f"{'':26}" + "".join(f"{'-'.join(c):>11}" for c in COLUMNS))
    for name, ours, paper in zip(ROWS, nll, PAPER, strict=True):
        print(f"{name:18} {'ours':7}" + "".join(f"{x:11.4f}" for x in ours))
        print(f"{'':18} {'paper':7}" + "".join(f"{x:11.4f}" for x in paper))
    best, target = nll.min(0), PAPER.min(0)
    print(f"{'best':18} {'ours':7}" + "".join(f"{x:11.4f}" for x in best))
    print(f"{'':18} {'paper':7}" + "".join(f"{x:11.4f}" for x in target))
    print(f"{'ours - paper':26}" + "".join(f"{x:+11.4f}" for x in best - target))


def show_warnings(noted: Sequence[Noted]) -> None:
    """How many searches ended with a warning, by column, and each text once."""
    calibrations = [n for n in noted if issubclass(n[2].category, CalibrationWarning)]
    print(f"\n{len(calibrations)} searches ended with a calibration warning:")
    for column in ("-".join(c) for c in COLUMNS):
        rows = [name for name, where, _ in calibrations if where == column]
        if rows:
            counts = ", ".join(f"{r} {rows.count(r)}" for r in ROWS if r in rows)
            print(f"  {column}: {counts}")
    for text in sorted({str(w.message).split(";")[0] for *_, w in calibrations}):
        print(f"  {text}")
    for name, column, warning in noted:
        if not issubclass(warning.category, CalibrationWarning):
            print(f"  other: {name}, {column}: {warning.message}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `laplax reproduce table1`."""
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")


def run(args: argparse.Namespace) -> int:
    """Print the table of these seeds. Small prior precisions are beyond float32."""
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {args.seeds}")
    with float64():
        return _run(range(args.seed, args.seed + args.seeds), args.progress)


def _run(seeds: range, progress: bool | None) -> int:
    nlls, noted = [], []
    for seed in seeds:
        start = time.perf_counter()
        nll, caught = one_seed(seed, progress)
        print(f"  {time.perf_counter() - start:.0f} s")
        nlls.append(nll)
        noted += caught
    everywhere, inside = np.median(nlls, axis=0)
    over = f"median over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    show(f"Test NLL on (-2, 2), {over}", everywhere)
    show(f"The same predictions, test points in (-1, 1) only, {over}", inside)
    show_warnings(noted)
    finite = np.isfinite(nlls).all(axis=(0, 1))
    print(f"\n{finite.sum()} of {finite.size} cells are finite for every seed and test set")
    return 0
