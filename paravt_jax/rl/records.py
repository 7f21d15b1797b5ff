"""Records of a step's episodes, as logged in RUN/episodes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paravt_jax.learner.credit import advantage_places, main_advantages, struct_mask
from paravt_jax.rl.episodes import Rollout
from paravt_jax.rl.groups import Group
from rollout.chat import Chat

REWARD_TERMS = ("total", "accuracy", "format", "base", "anchor", "think_first", "balanced", "tool", "prediction")


def records(groups: Sequence[Group], step: int, chat: Chat) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "visit": group.sample.number,
            "epoch": group.sample.epoch,
            "frame_budget": group.frame_budget,
            "answer": group.sample.item.answer,
            "question_type": group.sample.item.question_type,
            **rollout_record(rollout),
            "advantage": asdict(group.advantages.of(number))
            | {"keep": bool(group.keep[number]), "places": _advantage_spans(group, number, chat)},
        }
        for group in groups
        for number, rollout in enumerate(group.rollouts)
    ]


def _advantage_spans(group: Group, number: int, chat: Chat) -> list[list[float | int]]:
    """Spans of loss tokens as [turn, first character, last character, advantage], before any KL penalty."""
    rollout = group.rollouts[number]
    if not group.keep[number] or rollout.episode is None or rollout.terms is None:
        return []
    structural = struct_mask(rollout.episode, rollout.terms.tags, chat)
    advantage = main_advantages(rollout.episode, group.advantages.of(number), rollout.terms, structural, chat)
    return [[*span, value] for span, value in advantage_places(rollout.episode, advantage, chat)]


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    record: dict[str, Any] = {"id": rollout.id} if rollout.episode is None else rollout.episode.to_record()
    record |= {"missing": rollout.missing, "problem": rollout.problem}
    if rollout.missing:
        record |= {"reason": rollout.reason, "num_lost": rollout.num_lost}
    if rollout.terms is not None:
        record["reward"] = {name: getattr(rollout.terms, name) for name in REWARD_TERMS}
        record["reward"]["credits"] = [asdict(credit) for credit in rollout.terms.credits]
        record["reward"]["own"] = [asdict(term) for term in rollout.terms.own]
    return record
