"""What a report returns."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ._panels import Picture
from ._tables import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What a report found. `print(report)` shows the tables.

    Attributes:
        title: Its heading.
        summary: Facts about the problem, name to value.
        fits: One row per curvature; one that does not fit says why in `note`.
        metrics: Test metrics, the MAP first.
        coverage: How each leaf's curvature was computed, where an estimator says so.
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
    pictures: tuple[Picture, ...] = ()
    html: Path | None = None

    def __str__(self) -> str:
        return f"{self.title}\n\n{self.fits}\n\n{self.metrics}"
