"""From a curvature operator to a structure: how G is estimated."""

from .._enums import CurvApprox
from .._registry import Registry
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

ESTIMATORS = Registry[Estimator](
    "curv_type",
    Estimator,
    {
        CurvApprox.FULL: Full,
        CurvApprox.DIAGONAL: ExactDiagonal,
        CurvApprox.HUTCHINSON: Hutchinson,
        CurvApprox.LANCZOS: Lanczos,
        CurvApprox.KFAC: KFAC,
        CurvApprox.EKFAC: EKFAC,
        CurvApprox.BLOCK_DIAGONAL: ExactBlocks,
        CurvApprox.LOBPCG: Lobpcg,
    },
)


def estimator_class(curv_type: str) -> type[Estimator]:
    """The class that a name stands for."""
    ESTIMATORS.check(curv_type)
    return ESTIMATORS[curv_type]


def register_curvature_method(name: str, estimator: type[Estimator]) -> None:
    """Give an estimator class a name for `laplace(..., curv_type=name)`.

    A convenience: `laplace` takes the object itself as well.
    """
    ESTIMATORS.register(name, estimator)
