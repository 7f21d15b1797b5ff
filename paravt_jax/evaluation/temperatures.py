"""Plots format stability over temperatures, a curve per dispatch and budget, to plots/temperatures.png."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from paravt_jax.evaluation.results import Cell
from paravt_jax.run.log import PLOTS_DIR, whole_file
from paravt_jax.run.plots import STYLE, curve_color

PANELS = {"Format reward f_τ": "format_reward", "Fraction of parseable episodes": "parseable_frac"}
MARKERS = "osD^vPX*"


def draw_temperatures(directory: Path, cells: Sequence[Cell]) -> Path:
    path = directory / PLOTS_DIR / "temperatures.png"
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE), whole_file(path) as file:
        _figure(_curves(cells)).savefig(file, format="png")
    return path


def _curves(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each dispatch and frame budget, by temperature."""
    curves: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell["temperature"]):
        curves.setdefault(f"{cell['dispatch']}, {cell['frame_budget']} frames", []).append(cell)
    return curves


def _figure(curves: Mapping[str, Sequence[Cell]]) -> Figure:
    figure = Figure(figsize=(10.5, 3.6))
    panels = figure.subplots(1, len(PANELS))
    for axes, (title, metric) in zip(panels, PANELS.items(), strict=True):
        for number, (name, cells) in enumerate(curves.items()):
            color, marker = curve_color(number), MARKERS[number % len(MARKERS)]
            heights = [cell["metrics"][metric] for cell in cells]
            axes.plot([cell["temperature"] for cell in cells], heights, marker=marker, color=color, label=name)
        axes.set_title(title)
        axes.set_xlabel("temperature")
        axes.set_ylim(-0.02, 1.02)
    figure.legend(handles=panels[0].get_lines(), loc="outside right center", handlelength=1.5, handletextpad=0.6)
    return figure
