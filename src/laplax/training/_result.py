"""What training by marginal likelihood returns, shows on the way, and raises."""

import dataclasses
from typing import Any

import jax

from .._chain import PosteriorFn
from .._tree import PyTree, pytree


@pytree
class MarglikResult:
    """The weights of the best evidence seen, with the posterior there. A pytree.

    `history` has an entry for every step, `loss`, and entries for every fit of the curvature:
    `epoch`, `evidence`, `effective_parameters` and `prior_arguments`, each with a leading axis.
    """

    params: PyTree
    prior_arguments: dict[str, PyTree]
    posterior_fn: PosteriorFn | None  # None if training ended before the first fit
    evidence: jax.Array
    history: dict[str, Any]

    def __iter__(self) -> Any:
        """`params, prior_arguments, posterior_fn, history = marglik_training(...)`."""
        return iter((self.params, self.prior_arguments, self.posterior_fn, self.history))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingProgress:
    """What a callback sees after a fit of the curvature."""

    epoch: int  # how many are done
    step: int  # how many are done
    loss: float  # of the last step
    evidence: float
    effective_parameters: float
    params: PyTree
    prior_arguments: dict[str, PyTree]
    posterior_fn: PosteriorFn


class TrainingError(RuntimeError):
    """Training went wrong; `result` holds what was good before."""

    def __init__(self, message: str, result: MarglikResult) -> None:
        super().__init__(message)
        self.result = result
