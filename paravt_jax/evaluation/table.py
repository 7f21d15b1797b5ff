"""The published tables with your runs next to them."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

from model_port.cli import add_debug_flag, prog_of
from model_port.layout import read_results
from model_port.terminal import markdown_table
from paravt_jax.data.splits import SPLITS
from paravt_jax.evaluation.published import TABLES, PublishedTable
from paravt_jax.rewards.release import RELEASE
from paravt_jax.run.output_file import OutputFile

NOT_MEASURED, NOT_PUBLISHED = "not measured", "—"
BY_SPLIT = ("agentic_general", "agentic_minimal")  # the release's modes that eval.mode=agentic chooses by split
ROW_HEIGHT_IN, COLUMN_WIDTH_IN, NAME_WIDTH_IN = 0.28, 1.35, 4.2


@dataclass
class OwnRow:
    """A row of a table: a policy on one or more splits, with the same mode and settings; BY_SPLIT are one mode."""

    name: str
    published: str = ""  # the published row that this row reproduces
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)  # by split
    runs: dict[str, Path] = field(default_factory=dict)  # by split

    def score(self, split: str, scorer: str) -> str:
        cell = self.cells.get(split)
        if cell is None:
            return NOT_MEASURED
        if cell["refused"]:
            num_complete, expected = cell["n"]["answered"] + cell["n"]["unanswered"], cell["n"]["expected"]
            return f"incomplete, {num_complete} of {expected}"
        return "{:.1f} ({:.1f} to {:.1f})".format(*_percent(cell["scores"][scorer]))

    def difference(self, split: str, published: float | None) -> str:
        """Measured minus published, in points. The published number has no interval."""
        cell = self.cells.get(split)
        if cell is None or cell["refused"] or published is None:
            return NOT_PUBLISHED
        return "{:+.1f} ({:+.1f} to {:+.1f})".format(
            *(number - published for number in _percent(cell["scores"][self.scorers[0]]))
        )

    @property
    def scorers(self) -> list[str]:
        return list(next(iter(self.cells.values()))["scores"])


def _percent(scores: dict[str, Any]) -> list[float]:
    """A score and its interval."""
    return [100 * number for number in (scores["score"], *scores["interval_95"])]


def read_rows(runs: Iterable[Path]) -> list[OwnRow]:
    """Reads the cells of public splits and merges cells with the same policy and settings into a row."""
    rows: dict[str, OwnRow] = {}
    for run in runs:
        for cell in read_results(run):
            if cell.get("split") is None:
                continue
            name = _name(cell)
            row = rows.setdefault(name, OwnRow(name, cell.get("published_row", "")))
            if cell["split"] in row.cells and row.cells[cell["split"]] != cell:
                both = f"{row.runs[cell['split']]} and {run} both have {cell['split']} of {name}"
                raise ValueError(f"{both}; give `paravt eval table` only one")
            row.cells[cell["split"]], row.runs[cell["split"]] = cell, run
    if not rows:
        raise ValueError(
            "these runs have no cells of public splits (data.split); `paravt view RUN…` compares runs on your own rows"
        )
    return list(rows.values())


def _name(cell: dict[str, Any]) -> str:
    model = cell["model"]["path"]
    if cell.get("protocol") == RELEASE:
        mode = "agentic" if cell["mode"] in BY_SPLIT else cell["mode"]
        return f"{model}, release's protocol, {mode}"
    temperature = f", temperature {cell['temperature']:g}" if cell.get("temperature") else ""
    return f"{model}, {cell['mode']}, {cell['dispatch']}, {cell['frame_budget']} frames{temperature}"


def table_rows(table: PublishedTable, rows: Sequence[OwnRow]) -> list[list[str]]:
    """The header, each published row with your rows that reproduce it, then your other rows by scoring rule."""
    lines = [["model", *(SPLITS[split].title for split in table.splits)]]
    for name, numbers in table.rows.items():
        lines.append([name, *(NOT_PUBLISHED if number is None else f"{number:.1f}" for number in numbers)])
        for row in rows:
            if row.published == name:
                differences = map(row.difference, table.splits, numbers)
                lines += [*_own_lines(row, table), [f"ours minus published, {row.scorers[0]}", *differences]]
    names = {name for each in TABLES for name in each.rows}
    return lines + [line for row in rows if row.published not in names for line in _own_lines(row, table)]


def _own_lines(row: OwnRow, table: PublishedTable) -> list[list[str]]:
    return [
        [f"ours: {row.name}, {scorer}", *(row.score(split, scorer) for split in table.splits)] for scorer in row.scorers
    ]


def markdown(rows: Sequence[OwnRow]) -> str:
    """Print the published tables 1, A, B and C with your runs, by each scoring rule."""
    tables = [(table.title, *table_rows(table, rows)) for table in TABLES]
    return "\n\n".join(f"Table {title}\n\n{markdown_table(header, body)}" for title, header, *body in tables)


def draw(rows: Sequence[OwnRow], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grids = [table_rows(table, rows) for table in TABLES]
    heights = [len(grid) + 1 for grid in grids]
    width_in = NAME_WIDTH_IN + COLUMN_WIDTH_IN * max(len(grid[0]) - 1 for grid in grids)
    figure, panels = plt.subplots(
        len(grids), figsize=(width_in, ROW_HEIGHT_IN * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for panel, table, grid in zip(panels, TABLES, grids, strict=True):
        panel.axis("off")
        panel.set_title(f"Table {table.title}", loc="left", fontsize=10)
        widths = [inches / width_in for inches in (NAME_WIDTH_IN, *[COLUMN_WIDTH_IN] * (len(grid[0]) - 1))]
        drawn = panel.table(grid[1:], colLabels=grid[0], colWidths=widths, cellLoc="center", loc="upper left")
        drawn.auto_set_font_size(False)
        drawn.set_fontsize(7)
        for (row, column), cell in drawn.get_celld().items():
            cell.set_linewidth(0.3)
            cell.set_text_props(
                ha="left" if column == 0 else "center", weight="bold" if grid[row][0].startswith("ours") else "normal"
            )
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def show(runs: Iterable[Path], png: OutputFile | None) -> None:
    rows = read_rows(runs)
    print(markdown(rows))
    if png is not None:
        with png.partial() as partial:
            draw(rows, partial)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"{prog_of('paravt_jax.eval')} table", description=markdown.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run_dir of an evaluation")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the tables as a PNG")
    parser.add_argument("--force", action="store_true", help="replace FILE even if this command did not write it")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    png = args.png and OutputFile(args.png, "eval table --png", inputs=args.runs, force=args.force)
    show(args.runs, png)
