"""From weight space to output space, linear or by sampling."""

from ._fields import Moments as Moments
from ._fields import Recipe as Recipe
from ._fields import make_fields as make_fields
from ._fields import make_recipe as make_recipe
from ._fields import with_output_scale as with_output_scale
from ._input import as_inputs as as_inputs
from ._jacobian import TapJacobian as TapJacobian
from ._jacobian import jacobian as jacobian
from ._moments import draw_ensemble as draw_ensemble
from ._moments import prediction_work as prediction_work
from ._prediction import FIELDS as FIELDS
from ._prediction import Interval as Interval
from ._prediction import Prediction as Prediction
from ._prediction import of_first as of_first
from ._prediction import with_samples_axis as with_samples_axis
from ._predictive import PredictiveFamily as PredictiveFamily
from ._predictive import ProbPredictive as ProbPredictive
from ._predictive import predict as predict
