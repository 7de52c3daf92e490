"""Laplace approximations for neural networks in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from ._api import curvature_mv as curvature_mv
from ._api import laplace as laplace
from ._arguments import InputWarning as InputWarning
from ._chain import PosteriorFn as PosteriorFn
from ._chain import SetProbPredictive as SetProbPredictive
from ._enums import CalibrationMethod as CalibrationMethod
from ._enums import CalibrationObjective as CalibrationObjective
from ._enums import CurvApprox as CurvApprox
from ._enums import CurvatureType as CurvatureType
from ._enums import LossFn as LossFn
from ._enums import Predictive as Predictive
from ._enums import Pushforward as Pushforward
from ._glm import glm_mode as glm_mode
from ._linearised import linearise as linearise

# After the modules whose names they take.
from ._pipeline import calibration as calibration
from ._pipeline import effective_parameters as effective_parameters
from ._pipeline import evaluation as evaluation
from ._pipeline import log_marginal_likelihood as log_marginal_likelihood
from ._pipeline import predictive as predictive
from ._tempered import tempered_model as tempered_model
from ._version import __version__ as __version__
from .calibration import CalibrationWarning as CalibrationWarning
from .calibration import GradientDescent as GradientDescent
from .calibration import GridSearch as GridSearch
from .calibration import register_calibration_method as register_calibration_method
from .curvature import GGN as GGN
from .curvature import FisherEmpirical as FisherEmpirical
from .curvature import FisherMC as FisherMC
from .curvature import Hessian as Hessian
from .estimators import register_curvature_method as register_curvature_method
from .evaluation import judge as judge
from .evidence import data_fit as data_fit
from .evidence import residual_variance as residual_variance
from .features import last_layer_features as last_layer_features
from .posterior import CurvEstimate as CurvEstimate
from .posterior import Posterior as Posterior
from .prior import Prior as Prior
from .prior import gaussian_prior as gaussian_prior
from .pushforward import Interval as Interval
from .pushforward import Prediction as Prediction
from .pushforward import ProbPredictive as ProbPredictive
from .subset import largest_magnitude as largest_magnitude
from .subset import largest_variance as largest_variance

if TYPE_CHECKING:
    from ._report import Recommendation as Recommendation
    from ._report import Report as Report
    from ._report import recommend as recommend
    from ._report import report as report
    from ._shard import shard as shard
    from .files import FileError as FileError
    from .files import load as load
    from .files import save as save
    from .fsp import fsp_laplace as fsp_laplace

# What not every program needs is loaded when it is asked for: a quarter of the import.
_LATER = {
    "FileError": ".files",
    "Recommendation": "._report",
    "Report": "._report",
    "fsp_laplace": ".fsp",
    "load": ".files",
    "recommend": "._report",
    "report": "._report",
    "save": ".files",
    "shard": "._shard",
}


_LATER_MODULES = (
    "augmentation",
    "baselines",
    "conformal",
    "fsp",
    "ood",
    "pruning",
    "shifts",
    "standard_errors",
    "training",
)


def __getattr__(name: str) -> Any:
    if name in _LATER_MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_LATER, *_LATER_MODULES]
