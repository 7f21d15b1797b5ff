"""Defines the charts of a run. `plots` draws them as pictures, and `view` draws them on the report page.

To chart a metric, add it to `CHARTS`. Every other metric gets a chart of its own on the page.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Float, Int

from model_port.json_files import flattened
from model_port.terminal import visible
from paravt_jax.learner.settings import MismatchConfig
from paravt_jax.run.directory import load_settings, load_settings_log
from paravt_jax.run.log import METRICS_FILE, VALIDATION_FILE, rows_by_step

# The Okabe-Ito palette, which is safe for color blindness. The page has its own shades of these colors.
COLORS = {
    **{"ink": "#222222", "neutral": "#4D4D4D", "blue": "#0072B2", "sky": "#56B4E9"},
    **{"green": "#009E73", "orange": "#E69F00", "red": "#D55E00", "pink": "#CC79A7"},
}
SECTIONS = {  # sections of the page; each is also a file in RUN/plots
    "rewards": "Rewards and tool use",
    "prompts": "By frame budget and question type",
    "rollouts": "Rollouts",
    "learner": "Learner",
    "machine": "Machine",
}
OTHER = "other"  # section of metrics without a predefined chart; only the page has it
MAX_VALUE = 1e30  # larger values are errors, and their sums overflow
KL_FLOOR = 1e-9  # lower values are float32 noise, and a log scale has no 0


class Curve(NamedTuple):
    key: str
    label: str = ""
    color: str = "neutral"


@dataclass(frozen=True)
class Chart:
    title: str
    section: str
    lines: tuple[Curve, ...]
    kind: str = "line"  # or `log`, or `stack` (stacked areas)
    from_zero: bool = False
    sparse: bool = False  # each step has values for only some lines, so lines continue through gaps

    def repeat_of(self, line: Curve) -> int:
        """Number of earlier lines with the same color."""
        return [other.color for other in self.lines[: self.lines.index(line)]].count(line.color)


def _quantiles(key: str) -> tuple[Curve, ...]:
    labels = {"90": ("90 %", "orange"), "50": ("median", "ink"), "10": ("10 %", "sky")}
    return tuple(Curve(f"{key}_p{number}", *label) for number, label in labels.items())


TERMS = "Terms of the reward"
CHARTS = (
    Chart("Reward", "rewards", (Curve("rollout/reward_mean", color="ink"),)),
    Chart(
        TERMS,
        "rewards",
        (
            Curve("rollout/accuracy_mean", "accuracy", "blue"),
            Curve("rollout/format_reward", "format", "red"),
            Curve("rollout/tool_reward_mean", "tool", "green"),
            Curve("rollout/anchor_mean", "anchor", "pink"),
        ),
    ),
    Chart("Accuracy", "rewards", (Curve("rollout/accuracy_mean", color="blue"),), from_zero=True),
    Chart(
        "Format reward f_τ and parseable episodes",
        "rewards",
        (Curve("rollout/format_reward", "f_τ", "red"), Curve("rollout/parseable_frac", "parseable", "pink")),
        from_zero=True,
    ),
    Chart("Tool calls per episode κ", "rewards", (Curve("rollout/tool_calls_mean", color="orange"),), from_zero=True),
    Chart("Fraction of groups with a signal", "rewards", (Curve("rollout/taught_frac"),), from_zero=True),
    Chart("Sampled tokens per episode", "rollouts", _quantiles("rollout/sampled_tokens"), from_zero=True),
    Chart("Advantage in groups with a signal", "rollouts", _quantiles("rollout/advantage")),
    Chart("Imitation loss, nats per token", "learner", (Curve("loss/imitation"),)),
    Chart("Policy loss", "learner", (Curve("loss/policy"),)),
    Chart("KL to the reference policy, nats per token", "learner", (Curve("loss/kl_ref"),)),
    Chart("Fraction of clipped tokens", "learner", (Curve("loss/clip_frac"),)),
    Chart("Entropy of sampled tokens, nats", "learner", (Curve("loss/entropy"),)),
    Chart("Gradient norm before clipping", "learner", (Curve("optim/grad_norm"),)),
    Chart("Learning rate", "learner", (Curve("optim/learning_rate"),), from_zero=True),
    Chart(
        f"KL between engine and learner, nats per token (at least {KL_FLOOR:g})",
        "learner",
        (
            Curve("mismatch/behavior_kl", "all tokens", "ink"),
            Curve("mismatch/behavior_kl_plain", "plain", "sky"),
            Curve("mismatch/behavior_kl_structural", "structural", "red"),
            Curve("mismatch/behavior_kl_first_of_turn", "first of turn", "orange"),
        ),
        "log",
    ),
    Chart(
        "Time per step, seconds",
        "machine",
        (
            Curve("time/rollout_s", "rollout", "blue"),
            Curve("time/update_s", "update", "orange"),
            Curve("time/publish_s", "publish", "pink"),
            Curve("time/other_s", "other"),  # derived: time/step_s minus the other parts
        ),
        "stack",
        from_zero=True,
    ),
    Chart(
        "Tokens per second",
        "machine",
        (
            Curve("perf/sampled_tokens_per_s", "sampled", "blue"),
            Curve("perf/trained_tokens_per_s_device", "trained per device", "orange"),
            Curve("perf/tokens_per_s", "with repeated prompts"),
        ),
        from_zero=True,
    ),
    Chart("Model FLOPs utilization of the update (MFU)", "machine", (Curve("perf/mfu"),), from_zero=True),
    Chart("Peak memory of a device so far (GiB)", "machine", (Curve("perf/peak_gib"),), from_zero=True),
)
PARTS = {"Accuracy": "rollout/accuracy_mean_", "Tool calls per episode κ": "rollout/tool_calls_mean_"}
BUDGET = re.compile(r"k(\d+)")  # key suffix of a frame budget; other suffixes are question types
OWN_TERM = re.compile(r"rollout/reward_(.+)_mean")
OWN_COLORS = ("orange", "sky", "ink")
PART_COLORS = ("blue", "green", "orange", "red", "pink", "sky")
LEARNER_PREFIXES = ("loss/", "optim/", "moe/")  # every key under these has a chart in the section `learner`
STEP_PARTS = ("time/rollout_s", "time/update_s", "time/publish_s")
HIDDEN = ("step", "policy_version", "time/step_s")


@dataclass(frozen=True)
class Table:
    """Columns of a metrics file. Missing values and values beyond `MAX_VALUE` are NaN."""

    rows: dict[int, dict[str, Any]]  # in the order of steps

    @property
    def steps(self) -> Int[np.ndarray, " n"]:
        return np.array([*self.rows], int)

    def column(self, key: str) -> Float[np.ndarray, " n"]:
        values = [row.get(key) for row in self.rows.values()]
        return np.array([value if _is_drawable(value) else np.nan for value in values], float)

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())

    @property
    def keys(self) -> list[str]:
        """Keys with a number in at least one step."""
        return sorted(key for key in {key for row in self.rows.values() for key in row} if self.has(key))


@dataclass(frozen=True)
class LoggedRun:
    """A run's metrics, settings and charts."""

    path: Path
    metrics: Table
    validation: Table
    settings: dict[str, Any]  # empty if there is no config.json of a run
    settings_log: list[dict[str, Any]]  # all versions of the settings, with the number of steps done before each

    @property
    def name(self) -> str:
        """The run's name with its parent directory, because many runs are called seed0."""
        return visible("/".join(self.path.resolve().parts[-2:]))

    def settings_at(self, step: int | None) -> dict[str, Any]:
        """The settings that a step ran with; the current ones without a step, as in an evaluation."""
        versions = [version for version in self.settings_log if step is not None and version["after_step"] < step]
        return versions[-1] if versions else self.settings

    @property
    def kl_levels(self) -> dict[float, str]:
        """The warning and stop levels of `mismatch.max_kl`, with their labels."""
        max_kl = (self.settings.get("config", {}).get("mismatch") or {}).get("max_kl")
        mismatch = MismatchConfig(math.inf if max_kl is None else float(max_kl))
        return {mismatch.warn_kl: "warn", mismatch.max_kl: "stop"} if math.isfinite(mismatch.max_kl) else {}

    @cached_property
    def charts(self) -> list[Chart]:
        """The charts that have data, with only the lines that have data."""
        keys = self.metrics.keys
        added = {TERMS: _own_terms(keys)}
        charts = [
            replace(chart, lines=(*(line for line in chart.lines if line.key in keys), *added.get(chart.title, ())))
            for chart in (*CHARTS, *_by_part(keys))
        ]
        hidden = {*HIDDEN, *(line.key for chart in charts for line in chart.lines)}
        for key in keys:
            if key not in hidden:
                section = "learner" if key.startswith(LEARNER_PREFIXES) else OTHER
                charts.append(Chart(key, section, (Curve(key),)))
        sections = [*SECTIONS, OTHER]
        return sorted((chart for chart in charts if chart.lines), key=lambda chart: sections.index(chart.section))

    def values(self, chart: Chart, line: Curve) -> Float[np.ndarray, " n"]:
        values = self.metrics.column(line.key)
        return np.maximum(values, KL_FLOOR) if chart.kind == "log" else values

    def validation_values(self, chart: Chart) -> Float[np.ndarray, " n"] | None:
        """The values on held-out prompts of a chart with a single line."""
        key = validation_key(chart.lines[0].key)
        return self.validation.column(key) if len(chart.lines) == 1 and self.validation.has(key) else None

    def is_whole(self, chart: Chart) -> bool:
        """Whether all values of the chart are integers, as for counts."""
        validation = self.validation_values(chart)
        columns = [self.metrics.column(line.key) for line in chart.lines]
        values = np.concatenate([*columns, [] if validation is None else validation])
        return bool((values[np.isfinite(values)] % 1 == 0).all())


