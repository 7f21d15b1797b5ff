"""python -m paravt_jax.run.plots RUN_DIR
python -m paravt_jax.run.plots RUN_A RUN_B … --png FILE

Draws RUN/plots/*.png from the metrics of a finished or unfinished run, one picture per section of `charts`. With
several runs, draws one picture that overlays their curves.
"""

import argparse
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import named
from paravt_jax.run.charts import COLORS, SECTIONS, Chart, LoggedRun, load_run
from paravt_jax.run.log import METRICS_FILE, PLOTS_DIR
from paravt_jax.run.output_file import OutputFile

MAX_MARKED_STEPS = 40  # with more steps, a running mean replaces the points
MEAN_FRAC = 0.04  # window of the running mean, as a fraction of all steps
PANEL_INCHES = (5.6, 2.6)
COMPARED = {  # metric -> title; only metrics that a run has logged are drawn
    "rollout/format_reward": "Format reward f_τ",
    "rollout/tool_calls_mean": "Tool calls per episode κ",
    "rollout/parseable_frac": "Fraction of parseable episodes",
    "rollout/accuracy_mean": "Accuracy",
    "rollout/reward_mean": "Reward",
    "rollout/sampled_tokens_mean": "Sampled tokens per episode",
    "loss/imitation": "Imitation loss, nats per token",
}
CURVE_COLORS = ("blue", "red", "green", "orange", "pink", "sky", "ink", "neutral")
DASHES = ("-", "--", ":", "-.")  # line styles for further runs or lines, which repeat the colors
DASHED_LEGEND: Any = {"handlelength": 2, "handletextpad": 0.6}  # a legend that shows the line styles
LEGEND_ROW_INCHES = 0.25
MAX_LABEL_CHARS = 24
MAX_WRITTEN_OUT = 1e9  # larger values have an exponent
INK, FAINT = COLORS["ink"], "#808080"
STYLE: Any = {
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "savefig.dpi": 150,
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.xmargin": 0.02,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.labelcolor": "linecolor",
    "legend.frameon": False,
    "legend.handlelength": 0,
    "legend.handletextpad": 0,
    "legend.markerscale": 0,
}


