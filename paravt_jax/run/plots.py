"""python -m paravt_jax.run.plots RUN_DIR

Draws RUN/plots/*.png from the logs of a run, finished or not. Plots without data are skipped.
"""

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.progress import counted
from paravt_jax.learner.settings import MismatchConfig
from paravt_jax.run.log import (
    EPISODES_DIR,
    METRICS_FILE,
    PLOTS_DIR,
    VALIDATION_FILE,
    load_jsonl,
    rows_by_step,
    whole_file,
)

MAX_MARKED_STEPS = 40  # with more steps, a running mean replaces the points
MEAN_FRAC = 0.04  # window of the running mean, as a fraction of all steps
MAX_EPISODE_STEPS = 100  # only the newest, which show the current policy and load in seconds
KL_FLOOR = 1e-9  # below it float32 is noise, and a log scale has no 0
LABEL_GAP = 0.07  # height of a text line, as a fraction of a 3-inch panel

INK, FAINT, NEUTRAL = "#222222", "#808080", "#4D4D4D"
# The Okabe-Ito palette, which is safe for color blindness.
BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
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
}


class Quantity(NamedTuple):
    key: str
    label: str
    colour: str  # the same in every plot


REWARD_TERMS = (
    Quantity("rollout/reward_mean", "total", INK),
    Quantity("rollout/accuracy_mean", "accuracy", BLUE),
    Quantity("rollout/format_reward", "format", RED),
    Quantity("rollout/tool_reward_mean", "tool", GREEN),
    Quantity("rollout/anchor_mean", "anchor", PINK),
)
TOTAL, ACCURACY, FORMAT, *_ = REWARD_TERMS
CALLS = Quantity("rollout/tool_calls_mean", "calls", ORANGE)
MISMATCH = (
    Quantity("mismatch/behavior_kl", "all tokens", INK),
    Quantity("mismatch/behavior_kl_plain", "plain", SKY),
    Quantity("mismatch/behavior_kl_structural", "structural", RED),
    Quantity("mismatch/behavior_kl_first_of_turn", "first of turn", ORANGE),
)
PARTS = {"accuracy": "rollout/accuracy_mean_", "tool calls per episode κ": "rollout/tool_calls_mean_"}
BUDGET = re.compile(r"k(\d+)")  # key suffix of a frame budget; other suffixes are question types
PART_COLOURS = (SKY, BLUE, GREEN, ORANGE, RED, PINK)
TOKENS = (
    Quantity("rollout/sampled_tokens_p90", "90 %", ORANGE),
    Quantity("rollout/sampled_tokens_p50", "half", INK),
    Quantity("rollout/sampled_tokens_p10", "10 %", SKY),
)
ADVANTAGES = (
    Quantity("rollout/advantage_p90", "90 %", ORANGE),
    Quantity("rollout/advantage_p50", "half", INK),
    Quantity("rollout/advantage_p10", "10 %", SKY),
)
TAUGHT = Quantity("rollout/taught_frac", "", NEUTRAL)
NO_RESULTS = ("num_", "calls_", "missing_", "sampled_tokens_p", "time/", "perf/")  # validation metrics without a plot
LOSSES = {
    "imitation, nats per token": Quantity("loss/imitation", "", NEUTRAL),
    "policy loss": Quantity("loss/policy", "", NEUTRAL),
    "KL to the reference policy, nats per token": Quantity("loss/kl_ref", "", NEUTRAL),
    "clipped tokens, fraction": Quantity("loss/clip_frac", "", NEUTRAL),
    "entropy of sampled tokens, nats": Quantity("loss/entropy", "", NEUTRAL),
    "gradient norm before clipping": Quantity("optim/grad_norm", "", NEUTRAL),
}


MAX_DRAWN = 1e30  # larger values are errors, and their sums overflow


class Score(NamedTuple):
    """Score of an episode."""

    budget: int
    group: str  # one prompt in one step
    value: float | int


@dataclass(frozen=True)
class Table:
    """Columns of a metrics file. Missing values and values beyond `MAX_DRAWN` are NaN."""

    rows: dict[int, dict[str, Any]]

    @property
    def steps(self) -> np.ndarray:
        return np.array(sorted(self.rows))

    def column(self, key: str) -> np.ndarray:
        values = [self.rows[step].get(key) for step in sorted(self.rows)]
        shown = [value if isinstance(value, float | int) and abs(value) < MAX_DRAWN else np.nan for value in values]
        return np.array(shown, float)

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())


@dataclass(frozen=True)
class LoggedRun:
    path: Path
    metrics: Table
    validation: Table
    kl_levels: dict[float, str]

    @property
    def name(self) -> str:
        """Includes the parent directory, because many runs are called seed0."""
        return "/".join(self.path.resolve().parts[-2:])


