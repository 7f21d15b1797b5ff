"""The figure and the table of docs/miniature/crops.md.

python -m scripts.miniature.crops_page     after new runs: rewrites both from docs/miniature/data/crops.json
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from model_port.cli import add_debug_flag, prog_of, run_cli
from paravt_jax.run.log import whole_file
from paravt_jax.run.plots import STYLE
from scripts.miniature.cells import DATA, Row, read_rows
from scripts.miniature.map_page import with_table
from scripts.miniature.traces import PLAYS
from scripts.miniature.world import MAX_WINDOWS

MEASURED = DATA / "crops.json"
PAGE, FIGURE = DATA.parent / "crops.md", DATA.parent / "crops.png"
COLORS = dict(zip(PLAYS, ("#0072B2", "#E69F00", "#009E73"), strict=True))
MARKS = dict(zip(PLAYS, "os^", strict=True))
PANELS: Mapping[str, tuple[str, str]] = {  # key: title of its panel, format in the table
    "accuracy": ("accuracy", ".2f"),
    "visual_tokens": ("visual tokens, largest context", ".0f"),
    "turns": ("turns", ".1f"),
    "jax_alone_s": ("embedded, one at a time, s", ".2f"),
    "jax_together_s": ("embedded, 32 at once, s", ".2f"),
    "sglang_alone_s": ("SGLang, one at a time, s", ".2f"),
    "sglang_together_s": ("SGLang, 32 at once, s", ".2f"),
}


def table(rows: list[Row]) -> Iterator[str]:
    yield f"| windows | play | {' | '.join(title for title, _ in PANELS.values())} |"
    yield f"|{'---|' * (2 + len(PANELS))}"
    for row in rows:
        numbers = [f"{row[key]:{form}}" for key, (_, form) in PANELS.items()]
        low, high = row["interval_95"]
        numbers[0] += f" ({low:.2f} to {high:.2f})"
        yield f"| {row['windows']} | {row['play']} | {' | '.join(numbers)} |"


def draw(rows: list[Row], path: Path) -> None:
    """Small multiples over the number of windows, a line for each play; accuracy has 95 % intervals."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "savefig.dpi": 110}):
        figure, panels = plt.subplots(2, 4, figsize=(9, 4.4), sharex=True, layout="constrained")
        *drawn, last = [*panels[0, :3], *panels[1], panels[0, 3]]
        for axes, (key, (title, _)) in zip(drawn, PANELS.items(), strict=True):
            _draw_panel(axes, rows, key)
            axes.set_title(title, fontsize=8)
        last.axis("off")
        last.legend(*drawn[-1].get_legend_handles_labels(), loc="center", frameon=False)
        figure.supxlabel("windows that the question needs", fontsize=8)
        with whole_file(path) as file:
            figure.savefig(file, format="png")
        plt.close(figure)


def _draw_panel(axes: Axes, rows: list[Row], key: str) -> None:
    for number, play in enumerate(PLAYS):
        own = [row for row in rows if row["play"] == play]
        values = [row[key] for row in own]
        errors = [[abs(row["interval_95"][side] - row[key]) for row in own] for side in (0, 1)]
        at = [row["windows"] + (number - 1) * 0.06 for row in own]
        style = {"color": COLORS[play], "label": play, "marker": MARKS[play], "ms": 4, "lw": 1.2}
        axes.errorbar(at, values, errors if key == "accuracy" else None, **style)
    axes.set_ylim(0, 1.05 if key == "accuracy" else None)
    axes.set_xticks(range(1, MAX_WINDOWS + 1))
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("scripts.miniature.crops_page"),
        description="Rewrite the table and the figure of docs/miniature/crops.md from docs/miniature/data/crops.json.",
    )
    add_debug_flag(parser)
    parser.parse_args()
    rows = read_rows(MEASURED)
    draw(rows, FIGURE)
    page = with_table(PAGE.read_text(), "windows", table(rows))
    with whole_file(PAGE) as file:
        file.write(page.encode())
    print(f"{PAGE}\n{FIGURE}")


if __name__ == "__main__":
    run_cli(main)
