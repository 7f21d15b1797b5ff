"""The map's tables and figure: the table model's predictions, the measured numbers, and their agreement.

python -m scripts.miniature.map_page     after new runs: rewrites the tables and the figure of docs/miniature/map*.md
"""

import argparse
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from model_port.cli import add_debug_flag, prog_of, run_cli
from paravt_jax.run.log import whole_file
from paravt_jax.run.plots import STYLE
from scripts.miniature.arms import ARMS, TITLES, forces_prefix
from scripts.miniature.cells import (
    BUDGETS,
    CALLS,
    CELLS,
    COLD_START,
    CORE,
    DATA,
    MEASURED,
    METRICS,
    PREDICTIONS,
    REPORTS,
    STATED,
    Cell,
    Row,
    read_rows,
)

PAGE, DETAILS, FIGURE = (DATA.parent / name for name in ("map.md", "map_details.md", "map.png"))
MISSING = "–"
VERDICTS = ("yes", "equal", "no")
EQUAL = 0.02  # smaller differences count as equal
MARKS = {"accuracy": "#0072B2", "kappa": "#E69F00"}
Lookup = Callable[..., float]  # (arm, metric[, frames]) -> number


@dataclass(frozen=True)
class Numbers:
    """The predicted or measured rows of a cell."""

    rows: Sequence[Row]

    def of(
        self, arm: str, metric: str, frames: int | None = None, dispatch: str = "parallel", own: bool = True
    ) -> float:
        """Returns the mean over seeds and frames, with the arm's training prefix; NaN without rows."""
        return _mean(float(row[metric]) for row in self._chosen(arm, frames, dispatch, own))

    def half_interval(self, arm: str) -> float:
        """Returns the accuracy's 95 % half-width, averaged over frame budgets, because these share their videos."""
        rows = self._chosen(arm, None, "parallel", True)
        return _mean((row["interval_95"][1] - row["interval_95"][0]) / 2 for row in rows)

    def _chosen(self, arm: str, frames: int | None, dispatch: str, own: bool) -> list[Row]:
        forced = forces_prefix(arm) == own
        return [
            row
            for row in self.rows
            if (row["arm"], row["forced"], row["dispatch"]) == (arm, forced, dispatch)
            and frames in (None, row["frames"])
        ]


def _mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else float("nan")


def numbers_of(path: Path, cell: Cell) -> Numbers:
    return Numbers([row for row in read_rows(path) if (row["reports"], row["calls"]) == (cell.reports, cell.calls)])


CLAIMS: Mapping[str, Callable[[Lookup], float]] = {  # claim -> a difference that is positive if the claim is true
    "GRPO calls less than its cold start": lambda n: n(COLD_START, "kappa") - n("grpo", "kappa"),
    "the full method is parseable more often than GRPO": lambda n: n("para_grpo", "parseable") - n("grpo", "parseable"),
    "the full method calls more than GRPO": lambda n: n("para_grpo", "kappa") - n("grpo", "kappa"),
    "its calls follow need: more with 4 frames than with 32": lambda n: (
        n("para_grpo", "kappa", BUDGETS[0]) - n("para_grpo", "kappa", BUDGETS[-1])
    ),
    "the full method is more accurate than GRPO": lambda n: n("para_grpo", "accuracy") - n("grpo", "accuracy"),
    "R_tool adds calls": lambda n: n("para_grpo", "kappa") - n("no_tool_reward", "kappa"),
    "R_tool adds accuracy": lambda n: n("para_grpo", "accuracy") - n("no_tool_reward", "accuracy"),
    "the recommended reward is more accurate than the full method": lambda n: (
        n("recommended", "accuracy") - n("para_grpo", "accuracy")
    ),
}


def verdict(difference: float) -> str:
    if np.isnan(difference):
        return MISSING
    return "equal" if abs(difference) < EQUAL else "yes" if difference > 0 else "no"


