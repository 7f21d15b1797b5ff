"""Metrics of a run for the page: the settings, first and last values, and charts over steps.

Quantities, names and colors come from `paravt_jax.run.plots`. Charts only use metrics that the run has logged, so runs
of other kinds show their own metrics.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from paravt_jax.run import plots
from paravt_jax.run.plots import (
    ACCURACY,
    ADVANTAGES,
    CALLS,
    FORMAT,
    LOSSES,
    MISMATCH,
    PARTS,
    REWARD_TERMS,
    TAUGHT,
    TOKENS,
    TOTAL,
    LoggedRun,
    Quantity,
    Table,
    of_budgets,
    of_types,
)

HEADLINE_FRAC = 0.1  # of the steps, at each end
HEADLINES = (  # symbol, name
    (FORMAT, "f_τ", "format reward"),
    (CALLS, "κ", "tool calls per episode"),
    (ACCURACY, "R_acc", "accuracy"),
    (TOTAL, "R", "reward"),
    (LOSSES["imitation, nats per token"], "L", "imitation, nats per token"),
)
HELD_OUT = {"loss/imitation": "validation/loss"}  # keys under rollout/ have the same name under validation/
MAX_POINTS = 600  # per line; with more steps, points are means
MAX_OTHER = 80  # charts of metrics without a predefined chart, for example from plugins
COLOURS = {
    plots.INK: "ink",
    plots.NEUTRAL: "neutral",
    plots.BLUE: "blue",
    plots.SKY: "sky",
    plots.GREEN: "green",
    plots.ORANGE: "orange",
    plots.RED: "red",
    plots.PINK: "pink",
}
TIMES = (
    Quantity("time/rollout_s", "rollout", plots.BLUE),
    Quantity("time/update_s", "update", plots.ORANGE),
    Quantity("time/publish_s", "publish", plots.PINK),
    Quantity("time/other_s", "other", plots.NEUTRAL),  # derived: time/step_s minus the other parts
)
SECTIONS = {"eval": "evaluation", "sft": "imitation"}
FACTS = {  # label -> config keys, with values joined by a multiplication sign
    "Model": ("model.path",),
    "Activations": ("model.dtype",),
    "Engine": ("engine.kind",),
    "Split": ("data.split",),
    "Asked as": ("eval.mode",),
    "Calls made": ("eval.dispatches",),
    "Frames": ("eval.frame_budgets",),
    "Samples of a prompt": ("eval.num_samples",),
    "Rows a step": ("sft.rows_per_step",),
    "Tokens of a row": ("pack.row_tokens",),
    "Episodes a step": ("train.prompts_per_step", "train.group_size"),
    "Dispatch": ("rollout.dispatch",),
    "Frame budgets K": ("video.frame_budgets",),
    "Anchor credit": ("advantage.credit",),
    "Learning rate": ("optim.learning_rate",),
    "Loss": ("loss.name",),
    "KL coefficient": ("loss.kl_coef",),
    "Staleness, at most": ("train.max_staleness",),
    "Mesh: data, fsdp, tensor": ("mesh.data", "mesh.fsdp", "mesh.tensor"),
    "Seed": ("seed",),
}
IDLE = {"evaluation": ("rollout.dispatch", "video.frame_budgets"), "imitation": ("rollout.dispatch",)}  # no effect


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Quantity, ...]
    kind: str = "line"  # or `log`, or `stack` (stacked areas)
    section: str = "learned"
    from_zero: bool = False


CHARTS = (
    Chart("Reward and its terms", REWARD_TERMS),
    Chart("Accuracy", (ACCURACY,), from_zero=True),
    Chart("Format reward f_τ", (FORMAT,), from_zero=True),
    Chart("Tool calls per episode κ", (CALLS,), from_zero=True),
    Chart("Groups that taught, fraction", (TAUGHT,), from_zero=True),
    Chart("Sampled tokens of an episode, quantiles", TOKENS, from_zero=True),
    Chart("Advantage of episodes that taught, quantiles", ADVANTAGES),
    *(Chart(title[0].upper() + title[1:], (quantity,), section="learner") for title, quantity in LOSSES.items()),
    Chart("KL of engine and learner, nats per token", MISMATCH, "log", "learner"),
    Chart("Time of a step, seconds", TIMES, "stack", "machine", from_zero=True),
    Chart("Tokens per second", (Quantity("perf/tokens_per_s", "", plots.NEUTRAL),), section="machine", from_zero=True),
)
OWN_SECTION = ("loss/", "optim/")  # every key under these prefixes has a chart
LEARNT = (*OWN_SECTION, "mismatch/")  # logged only after an update
HIDDEN = ("step", "policy_version", "time/step_s", *(quantity.key for quantity in TIMES))


def load_settings(run_dir: Path) -> dict[str, Any]:
    """Reads RUN/config.json; empty if it does not exist."""
    path = run_dir / "config.json"
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON ({problem}); restore the file, or remove it") from None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else {}


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of run, by the config section that only this kind has."""
    return next((kind for section, kind in SECTIONS.items() if section in config), "training")


