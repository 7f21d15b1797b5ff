"""The certificate of a cell: prompts, frames, sample counts, scores and confidence intervals.

A missing sample is neither right nor wrong. `score` covers complete samples, and `missing_as_wrong` covers all samples.
A cell has a headline score only if every published sample is complete.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.config import SINGLE_TURN_MODES
from paravt_jax.data.splits import PublicSplit
from paravt_jax.evaluation.sample_log import SampleResult
from paravt_jax.evaluation.statistics import interval, mean_over, pass_at
from paravt_jax.rewards.official import OFFICIAL, STRICT
from paravt_jax.rewards.release import RELEASE
from paravt_jax.rl.metrics import QUANTILES, by_part
from rollout.endpoint.errors import REASONS

RIGHT = 0.5  # minimum score of a right episode, for pass@k
SUMMED = ("num_", "calls_", "missing_")  # prefixes of counts
AVERAGED = ("_mean", "_frac", "format_reward")  # suffixes of means over episodes


def certificate(
    split: PublicSplit | None,
    num_rows: int,
    bad: Mapping[str, int],
    results: Sequence[SampleResult],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Builds a certificate from `num_rows` rows, including bad ones. `about` has the provenance."""
    complete = [result for result in results if not result.missing]
    missing = Counter(result.missing for result in results if result.missing)
    counts = {
        "expected": None if split is None else split.num_samples,
        "rows": num_rows,
        "answered": sum(result.answered for result in complete),
        "unanswered": sum(not result.answered for result in complete),
        "missing": dict(missing) | {f"row: {reason}": count for reason, count in bad.items()},
        "not_played": num_rows - sum(bad.values()) - len(results),
    }
    own = RELEASE if about.get("protocol") == RELEASE else STRICT
    scorers = (own,) if split is None else (own, OFFICIAL)
    mode = about.get("mode", "")
    scores = {scorer: scored(split, results, counts, scorer, mode) for scorer in scorers if complete}
    by_type = by_part((result.question_type, result) for result in results)
    refused = why_refused(counts)
    return {
        **about,
        "split": None if split is None else split.name,
        "n": counts,
        "frames": _spread(episode["num_frames"] for result in complete for episode in result.episodes),
        "crop_frames": _spread(episode["num_crop_frames"] for result in complete for episode in result.episodes),
        "subtitles": dict(Counter(result.subtitles for result in complete if result.subtitles)),
        "scores": scores,
        "headline": None if refused or split is None or not complete else scores[own]["score"],
        "refused": refused,
        "metrics": pooled(results),
        "by_type": {kind: pooled(of_kind) for kind, of_kind in by_type.items()},
    }


def why_refused(counts: Mapping[str, Any]) -> str:
    """The reason for no headline score; empty if there is one, or if the number of samples is not published."""
    num_complete, expected = counts["answered"] + counts["unanswered"], counts["expected"]
    if expected is None or num_complete == expected == counts["rows"]:
        return ""
    reasons = [f"{count} missing ({reason})" for reason, count in counts["missing"].items()]
    reasons += [f"{counts['not_played']} not run"] if counts["not_played"] else []
    reasons += [f"the run has {counts['rows']} rows"] if counts["rows"] != expected else []
    return f"{num_complete} of {expected} samples: {', '.join(reasons)}"