def make_plots(run_dir: Path) -> list[Path]:
    """Writes RUN/plots/*.png and returns their paths."""
    run = load_run(run_dir)
    plots = {
        "reward_terms": _reward_terms,
        "format_and_calls": _format_and_calls,
        "reward_by_frame_budget": _reward_by_frame_budget,
        "frame_budget": _frame_budget,
        "question_type": _question_type,
        "groups": _groups,
        "mismatch": _mismatch,
        "loss": _loss,
        "validation": _validation,
    }
    written = []
    with matplotlib.rc_context(STYLE):  # restored afterwards, so that it does not affect the process's other figures
        for name, plot in plots.items():
            figure = plot(run)
            if figure is None:
                continue
            path = run_dir / PLOTS_DIR / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            with whole_file(path) as file:
                figure.savefig(file, format="png")
            written.append(path)
    return written


def _reward_terms(run: LoggedRun) -> Figure | None:
    return _over_steps(run, "Reward and its terms", run.metrics, {"mean over episodes": REWARD_TERMS}, height=5.0)


def _format_and_calls(run: LoggedRun) -> Figure | None:
    panels = {"format reward f_τ, mean over episodes": (FORMAT,), "tool calls per episode κ": (CALLS,)}
    return _over_steps(run, "Format and tool use", run.metrics, panels, from_zero=True)


def _frame_budget(run: LoggedRun) -> Figure | None:
    panels = {name: of_budgets(run.metrics, prefix) for name, prefix in PARTS.items()}
    return _over_steps(run, "By frame budget K", run.metrics, panels, from_zero=True, height=3.6, shared=True)


def _question_type(run: LoggedRun) -> Figure | None:
    panels = {name: of_types(run.metrics, prefix) for name, prefix in PARTS.items()}
    return _over_steps(run, "By question type", run.metrics, panels, from_zero=True, height=3.6, shared=True)


def of_budgets(table: Table, prefix: str) -> list[Quantity]:
    """One quantity per frame budget, smallest first."""
    budgets = sorted(int(part[1:]) for part in _parts(table, prefix) if BUDGET.fullmatch(part))
    return _quantities(prefix, {f"k{budget}": f"K={budget}" for budget in budgets})


def of_types(table: Table, prefix: str) -> list[Quantity]:
    types = sorted(part for part in _parts(table, prefix) if not BUDGET.fullmatch(part))
    return _quantities(prefix, dict(zip(types, types, strict=True)))


def _parts(table: Table, prefix: str) -> set[str]:
    return {key.removeprefix(prefix) for row in table.rows.values() for key in row if key.startswith(prefix)}


def _quantities(prefix: str, labels: Mapping[str, str]) -> list[Quantity]:
    colours = itertools.cycle(PART_COLOURS)
    return [Quantity(f"{prefix}{part}", label, next(colours)) for part, label in labels.items()]


def _groups(run: LoggedRun) -> Figure | None:
    panels = {
        "groups that taught, fraction": (TAUGHT,),
        "advantage, below which are so many of the episodes that taught": ADVANTAGES,
        "sampled tokens of an episode, likewise": TOKENS,
    }
    return _over_steps(run, "What groups taught", run.metrics, panels)


def _loss(run: LoggedRun) -> Figure | None:
    panels = {title: (quantity,) for title, quantity in LOSSES.items()}
    return _over_steps(run, "Loss and gradient", run.metrics, panels, num_columns=2)


def _validation(run: LoggedRun) -> Figure | None:
    """One panel per validation metric, without counts and times."""
    colours = {quantity.key.removeprefix("rollout/"): quantity.colour for quantity in (*REWARD_TERMS, CALLS)}
    keys = {key.removeprefix("validation/"): key for row in run.validation.rows.values() for key in row}
    names = [*(name for name in colours if name in keys), *(name for name in keys if name not in colours)]
    panels = {
        name: (Quantity(keys[name], "", colours.get(name, NEUTRAL)),)
        for name in names
        if name not in ("step", "policy_version") and not name.startswith(NO_RESULTS)
    }
    return _over_steps(run, "Validation", run.validation, panels, num_columns=3)


def _mismatch(run: LoggedRun) -> Figure | None:
    title = "How far the engine's log-probs are from the learner's"
    panels = {f"KL(behavior‖prox), nats per token; below {KL_FLOOR:g} drawn there": MISMATCH}
    return _over_steps(run, title, run.metrics, panels, height=5.0, log=True, levels=run.kl_levels)


