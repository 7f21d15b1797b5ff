"""Turns the groups of a step into updates of the learner: dialogues, parts, packed batches, old log-probs.

Each host packs the groups that it sampled. Batch shapes and denominators are global.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from model_port.inputs import Frame
from model_port.processing import VisionContract
from model_port.sharding import num_row_parts
from paravt_jax.config import PackConfig, TrainConfig
from paravt_jax.learner.advantages import Moments, relative_penalties, with_kl_penalty
from paravt_jax.learner.batch_shape import abstract_batch
from paravt_jax.learner.credit import dialogues_of
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import (
    BatchShape,
    Dialogue,
    PackSizes,
    best_row_tokens,
    largest_shape,
    num_batches,
    num_packed,
    pack,
    prompt_groups,
    replayed_frac,
    row_lengths,
)
from paravt_jax.learner.variants import StepCounts
from paravt_jax.rl.groups import Group
from paravt_jax.run.host_times import OwnTime
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.sampling.frames import frame_of
from rollout.chat import Chat
from rollout.episode_config import EpisodeConfig
from rollout.seeds import derived_seed

Value = TypeVar("Value")


def assign_parts(num_groups: int, num_parts: int, seed: int, version: int) -> np.ndarray:
    """Assigns each group to a part of the step at random, by seed and version; part sizes differ by at most one.

    Groups stay whole because their episodes share a row and its video.
    """
    return np.random.default_rng(derived_seed("parts", seed, version)).permutation(num_groups) % num_parts


@dataclass(frozen=True, eq=False)
class PackedPart(StepPart):
    """A part of the step with this host's dialogues, which are numbered from `first`."""

    dialogues: Sequence[Dialogue] = ()
    first: int = 0

    def with_advantages(self, advantages: Iterable[np.ndarray]) -> "PackedPart":
        pairs = zip(self.batches, advantages, strict=True)
        return replace(self, batches=[replace(batch, advantage=advantage) for batch, advantage in pairs])


