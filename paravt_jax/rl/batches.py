"""One step's groups into updates of the learner: dialogues, batches, log-probs from before where they are needed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model_port.inputs import Frame
from model_port.processing import VisionContract
from paravt_jax.config import PackConfig, TrainConfig
from paravt_jax.learner.advantages import batch_normalised, token_moments, with_kl_penalty
from paravt_jax.learner.credit import EpisodeAdvantage, dialogues_of
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.losses import loss_denominator
from paravt_jax.learner.packing import Dialogue, Shape, TrainBatch, fitting_row_tokens, pack, used_frac
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rl.rollouts import Group
from paravt_jax.sampling.frames import frame_of
from rollout.chat import Chat
from rollout.episode import EpisodeConfig


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
        advantage: AdvantageConfig,
        pack: PackConfig,
        max_pixels: int,
    ):
        self._learner, self._chat = learner, chat
        self._contract = replace(contract, max_pixels=max(contract.max_pixels, max_pixels))
        self._train, self._rollout, self._advantage, self._pack_settings = train, rollout, advantage, pack
        self._row_patches = max_pixels // contract.patch_px**2

    def run(self, groups: Sequence[Group], *, geometric_mask: bool) -> dict[str, float]:
        """Updates the learner, once or several times. A step without anything to learn from passes."""
        train, learner, loss = self._train, self._learner, self._learner.loss
        groups = [group for group in groups if group.teaches]
        dialogues = self._dialogues(groups)
        if not dialogues:
            for _ in range(train.updates_per_step):
                learner.skip()
            return {"perf/dummy_frac": 0.0, "perf/num_batches": 0.0}
        batches = self._pack(self._normalised(dialogues), groups)
        known = None
        kl_in_reward = loss.kl_in == "reward" and loss.kl_coef > 0
        if kl_in_reward or train.updates_per_step > 1:
            known = [learner.known(batch) for batch in batches]
        if kl_in_reward:
            assert known is not None
            penalties = learner.kl_penalties(batches, known, self._max_dialogues)
            dialogues = self._penalised(dialogues, groups, penalties)
            batches = self._pack(self._normalised(dialogues), groups)  # the same places, with other advantages
        denominator = loss_denominator(
            loss.denominator,
            num_loss_tokens=sum(int(dialogue.loss_mask.sum()) for dialogue in dialogues),
            num_episodes=train.prompts_per_step * train.group_size,
            max_new_tokens=self._rollout.max_new_tokens * (self._rollout.tool_turns + 1),
        )
        metrics: dict[str, float] = {}
        for _ in range(train.updates_per_step):
            metrics = learner.update(
                batches, denominator, self._max_dialogues, known=known, geometric_mask=geometric_mask
            )
        metrics["perf/dummy_frac"] = 1.0 - used_frac(batches)
        metrics["perf/num_batches"] = float(len(batches))
        return metrics

    @property
    def _max_dialogues(self) -> int:
        """A number that does not change from step to step: it is part of the compiled program."""
        train, rollout = self._train, self._rollout
        num_episodes = train.prompts_per_step * train.group_size
        return num_episodes * (1 + (rollout.tool_turns * rollout.max_parallel if train.subagent_loss else 0))

    def _dialogues(self, groups: Sequence[Group]) -> list[Dialogue]:
        """Those of the kept members; an episode's number is its place among all members of the step."""
        train, dialogues = self._train, []
        for first, group in enumerate(groups):
            earned = group.advantages
            for number, member in enumerate(group.members):
                if not earned.keep[number]:
                    continue
                assert member.episode is not None
                assert member.terms is not None
                dialogues += dialogues_of(
                    member.episode,
                    first * train.group_size + number,
                    EpisodeAdvantage(float(earned.sequence[number]), float(earned.anchor[number])),
                    member.terms.tags,
                    self._chat,
                    self._contract.unit_px,
                    anchors=train.anchor_tokens,
                    subagent_loss=train.subagent_loss,
                )
        return dialogues

    def _penalised(
        self, dialogues: Sequence[Dialogue], groups: Sequence[Group], penalties: np.ndarray
    ) -> list[Dialogue]:
        """KL in the reward: every token of an episode bears the KL of all its dialogues."""
        size = self._train.group_size
        of_episode = np.zeros(len(groups) * size)
        for dialogue, penalty in zip(dialogues, penalties, strict=False):
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

    def _normalised(self, dialogues: Sequence[Dialogue]) -> Sequence[Dialogue]:
        settings = self._advantage
        if not settings.batch_normalise:
            return dialogues
        moments = [token_moments(dialogue.advantage, dialogue.loss_mask) for dialogue in dialogues]
        total = sum(moments[1:], moments[0])
        return [
            replace(d, advantage=batch_normalised(d.advantage, d.loss_mask, total, settings.epsilon)) for d in dialogues
        ]

    def _pack(self, dialogues: Sequence[Dialogue], groups: Sequence[Group]) -> list[TrainBatch]:
        settings = self._pack_settings
        row_tokens = fitting_row_tokens(dialogues, settings.row_tokens, settings.sizes_per_doubling)
        shape = Shape(settings.num_rows, row_tokens, self._row_patches, settings.sizes_per_doubling)
        return pack(dialogues, self._frames(groups), self._learner.model.config, shape)

    def _frames(self, groups: Sequence[Group]) -> dict[str, Frame]:
        pictures = {
            picture.key: picture
            for group in groups
            for member in group.members
            if member.episode is not None
            for ledger in (member.episode.ledgers if self._train.subagent_loss else [member.episode.ledger])
            for picture in ledger.pictures
        }
        return {key: frame_of(picture, self._contract) for key, picture in pictures.items()}
