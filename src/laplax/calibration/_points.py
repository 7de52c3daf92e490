"""The points of a search: where it starts, and what a grid of numbers means."""

from collections.abc import Mapping

import jax
import numpy as np

from .._engine.memo import WeakInside, model_jit
from .._model import Model
from .._tree import PyTree, pytree
from ..evidence import prior_offset
from ..posterior import PosteriorFamily
from ._objectives import Objective

PERFECT = 1e-6  # of the outputs' variance: where the noise of a perfect fit starts

Point = tuple[dict[str, PyTree], jax.Array]  # what a grid chose at one of its points; the value


class CalibrationWarning(UserWarning):
    """A search ended where its answer should not be trusted without a look."""


@pytree
class Searched(WeakInside):
    """What a method minimises: an objective, and the natural scale of its hyperparameters."""

    objective: Objective
    scale: dict[str, jax.Array]  # as weights, Jacobians and residuals show them

    @property
    def model(self) -> Model:
        """The model whose hyperparameters they are."""
        return self.objective.model

    def __call__(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """The value to be minimised."""
        return self.objective(prior_arguments)

    def bytes_per_point(self) -> int:
        """Temporaries of one point of a grid."""
        return self.objective.bytes_per_point()

    def natural_grid(self, size: int, fixed: Mapping[str, PyTree]) -> tuple["Searched", np.ndarray]:
        """A logarithmic grid around the natural scale, and what reads its points."""
        del fixed
        grid = np.logspace(*self.objective.decades, size)
        return self, float(self.scale["prior_prec"]) * grid

    def point(self, point: jax.Array, fixed: Mapping[str, PyTree]) -> Point:
        """The hyperparameters that one number of the grid stands for, and the value there."""
        return {"prior_prec": point}, self.objective({**fixed, "prior_prec": point})


def natural_scale(
    objective: Objective, posterior_fn: PosteriorFamily, given: Mapping[str, PyTree]
) -> dict[str, float]:
    """Prior precision and noise variance as residuals, weights and Jacobians show them.

    The noise is the mean squared residual of the MAP; a likelihood without noise measures outputs
    in units of its own. The prior precision is the one at which the prior's variance of the
    outputs equals it or, for the evidence, that of weights as large as these. All change with the
    units of targets, inputs and weights as they should.
    """
    variance = objective.prior_variance()
    mean = {name: given[name] for name in ("prior_mean",) if name in given}
    if not posterior_fn.likelihood.has_noise:
        return {"prior_prec": variance or _precision_of_weights(posterior_fn, mean, 1.0)}
    squares, count = objective.squared_residuals()
    count = max(count, 1.0)
    noise = squares / count
    if variance and noise:
        return {"prior_prec": variance / noise, "sigma_squared": noise}
    energy, dimension, trace = (float(x) for x in _measures(posterior_fn, mean))
    # Of a perfect fit, and of weights at the prior's mean, the curvature tells the scale.
    noise = noise or PERFECT * trace * energy / (dimension * count) or 1.0
    precision = _precision_of_weights(posterior_fn, mean, noise)
    return {"prior_prec": precision, "sigma_squared": noise}


def _precision_of_weights(
    posterior_fn: PosteriorFamily, mean: Mapping[str, PyTree], noise: float
) -> float:
    """That of a prior whose weights are as large as these."""
    energy, dimension, trace = (float(x) for x in _measures(posterior_fn, mean))
    precision = dimension / energy if energy else trace / (dimension * noise)
    return precision or 1.0


@model_jit
def _measures(posterior_fn: PosteriorFamily, mean: Mapping[str, PyTree]) -> tuple[PyTree, ...]:
    """|theta - mu0|^2 as the prior measures it, how many directions vary, the trace of G."""
    arguments = posterior_fn.parse({"prior_prec": 1.0, **mean})
    precision = posterior_fn.at(arguments).precision
    energy = precision.prior_energy(prior_offset(posterior_fn, arguments))
    return energy, precision.dimension, posterior_fn.structure.trace()
