"""Figures of a Laplace approximation: plain matplotlib, one function per figure.

Every function draws on a given `ax` (the current one if there is none) and returns it. Nothing here
imports matplotlib before a figure is drawn: `pip install 'laplax[plot]'`.
"""

from ._classification import confidence_histogram as confidence_histogram
from ._classification import confidence_map as confidence_map
from ._classification import entropy_histograms as entropy_histograms
from ._classification import map_points as map_points
from ._classification import reliability_diagram as reliability_diagram
from ._curvature import curvature_values as curvature_values
from ._curvature import layer_std as layer_std
from ._curvature import spectrum as spectrum
from ._energy import covariance_ellipses as covariance_ellipses
from ._energy import energy_contours as energy_contours
from ._energy import energy_ellipses as energy_ellipses
from ._regression import predictive_band as predictive_band
from ._search import calibration_curve as calibration_curve
from ._style import OKABE_ITO as OKABE_ITO
from ._style import color as color
from ._style import style as style
