"""Reports the results: a table like the paper's table B, and plots of format, calls and accuracy over training."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from model_port.layout import RESULTS_FILE
from paravt_jax.run.log import METRICS_FILE, load_jsonl
from paravt_jax.run.plots import STYLE, running_mean
from scripts.miniature.arms import COLD_STARTS, FORCED, TITLES, forces_prefix
from scripts.miniature.experiment import Experiment

FRAME_BUDGETS = (4, 16, 32, 64)
CURVES = {
    "f_τ, format reward": "rollout/format_reward",
    "parseable episodes": "rollout/parseable_frac",
    "κ, tool calls per episode": "rollout/tool_calls_mean",
    "accuracy": "rollout/accuracy_mean",
}
SMOOTHED_STEPS = 5
NOT_MEASURED = "–"
Cell = dict[str, Any]


def table(experiment: Experiment) -> str:
    """Formats a Markdown table of means over seeds on held-out videos, with the standard deviation after ±.

    Columns without any number are omitted.
    """
    by_budget = [f"{name} K={k}" for name in ("κ", "acc") for k in FRAME_BUDGETS]
    columns = ["arm", "prefix", "seeds", "f_τ", "parseable", "κ", *by_budget, "parallel", "sequential", "no tool"]
    cells_of_columns = [
        ("format_reward", "parallel", None),
        ("parseable_frac", "parallel", None),
        ("tool_calls_mean", "parallel", None),
        *((key, "parallel", budget) for key in ("tool_calls_mean", "accuracy_mean") for budget in FRAME_BUDGETS),
        *(("accuracy_mean", dispatch, None) for dispatch in ("parallel", "sequential", "none")),
    ]
    rows = []
    for name, forced in ((name, forced) for name in TITLES for forced in (False, True)):
        evaluations = _evaluations(experiment, name, forced)
        if not evaluations:
            continue
        numbers = [_mean_and_spread([_mean(cells, *column) for cells in evaluations]) for column in cells_of_columns]
        rows.append([TITLES[name], "forced" if forced else "no", str(len(evaluations)), *numbers])
    measured = [not rows or any(row[n] != NOT_MEASURED for row in rows) for n in range(len(columns))]
    lines = [" | ".join(compress(line, measured)) for line in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def draw(experiment: Experiment, path: Path) -> None:
    """Plots metrics of the training episodes: the mean over seeds as a line, their range shaded."""
    with matplotlib.rc_context(STYLE | {"savefig.dpi": 85}):
        figure, panels = plt.subplots(2, 2, figsize=(11, 6.4), sharex=True, layout="constrained")
        for axes, (title, key) in zip(panels.flat, CURVES.items(), strict=True):
            for number, arm in enumerate(experiment.trained_arms):
                curves = [_curve(path, key) for path in _metric_files(experiment, arm)]
                if not curves:
                    continue
                length = min(map(len, curves))
                values = np.array([curve[:length] for curve in curves])
                steps, colour = np.arange(1, length + 1), f"C{number}"
                style = "--" if arm.startswith("no_") else "-"  # dash patterns distinguish overlapping arms
                axes.plot(steps, values.mean(0), style, color=colour, label=TITLES[arm])
                if len(values) > 1:
                    axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.set_title(title)
            axes.set_ylim(bottom=-0.02)  # keeps a line at 0 visible
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in panels[-1]:
            axes.set_xlabel("step")
        if handles := panels.flat[0].get_lines():
            figure.legend(handles=handles, loc="outside right center", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _evaluations(experiment: Experiment, name: str, forced: bool) -> list[list[Cell]]:
    """Returns the result cells of every seed."""
    root, how = experiment.directory / "eval" / name, FORCED.removeprefix("/") if forced else ""
    if name in COLD_STARTS:
        files = [root / how / RESULTS_FILE]
    elif name in experiment.arms:
        files = [root / f"seed{seed}" / how / RESULTS_FILE for seed in experiment.seeds]
    else:
        files = []
    return [json.loads(file.read_text())["cells"] for file in files if file.exists()]


def _mean(cells: Sequence[Cell], key: str, dispatch: str, budget: int | None = None) -> float:
    """Returns the mean over frame budgets, which all have the same prompts."""
    chosen = [cell for cell in cells if cell["dispatch"] == dispatch and budget in (None, cell["frame_budget"])]
    values = [cell["metrics"][key] for cell in chosen]
    return statistics.fmean(values) if values else float("nan")


def _mean_and_spread(values: Sequence[float]) -> str:
    if any(math.isnan(value) for value in values):
        return NOT_MEASURED
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"


def _metric_files(experiment: Experiment, arm: str) -> list[Path]:
    files = [experiment.directory / arm / f"seed{seed}" / METRICS_FILE for seed in experiment.seeds]
    return [file for file in files if file.exists()]


def _curve(path: Path, key: str) -> np.ndarray:
    values = np.array([row[key] for row in load_jsonl(path)], float)
    return running_mean(values, min(SMOOTHED_STEPS, len(values)))


def missing_seeds(experiment: Experiment) -> Iterable[str]:
    """Yields a line for every arm with seeds that are not evaluated yet."""
    for arm in experiment.trained_arms:
        missing = len(experiment.seeds) - len(_evaluations(experiment, arm, forces_prefix(arm)))
        if missing:
            yield f"{TITLES[arm]}: {missing} of {len(experiment.seeds)} seeds are not evaluated"
