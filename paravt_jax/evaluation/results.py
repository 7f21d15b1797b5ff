"""The Markdown tables that the evaluation command prints, one line per cell."""

from collections.abc import Sequence
from typing import Any

from model_port.terminal import markdown_table

COLUMNS = {
    "accuracy": "accuracy_mean",
    "f_tau": "format_reward",
    "parseable": "parseable_frac",
    "kappa": "tool_calls_mean",
    "tool use": "tool_use_frac",
    "reward": "reward_mean",
    "tokens": "sampled_tokens_mean",
    "missing": "num_missing",
}
TYPES = ("mcq", "tvg", "oe")  # question types with a column for their accuracy
Cell = dict[str, Any]
Shard = tuple[int, int]  # (k, n): the k-th of n, from 1


def cell_table(cells: Sequence[Cell]) -> str:
    axes = _axes(cells)
    rows = []
    for cell in cells:
        values = [_shown(cell["metrics"][key]) if key in cell["metrics"] else "" for key in COLUMNS.values()]
        by_type = [cell["by_type"].get(kind, {}).get("accuracy_mean") for kind in TYPES]
        rows.append([*_values(cell, axes), *values, *("" if value is None else f"{value:.3g}" for value in by_type)])
    return markdown_table([*axes, *COLUMNS, *TYPES], rows)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def score_table(cells: Sequence[Cell]) -> str:
    """The scores of a public split by both rules, in percent."""
    axes = _axes(cells)
    rows = []
    for cell in cells:
        num = cell["n"]["answered"] + cell["n"]["unanswered"]
        for scorer, scores in cell["scores"].items():
            low, high = scores["interval_95"]
            shares = [f"{100 * scores['score']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
            shares += [f"{100 * scores['missing_as_wrong']:.1f}", f"{num} of {cell['n']['expected']}"]
            rows.append([*_values(cell, axes), scorer, *shares, _breakdown(scores)])
    return markdown_table([*axes, "scorer", "score", "95 %", "missing as wrong", "n", "breakdown"], rows)


def _axes(cells: Sequence[Cell]) -> dict[str, str]:
    """The columns that distinguish cells, with their keys; the temperature only if it varies."""
    differs = len({cell["temperature"] for cell in cells}) > 1
    return {"dispatch": "dispatch", "frames": "frame_budget"} | ({"temperature": "temperature"} if differs else {})


def _values(cell: Cell, axes: dict[str, str]) -> list[str]:
    return [f"{value:g}" if isinstance(value := cell[key], float) else str(value) for key in axes.values()]


def _breakdown(scores: dict[str, Any]) -> str:
    """Formats other means, and the scores of the first breakdown."""
    means = {name: value for name, value in scores.items() if name == "micro" or "@" in name}
    parts = [f"{name} {100 * value:.1f}" for name, value in means.items() if value != scores["score"] or "@" in name]
    for labels in list(scores["groups"].values())[:1]:
        parts += [f"{label} {100 * group['score']:.1f} of {group['n']}" for label, group in labels.items()]
    return ", ".join(parts)


def refusal(cells: Sequence[Cell]) -> str:
    """The reasons why cells of a public split have no headline score; empty if all have one."""
    reasons = [f"{_title(cell, cells)}: {cell['refused']}" for cell in cells if cell["refused"]]
    return f"no headline for {'; '.join(reasons)}" if reasons else ""


def _title(cell: Cell, cells: Sequence[Cell]) -> str:
    dispatch, frames, *temperature = _values(cell, _axes(cells))
    return ", ".join([dispatch, f"{frames} frames", *(f"temperature {value}" for value in temperature)])
