"""Renders the report of a check as one HTML file without scripts or network access."""

import html
import shlex
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any

from model_port.json_files import flattened
from paravt_jax.check.report import COLUMNS, StageReport, rows_of

PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>paravt check: $verdict</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
  h1 { font-size: 1.5rem; margin-bottom: 0 }
  p { color: GrayText; margin-top: .3rem }
  h1, p, td:nth-child(2) { overflow-wrap: anywhere }
  .scroll { overflow-x: auto }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; font-variant-numeric: tabular-nums }
  td:nth-child(2) { min-width: 12rem }
  th { font-weight: 600; border-bottom: 2px solid }
  .stage td { font-weight: 600; border-top: 1px solid GrayText; padding-top: .6rem }
  .ok td:last-child { color: light-dark(#187a2f, #6c6) }
  .failed td { color: light-dark(#b3261e, #f88) }
  .skipped td { color: GrayText }
</style>
<h1>$verdict</h1>
<p>$machine<br><code>$command</code><br>$date</p>
<div class="scroll">
<table>
<thead><tr>$columns</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
</html>
""")


def page(record: Mapping[str, Any], reports: Sequence[StageReport]) -> str:
    """Renders the page. `record` is the report's JSON, with machine, command and date."""
    return PAGE.substitute(
        verdict=html.escape(_verdict(reports)),
        machine=html.escape(", ".join(_words(record["machine"]))),
        command=html.escape(f"paravt check {shlex.join(record['command'])}"),
        date=html.escape(record["date"]),
        columns="".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS),
        rows="\n".join(_row(cells) for report in reports for cells in rows_of(report)),
    )


def _verdict(reports: Sequence[StageReport]) -> str:
    if failed := [report.stage for report in reports if report.failed]:
        return f"{', '.join(failed)} failed"
    num_skipped = sum(report.skipped for report in reports)
    num_passed = len(reports) - num_skipped
    passed = f"{num_passed} stage{'' if num_passed == 1 else 's'} passed"
    return f"{passed}, {num_skipped} skipped" if num_skipped else passed


def _words(machine: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flattened(machine).items():
        yield f"{name.removeprefix('versions.')} {value}".replace("_", " ")


def _row(cells: Sequence[str]) -> str:
    kind = f"{'stage ' if cells[0] else ''}{cells[-1].lower()}"
    return f'<tr class="{kind}">{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
