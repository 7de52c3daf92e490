"""From a curvature operator to a structure: how G is estimated."""

from .._enums import CurvApprox, near_miss
from ._base import ConvergenceWarning as ConvergenceWarning
from ._base import Diagnostics as Diagnostics
from ._base import Estimator as Estimator
from ._diagonal import ExactDiagonal as ExactDiagonal
from ._diagonal import Hutchinson as Hutchinson
from ._full import Full as Full
from ._kfac import EKFAC as EKFAC
from ._kfac import KFAC as KFAC
from ._kfac import ExactBlocks as ExactBlocks
from ._lanczos import Lanczos as Lanczos
from ._lobpcg import Lobpcg as Lobpcg

ESTIMATORS: dict[str, type[Estimator]] = {
    CurvApprox.FULL: Full,
    CurvApprox.DIAGONAL: ExactDiagonal,
    CurvApprox.HUTCHINSON: Hutchinson,
    CurvApprox.LANCZOS: Lanczos,
    CurvApprox.KFAC: KFAC,
    CurvApprox.EKFAC: EKFAC,
    CurvApprox.BLOCK_DIAGONAL: ExactBlocks,
    CurvApprox.LOBPCG: Lobpcg,
}


def estimator_class(curv_type: str) -> type[Estimator]:
    """The class that a name stands for."""
    if curv_type not in ESTIMATORS:
        raise ValueError(f"unknown curv_type {curv_type!r}{near_miss(curv_type, ESTIMATORS)}")
    return ESTIMATORS[curv_type]


def register_curvature_method(name: str, estimator: type[Estimator]) -> None:
    """Give an estimator class a name for `laplace(..., curv_type=name)`.

    A convenience: `laplace` takes the object itself as well.
    """
    if not (isinstance(estimator, type) and issubclass(estimator, Estimator)):
        raise TypeError(f"estimator must be a subclass of Estimator; got {estimator!r}")
    if name in ESTIMATORS:
        raise ValueError(f"curv_type {name!r} exists already; choose another name")
    ESTIMATORS[name] = estimator
