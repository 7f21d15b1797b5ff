"""Plots format stability over temperatures, a curve per dispatch and budget, to plots/temperatures.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from paravt_jax.evaluation.results import Cell
from paravt_jax.run.log import PLOTS_DIR, whole_file
from paravt_jax.run.plots import STYLE, curve_color

PANELS = {"Format reward f_τ": "format_reward", "Fraction of parseable episodes": "parseable_frac"}
MARKERS = "osD^vPX*"


def draw_temperatures(directory: Path, cells: Sequence[Cell]) -> Path:
    curves: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell["temperature"]):
        curves.setdefault(f"{cell['dispatch']}, {cell['frame_budget']} frames", []).append(cell)
    path = directory / PLOTS_DIR / "temperatures.png"
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE), whole_file(path) as file:
        figure = Figure(figsize=(10.5, 3.6))
        panels = figure.subplots(1, len(PANELS))
        for axes, (title, metric) in zip(panels, PANELS.items(), strict=True):
            for number, (name, of_curve) in enumerate(curves.items()):
                heights = [cell["metrics"][metric] for cell in of_curve]
                style: Any = {"marker": MARKERS[number % len(MARKERS)], "color": curve_color(number), "label": name}
                axes.plot([cell["temperature"] for cell in of_curve], heights, **style)
            axes.set_title(title)
            axes.set_xlabel("temperature")
            axes.set_ylim(-0.02, 1.02)
        figure.legend(handles=panels[0].get_lines(), loc="outside right center", handlelength=1.5, handletextpad=0.6)
        figure.savefig(file, format="png")
    return path
