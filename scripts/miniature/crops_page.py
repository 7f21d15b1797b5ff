"""The figure and the table of docs/miniature/crops.md.

python -m scripts.miniature.crops_page     after new runs: rewrites both from docs/miniature/data/crops.json
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from model_port.cli import run_cli
from paravt_jax.run.log import whole_file
from paravt_jax.run.plots import STYLE
from scripts.miniature.cells import DATA, Row, read_rows
from scripts.miniature.map_page import rewrite, with_table
from scripts.miniature.traces import PLAYS

MEASURED = DATA / "crops.json"
PAGE, FIGURE = DATA.parent / "crops.md", DATA.parent / "crops.png"
STYLES: Mapping[str, tuple[str, str]] = dict(
    zip(PLAYS, (("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "D")), strict=True)
)
PANELS: Mapping[str, tuple[str, str]] = {  # key: title, format in the table
    "accuracy": ("accuracy", ".2f"),
    "context_tokens": ("visual tokens, largest context", ".0f"),
    "visual_tokens": ("visual tokens, all contexts", ".0f"),
    "main_tokens": ("tokens, main agent's context", ".0f"),
    "turns": ("turns", ".1f"),
    "jax_alone_s": ("embedded, one at a time, s", ".2f"),
    "jax_together_s": ("embedded, 32 at once, s", ".2f"),
    "sglang_alone_s": ("SGLang, one at a time, s", ".2f"),
    "sglang_together_s": ("SGLang, 32 at once, s", ".2f"),
}


def panels_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Returns the panels that were measured; older files have fewer."""
    return {key: panel for key, panel in PANELS.items() if all(key in row for row in rows)}


def table(rows: Sequence[Row]) -> Iterator[str]:
    measured = panels_of(rows)
    yield f"| windows | mode | {' | '.join(title for title, _ in measured.values())} |"
    yield f"|{'---|' * (2 + len(measured))}"
    for row in rows:
        accuracy, *numbers = (f"{row[key]:{digits}}" for key, (_, digits) in measured.items())
        accuracy += " ({:.2f} to {:.2f})".format(*row["interval_95"])
        yield f"| {row['windows']} | {row['play']} | {' | '.join([accuracy, *numbers])} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws a panel per metric over the number of windows, with a line for each mode."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "savefig.dpi": 110}):
        measured, plays = panels_of(rows), [play for play in PLAYS if any(row["play"] == play for row in rows)]
        figure, panels = plt.subplots(3, 3, figsize=(9, 6.2), sharex=True, layout="constrained")
        for axes in panels.flat[len(measured) :]:
            axes.set_axis_off()
        for axes, (key, (title, _)) in zip(panels.flat, measured.items(), strict=False):
            for play in plays:
                _draw_line(axes, [row for row in rows if row["play"] == play], key, play)
            axes.set_title(title, fontsize=8)
            axes.set_ylim(0, 1.05 if key == "accuracy" else None)
            axes.grid(axis="y", alpha=0.3)
        for axes in panels[-1]:
            axes.set_xlabel("windows in the question", fontsize=8)
        lines = [bars.lines[0] for bars in panels[0, 0].containers]
        figure.legend(lines, plays, loc="outside lower center", ncols=len(plays), frameon=False)
        with whole_file(path) as file:
            figure.savefig(file, format="png")
        plt.close(figure)


def _draw_line(axes: Axes, rows: Sequence[Row], key: str, play: str) -> None:
    """Draws a line; accuracy has error bars, shifted so that none hides another."""
    values, (color, mark) = [row[key] for row in rows], STYLES[play]
    errors = [[abs(row["interval_95"][side] - row[key]) for row in rows] for side in (0, 1)]
    at = [row["windows"] + 0.07 * (PLAYS.index(play) - 1) for row in rows]
    axes.errorbar(at, values, errors if key == "accuracy" else None, color=color, marker=mark, ms=4, lw=1.2, label=play)


def main() -> None:
    rows = read_rows(MEASURED)
    rewrite(
        "scripts.miniature.crops_page",
        FIGURE,
        partial(draw, rows),
        lambda page: with_table(page, "windows", table(rows)),
        PAGE,
    )


if __name__ == "__main__":
    run_cli(main)