def about(run: LoggedRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The head of the page: name, steps done and planned, commit, versions, settings."""
    nested = settings.get("config", {})
    config = dict(_flat(nested))
    planned = [value for key, value in config.items() if key.split(".")[-1] == "num_steps" and isinstance(value, int)]
    return {
        "kind": kind_of(nested),
        "name": run.name,
        "steps_done": int(max(run.metrics.rows, default=0)),
        "steps_planned": planned[0] if planned else None,
        **told(settings),
    }


def told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, commit and package versions."""
    config = dict(_flat(settings.get("config", {})))
    idle = IDLE.get(kind_of(settings.get("config", {})), ())
    return {
        "commit": settings.get("git_commit"),
        "packages": settings.get("packages", {}),
        "facts": [
            [label, text] for label, keys in FACTS.items() if keys[0] not in idle and (text := _fact(config, keys))
        ],
        "settings": [[key, _text(value)] for key, value in config.items()],
    }


def headlines(run: LoggedRun) -> list[dict[str, Any]]:
    """First and last values; losses if the run has no episodes."""
    known = [headline for headline in HEADLINES if run.metrics.has(headline[0].key)]
    if not known:
        names = sorted(key for key in _keys(run.metrics) if key.startswith("loss/"))[: len(HEADLINES)]
        known = [(Quantity(key, "", plots.NEUTRAL), key.removeprefix("loss/"), key) for key in names]
    return [_headline(run, *headline) for headline in known]


def charts(run: LoggedRun) -> dict[str, Any]:
    """Charts and their data columns."""
    table = _with_rest_of_time(run.metrics)
    all_charts = (*CHARTS, *_of_parts(table))
    shown = [(chart, lines) for chart in all_charts if (lines := [line for line in chart.lines if table.has(line.key)])]
    drawn = {line.key for _, lines in shown for line in lines}
    others = [key for key in sorted(_keys(table)) if key not in drawn and key not in HIDDEN]
    own = [key for key in others if key.startswith(OWN_SECTION)]
    rest = [key for key in others if key not in own]
    for section, keys in (("learner", own), ("other", rest[:MAX_OTHER])):
        for key in keys:
            line = Quantity(key, "", plots.NEUTRAL)
            shown.append((Chart(key, (line,), section=section), [line]))
    keys = sorted({line.key for _, lines in shown for line in lines})
    validation = {key: held_out for key in keys if run.validation.has(held_out := _held_out(key))}
    bins = _bins(len(table.steps))
    return {
        "steps": [int(table.steps[part[-1]]) for part in bins],
        "steps_a_point": max(map(len, bins), default=1),
        "gaps": {key: found for key in keys if (found := gaps(table, key))},
        "columns": {key: _numbers(_means(table.column(key), bins)) for key in keys},
        "validation": {
            "steps": [int(step) for step in run.validation.steps],
            "columns": {key: _numbers(run.validation.column(held_out)) for key, held_out in validation.items()},
        },
        "charts": [
            {
                "title": chart.title,
                "kind": chart.kind,
                "section": chart.section,
                "from_zero": chart.from_zero,
                "lines": [[line.key, line.label, COLOURS[line.colour]] for line in lines],
                "levels": [[level, name] for level, name in run.kl_levels.items()] if chart.kind == "log" else [],
            }
            for chart, lines in shown
        ],
        "num_left_out": len(rest[MAX_OTHER:]),
        "floor": plots.KL_FLOOR,
    }


def gaps(table: Table, key: str) -> list[tuple[int, int, str]]:
    """Gaps of a curve: first step, last step and reason."""
    steps = table.steps.tolist()
    unknown = ~np.isfinite(table.column(key))
    each = [
        (one + 1, other - 1, "the step is not in the log")
        for one, other in itertools.pairwise(steps)
        if other > one + 1
    ]
    each += [(step, step, _why(table.rows[step], key)) for step in itertools.compress(steps, unknown)]
    joined: list[tuple[int, int, str]] = []
    for first, last, why in sorted(each):
        if joined and joined[-1][1:] == (first - 1, why):
            first = joined.pop()[0]
        joined.append((first, last, why))
    return joined


def _why(row: Mapping[str, Any], key: str) -> str:
    if key in row:
        return "no finite number" if row[key] is None else "a number beyond any axis"
    if key.startswith(tuple(PARTS.values())):
        return "no such episode"
    if key.startswith(LEARNT) and row.get("perf/num_batches") == 0:
        return "nothing to learn from"
    return "not logged"


def _of_parts(table: Table) -> Iterator[Chart]:
    """Charts of κ and accuracy by frame budget and by question type."""
    for name, prefix in PARTS.items():
        for parts, of_parts in (("frame budget K", of_budgets), ("question type", of_types)):
            title = f"{name[0].upper()}{name[1:]} by {parts}"
            yield Chart(title, tuple(of_parts(table, prefix)), from_zero=True)


def _held_out(key: str) -> str:
    return HELD_OUT.get(key, f"validation/{key.removeprefix('rollout/')}")


def _headline(run: LoggedRun, quantity: Quantity, symbol: str, name: str) -> dict[str, Any]:
    values = run.metrics.column(quantity.key)
    size = max(1, round(HEADLINE_FRAC * len(values)))
    held_out = run.validation.column(_held_out(quantity.key))
    held_out = held_out[np.isfinite(held_out)]
    return {
        "key": quantity.key,
        "symbol": symbol,
        "name": name,
        "colour": COLOURS[quantity.colour],
        "first": _number(_mean(values[:size])),
        "last": _number(_mean(values[-size:])),
        "num_steps": size,
        "validation": _numbers(held_out[[0, -1]]) if len(held_out) else None,
        "line": _numbers(_means(values, _bins(len(values), max_bins=80))),
    }


def _with_rest_of_time(table: Table) -> Table:
    """Adds `time/other_s`, the step time that no other part accounts for."""
    rows = {}
    for step, row in table.rows.items():
        parts = [row.get(quantity.key) for quantity in TIMES[:-1]]
        whole = row.get("time/step_s")
        if isinstance(whole, float | int) and any(isinstance(part, float | int) for part in parts):
            rest = whole - sum(part for part in parts if isinstance(part, float | int))
            row = row | {TIMES[-1].key: max(0.0, rest)}
        rows[step] = row
    return Table(rows)


def _keys(table: Table) -> list[str]:
    """Keys with a number in at least one step."""
    keys = dict.fromkeys(key for row in table.rows.values() for key in row)
    return [key for key in keys if table.has(key)]


def _bins(length: int, max_bins: int = MAX_POINTS) -> list[np.ndarray]:
    """Bins of equal size, except the last. Means over unequal bins would alias with periodic metrics."""
    size = max(1, -(-length // max_bins))
    return np.split(np.arange(length), range(size, length, size)) if length else []


def _means(values: Float[np.ndarray, " n"], bins: list[np.ndarray]) -> Float[np.ndarray, " m"]:
    return np.array([_mean(values[part]) for part in bins])


def _mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    """Rounds a value to keep the page small; None for NaN, which JSON lacks."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens nested settings to dotted keys, as on the command line."""
    if not isinstance(settings, dict) or (not settings and prefix):
        yield prefix, settings
        return
    for key, value in settings.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _fact(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return " × ".join(_text(config[key]) for key in keys) if all(key in config for key in keys) else ""


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
