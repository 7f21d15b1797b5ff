"""Everything that is open while a run trains, what a step asks of it, and how it ends.

A run's directory is its name: started again with the same one, it goes on from its newest checkpoint. What it draws at
random is keyed by seed and number, so a checkpoint needs no more than the numbers.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from paravt_jax.config import Config
from paravt_jax.data.prompts import Prompt
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.losses import mismatch_decision
from paravt_jax.rewards.judge import Judge
from paravt_jax.rl.batches import PolicyUpdate
from paravt_jax.rl.metrics import member_metrics, num_tokens, rollout_metrics, staleness_mean
from paravt_jax.rl.rollouts import Group, Rollouts, evaluate, records
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.log import RunLog
from paravt_jax.run.policy import Policy
from paravt_jax.run.process import Compiles, in_thread, unless_stopped
from paravt_jax.sampling.weights import ModelWeights, sampling_model
from rollout.engine.protocol import Engine
from rollout.episode import Agent
from rollout.video.reader import FrameReader


@dataclass(eq=False)
class Run:
    """Use `async with opening.opened(config) as run`."""

    config: Config
    directory: Path
    policy: Policy
    learner: Learner
    policy_update: PolicyUpdate
    engine: Engine
    rollouts: Rollouts
    greedy: Agent
    judge: Judge | None
    held_out: Sequence[Prompt]
    frames: FrameReader
    log: RunLog
    checkpoints: Checkpoints
    stopping: asyncio.Event
    step: int  # steps done
    geometric_mask: bool  # the mismatch ladder asks for it in the next step
    compiles: Compiles
    began_step_s: float = 0.0

    @property
    def version(self) -> int:
        """Optimizer steps in the learner's weights."""
        return int(self.learner.state.step)

    async def collect(self) -> list[Group] | None:
        """The next step's episodes, or None when there is nothing more to do."""
        self.began_step_s = time.monotonic()
        if self.step == self.config.train.num_steps:
            return None
        self.log.phase("rollout")
        return await unless_stopped(self.stopping, self.rollouts.take(self.step + 1))

    async def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Teaches the learner; rollouts of later steps go on meanwhile. Returns what the step was like."""
        rollout_s = time.monotonic() - self.began_step_s
        metrics = rollout_metrics(groups) | {"staleness_mean": staleness_mean(groups, self.version)}
        self.log.phase("update")
        begun_s = time.monotonic()
        metrics |= await in_thread(lambda: self.policy_update.run(groups, geometric_mask=self.geometric_mask))
        metrics |= {"time/rollout_s": rollout_s, "time/update_s": time.monotonic() - begun_s}
        self._heed_mismatch(metrics)
        self.step += 1
        self.rollouts.cursor.done([group.visit.number for group in groups])
        return metrics

    async def publish(self) -> float:
        """Gives the engine the learner's weights; seconds that it took."""
        self.log.phase("publish")
        begun_s = time.monotonic()
        await self.engine.publish(await in_thread(self._weights), self.version)
        return time.monotonic() - begun_s

    async def validate_if_due(self) -> None:
        if not self.held_out or not self._due(self.config.validation.every_steps):
            return
        self.log.phase("validation")
        budget = self.config.video.overview_frames
        members = await evaluate(self.greedy, self.held_out, budget, self.judge, self.config)
        metrics = {f"validation/{name}": value for name, value in member_metrics(members).items()}
        self.log.validation(self.step, metrics | {"policy_version": self.version})

    def record(self, groups: Sequence[Group], metrics: dict[str, float], publish_s: float) -> None:
        step_s = time.monotonic() - self.began_step_s
        tokens = num_tokens(groups, self.policy.chat, self.policy.contract.unit_px)
        metrics |= {
            "policy_version": float(self.version),
            "time/publish_s": publish_s,
            "time/step_s": step_s,
            "perf/tokens_per_s": tokens / step_s,
            **self.compiles.taken(),
            **{f"perf/{name}": value for name, value in self.frames.metrics().items()},
        }
        self.log.step(self.step, metrics, records(groups, self.step))

    async def save_if_due(self) -> None:
        if self._due(self.config.checkpoint.every_steps):
            await self.save()

    async def save(self) -> None:
        """Returns when the state is copied; rollouts of later steps go on meanwhile."""
        progress = {
            "step": self.step,
            "geometric_mask": self.geometric_mask,
            "cursor": self.rollouts.cursor.to_record(),
            "visits": self.rollouts.visits.fingerprint,
        }
        await in_thread(lambda: self.checkpoints.save(self.learner, progress))

    def _due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0 or self.step == self.config.train.num_steps

    def _heed_mismatch(self, metrics: dict[str, float]) -> None:
        """The ladder: warn, leave out sequences that are far off in the next step, stop."""
        found = metrics.get("mismatch/behavior_kl")
        if found is None:
            return
        decision = mismatch_decision(found, self.config.mismatch)
        ladder = self.config.mismatch
        if decision == "stop":
            raise RuntimeError(
                f"engine and learner differ by a KL of {found:.3g} on average over the tokens of step {self.step + 1}, "
                f"mismatch.stop_kl={ladder.stop_kl}: the samples are of another policy. Compare the two with "
                f"python -m rollout.check, or lower train.max_staleness"
            )
        if decision != "ok":
            self.log.say(
                f"step {self.step + 1}: engine and learner differ by a KL of {found:.3g}"
                + (", the next step leaves out whole sequences" if decision == "geometric_mask" else "")
            )
        self.geometric_mask = decision == "geometric_mask"

    def _weights(self) -> Any:
        dtype, copied = self.config.model.dtype, self.config.train.max_staleness > 0
        if self.config.engine.kind == "jax":
            return ModelWeights(sampling_model(self.learner.model, dtype, copied=copied), np.dtype(jnp.dtype(dtype)))
        weights = ModelWeights(self.learner.model, np.dtype(jnp.dtype(dtype)))
        # Files are written before the next update takes the arrays; tensors may be asked for again after it.
        return weights.on_host() if self.config.engine.route == "tensors" else weights
