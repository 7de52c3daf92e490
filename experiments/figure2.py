"""Figure 2 of the paper: linearised Laplace beside FSP-Laplace on a sinusoid with a gap.

The data are those of Table 1: y = sin(2 pi x) with noise 0.2, 150 training points on [-1, -0.5] and
[0.5, 1], test points on (-2, 2). Left: the network of Table 1 with Lanczos curvature, prior
precision and noise by gradient descent on the NLL of 50 validation points (NLL-GD-L). Middle and
right: a network of the same shape, trained and approximated under a Gaussian-process prior with a
Matern-5/2 and with a periodic kernel; the noise variance is the true one. Nothing was tuned on
test data: length scale 0.3 for Matern-5/2, period 1 (the sinusoid's) and length scale 1 for the
periodic kernel, whose training takes a jitter of 1e-3 (functions that are nearly periodic), and
200 Halton points on the domain as context.
"""

import argparse
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from laplax import calibration, laplace, predictive
from laplax.fsp import GPPrior, Matern52, Periodic, context, fsp_laplace, fsp_objective, train
from laplax.plot import predictive_band, style

from ._precision import float64
from .table1 import DOMAIN, NOISE, init_params, map_by_evidence, model_fn, observe, two_intervals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, CONTEXT = 4000, 200
TITLES = ("linearised Laplace (Lanczos)", "FSP-Laplace, Matern-5/2", "FSP-Laplace, periodic")
Predictions = dict[str, Mapping[str, jax.Array]]


def priors() -> dict[str, tuple[GPPrior, GPPrior]]:
    """For each kernel the prior of training and that of the posterior."""
    matern, periodic = Matern52(length_scale=0.3), Periodic(period=1.0, length_scale=1.0)
    return {
        TITLES[1]: (GPPrior(matern), GPPrior(matern)),
        TITLES[2]: (GPPrior(periodic, jitter=1e-3), GPPrior(periodic)),
    }


def start(key: jax.Array) -> Any:
    """As in Table 1, with units four times as steep: the prior's functions bend that much."""
    params = init_params(key)
    first = {name: 4 * leaf for name, leaf in params[0].items()}
    return [first, *params[1:]]


def isotropic(key: jax.Array, data: Any, valid: Any, x: jax.Array) -> Mapping[str, jax.Array]:
    """Predictions of linearised Laplace, NLL-GD-L."""
    params, _ = map_by_evidence(key, data)
    posterior_fn, _ = laplace(model_fn, params, data, loss_fn="mse", curv_type="lanczos", rank=50)
    residual = jnp.mean((model_fn(data["input"], params) - data["target"]) ** 2)
    arguments, set_prob_predictive = calibration(
        posterior_fn,
        model_fn,
        params,
        valid,
        calibration_objective="nll",
        calibration_method="gradient_descent",
        prior_arguments={"prior_prec": 1.0, "sigma_squared": residual},
        progress=False,
    )
    return set_prob_predictive(arguments)(x)


def function_space(
    key: jax.Array, data: Any, pair: tuple[GPPrior, GPPrior], x: jax.Array, progress: bool | None
) -> Mapping[str, jax.Array]:
    """Predictions of FSP-Laplace."""
    training, prior = pair
    box = (np.asarray([-DOMAIN]), np.asarray([DOMAIN]))
    objective = fsp_objective(
        model_fn,
        training,
        loss_fn="mse",
        num_total_samples=data["input"].shape[0],
        sigma_squared=NOISE**2,
    )
    params, _ = train(
        objective,
        start(key),
        data,
        context=lambda key: context.uniform(CONTEXT // 2, box, key),
        key=key,
        num_steps=STEPS,
        progress=progress,
    )
    points = context.halton(CONTEXT, box)
    posterior_fn, _ = fsp_laplace(
        model_fn, params, data, loss_fn="mse", prior=prior, context=points, progress=progress
    )
    return predictive(posterior_fn, model_fn)({"sigma_squared": NOISE**2})(x)


def predictions(seed: int, progress: bool | None) -> tuple[Any, Any, Predictions]:
    """Training data, test data, and the predictions of the three panels on them."""
    keys = jax.random.split(jax.random.key(seed), 4)
    data, valid = two_intervals(keys[0], 150), two_intervals(keys[1], 50)
    test = observe(keys[2], jnp.linspace(-DOMAIN, DOMAIN, 402)[1:-1, None])
    x = test["input"]
    panels: Predictions = {TITLES[0]: isotropic(keys[3], data, valid, x)}
    for name, pair in priors().items():
        panels[name] = function_space(keys[3], data, pair, x, progress)
    return data, test, panels


def scores(test: Any, prediction: Mapping[str, jax.Array]) -> dict[str, float]:
    """RMSE to the sinusoid, and the share of observations in the 95% band, outside [-1, 1]."""
    outside = np.abs(np.asarray(test["input"][:, 0])) > 1
    truth = np.sin(2 * np.pi * np.asarray(test["input"]))
    mean, std = np.asarray(prediction["pred_mean"]), np.asarray(prediction["total_std"])
    within = np.abs(np.asarray(test["target"]) - mean) < 1.96 * std
    nll = 0.5 * ((np.asarray(test["target"]) - mean) / std) ** 2 + np.log(std)
    return {
        "rmse": float(np.sqrt(np.mean((mean - truth)[outside] ** 2))),
        "coverage": float(np.mean(within[outside])),
        "nll": float(np.mean(nll[outside]) + 0.5 * np.log(2 * np.pi)),
    }


def draw(data: Any, test: Any, predictions: Predictions) -> "Figure":
    """Three panels beside each other, one legend."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.4), layout="constrained")
        grid = figure.subplots(1, 3, sharey=True)
        x, observed = test["input"][:, 0], (data["input"][:, 0], data["target"][:, 0])
        for axes, (title, prediction) in zip(grid, predictions.items(), strict=True):
            fields = {name: prediction[name][:, 0] for name in prediction}
            axes.plot(x, np.sin(2 * np.pi * x), "--", color="0.35", linewidth=1, label="truth")
            predictive_band(x, fields, data=observed, legend=False, ax=axes)
            axes.set(title=title, ylim=(-4, 4), xlabel="x", ylabel="")
        grid[0].set_ylabel("y")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose but the seed."""


def run(args: argparse.Namespace) -> int:
    """Write `figure2.png` and `figure2.svg`, print what happens outside of the data."""
    with float64():
        numbers = predictions(args.seed, args.progress)
    data, test, panels = jax.tree.map(np.asarray, numbers)  # outside, float64 is NumPy's
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    figure = draw(data, test, panels)
    for suffix in ("png", "svg"):
        path = out / f"figure2.{suffix}"
        figure.savefig(path, dpi=200, bbox_inches="tight")
        print(path)
    print(f"\noutside of [-1, 1], seed {args.seed}")
    print(f"{'':32} {'rmse':>8} {'95% band':>9} {'nll':>8}")
    for title, prediction in panels.items():
        row = scores(test, prediction)
        print(f"{title:32} {row['rmse']:8.4f} {row['coverage']:9.3f} {row['nll']:8.3f}")
    return 0
