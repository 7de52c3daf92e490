"""FSP-Laplace: Gaussian-process priors on the function of a network."""

from . import context as context
from ._checks import FSPWarning as FSPWarning
from ._kernels import RBF as RBF
from ._kernels import Constant as Constant
from ._kernels import Kernel as Kernel
from ._kernels import Linear as Linear
from ._kernels import Matern12 as Matern12
from ._kernels import Matern32 as Matern32
from ._kernels import Matern52 as Matern52
from ._kernels import Periodic as Periodic
from ._kernels import RationalQuadratic as RationalQuadratic
from ._kernels import White as White
from ._kernels import gram as gram
from ._objective import fsp_objective as fsp_objective
from ._posterior import fsp_laplace as fsp_laplace
from ._prior import GPPrior as GPPrior
from ._regression import FittedPrior as FittedPrior
from ._regression import fit_prior as fit_prior
from ._regression import gp_log_evidence as gp_log_evidence
from ._regression import gp_regression as gp_regression
from ._train import train as train
