"""Figure 1 of the paper: the Laplace approximation of a ReLU network with two parameters.

Grey contours are levels of the energy with square loss and prior,

    E(theta) = 1/2 sum_n (f(x_n, theta) - y_n)^2 + prior_prec / 2 |theta|^2,

the cross is the MAP, and the ellipses are the 1- and 2-sigma levels of N(MAP, Lambda^-1): points at
a Mahalanobis distance of 1 and 2 from it. The posterior is that of the linearised network, with the
GGN as its curvature, so that an ellipse need not follow the contours.

The caption of the figure and the listing beside it disagree: theta_2 relu(theta_1 x + 1) on
{(1, -1), (-1, -1)} there, theta_2 relu(theta_1 x - 1) on {(1, 1), (-1, -1)} here. This is the
listing: its weights are the minimum of this energy with its prior precision, 0.2, but for a
gradient of 0.001 that is left.
"""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from laplax import laplace
from laplax.plot import energy_ellipses, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRIOR_PREC = 0.2
MAP = {"theta1": 1.6556547, "theta2": 1.0420421}
WINDOW = ((-1.5, 4.8), (-3.2, 5.2))  # theta_1, theta_2: the 2-sigma ellipse and some room


def model_fn(input: jax.Array, params: Any) -> jax.Array:
    """The network: theta_2 relu(theta_1 x - 1)."""
    return jax.nn.relu(params["theta1"] * input - 1) * params["theta2"]


def training_data() -> dict[str, jax.Array]:
    """Two points."""
    return {"input": jnp.array([1.0, -1.0]), "target": jnp.array([1.0, -1.0])}


def energy(theta: np.ndarray | jax.Array) -> jax.Array:
    """Minus the log joint density up to a constant, for weights (n, 2)."""
    data, weights = training_data(), jnp.asarray(theta)
    params = {"theta1": weights[:, :1], "theta2": weights[:, 1:]}
    residual = model_fn(data["input"], params) - data["target"]
    return 0.5 * jnp.sum(residual**2, axis=1) + 0.5 * PRIOR_PREC * jnp.sum(weights**2, axis=1)


def posterior_covariance() -> np.ndarray:
    """Lambda^-1 of the weights, in the order (theta_1, theta_2)."""
    params = {name: jnp.asarray(value) for name, value in MAP.items()}
    posterior_fn, _ = laplace(
        model_fn, params, training_data(), loss_fn="mse", curv_type="full", progress=False
    )
    scale = posterior_fn({"prior_prec": PRIOR_PREC}).state["scale"]
    return np.asarray(scale @ scale.T)


def draw(covariance: np.ndarray) -> "Figure":
    """The figure, on no global state of matplotlib."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.4, 3.6))
        energy_ellipses(
            energy,
            np.array(list(MAP.values())),
            {"Laplace": covariance},
            names=(r"$\theta_1$", r"$\theta_2$"),
            xlim=WINDOW[0],
            ylim=WINDOW[1],
            ax=figure.subplots(),
        )
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose: the figure has no randomness."""


def run(args: argparse.Namespace) -> int:
    """Write `figure1.png` and `figure1.svg`, print the marginals."""
    covariance = posterior_covariance()
    figure, out = draw(covariance), pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg"):
        path = out / f"figure1.{suffix}"
        figure.savefig(path, dpi=200, bbox_inches="tight")
        print(path)
    deviations = np.sqrt(np.diagonal(covariance))
    for (name, value), deviation in zip(MAP.items(), deviations, strict=True):
        print(f"{name} = {value:.4f} +- {deviation:.4f} (one standard deviation)")
    return 0
