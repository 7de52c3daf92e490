"""From weight space to output space, linear or by sampling."""

from ._moments import jacobian as jacobian
from ._prediction import Prediction as Prediction
from ._predictive import ProbPredictive as ProbPredictive
from ._predictive import SetProbPredictive as SetProbPredictive
from ._predictive import predictive as predictive
