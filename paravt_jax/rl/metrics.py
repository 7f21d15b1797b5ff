"""Metrics of a step's rollouts, including the paper's, computed by the same rules in every run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from paravt_jax.rewards.terms import OUTCOMES
from paravt_jax.rl.episodes import REASONS, Rollout
from paravt_jax.rl.groups import Group
from rollout.chat import Chat

Item = TypeVar("Item")
IN_PARTS = ("accuracy_mean", "tool_calls_mean")  # also reported by question type and by frame budget
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
MAX_DEADLINE_FRAC = 0.05  # fraction of a step's episodes above which the run warns of a bias towards short ones


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    budgets = [(f"k{group.frame_budget}", rollout) for group in groups for rollout in group.rollouts]
    types = [(group.sample.item.question_type, rollout) for group in groups for rollout in group.rollouts]
    trained = [group.advantages.sequence[group.keep] for group in groups]
    metrics = {
        **rollout_metrics(rollouts),
        **metrics_in_parts(budgets),
        **metrics_in_parts(types),
        **_quantiles("advantage", np.concatenate(trained)),
        "frame_budget_mean": float(np.mean([group.frame_budget for group in groups])),
        "num_groups": float(len(groups)),
        "num_groups_without_spread": float(sum(not group.advantages.has_spread for group in groups)),
        "taught_frac": float(np.mean([group.has_signal for group in groups])),
    }
    return {f"rollout/{name}": value for name, value in metrics.items()}


def metrics_in_parts(rollouts: Iterable[tuple[str, Rollout]]) -> dict[str, float]:
    """Accuracy and kappa by question type or frame budget, for example `accuracy_mean_mcq`, `tool_calls_mean_k16`."""
    parts = {part: rollout_metrics(of_part) for part, of_part in by_part(rollouts).items()}
    return {f"{name}_{part}": metrics[name] for part, metrics in parts.items() for name in IN_PARTS if name in metrics}


def by_part(items: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    parts: dict[str, list[Item]] = {}
    for part, item in items:
        parts.setdefault(part, []).append(item)
    return parts


def missing_remark(rollouts: Sequence[Rollout], bound: str = "") -> str | None:
    """Log line with the number of missing episodes, `bound` and an example; None if none is missing."""
    missing = [rollout for rollout in rollouts if rollout.missing]
    if not missing:
        return None
    more = f", more than {bound}" if bound else ""
    example = f"{missing[0].id}: {missing[0].problem}"
    return f"{len(missing)} of {len(rollouts)} episodes are missing{more}; for example {example}"


def no_room_remark(rollouts: Sequence[Rollout], max_context_tokens: int) -> str | None:
    """A warning about episodes without a turn, because their prompts are too long; None if there are none."""
    full = [rollout for rollout in rollouts if not rollout.missing and rollout.stats and not rollout.stats.num_turns]
    if not full:
        return None
    return (
        f"{len(full)} of {len(rollouts)} episodes have no turn, because their prompts leave no room in "
        f"rollout.max_context_tokens={max_context_tokens}; for example {full[0].id}. Raise it, or show fewer or "
        f"smaller frames (video.frame_budgets, video.overview_frames, video.max_pixels)"
    )


def deadline_remark(metrics: Mapping[str, float], turn_deadline_s: float) -> str | None:
    """A warning if the deadline cuts too many episodes, which biases training towards short episodes."""
    num_cut = metrics["rollout/missing_deadline"]
    num_started = metrics["rollout/num_episodes"] + metrics["rollout/num_missing"]
    if not metrics["rollout/num_episodes"] or num_cut <= MAX_DEADLINE_FRAC * num_started:
        return None
    return (
        f"{num_cut:.0f} of {num_started:.0f} episodes are missing because of rollout.turn_deadline_s="
        f"{turn_deadline_s:g}: they had {metrics['rollout/deadline_tokens_mean']:.0f} sampled tokens in earlier turns, "
        f"the finished ones have {metrics['rollout/sampled_tokens_mean']:.0f} in total, a bias towards short episodes. "
        f"Raise the deadline, add servers, or lower rollout.max_new_tokens"
    )


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of rollouts: the paper's f_tau is `format_reward`, its kappa `tool_calls_mean`.

    Missing episodes count only in the metrics about them. A mean without values is left out.
    """
    scored = [rollout for rollout in rollouts if not rollout.missing]
    stats = [rollout.stats for rollout in scored if rollout.stats is not None]

    def values_of(name: str) -> list[float]:
        return [value for each in stats if (value := getattr(each, name)) is not None]

    means: dict[str, list[float]] = {
        "reward_mean": values_of("total"),
        "accuracy_mean": values_of("accuracy"),  # none with only question types that a plugin defines
        "anchor_mean": values_of("anchor"),
        "tool_reward_mean": values_of("tool"),
        "format_reward": [rollout.format_reward for rollout in scored],
        "parseable_frac": values_of("parseable"),
        "tool_calls_mean": values_of("num_executed"),
        "failed_calls_mean": [sum(each.outcomes.values()) - each.num_executed for each in stats],
        "tool_use_frac": [each.num_executed > 0 for each in stats],
        "turns_mean": values_of("num_turns"),
        "sampled_tokens_mean": values_of("num_sampled"),
        "cut_off_frac": values_of("cut_off"),
        "deadline_tokens_mean": [rollout.num_lost for rollout in rollouts if rollout.reason == "deadline"],
    }
    for name, value in (term for each in stats for term in each.own):  # terms of a plugin, and the length penalty
        means.setdefault(f"reward_{name}_mean", []).append(value)
    outcomes = sum((Counter(each.outcomes) for each in stats), Counter[str]())
    reasons = (rollout.reason for rollout in rollouts if rollout.missing)
    missing = Counter(reason if reason in REASONS else "engine" for reason in reasons)  # an endpoint has other reasons
    return {
        "num_episodes": float(len(scored)),
        "num_missing": float(len(rollouts) - len(scored)),
        **{name: float(np.mean(values)) for name, values in means.items() if values},
        **({"reward_std": float(np.std(totals))} if (totals := means["reward_mean"]) else {}),
        **_quantiles("sampled_tokens", np.array(means["sampled_tokens_mean"])),
        **{f"calls_{outcome}": float(outcomes[outcome]) for outcome in OUTCOMES},
        **{f"missing_{reason}": float(missing[reason]) for reason in REASONS},
    }


def staleness_mean(groups: Sequence[Group], version: int) -> float | None:
    """Mean number of policy versions by which the sampled tokens lag the learner; None without tokens."""
    num_by_age = Counter[int]()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.stats is not None:
            num_by_age.update({version - int(older): number for older, number in rollout.stats.versions.items()})
    total = num_by_age.total()
    return sum(age * number for age, number in num_by_age.items()) / total if total else None


def num_tokens(groups: Sequence[Group], chat: Chat) -> int:
    """Tokens of this host's dialogues including sub-agents, counting shared prompts every time."""
    episodes = [rollout.episode for group in groups for rollout in group.rollouts if rollout.episode is not None]
    ledgers = (ledger for episode in episodes for ledger in episode.ledgers)
    return sum(int(ledger.num_tokens_each(chat.image_id, chat.token_px).sum()) for ledger in ledgers)


def _quantiles(name: str, values: np.ndarray) -> dict[str, float]:
    """Quantiles of the values, as metrics; empty without values."""
    return {f"{name}_{key}": float(np.quantile(values, at)) for key, at in QUANTILES.items()} if len(values) else {}
