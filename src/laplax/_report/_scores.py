"""What rows are compared by: one number per test point, so that every difference has its error."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from ..metrics import auroc
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
        terms_in, terms_out = _placements(self.inside, self.outside[part])
        value = float(auroc(self.inside, self.outside[part]))
        return Estimate(value, _two_sample_error(terms_in, terms_out))

    def mean_nll(self, part: str) -> Estimate:
        """On one test set."""
        return mean_with_error(self.nll[part])


def nll_gain(first: Scores, second: Scores, part: str) -> Estimate:
    """By how much the NLL of the first is lower."""
    return paired_difference(second.nll[part], first.nll[part])


def auroc_gain(first: Scores, second: Scores, part: str) -> Estimate:
    """By how much the AUROC of the first is higher. Both saw the same points."""
    ours = _placements(first.inside, first.outside[part])
    theirs = _placements(second.inside, second.outside[part])
    terms_in, terms_out = (a - b for a, b in zip(ours, theirs, strict=True))
    return Estimate(float(terms_out.mean()), _two_sample_error(terms_in, terms_out))


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


def _placements(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every point, the share of the other set that it is ordered rightly against.

    The mean of either is the AUROC; their variances give its error (DeLong et al., 1988).
    """
    return 1 - _share_below(outside, inside), _share_below(inside, outside)


def _share_below(reference: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The share of `reference` below each point; a tie counts half."""
    ordered = np.sort(reference)
    below = np.searchsorted(ordered, points, side="left")
    up_to = np.searchsorted(ordered, points, side="right")
    return (below + up_to) / (2 * ordered.size)


def _two_sample_error(first: np.ndarray, second: np.ndarray) -> float:
    return math.sqrt(sum(float(x.var(ddof=1)) / x.size for x in (first, second) if x.size > 1))
