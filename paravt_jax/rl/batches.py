"""One step's groups into updates of the learner: dialogues, parts, batches, log-probs from before where needed.

Of several hosts each packs the groups that it played. What a batch has in common, and what a sum is divided by, is that
of all hosts.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TypeVar

import numpy as np

from model_port.inputs import Frame
from model_port.processing import VisionContract
from model_port.sharding import num_row_parts
from paravt_jax.config import PackConfig, TrainConfig
from paravt_jax.learner.advantages import with_kl_penalty
from paravt_jax.learner.credit import dialogues_of
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import Dialogue, PackSizes, Shape, fitting_row_tokens, pack, used_frac
from paravt_jax.learner.variants import StepCounts
from paravt_jax.rl.rollouts import Group
from paravt_jax.run.host_times import OwnTime
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.sampling.frames import frame_of
from rollout.chat import Chat
from rollout.episode import EpisodeConfig
from rollout.seeds import derived_seed

Value = TypeVar("Value")


def dealt_out(num_groups: int, num_parts: int, seed: int, version: int) -> np.ndarray:
    """The part of the step that each group is in: at random, in parts of nearly one size.

    By group, because the episodes of one share a row and its video. Seed and version decide, so that a run that was
    resumed deals as one that was not.
    """
    return np.random.default_rng(derived_seed("parts", seed, version)).permutation(num_groups) % num_parts


class PolicyUpdate:
    """What a step does to the learner, from its groups: which tokens count, with which advantage, in which rows."""

    def __init__(
        self,
        learner: Learner,
        chat: Chat,
        contract: VisionContract,
        *,
        train: TrainConfig,
        rollout: EpisodeConfig,
        pack: PackConfig,
        max_pixels: int,
        seed: int,
        hosts: Hosts = ALONE,
    ):
        self._learner, self._chat, self._hosts = learner, chat, hosts
        self._contract = replace(contract, max_pixels=max(contract.max_pixels, max_pixels))
        self._train, self._rollout, self._pack_settings = train, rollout, pack
        self._row_patches, self._seed = max_pixels // contract.patch_px**2, seed
        self.own_time = OwnTime()  # of this host in the last update, without others and without devices

    def run(self, groups: Sequence[Group], *, geometric_mask: bool) -> dict[str, float]:
        """Updates the learner, once for every part of the step. A step without anything to learn from passes."""
        with self.own_time.working():
            return self._run(groups, geometric_mask)

    def _run(self, groups: Sequence[Group], geometric_mask: bool) -> dict[str, float]:
        parts = self.parts(groups)
        batches = [batch for part in parts for batch in part.batches]
        used = self._gather("used", used_frac(batches))
        packed = {"perf/dummy_frac": 1.0 - float(np.mean(used)) if batches else 0.0}
        packed["perf/num_batches"] = float(len(batches))
        if not batches:
            for _ in parts:
                self._learner.skip()
            return packed
        with self.own_time.waiting():
            return self._learner.update(parts, self._max_dialogues, geometric_mask=geometric_mask) | packed

    def parts(self, groups: Sequence[Group]) -> list[StepPart]:
        """What the updates of a step learn from, each one from groups of its own."""
        learner, loss = self._learner, self._learner.loss
        groups = [group for group in groups if group.teaches]
        dialogues, version = self._dialogues(groups), int(learner.state.step)
        part_of = dealt_out(len(groups), self._train.updates_per_step, self._seed, version)
        parts, first_numbers = self._packed(dialogues, groups, part_of)
        kl_in_reward = loss.kl_in == "reward" and loss.kl_coef > 0
        if kl_in_reward or len(parts) > 1:
            with self.own_time.waiting():
                parts = [replace(part, known=[learner.known(batch) for batch in part.batches]) for part in parts]
        if kl_in_reward:
            dialogues = self._penalised(dialogues, groups, part_of, parts, first_numbers)
            again, _ = self._packed(dialogues, groups, part_of)
            # The same places, with other advantages.
            parts = [replace(part, known=before.known) for part, before in zip(again, parts, strict=True)]
        return parts

    def _packed(
        self, dialogues: Sequence[Dialogue], groups: Sequence[Group], part_of: np.ndarray
    ) -> tuple[list[StepPart], list[int]]:
        """Each with its own N, and the number of this host's first dialogue in it."""
        train, rollout = self._train, self._rollout
        max_tokens = train.prompts_per_step * train.group_size * rollout.max_new_tokens * (rollout.tool_turns + 1)
        shape, frames, model = self._shape(dialogues), self._frames(groups), self._learner.model.config
        parts, first_numbers = [], []
        for own in self._in_parts(dialogues, part_of):
            num_tokens = sum(int(dialogue.loss_mask.sum()) for dialogue in own)
            of_hosts = np.array(self._gather("dialogues", (num_tokens, len(own))))
            all_tokens, all_dialogues = map(float, of_hosts.sum(axis=0))
            counts = StepCounts(all_tokens, all_dialogues, max_tokens / train.updates_per_step)
            first = int(of_hosts[: self._hosts.index, 1].sum())
            parts.append(StepPart(pack(own, frames, model, shape, first_number=first, agreed=self._agreed), counts))
            first_numbers.append(first)
        return parts, first_numbers

    def _gather(self, stream: str, value: Value) -> list[Value]:
        with self.own_time.waiting():
            return self._hosts.gather(stream, value)

    def _agreed(self, sizes: PackSizes) -> PackSizes:
        of_hosts = self._gather("sizes", astuple(sizes))
        return PackSizes(*(max(each) for each in zip(*of_hosts, strict=True)))

    def _in_parts(self, dialogues: Sequence[Dialogue], part_of: np.ndarray) -> list[list[Dialogue]]:
        size, num_parts = self._train.group_size, self._train.updates_per_step
        return [[d for d in dialogues if part_of[d.episode // size] == part] for part in range(num_parts)]

    @property
    def _max_dialogues(self) -> int:
        """A number that does not change from step to step: it is part of the compiled program."""
        train, rollout = self._train, self._rollout
        num_episodes = train.prompts_per_step * train.group_size
        return num_episodes * (1 + (rollout.tool_turns * rollout.max_parallel if train.subagent_loss else 0))

    def _dialogues(self, groups: Sequence[Group]) -> list[Dialogue]:
        """Those of the kept members played here; an episode's number is its place among all members of the step."""
        train, dialogues = self._train, []
        for first, group in enumerate(groups):
            if group.away:
                continue
            earned = group.advantages
            for number, member in enumerate(group.members):
                if not group.keep[number]:
                    continue
                assert member.episode is not None
                assert member.terms is not None
                dialogues += dialogues_of(
                    member.episode,
                    first * train.group_size + number,
                    earned.of(number),
                    member.terms,
                    self._chat,
                    self._contract.unit_px,
                    anchors=train.anchor_tokens,
                    subagent_loss=train.subagent_loss,
                )
        return dialogues

    def _penalised(
        self,
        dialogues: Sequence[Dialogue],
        groups: Sequence[Group],
        part_of: np.ndarray,
        parts: Sequence[StepPart],
        first_numbers: Sequence[int],
    ) -> list[Dialogue]:
        """KL in the reward: every token of an episode bears the KL of all its dialogues."""
        size = self._train.group_size
        of_episode = np.zeros(len(groups) * size)
        for own, part, first in zip(self._in_parts(dialogues, part_of), parts, first_numbers, strict=True):
            assert part.known is not None
            with self.own_time.waiting():
                penalties = self._learner.kl_penalties(part.batches, part.known, self._max_dialogues)
            for dialogue, penalty in zip(own, penalties[first:], strict=False):
                of_episode[dialogue.episode] += penalty
        return [
            replace(
                dialogue,
                advantage=with_kl_penalty(
                    dialogue.advantage,
                    dialogue.loss_mask,
                    float(of_episode[dialogue.episode]),
                    groups[dialogue.episode // size].advantages.unit,
                ),
            )
            for dialogue in dialogues
        ]

    def _shape(self, dialogues: Sequence[Dialogue]) -> Shape:
        """One for all parts of the step: of the rows that this host packs."""
        settings, num_hosts = self._pack_settings, self._hosts.num
        fitting = fitting_row_tokens(dialogues, settings.row_tokens, settings.sizes_per_doubling)
        row_tokens = max(self._gather("row tokens", fitting))
        num_rows, num_parts = settings.num_rows // num_hosts, num_row_parts(self._learner.mesh) // num_hosts
        return Shape(num_rows, row_tokens, self._row_patches, settings.sizes_per_doubling, num_parts)

    def _frames(self, groups: Sequence[Group]) -> dict[str, Frame]:
        pictures = {
            picture.key: picture
            for group in groups
            for member in group.members
            if member.episode is not None and not group.away
            for ledger in (member.episode.ledgers if self._train.subagent_loss else [member.episode.ledger])
            for picture in ledger.pictures
        }
        return {key: frame_of(picture, self._contract) for key, picture in pictures.items()}
