"""Curvatures of the loss: what is measured, as products and as rows."""

from ._kinds import GGN as GGN
from ._kinds import Curvature as Curvature
from ._kinds import FisherEmpirical as FisherEmpirical
from ._kinds import FisherMC as FisherMC
from ._kinds import Hessian as Hessian
from ._operator import CurvatureOperator as CurvatureOperator
