"""The curvature's spectrum, and the posterior's width layer by layer."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._tree import PyTree, leaf_names
from ..posterior import CurvEstimate
from ..structures import BlockDiagonal, Diagonal, LowRank, Structure
from ._style import LINES, OKABE_ITO, color, finish, on, plain_log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def curvature_values(structure: Structure) -> np.ndarray:
    """The eigenvalues that a structure keeps, largest first; for a diagonal one its entries.

    >>> import jax.numpy as jnp
    >>> curvature_values(Diagonal(jnp.asarray([1.0, 4.0, 2.0]))).tolist()
    [4.0, 2.0, 1.0]
    """
    spectral = structure.spectral()
    if isinstance(spectral, LowRank):
        values = spectral.eigenvalues
    elif isinstance(spectral, BlockDiagonal):
        values = jnp.concatenate([block.values.reshape(-1) for block in spectral.blocks])
    elif isinstance(spectral, Diagonal):
        values = spectral.values
    else:
        values = jnp.linalg.eigvalsh(spectral.to_dense())
    return np.sort(np.asarray(values))[::-1]


def spectrum(
    curvature: CurvEstimate | Structure | ArrayLike,
    *,
    label: str = "curvature",
    threshold: float | None = None,
    curve: int = 0,
    legend: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Eigenvalues of the curvature (or its diagonal) by rank, on a logarithmic scale.

    Args:
        curvature: A `CurvEstimate`, a structure, or an array of values.
        label: The name in the legend; how many values are not positive is added.
        threshold: Where prior and data weigh the same, prior_prec * sigma_squared: the data
            determine what lies above. Drawn as a thin line if given.
        curve: Which colour and line to take.
        legend: Whether to put a legend under the axes.
        ax: Where to draw; the current axes if not given.
    """
    structure = curvature.structure if isinstance(curvature, CurvEstimate) else curvature
    if isinstance(structure, Structure):
        values = curvature_values(structure)
    else:
        values = np.sort(np.ravel(structure))[::-1]
    # Zero has no logarithm, and what rounding leaves of it says nothing.
    noise = values.max(initial=0) * float(np.finfo(values.dtype).eps)
    positive = values[values > noise]
    if positive.size == 0:
        raise ValueError("the curvature holds no positive value, so there is no spectrum to draw")
    axes = on(ax)
    rest = values.size - positive.size
    name = f"{label} ({rest} at zero)" if rest else label
    line = LINES[curve % len(LINES)]
    ranks = np.arange(1, positive.size + 1)
    axes.plot(ranks, positive, linestyle=line, color=color(curve), label=name)
    if threshold is not None:
        axes.axhline(float(threshold), color=color(curve), linestyle=line, linewidth=0.6)
    return finish(axes, "rank of the value", "curvature", legend=legend, yscale="log")


def layer_std(variances: PyTree, *, ax: "Axes | None" = None) -> "Axes":
    """Posterior standard deviations, one box per leaf of the parameters.

    A box holds the middle half, its line the median, the whiskers all values. What does not vary
    (a variance of zero) is left out, and a leaf without any variance is named as fixed.

    Args:
        variances: `posterior.variance()`, a pytree like the parameters.
        ax: Where to draw; the current axes if not given.
    """
    axes = on(ax)
    names = []
    pairs = zip(leaf_names(variances), jax.tree.leaves(variances), strict=True)
    for place, (name, leaf) in enumerate(pairs):
        flat = np.ravel(np.asarray(leaf))
        free = np.sqrt(flat[flat > 0])
        count = f"{free.size}" if free.size == flat.size else f"{free.size} of {flat.size}"
        names.append(f"{name}\n({count if free.size else 'fixed'})")
        if free.size:
            _box(axes, place, np.quantile(free, [0, 0.25, 0.5, 0.75, 1]))
    plain_log_ticks(axes)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first leaf on top
    label = "posterior standard deviation"
    return finish(axes, label, "leaf (parameters)", legend=False, lines="x")


def _box(axes: "Axes", place: int, quartiles: np.ndarray) -> None:
    """Whiskers over all values, a box over the middle half, a line at the median."""
    low, first, median, third, high = quartiles
    blue = OKABE_ITO["blue"]
    sky = OKABE_ITO["sky"]
    axes.hlines(place, low, high, color=blue, linewidth=1.2)
    axes.barh(place, third - first, left=first, height=0.55, color=sky, edgecolor=blue)
    axes.vlines(median, place - 0.275, place + 0.275, color="black", linewidth=1.6)