def map_table() -> Iterator[str]:
    """Formats accuracy and κ of every cell: predicted, and measured in bold."""
    titles = [TITLES[arm] for arm in CORE]
    columns = [f"{metric}, {title}" for metric in ("accuracy", "κ") for title in titles]
    yield f"| reports, calls | {' | '.join(columns)} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for cell in CELLS:
        predicted, measured = numbers_of(PREDICTIONS, cell), numbers_of(MEASURED, cell)
        numbers = [_both(predicted, measured, arm, metric) for metric in ("accuracy", "kappa") for arm in CORE]
        yield f"| {cell.reports}, {cell.calls} | {' | '.join(numbers)} |"


def _both(predicted: Numbers, measured: Numbers, arm: str, metric: str) -> str:
    value = measured.of(arm, metric)
    return f"{predicted.of(arm, metric):.2f}{'' if np.isnan(value) else f' **{value:.2f}**'}"


def arm_table(cell: Cell) -> Iterator[str]:
    """Formats every arm of a stated cell: predicted accuracy and κ, then the measured numbers."""
    predicted, measured = numbers_of(PREDICTIONS, cell), numbers_of(MEASURED, cell)
    by_frames = f"K = {', '.join(map(str, BUDGETS))}"
    columns = ["prefix", "predicted accuracy", "κ", "accuracy", by_frames, "κ", by_frames, "f_τ", "parseable"]
    columns += ["without the tool", "other prefix: accuracy, f_τ"]
    yield f"| {_heading(cell)} | {' | '.join(columns)} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for arm in (COLD_START, *ARMS):
        prefix = "forced" if forces_prefix(arm) else "no"
        guess = [f"{predicted.of(arm, metric):.2f}" for metric in ("accuracy", "kappa")]
        yield f"| {TITLES[arm]} | {prefix} | {' | '.join([*guess, *_measured(measured, arm)])} |"


def _heading(cell: Cell) -> str:
    return f"reports {cell.reports}, calls {cell.calls}"


def _measured(numbers: Numbers, arm: str) -> list[str]:
    accuracy = numbers.of(arm, "accuracy")
    if np.isnan(accuracy):
        return [MISSING] * 8
    by_frames = [
        " ".join(f"{numbers.of(arm, metric, frames):.2f}" for frames in BUDGETS) for metric in ("accuracy", "kappa")
    ]
    other = [f"{numbers.of(arm, metric, own=False):.2f}" for metric in ("accuracy", "f_tau")]
    means = [f"{numbers.of(arm, metric):.2f}" for metric in ("kappa", "f_tau", "parseable")]
    spread = f"{accuracy:.2f} ± {numbers.half_interval(arm):.2f}"
    without = f"{numbers.of(arm, 'accuracy', dispatch='none'):.2f}"
    return [spread, by_frames[0], means[0], by_frames[1], *means[1:], without, ", ".join(other)]


def summary_table() -> Iterator[str]:
    """Formats, for each claim, the number of cells with each verdict, and the number of agreeing cells."""
    counted = ", ".join(VERDICTS)
    yield f"| in {len(CELLS)} worlds | predicted: {counted} | measured: {counted} | same verdict |"
    yield f"|{'---|' * 4}"
    for claim, pairs in verdicts().items():
        counts = [" ".join(str(side.count(each)) for each in VERDICTS) for side in zip(*pairs, strict=True)]
        num_agreed = sum(predicted == measured != MISSING for predicted, measured in pairs)
        yield f"| {claim} | {' | '.join(counts)} | {num_agreed} |"


def verdicts() -> dict[str, list[tuple[str, str]]]:
    """Returns each claim's predicted and measured verdicts by cell."""
    lookups = [[numbers_of(path, cell).of for path in (PREDICTIONS, MEASURED)] for cell in CELLS]
    return {
        claim: [(verdict(difference(predicted)), verdict(difference(measured))) for predicted, measured in lookups]
        for claim, difference in CLAIMS.items()
    }