@contextmanager
def own_style() -> Iterator[None]:
    """Sets the style until the body ends. Characters that the font lacks, as in 视频, are boxes without a warning."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        yield


def make_plots(run_dir: Path) -> list[Path]:
    """Writes RUN/plots/*.png and returns their paths."""
    run = load_run(run_dir)
    written = []
    # Another process may draw the same plots.
    with own_style(), TemporaryDirectory(prefix=".plots", dir=run_dir) as partial:
        for section, title in SECTIONS.items():
            charts = [chart for chart in run.charts if chart.section == section]
            if not charts:
                continue
            path = run_dir / PLOTS_DIR / f"{section}.png"
            path.parent.mkdir(exist_ok=True)
            with named(path):
                draw_section(run, title, charts).savefig(drawn := Path(partial) / path.name)
            written.append(drawn.replace(path))
    return written


def draw_section(run: LoggedRun, title: str, charts: Sequence[Chart]) -> Figure:
    num_rows, num_columns = math.ceil(len(charts) / 2), min(2, len(charts))
    figure = Figure(figsize=(PANEL_INCHES[0] * num_columns, PANEL_INCHES[1] * num_rows + 0.9))
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, weight="bold")
    notes = [run.name, "by step"]
    if any(run.validation_values(chart) is not None for chart in charts):
        notes.append("diamonds: validation")
    if len(run.metrics.steps) > MAX_MARKED_STEPS:
        notes.append("bold: running mean")
    figure.supxlabel(
        " · ".join(notes), x=0.99, ha="right", fontsize=9, color=FAINT, parse_math=False
    )  # a name may contain $
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, chart in zip(panels, charts, strict=False):
        _draw(axes, run, chart)
    for axes in panels[len(charts) :]:
        axes.remove()
    return figure


def _draw(axes: Axes, run: LoggedRun, chart: Chart) -> None:
    drawn: list[tuple[float, Line2D]] = []  # last value of each line, and the line
    bottom = np.zeros(len(run.metrics.steps))
    for line in chart.lines:
        color, values = COLORS[line.color], run.values(chart, line)
        present = np.isfinite(values) | (not chart.sparse)
        steps, values = run.metrics.steps[present], values[present]
        marked = len(run.metrics.steps) <= MAX_MARKED_STEPS
        heights = values if marked else running_mean(values, max(3, round(MEAN_FRAC * len(values))))
        last = last_of(heights)
        label = f"{_shortened(line.label)} {_number(last)}".strip()
        if chart.kind == "stack":
            heights = bottom + np.nan_to_num(heights)
            axes.fill_between(steps, bottom, heights, color=color, alpha=0.8, linewidth=0)
            bottom = heights
        else:
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.2)
        dash = DASHES[chart.repeat_of(line) % len(DASHES)]
        curve = axes.plot(steps, heights, f"o{dash}" if marked else dash, color=color, label=label)[0]
        drawn.append((last_of(heights), curve))
    if (validation := run.validation_values(chart)) is not None:
        axes.plot(run.validation.steps, validation, "D:", color=drawn[0][1].get_color(), markerfacecolor="white")
    axes.set_title(chart.title, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    if chart.kind != "log" and run.is_whole(chart):
        axes.locator_params(axis="y", integer=True, min_n_ticks=1)
    if chart.kind == "log":
        axes.set_yscale("log")
        for (level, name), shift in zip(run.kl_levels.items(), (-12, 4), strict=False):  # below and above its line
            axes.axhline(level, color=FAINT, linestyle="--", linewidth=1)
            place = (0, level), (4, shift), ("axes fraction", "data"), "offset points"
            axes.annotate(f"{name} {level:g}", *place, color=FAINT)
            low, high = axes.get_ylim()
            axes.set_ylim(low, max(high, level * (level / low) ** 0.2))  # room for the label
    elif chart.from_zero and axes.dataLim.y0 >= 0:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    lines = [line for _, line in sorted(drawn, key=lambda end: -end[0])]
    legend = axes.legend(
        handles=lines,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        prop={"weight": "bold"},
        **(DASHED_LEGEND if any(map(chart.repeat_of, chart.lines)) else {}),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a question type may contain $


def _shortened(label: str) -> str:
    return label if len(label) <= MAX_LABEL_CHARS else f"{label[:MAX_LABEL_CHARS]}…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < MAX_WRITTEN_OUT else f"{value:.3g}"


def draw_runs(runs: Sequence[LoggedRun]) -> Figure:
    """Draws the curves of several runs. Raises ValueError if no run has any of the metrics."""
    panels = {key: title for key, title in COMPARED.items() if any(run.metrics.has(key) for run in runs)}
    if not panels:
        raise ValueError(f"{', '.join(run.name for run in runs)}: none has logged any of {', '.join(COMPARED)} yet")
    num_rows, num_columns = math.ceil(len(panels) / 2), min(2, len(panels))
    height = PANEL_INCHES[1] * num_rows + LEGEND_ROW_INCHES * (len(runs) + 1)
    figure = Figure(figsize=(PANEL_INCHES[0] * num_columns, height))
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (key, title) in zip(grid, panels.items(), strict=False):
        for number, run in enumerate(runs):
            steps, values, color = run.metrics.steps, run.metrics.column(key), curve_color(number)
            if len(steps) <= MAX_MARKED_STEPS:
                axes.plot(steps, values, f"o{_dash(number)}", color=color, markersize=3)
                continue
            means = running_mean(values, max(3, round(MEAN_FRAC * len(values))))
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.2)
            axes.plot(steps, means, _dash(number), color=color)
        axes.set_title(title)
        axes.set_ylim(bottom=min(0, axes.dataLim.y0))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    for axes in grid[len(panels) :]:
        axes.remove()
    handles = [grid[0].plot([], [], _dash(number), color=curve_color(number))[0] for number in range(len(runs))]
    legend = figure.legend(handles, [run.name for run in runs], loc="outside lower left", **DASHED_LEGEND)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain $
    return figure


def curve_color(number: int) -> str:
    return COLORS[CURVE_COLORS[number % len(CURVE_COLORS)]]


def _dash(number: int) -> str:
    return DASHES[number // len(CURVE_COLORS) % len(DASHES)]


def last_of(values: np.ndarray) -> float:
    """The last finite value."""
    return float(values[np.isfinite(values)][-1])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centered running mean over finite values; NaN where the window has none."""
    finite = np.isfinite(values)
    box = np.ones(min(window, len(values)))
    sums, counts = (
        np.convolve(part, box, mode="same") for part in (np.where(finite, values, 0.0), finite.astype(float))
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.run.plots"),
        description="Draws RUN_DIR/plots/*.png from the metrics that a run has logged so far, or overlays several "
        "runs in one picture.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help=f"directory with {METRICS_FILE}")
    parser.add_argument("--png", type=Path, metavar="FILE", help="output PNG for several runs")
    parser.add_argument("--force", action="store_true", help="replace FILE even if this command did not write it")
    add_debug_flag(parser)
    args = parser.parse_args()
    png = args.png and OutputFile(args.png, "plots", inputs=args.run_dirs, force=args.force)
    for run_dir in args.run_dirs:
        if not (run_dir / METRICS_FILE).exists():
            raise ValueError(f"{run_dir} is not a run: it has no {METRICS_FILE}; give the run_dir of a run")
    if png:
        _compare(args.run_dirs, png)
        print(args.png)
        return
    if len(args.run_dirs) > 1:
        raise ValueError(f"{len(args.run_dirs)} runs are drawn in one picture; pass --png FILE")
    written = make_plots(args.run_dirs[0])
    if not written:
        raise ValueError(f"{args.run_dirs[0]} has logged nothing yet; wait for its first step")
    for path in written:
        print(path)


def _compare(run_dirs: Sequence[Path], png: OutputFile) -> None:
    with own_style():
        figure = draw_runs([load_run(run_dir) for run_dir in run_dirs])
        with png.partial() as partial:
            figure.savefig(partial, format="png")


if __name__ == "__main__":
    run_cli(main)
