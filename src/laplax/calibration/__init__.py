"""Hyperparameters by evidence, or by a metric on held-out data."""

from ._chosen import Calibrated as Calibrated
from ._chosen import check_chosen_for as check_chosen_for
from ._methods import GradientDescent as GradientDescent
from ._methods import GridSearch as GridSearch
from ._methods import Method as Method
from ._methods import Trace as Trace
from ._points import CalibrationWarning as CalibrationWarning
from ._points import Searched as Searched
from ._search import EVIDENCE as EVIDENCE
from ._search import calibrate as calibrate
from ._search import register_calibration_method as register_calibration_method
