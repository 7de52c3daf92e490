"""One measurement of a curvature, and the same measurement again."""

import jax

from ._engine.arrays import all_finite, is_concrete
from ._problem import Problem
from .curvature import CurvatureOperator, LocalCurvature
from .estimators import Diagnostics, Estimator
from .posterior import Measurement, PosteriorFamily
from .structures import Structure


def measured_structure(
    operator: CurvatureOperator, estimator: Estimator
) -> tuple[Structure, Diagnostics]:
    """The estimated curvature for all `num_total_samples`, checked, and its diagnostics."""
    estimated, diagnostics = estimator.estimate(operator)
    structure = operator.scaled(estimated)
    _check_structure(structure, operator)
    return structure, diagnostics


def measurement_of(fitted: PosteriorFamily, otherwise: str = "") -> Measurement:
    """How the curvature was measured, or an error if that is lost; `otherwise` is a way out."""
    if fitted.measurement is None:
        raise ValueError(
            "this posterior_fn does not know how its curvature was measured: it was loaded, "
            f"unpickled or passed through jax.jit. Pass the one that laplace returned{otherwise}"
        )
    return fitted.measurement


def operator_again(
    fitted: PosteriorFamily,
    problem: Problem,
    num_total_samples: int | None,
    progress: bool | None,
) -> CurvatureOperator:
    """The operator of the fit on another problem: other weights, other data."""
    how = measurement_of(fitted)
    local = LocalCurvature(
        problem.params, how.curvature, problem.model, problem.likelihood, fitted.space
    )
    return CurvatureOperator(
        local,
        problem.data,
        problem.traced,
        num_total_samples=num_total_samples,
        num_curv_samples=how.num_curv_samples,
        batch_size=how.batch_size,
        memory_budget=how.memory_budget,
        progress=progress,
    )


def _check_structure(structure: Structure, operator: CurvatureOperator) -> None:
    if structure.size != operator.size:
        raise ValueError(
            f"the estimator returned a structure of size {structure.size} for "
            f"{operator.size} parameters"
        )
    arrays = [x for x in jax.tree.leaves(structure) if hasattr(x, "dtype")]
    if is_concrete(arrays) and not all_finite(arrays):
        raise ValueError(
            "the curvature is not finite although parameters and data are: the model or its "
            "derivatives overflow. Look at the model's outputs on the training data: exp of a "
            "log-rate, or of minus a log-variance, is beyond float32 at 88 (rescale the target, or "
            "use float64, jax.config.update('jax_enable_x64', True)). (A callable "
            "loss gives this too where its Hessian in the output has negative eigenvalues: "
            "loss_fn=Custom(loss, indefinite='clip') counts them as zero.)"
        )
