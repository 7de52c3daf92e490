"""Training by marginal likelihood: the weights and their prior from the training data alone."""

from ._bound import marglik_bound as marglik_bound
from ._hyper import HyperState as HyperState
from ._hyper import hyper_state as hyper_state
from ._hyper import hyper_step as hyper_step
from ._marglik import marglik_training as marglik_training
from ._result import MarglikResult as MarglikResult
from ._result import TrainingError as TrainingError
from ._result import TrainingProgress as TrainingProgress
