"""Draws several runs over each other, step by step: a panel per metric, a color per run."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paravt_jax.run.charts import COLORS, LoggedRun
from paravt_jax.run.plots import MAX_MARKED_STEPS, MEAN_FRAC, PANEL_INCHES, running_mean

PANELS = {  # metric -> title; only metrics that a run has logged are drawn
    "rollout/format_reward": "Format reward f_τ",
    "rollout/tool_calls_mean": "Tool calls per episode κ",
    "rollout/parseable_frac": "Fraction of parseable episodes",
    "rollout/accuracy_mean": "Accuracy",
    "rollout/reward_mean": "Reward",
    "rollout/sampled_tokens_mean": "Sampled tokens per episode",
    "loss/imitation": "Imitation loss, nats per token",
}
RUN_COLORS = ("blue", "red", "green", "orange", "pink", "sky", "ink", "neutral")
DASHES = ("-", "--", ":", "-.")  # for further runs, which repeat the colors
LEGEND_ROW_INCHES = 0.25


def draw_runs(runs: Sequence[LoggedRun]) -> Figure:
    """Raises ValueError if no run has any of the metrics."""
    panels = {key: title for key, title in PANELS.items() if any(run.metrics.has(key) for run in runs)}
    if not panels:
        raise ValueError(f"{', '.join(run.name for run in runs)}: none has logged any of {', '.join(PANELS)} yet")
    num_rows, num_columns = math.ceil(len(panels) / 2), min(2, len(panels))
    height = PANEL_INCHES[1] * num_rows + LEGEND_ROW_INCHES * (len(runs) + 1)
    figure = Figure(figsize=(PANEL_INCHES[0] * num_columns, height))
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, (key, title) in zip(grid, panels.items(), strict=False):
        for number, run in enumerate(runs):
            _draw(axes, run, key, number)
        axes.set_title(title)
        axes.set_ylim(bottom=min(0, axes.dataLim.y0))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    for axes in grid[len(panels) :]:
        axes.remove()
    handles = [grid[0].plot([], [], _dash(number), color=_color(number))[0] for number in range(len(runs))]
    legend = figure.legend(handles, [run.name for run in runs], loc="outside lower left", handlelength=2)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain $
    return figure


def _draw(axes: Axes, run: LoggedRun, key: str, number: int) -> None:
    steps, values, color = run.metrics.steps, run.metrics.column(key), _color(number)
    if len(steps) <= MAX_MARKED_STEPS:
        axes.plot(steps, values, f"o{_dash(number)}", color=color, markersize=3)
        return
    axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.2)
    axes.plot(steps, running_mean(values, max(3, round(MEAN_FRAC * len(values)))), _dash(number), color=color)


def _color(number: int) -> str:
    return COLORS[RUN_COLORS[number % len(RUN_COLORS)]]


def _dash(number: int) -> str:
    return DASHES[number // len(RUN_COLORS) % len(DASHES)]
