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
import numpy as np

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


ROWS = {"MAP": ("#8a9099", "o"), "temperature scaling": ("#d55e00", "s"), None: ("#0b6aa8", "D")}


def demo():
    """What is gained: the gap of a regression; NLL and foreign inputs of a classification."""
    from laplax.cli._problems import digits, sinusoid

    with plot.style():
        fig, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
        draw_bands(axes[0], sinusoid(0))
        verdict = laplax.report(**digits(0), progress=False).verdict
        draw_rows(axes[1], verdict, "nll", "NLL (lower is better)")
        draw_rows(axes[2], verdict, "auroc", "AUROC of foreign inputs (higher is better)")
        axes[2].legend(*axes[1].get_legend_handles_labels(), loc="lower left", fontsize=8)
    return fig


def draw_bands(ax, problem):
    """The bands of the chosen row, and lines at two standard deviations of the MAP's noise."""
    made = laplax.report(**problem, progress=False).verdict
    x = jnp.linspace(-2, 2, 300)[:, None]
    prediction = made.prob_predictive(x)
    data = (problem["train"]["input"], problem["train"]["target"])
    plot.predictive_band(x, prediction, data=data, legend=False, ax=ax)
    inputs, targets = problem["calibration"]["input"], problem["calibration"]["target"]
    mean = jax.vmap(problem["model_fn"], (0, None))(inputs, problem["params"])
    noise = float(jnp.std(targets - mean))
    for sign, label in ((-1, None), (1, "95% of the MAP")):
        line = prediction.pred_mean[:, 0] + 1.96 * sign * noise
        ax.plot(x[:, 0], line, "--", color="#d55e00", linewidth=1.2, label=label)
    ax.set(ylim=(-3.6, 2.6), title="Regression: 95% bands")
    ax.legend(fontsize=8, loc="lower left", ncols=2)
    table = {row["name"]: row for row in made.table.rows}
    values = [table[name]["nll the gap"].value for name in ("MAP", made.name)]
    text = f"NLL in the gap: MAP {values[0]:.2f}, {made.name} {values[1]:.2f}"
    ax.text(0.5, 0.97, text, transform=ax.transAxes, ha="center", va="top", fontsize=8)


def draw_rows(ax, verdict, kind, title):
    """Every set a group of points: the network, temperature scaling and the chosen row."""
    table = {row["name"]: row for row in verdict.table.rows}
    parts = [key.removeprefix(f"{kind} ") for key in table["MAP"] if key.startswith(f"{kind} ")]
    for offset, (name, (color, marker)) in zip((-0.2, 0, 0.2), ROWS.items(), strict=True):
        row = table[name or verdict.name]
        found = [row[f"{kind} {part}"] for part in parts]
        ax.errorbar(
            np.arange(len(parts)) + offset,
            [x.value for x in found],
            [2 * x.standard_error for x in found],
            fmt=marker,
            color=color,
            capsize=3,
            markersize=5,
            label=name or f"Laplace ({verdict.name})",
        )
    labels = [part.replace("digits ", "").replace(" (", "\n(") for part in parts]
    ax.set(xticks=range(len(parts)), xticklabels=labels, title=f"Digits: {title}")
    ax.set_xlim(-0.5, len(parts) - 0.5)
    ax.grid(axis="y", alpha=0.4)


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
