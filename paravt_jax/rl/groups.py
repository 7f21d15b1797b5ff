"""Groups: the rollouts of a prompt and their advantages; their records for the log and for other hosts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool

from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import PromptSample
from paravt_jax.learner.advantages import GroupAdvantages, GroupRewards, group_advantages, group_rewards
from paravt_jax.learner.credit import advantage_places, main_advantages, struct_mask
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rl.episodes import Rollout
from rollout.chat import Chat


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of a prompt sample, which share their first frames."""

    sample: PromptSample[Prompt]
    frame_budget: int
    rollouts: list[Rollout]
    advantages: GroupAdvantages
    is_remote: bool = False  # another host ran the group, keeps its tokens and packs them
    remote_rewards: GroupRewards | None = None  # advantage.normalise=batch needs all rewards of a step

    @property
    def keep(self) -> Bool[np.ndarray, " G"]:
        """True for rollouts with loss tokens."""
        return self.advantages.keep & [not rollout.left_out for rollout in self.rollouts]

    @property
    def has_signal(self) -> bool:
        return bool(self.keep.any())

    def to_message(self, rewards: GroupRewards) -> dict[str, Any]:
        return {
            "sample": self.sample.number,
            "frame_budget": self.frame_budget,
            "rollouts": [rollout.to_message() for rollout in self.rollouts],
            "advantages": vars(self.advantages),
            "rewards": vars(rewards),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any], sample: PromptSample[Prompt]) -> "Group":
        rollouts = list(map(Rollout.from_message, message["rollouts"]))
        advantages = GroupAdvantages(**_with_arrays(message["advantages"]))
        rewards = GroupRewards(**_with_arrays(message["rewards"]))
        return cls(sample, message["frame_budget"], rollouts, advantages, is_remote=True, remote_rewards=rewards)


AnyGroup = TypeVar("AnyGroup", bound=Any)  # a Group or a PendingGroup


def for_step(groups: Iterable[AnyGroup], num_wanted: int) -> Iterator[AnyGroup]:
    """Yields the first `num_wanted` groups with signal, and every group without signal."""
    for group in groups:
        if num_wanted or not group.has_signal:
            num_wanted -= group.has_signal
            yield group


def advantages_of(rollouts: Sequence[Rollout], reward: RewardConfig, advantage: AdvantageConfig) -> GroupAdvantages:
    return group_advantages(rewards_of(rollouts, reward, advantage), advantage)


def over_step(groups: list[Group], reward: RewardConfig, advantage: AdvantageConfig) -> list[Group]:
    """With `advantage.normalise=batch`, normalizes advantages by the statistics of the whole step."""
    if advantage.normalise != "batch":
        return groups
    step = [group.remote_rewards or rewards_of(group.rollouts, reward, advantage) for group in groups]
    return [
        replace(group, advantages=group_advantages(rewards, advantage, step))
        for group, rewards in zip(groups, step, strict=True)
    ]


def rewards_of(rollouts: Sequence[Rollout], reward: RewardConfig, advantage: AdvantageConfig) -> GroupRewards:
    terms = [rollout.terms for rollout in rollouts]  # a missing rollout has no terms, or terms without a score
    return group_rewards(terms, anchor_scale=reward.anchor_weight * reward.format_weight, config=advantage)


def records(groups: Sequence[Group], step: int, chat: Chat) -> list[dict[str, Any]]:
    """Makes the records of a step's episodes, as logged in RUN/episodes."""
    return [
        {
            "step": step,
            "visit": group.sample.number,
            "epoch": group.sample.epoch,
            "frame_budget": group.frame_budget,
            "answer": group.sample.item.answer,
            "question_type": group.sample.item.question_type,
            **rollout.to_record(),
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


def _with_arrays(message: Any) -> Any:
    """Turns the lists in a message into arrays."""
    if isinstance(message, Mapping):
        return {name: _with_arrays(value) for name, value in message.items()}
    return np.array(message) if isinstance(message, list) else message
