"""What a report returns."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ._panels import Picture
from ._tables import Table
from ._verdict import Recommendation


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What a report found. `print(report)` shows the tables.

    Attributes:
        title: Its heading.
        summary: Facts about the problem, name to value.
        fits: One row per curvature; one that does not fit says why in `note`.
        metrics: Test metrics, the MAP first.
        coverage: How each leaf's curvature was computed, where an estimator says so.
        verdict: What to take, and why; None if no row could be compared.
        shown: The curvature that figures of a single one show.
        prior_arguments: The chosen hyperparameters by curvature.
        pictures: The figures, with the paths of their files.
        html: The page, if one was written.
    """

    title: str
    summary: Mapping[str, str]
    fits: Table
    metrics: Table
    coverage: Table
    shown: str | None
    prior_arguments: Mapping[str, Mapping[str, float]]
    verdict: Recommendation | None = None
    pictures: tuple[Picture, ...] = ()
    html: Path | None = None

    def __str__(self) -> str:
        parts = [self.title, self.verdict, self.metrics, self.fits]
        return "\n\n".join(str(part) for part in parts if part is not None)
