"""The pictures of the documentation: python docs/images/make.py [NAME ...]

A page's picture is the figure that its own code leaves in `fig`. Where a page can use real data, so
does its picture: set LAPLAX_DATA, as the page says. `demo` comes from the two problems of
`laplax demo`.
"""

import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import laplax
from laplax import plot

HERE = pathlib.Path(__file__).parent
PAGES = {"regression": "tutorials/regression.md", "ood": "tutorials/classification.md"}
NEEDS_DATA = ("ood",)
DPI = 110


def of_page(name):
    text = (HERE.parent / PAGES[name]).read_text()
    names = {"__name__": "__page__"}
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M):
        exec(compile(code, PAGES[name], "exec"), names)
    return names["fig"]


def fitted(problem):
    """The full curvature of a problem, calibrated as the demonstration does it."""
    arguments = (problem["model_fn"], problem["params"])
    by_evidence = problem.get("calibration_objective") is None
    posterior_fn, _ = laplax.laplace(*arguments, problem["train"], loss_fn=problem["loss_fn"])
    prior_arguments, set_prob_predictive = laplax.calibration(
        posterior_fn,
        *arguments,
        problem["train" if by_evidence else "calibration"],
        calibration_objective="marginal_log_likelihood" if by_evidence else "nll",
        calibration_method="gradient_descent" if by_evidence else "grid_search",
    )
    return set_prob_predictive(prior_arguments)


def demo():
    from laplax.cli._problems import sinusoid, two_moons

    with plot.style():
        fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
        problem = sinusoid(0)
        x = jnp.linspace(-2, 2, 300)[:, None]
        data = (problem["train"]["input"], problem["train"]["target"])
        plot.predictive_band(x, fitted(problem)(x), data=data, ax=axes[0])
        axes[0].set_title("regression: 95% bands")
        problem = two_moons(0)
        prob_predictive = fitted(problem)
        data = (problem["train"]["input"], problem["train"]["target"])
        model = jax.vmap(problem["model_fn"], (0, None))
        maps = {
            "network: confidence": lambda x: jax.nn.softmax(model(x, problem["params"])),
            "Laplace: confidence": lambda x: prob_predictive(x).pred_act,
        }
        for ax, (title, probabilities) in zip(axes[1:], maps.items(), strict=True):
            plot.confidence_map(
                lambda x, p=probabilities: p(jnp.asarray(x, jnp.float32)),
                xlim=(-2.5, 3.5),
                ylim=(-2.5, 3.0),
                data=data,
                colorbar=ax is axes[2],
                ax=ax,
            )
            ax.set_title(title)
    return fig


MAKERS = {"demo": demo, **{name: lambda name=name: of_page(name) for name in PAGES}}


def main():
    for name in sys.argv[1:] or MAKERS:
        if name in NEEDS_DATA and "LAPLAX_DATA" not in os.environ:
            print(f"{name}: not drawn, LAPLAX_DATA is not set")
            continue
        path = HERE / f"{name}.png"
        MAKERS[name]().savefig(path, dpi=DPI, bbox_inches="tight")
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
