"""What an evaluation found, as its command prints it: Markdown, a line for each cell."""

from collections.abc import Iterable
from typing import Any

SHOWN = {
    "accuracy": "accuracy_mean",
    "f_tau": "format_reward",
    "kappa": "tool_calls_mean",
    "tool use": "tool_use_frac",
    "reward": "reward_mean",
    "tokens": "sampled_tokens_mean",
    "missing": "num_missing",
}
Cell = dict[str, Any]
OfShards = tuple[int, int]  # the k-th of n, from 1


def cell_table(cells: Iterable[Cell]) -> str:
    """One line for each."""
    columns = ["dispatch", "frames", *SHOWN, "mcq", "tvg", "oe"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        values = [f"{cell['metrics'][key]:.3g}" for key in SHOWN.values()]
        by_type = [cell["by_type"].get(kind, {}).get("accuracy_mean") for kind in ("mcq", "tvg", "oe")]
        values += ["" if value is None else f"{value:.3g}" for value in by_type]
        lines.append(f"| {cell['dispatch']} | {cell['frame_budget']} | {' | '.join(values)} |")
    return "\n".join(lines)


def score_table(cells: Iterable[Cell]) -> str:
    """Of a public split, the scores of each cell by both rules, in percent."""
    lines = ["| dispatch | frames | scorer | score | 95 % | missing as wrong | n | apart |", "|---" * 8 + "|"]
    for cell in cells:
        num = cell["n"]["answered"] + cell["n"]["unanswered"]
        for scorer, scores in cell["scores"].items():
            low, high = scores["interval_95"]
            shares = [f"{100 * scores['score']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
            shares += [f"{100 * scores['missing_as_wrong']:.1f}", f"{num} of {cell['n']['expected']}", _apart(scores)]
            lines.append(f"| {cell['dispatch']} | {cell['frame_budget']} | {scorer} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _apart(scores: dict[str, Any]) -> str:
    """What else a score has, and the first of its groups."""
    beside = {name: value for name, value in scores.items() if name == "micro" or "@" in name}
    parts = [f"{name} {100 * value:.1f}" for name, value in beside.items() if value != scores["score"] or "@" in name]
    for labels in list(scores["groups"].values())[:1]:
        parts += [f"{label} {100 * found['score']:.1f} of {found['n']}" for label, found in labels.items()]
    return ", ".join(parts)


def refusal(cells: Iterable[Cell]) -> str:
    """Why some cells of a public split have no headline; empty where all have."""
    told = [
        f"{cell['dispatch']}, {cell['frame_budget']} frames: {cell['refused']}" for cell in cells if cell["refused"]
    ]
    return f"no headline for {'; '.join(told)}" if told else ""
