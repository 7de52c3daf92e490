"""Baselines with the interface of a Laplace predictive: what every method is compared with.

`baseline(input, fields=None)` is a prediction with the fields of `laplax.predictive`, and
`baseline.evaluate(data, metrics=None)` has the metrics of `laplax.evaluation`.
"""

from ._base import Baseline as Baseline
from ._ensemble import DeepEnsemble as DeepEnsemble
from ._ensemble import MCDropout as MCDropout
from ._ensemble import deep_ensemble as deep_ensemble
from ._ensemble import mc_dropout as mc_dropout
from ._mixture import Mixture as Mixture
from ._mixture import mixture_of_laplace as mixture_of_laplace
from ._point import PointPredictive as PointPredictive
from ._point import map_predictive as map_predictive
from ._scaling import temperature_scaling as temperature_scaling
from ._vector_scaling import vector_scaling as vector_scaling
