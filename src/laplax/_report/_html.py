"""One page that holds everything: styles inline, images inside, nothing fetched."""

import base64
import html
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._tables import TEXT, Table, show

if TYPE_CHECKING:
    from ._panels import Picture

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b626b; --line: #d9dde2;
  --page: #ffffff; --box: #f5f7f9; --mark: #0b6aa8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7e9ec; --soft: #a4abb3; --line: #3a4048; --page: #16181b; --box: #202429;
    --mark: #6bbcf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.25rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.4rem 0 1rem; }
h2 { font-size: 1.35rem; margin: 2.2rem 0 0.8rem; padding-top: 1rem;
  border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 0.5rem; }
p, figcaption { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { background: var(--box); font-weight: 600; vertical-align: bottom; white-space: normal; }
.text { text-align: left; }
td.note { white-space: normal; min-width: 16rem; color: var(--soft); font-size: 0.82rem; }
td.best { font-weight: 700; color: var(--mark); }
tr.first td { background: var(--box); }
.figures { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; }
figure.wide { flex-basis: 100%; }
.paper { background: #ffffff; border: 1px solid var(--line); border-radius: 8px; padding: 0.5rem;
  overflow-x: auto; }
.paper img { display: block; height: auto; max-width: 100%; margin: 0 auto; }
figcaption { font-size: 0.88rem; margin-top: 0.45rem; max-width: 46rem; }
figcaption b { color: var(--ink); }
@media (max-width: 640px) {
  .wide .paper img { max-width: none; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.4rem; } }
footer { margin-top: 2.5rem; font-size: 0.82rem; color: var(--soft); }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def write_page(path: Path, title: str, reports: Sequence[Any]) -> None:
    """One self-contained page; with several reports, a section for each."""
    sections = [_section(report, heading=len(reports) > 1) for report in reports]
    page = PAGE.format(
        title=html.escape(title), style=STYLE, body="\n".join(sections), footer=_footer()
    )
    path.write_text(page, encoding="utf-8")


def _section(report: Any, *, heading: bool) -> str:
    facts = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in report.summary.items()
    )
    noise = ", with the noise of its training residuals" * ("rmse" in report.metrics.columns)
    parts = [
        f"<h2>{html.escape(report.title)}</h2>" if heading else "",
        f"<dl>{facts}</dl>",
        _table(report.metrics, f"Best values are marked. MAP: the network as it is{noise}."),
        _table(report.fits, "Seconds include compilation."),
        '<div class="figures">' + "".join(_figure(p) for p in report.pictures) + "</div>",
        _table(report.coverage, "") if report.coverage.rows else "",
    ]
    return "<section>" + "\n".join(part for part in parts if part) + "</section>"


def _table(table: Table, remark: str) -> str:
    head = "".join(
        f'<th scope="col"{_kind(key)}>{html.escape(heading)}</th>'
        for key, heading in table.columns.items()
    )
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(
            f"<td{_kind(key, best=table.is_best(row, key))}>"
            f"{html.escape(show(key, row.get(key)))}</td>"
            for key in table.columns
        )
        first = ' class="first"' if i == 0 and row["name"] == "MAP" else ""
        rows.append(f"<tr{first}>{cells}</tr>")
    note = f"<p>{html.escape(remark)}</p>" if remark else ""
    return (
        f'<h3>{html.escape(table.title)}</h3><div class="scroll" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _kind(key: str, *, best: bool = False) -> str:
    names = [
        name for name, on in (("text", key in TEXT), ("note", key == "note"), ("best", best)) if on
    ]
    return f' class="{" ".join(names)}"' if names else ""


def _figure(picture: "Picture") -> str:
    data = base64.b64encode(picture.png.read_bytes()).decode("ascii")
    pixels = round(picture.width * 96)
    # A narrow figure is as wide as its image, so that two of them stand side by side.
    place = ' class="wide"' if picture.width > 6 else f' style="width: {pixels + 18}px"'
    title, caption = html.escape(picture.title), html.escape(picture.caption)
    return (
        f'<figure{place}><h3>{title}</h3><div class="paper">'
        f'<img src="data:image/png;base64,{data}" width="{pixels}" '
        f'alt="{title}. {caption}"></div><figcaption>{caption}</figcaption></figure>'
    )


def _footer() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in ("laplax", "jax", "numpy")]
    return html.escape(f"{', '.join(versions)}, Python {platform.python_version()}")
