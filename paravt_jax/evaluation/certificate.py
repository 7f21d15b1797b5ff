"""The certificate of a cell: what was asked and shown, of how many samples, what they score, and how sure that is.

Missing is neither wrong nor right: the score is of what is there, and beside it stands the one with missing counted as
wrong. A headline is given only where every published sample was answered or left unanswered by the policy itself.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.data.splits import PublicSplit
from paravt_jax.evaluation.lines import SampleResult
from paravt_jax.evaluation.statistics import interval, mean_over, pass_at
from paravt_jax.rewards.official import OFFICIAL, STRICT
from paravt_jax.rl.metrics import QUANTILES

RIGHT = 0.5  # a score from which on an episode counts as right, for pass@k
SUMMED = ("num_", "calls_", "missing_")  # what metrics of counts begin with
AVERAGED = ("_mean", "_frac", "format_reward")  # what those of episodes end with


def certificate(
    split: PublicSplit | None,
    num_rows: int,
    bad: Mapping[str, int],
    results: Sequence[SampleResult],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Of so many rows, of which some are bad and the others are to be played; `about` says how that was done."""
    there = [result for result in results if not result.missing]
    missing = Counter(result.missing for result in results if result.missing)
    counts = {
        "expected": None if split is None else split.num_samples,
        "rows": num_rows,
        "answered": sum(result.answered for result in there),
        "unanswered": sum(not result.answered for result in there),
        "missing": dict(missing) | {f"row: {reason}": count for reason, count in bad.items()},
        "not_played": num_rows - sum(bad.values()) - len(results),
    }
    scorers = (STRICT,) if split is None else (STRICT, OFFICIAL)
    scores = {scorer: scored(split, results, counts, scorer) for scorer in scorers if there}
    refused = why_refused(counts)
    return {
        **about,
        "split": None if split is None else split.name,
        "n": counts,
        "frames": _spread(episode["num_frames"] for result in there for episode in result.episodes),
        "crop_frames": _spread(episode["num_crop_frames"] for result in there for episode in result.episodes),
        "subtitles": dict(Counter(result.subtitles for result in there if result.subtitles)),
        "scores": scores,
        "headline": None if refused or split is None or not there else scores[STRICT]["score"],
        "refused": refused,
        "metrics": pooled(results),
        "by_type": {kind: pooled(of_kind) for kind, of_kind in _parted(results).items()},
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


def scored(
    split: PublicSplit | None, results: Sequence[SampleResult], counts: Mapping[str, Any], scorer: str
) -> dict[str, Any]:
    """By one scorer: the headline's score with its interval, both readings of missing, and every group."""
    there = [result for result in results if not result.missing]
    means = [statistics.fmean(result.scores(scorer)) for result in there]
    name = split.mean_over if split else ""
    strata = _strata(there, name)
    found: dict[str, Any] = {
        "score": mean_over(means, strata),
        "interval_95": interval(means, [result.video for result in there], strata),
        "micro": statistics.fmean(means),
        "missing_as_wrong": _as_wrong(results, scorer, name, counts),
        "groups": groups(there, means),
    }
    if split is not None and split.thresholds:
        shares = {f"R@{t:g}": [float(mean >= t) for mean in means] for t in split.thresholds}
        found |= {name: statistics.fmean(over) for name, over in shares.items()}
    if (k := len(there[0].episodes)) > 1:
        right = [sum(score >= RIGHT for score in result.scores(scorer)) for result in there]
        found |= {f"avg@{k}": found["micro"], f"pass@{k}": statistics.fmean(pass_at(k, num, k) for num in right)}
    return found


def groups(there: Sequence[SampleResult], means: Sequence[float]) -> dict[str, dict[str, dict[str, float | int]]]:
    """A sample of several labels counts in each."""
    found: dict[str, dict[str, list[float]]] = {}
    for result, mean in zip(there, means, strict=True):
        for name, labels in result.groups.items():
            for label in labels:
                found.setdefault(name, {}).setdefault(label, []).append(mean)
    return {
        name: {
            label: {"score": statistics.fmean(scores), "n": len(scores)} for label, scores in sorted(of_labels.items())
        }
        for name, of_labels in found.items()
    }


def pooled(results: Iterable[SampleResult]) -> dict[str, float]:
    """Those of all episodes together, from those of each: counts add up, means are of the episodes that are there."""
    each = [episode["metrics"] for result in results for episode in result.episodes]
    there = [metrics for metrics in each if metrics["num_episodes"]]
    names = dict.fromkeys(name for metrics in (there or each) for name in metrics)
    rewards, lengths = [[metrics[name] for metrics in there] for name in ("reward_mean", "sampled_tokens_mean")]
    cut = [metrics["deadline_tokens_mean"] for metrics in each if "deadline_tokens_mean" in metrics]
    return {
        **{name: math.fsum(metrics[name] for metrics in each) for name in names if name.startswith(SUMMED)},
        **{name: _mean(metrics.get(name) for metrics in there) for name in names if name.endswith(AVERAGED)},
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        **{f"sampled_tokens_{key}": float(np.quantile(lengths, at)) for key, at in QUANTILES.items() if lengths},
        **({"deadline_tokens_mean": _mean(cut)} if cut else {}),
    }


def _mean(values: Iterable[float | None]) -> float:
    """Of those that there are; 0 of none."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else 0.0


def _as_wrong(results: Sequence[SampleResult], scorer: str, name: str, counts: Mapping[str, Any]) -> float:
    """The score with 0 for what is missing, rows that have no line included."""
    means = [0.0 if result.missing else statistics.fmean(result.scores(scorer)) for result in results]
    num_all = max(counts["expected"] or counts["rows"], len(results))
    return mean_over(means, _strata(results, name)) * len(results) / num_all


def _strata(there: Sequence[SampleResult], name: str) -> list[str]:
    return ["".join(result.groups[name]) if name else "" for result in there]


def _parted(results: Iterable[SampleResult]) -> dict[str, list[SampleResult]]:
    parts: dict[str, list[SampleResult]] = {}
    for result in results:
        parts.setdefault(result.question_type, []).append(result)
    return parts


def _spread(counts: Iterable[int]) -> dict[str, float | int]:
    numbers = list(counts)
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)} if numbers else {}