def _reward_by_frame_budget(run: LoggedRun) -> Figure | None:
    paths = [path for path in (run.path / EPISODES_DIR).glob("*.jsonl") if path.stem.isdecimal()]
    paths = sorted(paths, key=lambda path: int(path.stem))[-MAX_EPISODE_STEPS:]
    scores: dict[Quantity, list[Score]] = {TOTAL: [], ACCURACY: []}
    for path in counted(paths, "reading episodes", "step"):
        for episode in load_jsonl(path):
            budget, reward = episode.get("frame_budget"), episode.get("reward") or {}
            for quantity, of_quantity in scores.items():
                value = reward.get(quantity.label)
                if isinstance(budget, int) and isinstance(value, float | int):  # reward is None without a judge score
                    of_quantity.append(Score(budget, f"{path.stem} {episode.get('task')}", value))
    scores = {quantity: of_quantity for quantity, of_quantity in scores.items() if of_quantity}
    if not scores:
        return None
    caption = "dot: mean · thick: its 95 % interval · thin: standard deviation of the episodes"
    figure = _figure(run, "Reward by frame budget", _span([int(path.stem) for path in paths]), caption, (9.0, 4.2))
    for axes, (quantity, of_quantity) in zip(_panels(figure, 1, len(scores)), scores.items(), strict=True):
        budgets = sorted({score.budget for score in of_quantity})
        of_budget = [[score for score in of_quantity if score.budget == budget] for budget in budgets]
        for place, members in enumerate(of_budget):
            _draw_spread(axes, place, members, quantity.colour)
        axes.set_title(f"{'reward' if quantity is TOTAL else quantity.label} of an episode")
        axes.set_xlabel("frame budget K, frames (n: episodes)")
        axes.set_xticks(range(len(budgets)), [f"{k}\nn={len(m)}" for k, m in zip(budgets, of_budget, strict=True)])
        axes.set_xlim(-0.5, len(budgets) - 0.3)
        _show_zero(axes)
        axes.grid(visible=False, axis="x")
    return figure


def _draw_spread(axes: Axes, place: int, scores: Sequence[Score], colour: str) -> None:
    values = np.array([score.value for score in scores])
    _, groups = np.unique([score.group for score in scores], return_inverse=True)
    mean = float(values.mean())
    for half, linewidth, alpha in ((values.std(), 1, 1.0), (1.96 * mean_error(values, groups), 8, 0.4)):
        low, high = np.clip([mean - half, mean + half], values.min(), values.max())  # no score is beyond
        axes.vlines(place, low, high, colour, linewidth=linewidth, alpha=alpha)
    axes.plot(place, mean, "o", color=colour, markersize=6, clip_on=False)
    _note(axes, f"{mean:.2f}", (place, mean), (9, 0))


