"""Curvatures of the loss: what is measured, as products and as rows."""

from ._kinds import CURVATURES as CURVATURES
from ._kinds import GGN as GGN
from ._kinds import Curvature as Curvature
from ._kinds import FisherEmpirical as FisherEmpirical
from ._kinds import FisherMC as FisherMC
from ._kinds import Hessian as Hessian
from ._kinds import OuterProductCurvature as OuterProductCurvature
from ._operator import CurvatureOperator as CurvatureOperator
from ._operator import LocalCurvature as LocalCurvature
from ._operator import product_of_batch as product_of_batch
from ._operator import subset_scale as subset_scale
from ._tapped import Tapped as Tapped
from ._tapped import bytes_per_example as bytes_per_example
from ._tapped import coverage_of as coverage_of
from ._tapped import diagonal_of_batch as diagonal_of_batch
from ._tapped import leaf_diagonal as leaf_diagonal
from ._tapped import leaves_of_diagonal as leaves_of_diagonal
from ._tapped import run_taps as run_taps
from ._tapped import tap_batch as tap_batch
