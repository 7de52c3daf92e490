"""Metrics of predictions: pure functions on arrays, each with a twin that streams over batches.

`rmse(pred_mean, target)` is a number; `get_metric("rmse").stream(batches)` is the same number over
batches of any sizes. Parameters are named after the fields of a prediction that they read.
Predictions in half precision are judged in float32, others in their own dtype.
"""

from ._calibration_error import adaptive_ece as adaptive_ece
from ._calibration_error import adaptive_ece_metric as adaptive_ece_metric
from ._calibration_error import ece as ece
from ._calibration_error import ece_metric as ece_metric
from ._calibration_error import mce as mce
from ._calibration_error import mce_metric as mce_metric
from ._classification import accuracy as accuracy
from ._classification import brier as brier
from ._classification import cross_entropy as cross_entropy
from ._classification import entropy as entropy
from ._classification import entropy_per_example as entropy_per_example
from ._classification import mutual_information as mutual_information
from ._classification import mutual_information_per_example as mutual_information_per_example
from ._classification import nll_from_log_probs as nll_from_log_probs
from ._classification import top_k_accuracy as top_k_accuracy
from ._classification import top_k_accuracy_metric as top_k_accuracy_metric
from ._lookup import CLASSIFICATION_METRICS as CLASSIFICATION_METRICS
from ._lookup import REGRESSION_METRICS as REGRESSION_METRICS
from ._lookup import get_metric as get_metric
from ._ood import auroc as auroc
from ._ood import fpr95 as fpr95
from ._regression import chi_squared as chi_squared
from ._regression import coverage as coverage
from ._regression import coverage_metric as coverage_metric
from ._regression import crps as crps
from ._regression import interval_width as interval_width
from ._regression import interval_width_metric as interval_width_metric
from ._regression import nll as nll
from ._regression import pit as pit
from ._regression import rmse as rmse
from ._selective import accuracy_at_coverage as accuracy_at_coverage
from ._selective import area_under_risk_coverage as area_under_risk_coverage
from ._selective import aurc as aurc
from ._selective import excess_area_under_risk_coverage as excess_area_under_risk_coverage
from ._selective import excess_aurc as excess_aurc
from ._selective import regression_aurc as regression_aurc
from ._selective import regression_excess_aurc as regression_excess_aurc
from ._selective import risk_at_coverage as risk_at_coverage
from ._selective import risk_coverage_curve as risk_coverage_curve
from ._streaming import Metric as Metric
from ._streaming import average as average
from ._streaming import required_parameters as required_parameters