def scored(
    split: PublicSplit | None, results: Sequence[SampleResult], counts: Mapping[str, Any], scorer: str, mode: str
) -> dict[str, Any]:
    """A scorer's results: the score and its interval, the score with missing as wrong, and the score of every group."""
    complete = [result for result in results if not result.missing]
    means = [statistics.fmean(result.scores(scorer)) for result in complete]
    name = split.mean_over if split and scorer != RELEASE else ""
    strata = _strata(complete, name)
    scores: dict[str, Any] = {
        "score": mean_over(means, strata),
        "interval_95": interval(means, [result.video for result in complete], strata),
        "micro": statistics.fmean(means),
        "missing_as_wrong": _score_with_missing(results, scorer, name, counts),
        "groups": groups(complete, means),
    }
    if split is not None and split.thresholds:
        shares = {f"R@{t:g}": [float(mean >= t) for mean in means] for t in split.thresholds}
        scores |= {name: statistics.fmean(over) for name, over in shares.items()}
    if scorer == RELEASE:
        scores["as_released"] = as_released(results, scores, mode)
    if (k := len(complete[0].episodes)) > 1:
        right = [sum(score >= RIGHT for score in result.scores(scorer)) for result in complete]
        scores |= {f"avg@{k}": scores["micro"], f"pass@{k}": statistics.fmean(pass_at(k, num, k) for num in right)}
    return scores


def as_released(results: Sequence[SampleResult], scores: Mapping[str, Any], mode: str) -> float:
    """The score as the release computes it. Errors count as wrong; the mean IoU of temporal grounding excludes them.

    In a dialogue with calls, the release does not treat a failed request as an error: the error's text is the reply.
    """
    if results[0].question_type != "tvg":
        return scores["missing_as_wrong"]
    counted = {"empty"} if mode in SINGLE_TURN_MODES else REASONS
    complete = [result for result in results if not result.missing and not result.episodes[0]["malformed"]]
    ious = [result.scores(RELEASE)[0] for result in complete]
    ious += [0.0 for result in results if result.missing in counted]
    return statistics.fmean(ious) if ious else 0.0


def groups(results: Sequence[SampleResult], means: Sequence[float]) -> dict[str, dict[str, dict[str, float | int]]]:
    """Scores by breakdown and label. A sample with several labels counts in each."""
    scores: dict[str, dict[str, list[float]]] = {}
    for result, mean in zip(results, means, strict=True):
        for name, labels in result.groups.items():
            for label in labels:
                scores.setdefault(name, {}).setdefault(label, []).append(mean)
    return {
        name: {
            label: {"score": statistics.fmean(values), "n": len(values)} for label, values in sorted(of_labels.items())
        }
        for name, of_labels in scores.items()
    }


def pooled(results: Iterable[SampleResult]) -> dict[str, float]:
    """Pools the metrics of episodes: sums counts, and averages means over episodes that are not missing."""
    each = [episode["metrics"] for result in results for episode in result.episodes]
    complete = [metrics for metrics in each if metrics["num_episodes"]]
    names = dict.fromkeys(name for metrics in (complete or each) for name in metrics)
    values = {name: [metrics[name] for metrics in complete if name in metrics] for name in names}
    values["deadline_tokens_mean"] = [m["deadline_tokens_mean"] for m in each if "deadline_tokens_mean" in m]
    rewards, lengths = (values.get(name, []) for name in ("reward_mean", "sampled_tokens_mean"))
    return {
        **{name: math.fsum(metrics[name] for metrics in each) for name in names if name.startswith(SUMMED)},
        **{name: statistics.fmean(of) for name, of in values.items() if of and name.endswith(AVERAGED)},
        **({"reward_std": float(np.std(rewards))} if rewards else {}),
        **{f"sampled_tokens_{key}": float(np.quantile(lengths, at)) for key, at in QUANTILES.items() if lengths},
    }


def _score_with_missing(results: Sequence[SampleResult], scorer: str, name: str, counts: Mapping[str, Any]) -> float:
    """The score if missing samples and rows without a record count as 0."""
    means = [0.0 if result.missing else statistics.fmean(result.scores(scorer)) for result in results]
    num_all = max(counts["expected"] or counts["rows"], len(results))
    return mean_over(means, _strata(results, name)) * len(results) / num_all


def _strata(results: Sequence[SampleResult], name: str) -> list[str]:
    return ["".join(result.groups[name]) if name else "" for result in results]


def _spread(counts: Iterable[int]) -> dict[str, float | int]:
    numbers = list(counts)
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)} if numbers else {}
