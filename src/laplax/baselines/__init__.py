"""Baselines with the interface of a Laplace predictive: what every method is compared with.

`baseline(input, fields=None)` is a prediction with the fields of `laplax.predictive`, and
`baseline.evaluate(data, metrics=None)` has the metrics of `laplax.evaluation`.
"""

from ._base import Baseline as Baseline
from ._point import PointPredictive as PointPredictive
from ._point import map_predictive as map_predictive
from ._scaling import temperature_scaling as temperature_scaling