def mean_error(values: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"]) -> float:
    """Clustered standard error of the mean: groups are independent, but episodes of the same prompt are correlated.

    NaN for a single group, because the spread between groups is then unknown.
    """
    num_groups = int(groups.max()) + 1
    if num_groups == 1:
        return math.nan
    of_groups = np.bincount(groups, values - values.mean())
    return float(np.sqrt(np.sum(of_groups**2) * num_groups / (num_groups - 1)) / len(values))


def _over_steps(
    run: LoggedRun,
    title: str,
    table: Table,
    panels: Mapping[str, Sequence[Quantity]],
    *,
    num_columns: int = 1,
    height: float = 2.6,
    log: bool = False,
    from_zero: bool = False,
    levels: Mapping[float, str] | None = None,
    shared: bool = False,
) -> Figure | None:
    """Panels of lines over steps. Skips lines and panels without data.

    Set `shared` when each step only has values for some lines of a panel: it widens the running mean and draws lines
    through gaps.
    """
    drawn = {name: [quantity for quantity in panel if table.has(quantity.key)] for name, panel in panels.items()}
    drawn = {name: panel for name, panel in drawn.items() if panel}
    if not drawn:
        return None
    steps = table.steps
    window = max(3, round(MEAN_FRAC * len(steps))) if len(steps) > MAX_MARKED_STEPS else 1
    if shared and window > 1:
        window = min(len(steps), window * max(map(len, drawn.values())))
    num_columns = min(num_columns, len(drawn))
    num_rows = -(-len(drawn) // num_columns)
    caption = f"bold: running mean over {window} steps" if window > 1 else ""
    figure = _figure(run, title, _span(steps), caption, (max(9.0, 4.0 * num_columns), 0.9 + height * num_rows))
    all_axes = _panels(figure, num_rows, num_columns)
    for axes in all_axes[len(drawn) :]:
        axes.remove()
    for number, (axes, (name, panel)) in enumerate(zip(all_axes, drawn.items(), strict=False)):
        ends = [_draw_line(axes, table, quantity, window, log, through_gaps=shared) for quantity in panel]
        axes.set_title(name, parse_math=False)
        if number + num_columns >= len(drawn):  # bottom row
            axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        if len(steps) == 1:
            axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
        if log:
            axes.set_yscale("log")
        if from_zero:
            _show_zero(axes)
        for level, names in (levels or {}).items():
            axes.axhline(level, color=FAINT, linestyle=(0, (4, 4)), linewidth=1, zorder=1)
            _note(axes, f"{names} {level:g}", (int(steps[0]), level), (0, 6))
        _label_ends(axes, ends, gap=LABEL_GAP * 3 / height)
    return figure


def _draw_line(
    axes: Axes, table: Table, quantity: Quantity, window: int, log: bool, through_gaps: bool
) -> tuple[float, str, str]:
    """Draws a line. Returns the height of its end, its label and its color."""
    values = table.column(quantity.key)
    smooth = running_mean(values, window)
    last = float(smooth[np.isfinite(smooth)][-1])
    if log:
        values, smooth = np.maximum(values, KL_FLOOR), np.maximum(smooth, KL_FLOOR)
    if window > 1:
        axes.plot(table.steps, values, color=quantity.colour, linewidth=0.7, alpha=0.2)
    how = {"marker": "" if window > 1 else "o", "markersize": 5, "linewidth": 2, "clip_on": False}
    shown = np.isfinite(smooth) if through_gaps else np.full(len(smooth), True)
    axes.plot(table.steps[shown], smooth[shown], color=quantity.colour, **how)
    return max(last, KL_FLOOR) if log else last, f"{quantity.label} {last:.3g}".strip(), quantity.colour


def _show_zero(axes: Axes) -> None:
    """Includes 0 in the y-axis. Values that are never negative start there."""
    low, high = min(0, axes.dataLim.y0), max(0, axes.dataLim.y1)
    margin = 0.08 * (high - low) or 1
    axes.set_ylim(low - margin if low < 0 else 0, high + margin)


def _label_ends(axes: Axes, ends: Iterable[tuple[float, str, str]], gap: float) -> None:
    """Labels lines at their ends and moves overlapping labels apart by least squares."""
    axes.get_ylim()  # computes the limits that transData uses
    to_panel = axes.transData + axes.transAxes.inverted()
    labels = sorted((float(to_panel.transform((0, y))[1]), text, colour) for y, text, colour in ends)
    blocks: list[list[float]] = []  # isotonic regression by pooling adjacent violators
    for number, (height, *_) in enumerate(labels):
        blocks.append([height - number * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    heights = [float(np.mean(block)) for block in blocks for _ in block]
    for number, (height, (_, text, colour)) in enumerate(zip(heights, labels, strict=True)):
        at = (1.01, height + number * gap)
        axes.text(*at, text, color=colour, transform=axes.transAxes, va="center", weight="bold")


def _note(axes: Axes, text: str, at: tuple[float | int, float], shift_points: tuple[int, int]) -> None:
    """Small text next to a data point."""
    axes.annotate(text, at, shift_points, textcoords="offset points", va="center", color=FAINT, fontsize=9)


def _figure(run: LoggedRun, title: str, steps: str, caption: str, size_inches: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size_inches)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, weight="bold")
    about = " · ".join(part for part in (run.name, steps, caption) if part)
    figure.supxlabel(about, x=0.99, ha="right", fontsize=9, color=FAINT, parse_math=False)  # a run name may contain $
    return figure


def _panels(figure: Figure, num_rows: int, num_columns: int) -> list[Axes]:
    return list(figure.subplots(num_rows, num_columns, squeeze=False).flat)


def _span(steps: Sequence[int] | np.ndarray) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centered running mean over finite values; NaN where the window has none."""
    known = np.isfinite(values)
    box = np.ones(window)
    sums, counts = (np.convolve(part, box, mode="same") for part in (np.where(known, values, 0.0), known.astype(float)))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def load_run(run_dir: Path) -> LoggedRun:
    return LoggedRun(run_dir, _table(run_dir / METRICS_FILE), _table(run_dir / VALIDATION_FILE), _kl_levels(run_dir))


def _table(path: Path) -> Table:
    return Table(rows_by_step(path))


def _kl_levels(run_dir: Path) -> dict[float, str]:
    """The warning and stop levels of `mismatch.max_kl`, with their labels."""
    path = run_dir / "config.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    mismatch = MismatchConfig(record.get("config", record).get("mismatch", {}).get("max_kl", math.inf))
    return {mismatch.warn_kl: "warn", mismatch.max_kl: "stop"} if math.isfinite(mismatch.max_kl) else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.run.plots"),
        description="Draws RUN_DIR/plots/*.png from what a run has logged so far.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=f"the directory with {METRICS_FILE}")
    add_debug_flag(parser)
    run_dir = parser.parse_args().run_dir
    if not (run_dir / METRICS_FILE).exists():
        raise ValueError(
            f"{run_dir} is no run: it has no {METRICS_FILE}; give the directory that was the run's run_dir"
        )
    written = make_plots(run_dir)
    if not written:
        raise ValueError(f"{run_dir} has logged nothing yet; wait for its first step")
    for path in written:
        print(path)


if __name__ == "__main__":
    run_cli(main)
