"""One page that holds everything: styles inline, images inside, nothing fetched."""

import base64
import platform
import string
from collections.abc import Sequence
from html import escape
from importlib import metadata
from pathlib import Path

from ._panels import Picture
from ._result import Report
from ._tables import TEXT, Table, show
from ._verdict import RULE, Recommendation

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, title: str, reports: Sequence[Report]) -> None:
    """Write one self-contained page; with several reports, a section for each."""
    sections = [_section(report, heading=len(reports) > 1) for report in reports]
    versions = [f"{name} {metadata.version(name)}" for name in ("laplax", "jax", "numpy")]
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        body="\n".join(sections),
        footer=escape(f"{', '.join(versions)}, Python {platform.python_version()}"),
    )
    path.write_text(page, encoding="utf-8")


def _section(report: Report, *, heading: bool) -> str:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.summary.items()
    )
    parts = [
        f"<h2>{escape(report.title)}</h2>" if heading else "",
        "" if report.verdict is None else _verdict(report.verdict),
        _figures(report.pictures[:1]),
        f"<h3>The problem</h3><dl>{facts}</dl>",
        _table(report.metrics, "All metrics are of the test data."),
        _table(report.fits, "Seconds include compilation."),
        _figures(report.pictures[1:]),
        _table(report.coverage) if report.coverage.rows else "",
    ]
    return "<section>" + "\n".join(part for part in parts if part) + "</section>"


def _verdict(verdict: Recommendation) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons)
    remark = (
        "Mean ± standard error. A value is marked if it is better than every other one by more "
        f"than noise. {RULE}"
    )
    return (
        f'<div class="verdict"><p>{escape(verdict.sentence)}</p>'
        + (f"<ul>{reasons}</ul>" if reasons else "")
        + "</div>"
        + _table(verdict.table, remark, verdict.name)
        + f"<h3>The code of this row</h3><pre>{escape(verdict.code)}</pre>"
    )


def _figures(pictures: Sequence[Picture]) -> str:
    return f'<div class="figures">{"".join(map(_figure, pictures))}</div>' if pictures else ""


def _table(table: Table, remark: str = "", chosen: str | None = None) -> str:
    head = "".join(
        f'<th scope="col"{_class_of(key)}>{escape(heading)}</th>'
        for key, heading in table.columns.items()
    )
    rows = []
    for row in table.rows:
        cells = "".join(
            f"<td{_class_of(key, table.is_marked(row, key))}>{escape(show(key, row.get(key)))}</td>"
            for key in table.columns
        )
        place = ' class="chosen"' if row["name"] == chosen else ""
        rows.append(f"<tr{place}>{cells}</tr>")
    note = f"<p>{escape(remark)}</p>" if remark else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _class_of(key: str, best: bool = False) -> str:
    names = ["text"] * (key in TEXT) + ["note"] * (key == "note") + ["best"] * best
    return f' class="{" ".join(names)}"' if names else ""


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png.read_bytes()).decode("ascii")
    pixels = round(picture.width * 96)
    # A narrow figure is as wide as its image, so that two of them stand side by side.
    place = ' class="wide"' if picture.width > 6 else f' style="width: {pixels + 18}px"'
    title = escape(picture.title)
    caption = escape(picture.caption)
    return (
        f'<figure{place}><h3>{title}</h3><div class="paper">'
        f'<img src="data:image/png;base64,{data}" width="{pixels}" '
        f'alt="{title}. {caption}"></div><figcaption>{caption}</figcaption></figure>'
    )
