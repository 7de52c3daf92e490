"""Tables as plain data, and as text."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..standard_errors import Estimate

EMPTY = "–"  # noqa: RUF001 - a dash is how tables say that there is no number


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by column key. `columns` maps keys to headings; `marks` are names and keys of cells."""

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    marks: frozenset[tuple[str, str]] = frozenset()

    def without_empty_columns(self) -> "Table":
        """The same table with the columns that have a value in some row."""
        filled = {key for row in self.rows for key, value in row.items() if value not in (None, "")}
        columns = {key: heading for key, heading in self.columns.items() if key in filled}
        return dataclasses.replace(self, columns=columns)

    def cells(self) -> list[list[str]]:
        """Every cell as text, the headings left out."""
        return [[show(key, row.get(key)) for key in self.columns] for row in self.rows]

    def is_marked(self, row: Mapping[str, Any], key: str) -> bool:
        """Whether a cell stands out: its row is better than all others by more than noise."""
        return (row["name"], key) in self.marks

    def __str__(self) -> str:
        lines = [list(self.columns.values()), *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(
                cell.ljust(width) if i == 0 or key in TEXT else cell.rjust(width)
                for i, (key, cell, width) in enumerate(zip(self.columns, line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *text])


TEXT = ("name", "note", "leaf", "how", "why")  # columns of words, set flush left


def show(key: str, value: Any) -> str:
    """A value as people read it."""
    if value is None or value == "":
        return EMPTY if key not in TEXT else ""
    if isinstance(value, Estimate):
        return with_error(value)
    if key == "milliseconds":
        return f"{value:.2g}"
    if key.endswith("bytes"):
        return human_bytes(int(value))
    if isinstance(value, float):
        return f"{value:.1f}" if key.endswith("seconds") else number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def number(value: float) -> str:
    """Four digits, without an exponent where one can do without.

    >>> number(0.123456), number(-1234.5), number(2.5e-7), number(float("nan"))
    ('0.1235', '-1,234', '2.5e-07', 'nan')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e3:
        digits = 3 - math.floor(math.log10(abs(value)))
        return f"{value:.{min(4, max(0, digits))}f}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"


def with_error(estimate: Estimate) -> str:
    """A value to the digits that its standard error leaves.

    >>> with_error(Estimate(0.14723, 0.0123)), with_error(Estimate(12.5, 3.4))
    ('0.147 ± 0.012', '12.5 ± 3.4')
    """
    error = estimate.standard_error
    if not (math.isfinite(error) and error > 0):
        return number(estimate.value)
    digits = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{estimate.value:,.{digits}f} ± {error:,.{digits}f}"


def human_bytes(size: int) -> str:
    """Bytes with the unit that fits.

    >>> human_bytes(640), human_bytes(3 * 2**20)
    ('640 B', '3.0 MiB')
    """
    if size < 1024:
        return f"{size} B"
    power = min(4, int(math.log2(size)) // 10)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