def agreement() -> str:
    """Formats how many verdicts agree, and the mean absolute errors."""
    errors: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for cell in CELLS:
        predicted, measured = numbers_of(PREDICTIONS, cell), numbers_of(MEASURED, cell)
        for metric, values in errors.items():
            values += [abs(predicted.of(arm, metric) - measured.of(arm, metric)) for arm in ARMS]
    pairs = itertools.chain.from_iterable(verdicts().values())
    decided = [predicted == measured for predicted, measured in pairs if measured != MISSING]
    if not decided:
        return "No arm is measured yet."
    means = (f"{metric} {np.nanmean(values):.2f}" for metric, values in errors.items())
    return f"{sum(decided)} of {len(decided)} verdicts agree. Mean absolute errors over arms: {', '.join(means)}."


def draw(path: Path) -> None:
    """Draws a panel per cell, with predictions as rings and measurements as dots with intervals."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "savefig.dpi": 110}):
        figure, panels = plt.subplots(3, 3, figsize=(9, 6.4), sharex=True, sharey=True, layout="constrained")
        for cell in CELLS:
            axes = panels[REPORTS[::-1].index(cell.reports)][CALLS.index(cell.calls)]
            _draw_cell(axes, cell)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, handlelength=1, markerscale=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            figure.savefig(file, format="png")
        plt.close(figure)


def _draw_cell(axes: Axes, cell: Cell) -> None:
    predicted, measured = numbers_of(PREDICTIONS, cell), numbers_of(MEASURED, cell)
    for row, arm in enumerate(CORE):
        for offset, (metric, color) in zip((-0.14, 0.14), MARKS.items(), strict=True):
            axes.plot(predicted.of(arm, metric), row + offset, "o", mfc="none", mec=color, ms=5)
            error = measured.half_interval(arm) if metric == "accuracy" else 0
            axes.errorbar(measured.of(arm, metric), row + offset, xerr=error, fmt="o", color=color, ms=4)
    stated = ", stated" if (cell.reports, cell.calls) in STATED else ""
    axes.set_title(f"reports {cell.reports:g}, calls {cell.calls:g}{stated}", fontsize=8)
    axes.set_yticks(range(len(CORE)), [TITLES[arm] for arm in CORE])
    axes.set_ylim(len(CORE) - 0.5, -0.5)
    axes.set_xlim(-0.05, 1.1)
    axes.grid(axis="x", alpha=0.3)


def _legend() -> list[Line2D]:
    names = {"accuracy": "accuracy", "kappa": "κ, calls an episode"}
    return [
        Line2D([], [], marker="o", linestyle="", color=color, markerfacecolor=face, label=f"{names[metric]}, {what}")
        for what, face in (("predicted", "none"), ("measured", None))
        for metric, color in MARKS.items()
    ]


def with_tables(page: str) -> str:
    """Returns the page with its tables and its line of agreement recomputed from the data."""
    tables = {
        f"in {len(CELLS)} worlds": summary_table(),
        "reports, calls": map_table(),
        _heading(CELLS[0]): arm_table(CELLS[0]),
    }
    for first, lines in tables.items():
        page = with_table(page, first, lines)
    return re.sub(r"^(No arm is measured yet|\d+ of \d+ verdicts agree)\..*$", agreement(), page, flags=re.M)


def with_table(page: str, first: str, lines: Iterable[str]) -> str:
    """Returns the page with `lines` in place of the table whose first heading is `first`."""
    text = "\n".join([*lines, ""])
    return re.sub(rf"^\| {first} \|.*?\n(?=\n|\Z)", lambda _: text, page, flags=re.M | re.S)


def rewrite(
    module: str, figure: Path, draw: Callable[[Path], None], with_results: Callable[[str], str], *pages: Path
) -> None:
    """Implements the page commands: draws a figure, and rewrites the tables."""
    parser = argparse.ArgumentParser(
        prog=prog_of(module),
        description=f"Rewrite the tables and the figure of {' and '.join(page.name for page in pages)} "
        "in docs/miniature from docs/miniature/data.",
    )
    add_debug_flag(parser)
    parser.parse_args()
    draw(figure)
    for page in pages:
        text = with_results(page.read_text())
        with whole_file(page) as file:
            file.write(text.encode())
    print(*pages, figure, sep="\n")


def main() -> None:
    rewrite("scripts.miniature.map_page", FIGURE, draw, with_tables, PAGE, DETAILS)


if __name__ == "__main__":
    run_cli(main)
