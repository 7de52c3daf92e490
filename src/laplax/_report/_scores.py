"""What rows are compared by: one number per test point, so that every difference has its error."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from ..ood import auroc_difference, auroc_with_error
from ..standard_errors import Estimate, mean_with_error, paired_difference

NOISE = 2.0  # standard errors that a difference must exceed


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Of one row: NLLs by test set, and scores of uncertainty by set of foreign inputs."""

    nll: Mapping[str, np.ndarray]
    inside: np.ndarray
    outside: Mapping[str, np.ndarray]

    def auroc(self, part: str) -> Estimate:
        """How well uncertainty tells foreign inputs from the test data."""
        return auroc_with_error(self.inside, self.outside[part])

    def mean_nll(self, part: str) -> Estimate:
        """On one test set."""
        return mean_with_error(self.nll[part])


def nll_gain(first: Scores, second: Scores, part: str) -> Estimate:
    """By how much the NLL of the first is lower."""
    return paired_difference(second.nll[part], first.nll[part])


def auroc_gain(first: Scores, second: Scores, part: str) -> Estimate:
    """By how much the AUROC of the first is higher. Both saw the same points."""
    ours = (first.inside, first.outside[part])
    return auroc_difference(ours, (second.inside, second.outside[part]))


def mean_gain(
    gain: Callable[[Scores, Scores, str], Estimate], first: Scores, second: Scores
) -> Estimate:
    """The mean over all sets. The sets may share points: the error is its upper bound."""
    parts = first.nll if gain is nll_gain else first.outside
    gains = [gain(first, second, part) for part in parts]
    return Estimate(
        sum(x.value for x in gains) / len(gains), sum(x.standard_error for x in gains) / len(gains)
    )


def is_clear(gain: Estimate) -> bool:
    """Whether a gain is above zero by more than noise."""
    return gain.value > NOISE * gain.standard_error and gain.value > 0