def load_run(run_dir: Path) -> LoggedRun:
    metrics, validation = (sorted(rows_by_step(run_dir / name).items()) for name in (METRICS_FILE, VALIDATION_FILE))
    for _, row in metrics:
        parts = [row[key] for key in STEP_PARTS if _is_drawable(row.get(key))]
        if parts and _is_drawable(step_s := row.get("time/step_s")):
            row["time/other_s"] = max(0.0, step_s - sum(parts))  # the step time that no other part accounts for
    settings = load_settings(run_dir), load_settings_log(run_dir)
    return LoggedRun(run_dir, Table(dict(metrics)), Table(dict(validation)), *settings)


def flat_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config in a run's settings, by dotted key."""
    return flattened(settings.get("config", {}))


def validation_key(key: str) -> str:
    return "validation/loss" if key == "loss/imitation" else f"validation/{key.removeprefix('rollout/')}"


def _own_terms(keys: Iterable[str]) -> Iterator[Curve]:
    """Yields curves of the terms of `reward.plugin` and `train.truncated`."""
    matches = [match for key in keys if (match := OWN_TERM.fullmatch(key))]
    for number, match in enumerate(matches):
        yield Curve(match[0], match[1], OWN_COLORS[number % len(OWN_COLORS)])


def _by_part(keys: Iterable[str]) -> Iterator[Chart]:
    """Yields charts by frame budget, smallest first, and by question type."""
    for title, prefix in PARTS.items():
        parts = sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        budgets = sorted(int(match[1]) for part in parts if (match := BUDGET.fullmatch(part)))
        types = {part: part for part in parts if not BUDGET.fullmatch(part)}
        labels_by = {"frame budget K": {f"k{budget}": f"K={budget}" for budget in budgets}, "question type": types}
        for name, labels in labels_by.items():
            lines = [
                Curve(prefix + part, label, PART_COLORS[number % len(PART_COLORS)])
                for number, (part, label) in enumerate(labels.items())
            ]
            yield Chart(f"{title} by {name}", "prompts", tuple(lines), from_zero=True, sparse=True)


def _is_drawable(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int) and abs(value) < MAX_VALUE