class PolicyUpdate:
    """Updates the learner from the groups of a step."""

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
        max_frames: int,
        over_tokens: bool = False,
        seed: int,
        hosts: Hosts = ALONE,
    ):
        """Sets up updates for pictures of at most `max_pixels` and steps of at most `max_frames` frames.

        With `over_tokens`, advantages are normalized over all loss tokens of the step.
        """
        self._learner, self._chat, self._hosts = learner, chat, hosts
        self._contract = replace(contract, max_pixels=max(contract.max_pixels, max_pixels))
        self._train, self._rollout, self._pack_settings = train, rollout, pack
        self._row_patches, self._seed = contract.max_patches(max_pixels), seed
        self._over_tokens = over_tokens
        self._num_rows, self._num_parts = pack.num_rows // hosts.num, num_row_parts(learner.mesh) // hosts.num
        merge_unit = learner.model.config.vision.merge_unit
        self._largest_shape = largest_shape(
            self._num_rows, pack.row_tokens, self._row_patches, merge_unit, self._num_parts, max_frames
        )
        self.own_time = OwnTime()  # time of the last update without waiting for other hosts or devices

    def run(self, groups: Sequence[Group]) -> dict[str, float]:
        """Updates the learner once per part of the step. Without loss tokens, only the version changes."""
        with self.own_time.working():
            return self._run(groups)

    def _run(self, groups: Sequence[Group]) -> dict[str, float]:
        parts = self.parts(groups)
        batches = [batch for part in parts for batch in part.batches]
        distinct = sum(group.num_tokens for part in parts for group in prompt_groups(part.dialogues))
        slots = sum(batch.text.tokens.size for batch in batches)
        of_hosts = np.array(self._gather("used", (num_packed(batches), distinct, slots)))
        num_tokens, num_distinct, num_slots = map(float, of_hosts.sum(axis=0))
        packed = {
            "perf/dummy_frac": 1.0 - num_tokens / num_slots if batches else 0.0,
            # Tokens of prompts that repeat because their group spans several rows.
            "perf/repeated_frac": (num_tokens - num_distinct) / max(num_slots, 1.0),
            "perf/num_batches": float(len(batches)),
            "perf/num_trained_tokens": num_tokens,
        }
        if batches and batches[0].text.experts is not None:
            packed["moe/replayed_frac"] = float(np.mean(self._gather("replayed", replayed_frac(batches))))
        if not batches:
            for _ in parts:
                self._learner.skip()
            return packed
        with self.own_time.waiting():
            return self._learner.update(parts, self._max_dialogues) | packed

    def parts(self, groups: Sequence[Group]) -> list[PackedPart]:
        loss = self._learner.loss
        groups = [group for group in groups if group.has_signal]
        parts = self._packed(groups)
        if self._scores_before:
            with self.own_time.waiting():
                parts = [replace(part, old=list(map(self._learner.old_log_probs, part.batches))) for part in parts]
        if loss.penalizes_reward:
            parts = [self._with_kl_in_reward(part, groups) for part in parts]
        if loss.penalizes_returns:
            with self.own_time.waiting():  # all hosts compute the log-probs together
                parts = list(map(self._with_kl_in_returns, parts))
        return self._normalised(parts) if self._over_tokens else parts

    def _normalised(self, parts: Sequence[PackedPart]) -> list[PackedPart]:
        """Normalizes advantages to mean 0 and std 1 over the loss tokens of all parts and hosts."""
        batches = [batch for part in parts for batch in part.batches]
        values = np.concatenate([np.zeros(0), *(batch.advantage[batch.loss_mask] for batch in batches)])
        step = Moments.of_all([Moments(*of_host) for of_host in self._gather("moments", Moments.of(values))])
        return [
            part.with_advantages(step.normalised(batch.advantage, batch.loss_mask) for batch in part.batches)
            for part in parts
        ]

    def _packed(self, groups: Sequence[Group]) -> list[PackedPart]:
        train, rollout = self._train, self._rollout
        max_tokens = train.prompts_per_step * train.group_size * rollout.max_new_tokens * (rollout.tool_turns + 1)
        dialogues, frames, model = self._dialogues(groups), self._frames(groups), self._learner.model.config
        part_of = assign_parts(len(groups), train.updates_per_step, self._seed, int(self._learner.state.step))
        dialogues_of_parts = [
            [dialogue for dialogue in dialogues if part_of[dialogue.episode // train.group_size] == number]
            for number in range(train.updates_per_step)
        ]
        shape, parts = self._shape(dialogues_of_parts), []
        for own in dialogues_of_parts:
            num_tokens = sum(int(dialogue.loss_mask.sum()) for dialogue in own)
            num_episodes = len({dialogue.episode for dialogue in own})
            of_hosts = np.array(self._gather("dialogues", (len(own), num_tokens, num_episodes)))
            all_tokens, all_episodes = map(float, of_hosts.sum(axis=0)[1:])
            counts = StepCounts(all_tokens, all_episodes, max_tokens / train.updates_per_step)
            first = int(of_hosts[: self._hosts.index, 0].sum())
            batches = pack(own, frames, model, shape, first_number=first, agree=self._max_over_hosts)
            parts.append(PackedPart(batches, counts, dialogues=own, first=first))
        return parts

    def _gather(self, stream: str, value: Value) -> list[Value]:
        with self.own_time.waiting():
            return self._hosts.gather(stream, value)

    def _max_over_hosts(self, sizes: PackSizes) -> PackSizes:
        of_hosts = self._gather("sizes", sizes)
        return PackSizes(*(max(each) for each in zip(*of_hosts, strict=True)))

    @property
    def _max_dialogues(self) -> int:
        """The most dialogues that a step can have. It is static in the compiled program, so it never changes."""
        train, rollout = self._train, self._rollout
        num_episodes = train.prompts_per_step * train.group_size
        return num_episodes * (1 + rollout.max_calls * train.subagent_loss)

    def _dialogues(self, groups: Sequence[Group]) -> list[Dialogue]:
        """Makes the dialogues of this host's kept episodes. An episode's number is its index in the whole step."""
        train, dialogues = self._train, []
        for first, group in enumerate(groups):
            if group.is_remote:
                continue
            earned = group.advantages
            for number, rollout in enumerate(group.rollouts):
                if not group.keep[number]:
                    continue
                assert rollout.episode is not None
                assert rollout.terms is not None
                dialogues += dialogues_of(
                    rollout.episode,
                    first * train.group_size + number,
                    earned.of(number),
                    rollout.terms,
                    self._chat,
                    subagent_loss=train.subagent_loss,
                )
        return dialogues

    def _with_kl_in_returns(self, part: PackedPart) -> PackedPart:
        """Subtracts from each token's advantage the KL summed from this token to the end of its dialogue."""
        assert part.old is not None
        to_go = map(self._learner.kl_to_go, part.batches, part.old)
        return part.with_advantages(
            with_kl_penalty(batch.advantage, batch.loss_mask, kl) for batch, kl in zip(part.batches, to_go, strict=True)
        )

    def _with_kl_in_reward(self, part: PackedPart, groups: Sequence[Group]) -> PackedPart:
        """Subtracts each episode's KL penalty, relative to its group, from the advantages of the episode's tokens."""
        if not part.dialogues:
            return part
        last = part.first + len(part.dialogues)
        with self.own_time.waiting():
            penalties = self._learner.kl_penalties(part, last)[part.first :]
        of_dialogues = np.array([dialogue.episode for dialogue in part.dialogues])
        episodes, places = np.unique(of_dialogues, return_inverse=True)
        units = np.array([group.advantages.unit for group in groups])
        relative = relative_penalties(np.bincount(places, penalties), episodes // self._train.group_size, units)
        of_dialogue = np.zeros(last, np.float32)
        of_dialogue[part.first :] = relative[places]
        return part.with_advantages(
            with_kl_penalty(batch.advantage, batch.loss_mask, of_dialogue[batch.dialogue]) for batch in part.batches
        )

    def _shape(self, dialogues_of_parts: Sequence[Sequence[Dialogue]]) -> BatchShape:
        """Chooses the shape of this host's rows, which is the same for all parts of the step."""
        if self._pack_settings.one_shape:
            return self._largest_shape
        lengths = row_lengths(self._pack_settings.row_tokens)
        groups_of_parts = list(map(prompt_groups, dialogues_of_parts))
        own = [[num_batches(groups, length, self._num_rows) for length in lengths] for groups in groups_of_parts]
        of_hosts = np.array(self._gather("batches", own))  # by host, part and length
        row_tokens = best_row_tokens(lengths, of_hosts.max(axis=0).sum(axis=0).tolist())
        return BatchShape(self._num_rows, row_tokens, self._row_patches, self._num_parts)

    def compile_ahead(self) -> Callable[[], None]:
        """Returns a function, for another thread, that compiles all update programs if their shapes are fixed."""
        if not self._pack_settings.one_shape:
            return lambda: None
        learner = self._learner
        batch = abstract_batch(self._largest_shape.of_hosts(self._hosts.num), learner.model.config, learner.mesh)
        compiler = learner.update_compiler(self._max_dialogues, scores_before=self._scores_before)
        return lambda: compiler.compile(batch)

    @property
    def _scores_before(self) -> bool:
        return self._learner.loss.scores_before(self._train.updates_per_step)

    def _frames(self, groups: Sequence[Group]) -> dict[str, Frame]:
        pictures = {
            picture.key: picture
            for group in groups
            for rollout in group.rollouts
            if rollout.episode is not None and not group.is_remote
            for ledger in (rollout.episode.ledgers if self._train.subagent_loss else [rollout.episode.ledger])
            for picture in ledger.pictures
        }
        return {key: frame_of(picture, self._contract) for key, picture in pictures.items()}
