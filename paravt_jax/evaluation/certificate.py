"""The certificate of a cell: what was asked and shown, of how many samples, what they score, and how sure that is.

Missing is neither wrong nor right: the score is of what is there, and beside it stands the one with missing counted as
wrong. A headline is given only where every published sample was answered or left unanswered by the policy itself.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.data.splits import PublicSplit
from paravt_jax.evaluation.lines import Ran
from paravt_jax.evaluation.statistics import interval, mean_over, pass_at
from paravt_jax.rewards.official import OFFICIAL, STRICT

RIGHT = 0.5  # a score from which on an episode counts as right, for pass@k
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
SUMMED = ("num_", "calls_", "missing_")  # what metrics of counts begin with


def certificate(
    split: PublicSplit | None, num_rows: int, bad: Mapping[str, int], rans: Sequence[Ran], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Of so many rows, of which some are bad and the others are to be played; `about` says how that was done."""
    there = [ran for ran in rans if not ran.missing]
    missing = Counter(ran.missing for ran in rans if ran.missing)
    counts = {
        "expected": None if split is None else split.num_samples,
        "rows": num_rows,
        "answered": sum(all(episode["answered"] for episode in ran.episodes) for ran in there),
        "unanswered": sum(not all(episode["answered"] for episode in ran.episodes) for ran in there),
        "missing": dict(missing) | {f"row: {reason}": count for reason, count in bad.items()},
        "not_played": num_rows - sum(bad.values()) - len(rans),
    }
    scorers = (STRICT,) if split is None else (STRICT, OFFICIAL)
    scores = {scorer: scored(split, rans, counts, scorer) for scorer in scorers if there}
    refused = why_refused(counts)
    return {
        **about,
        "split": None if split is None else split.name,
        "n": counts,
        "frames": _spread(episode["num_frames"] for ran in there for episode in ran.episodes),
        "crop_frames": _spread(episode["num_crop_frames"] for ran in there for episode in ran.episodes),
        "subtitles": dict(Counter(ran.subtitles for ran in there if ran.subtitles)),
        "scores": scores,
        "headline": None if refused or split is None or not there else scores[STRICT]["score"],
        "refused": refused,
        "metrics": pooled(rans),
        "by_type": {kind: pooled(of_kind) for kind, of_kind in _parted(rans).items()},
    }


def why_refused(counts: Mapping[str, Any]) -> str:
    """Why there is no headline; empty where there is one, or where nobody published how many samples there are."""
    there, expected = counts["answered"] + counts["unanswered"], counts["expected"]
    if expected is None or there == expected == counts["rows"]:
        return ""
    reasons = [f"{count} missing ({reason})" for reason, count in counts["missing"].items()]
    reasons += [f"{counts['not_played']} not played"] if counts["not_played"] else []
    reasons += [f"{counts['rows']} rows"] if counts["rows"] != expected else []
    return f"{there} of {expected} samples: {', '.join(reasons)}"


def scored(split: PublicSplit | None, rans: Sequence[Ran], counts: Mapping[str, Any], scorer: str) -> dict[str, Any]:
    """By one scorer: the headline's score with its interval, both readings of missing, and every group."""
    there = [ran for ran in rans if not ran.missing]
    means = [statistics.fmean(ran.scores(scorer)) for ran in there]
    name = split.mean_over if split else ""
    strata = _strata(there, name)
    found: dict[str, Any] = {
        "score": mean_over(means, strata),
        "interval_95": interval(means, [ran.video for ran in there], strata),
        "micro": statistics.fmean(means),
        "missing_as_wrong": _as_wrong(rans, scorer, name, counts),
        "groups": groups(there, means),
    }
    if split is not None and split.thresholds:
        shares = {f"R@{t:g}": [float(mean >= t) for mean in means] for t in split.thresholds}
        found |= {name: statistics.fmean(over) for name, over in shares.items()}
    if (k := len(there[0].episodes)) > 1:
        right = [sum(score >= RIGHT for score in ran.scores(scorer)) for ran in there]
        found |= {f"avg@{k}": found["micro"], f"pass@{k}": statistics.fmean(pass_at(k, num, k) for num in right)}
    return found


def groups(there: Sequence[Ran], means: Sequence[float]) -> dict[str, dict[str, dict[str, float | int]]]:
    """A sample of several labels counts in each."""
    found: dict[str, dict[str, list[float]]] = {}
    for ran, mean in zip(there, means, strict=True):
        for name, labels in ran.groups.items():
            for label in labels:
                found.setdefault(name, {}).setdefault(label, []).append(mean)
    return {
        name: {
            label: {"score": statistics.fmean(scores), "n": len(scores)} for label, scores in sorted(of_labels.items())
        }
        for name, of_labels in found.items()
    }


def pooled(rans: Iterable[Ran]) -> dict[str, float]:
    """Those of all episodes together, from those of each: counts add up, means are of the episodes that are there."""
    each = [episode["metrics"] for ran in rans for episode in ran.episodes]
    there = [metrics for metrics in each if metrics["num_episodes"]]
    found = {name: sum(one[name] for one in each) for name in each[0] if name.startswith(SUMMED)} if each else {}
    names = dict.fromkeys(name for one in (there or each) for name in one)
    for name in names:
        if not name.startswith((*SUMMED, "reward_std", "sampled_tokens_p", "deadline_")):
            values = [one[name] for one in there if name in one]
            found[name] = statistics.fmean(values) if values else 0.0
    rewards, lengths = [[one[name] for one in there] for name in ("reward_mean", "sampled_tokens_mean")]
    found["reward_std"] = float(np.std(rewards)) if rewards else 0.0
    found |= {f"sampled_tokens_{key}": float(np.quantile(lengths, at)) for key, at in QUANTILES.items() if lengths}
    cut = [one["deadline_tokens_mean"] for one in each if "deadline_tokens_mean" in one]
    return found | ({"deadline_tokens_mean": statistics.fmean(cut)} if cut else {})


def _as_wrong(rans: Sequence[Ran], scorer: str, name: str, counts: Mapping[str, Any]) -> float:
    """The score with 0 for what is missing, rows that have no line included."""
    means = [0.0 if ran.missing else statistics.fmean(ran.scores(scorer)) for ran in rans]
    num_all = max(counts["expected"] or counts["rows"], len(rans))
    return mean_over(means, _strata(rans, name)) * len(rans) / num_all


def _strata(there: Sequence[Ran], name: str) -> list[str]:
    return ["".join(ran.groups[name]) if name else "" for ran in there]


def _parted(rans: Iterable[Ran]) -> dict[str, list[Ran]]:
    parts: dict[str, list[Ran]] = {}
    for ran in rans:
        parts.setdefault(ran.question_type, []).append(ran)
    return parts


def _spread(counts: Iterable[int]) -> dict[str, float | int]:
    numbers = list(counts)
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)} if numbers else {}
