"""State of an RL run and the operations of a step."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paravt_jax.config import EngineConfig, ValidationConfig
from paravt_jax.data.prompts import Prompt
from paravt_jax.learner.settings import MismatchConfig
from paravt_jax.plan.run import PlannedRl
from paravt_jax.rl.batches import PolicyUpdate
from paravt_jax.rl.episodes import Rollout, RolloutWorker, evaluate
from paravt_jax.rl.groups import Group, records
from paravt_jax.rl.metrics import (
    deadline_remark,
    group_metrics,
    metrics_in_parts,
    missing_remark,
    no_room_remark,
    num_tokens,
    rollout_metrics,
    staleness_mean,
)
from paravt_jax.rl.replay import Replay
from paravt_jax.rl.scheduler import RolloutScheduler, interleave, scatter
from paravt_jax.run.host_times import DeviceProbe, by_host
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.policy import Policy
from paravt_jax.run.threads import in_thread
from paravt_jax.run.training import Progress, Training
from paravt_jax.sampling.weights import AdapterWeights, ModelWeights
from rollout.engine.protocol import Engine, Weights
from rollout.engine.sglang import SGLangEngine
from rollout.video.reader import FrameReader


@dataclass(eq=False)
class Run:
    """A running RL training. Use `async with open_run(config) as run`."""

    training: Training
    policy: Policy
    policy_update: PolicyUpdate
    planned: PlannedRl
    engine: Engine
    engine_settings: EngineConfig
    rollouts: RolloutScheduler | Replay
    mismatch: MismatchConfig
    validation: ValidationConfig
    validation_frames: int  # per prompt
    greedy: RolloutWorker  # for validation
    held_out: Sequence[Prompt]  # empty in a replay
    frames: FrameReader
    hosts: Hosts
    probe: DeviceProbe
    own_s: dict[str, float] = field(default_factory=dict)  # this host's times in the step, with several hosts
    of_hosts: dict[str, float] = field(default_factory=dict)  # the times of all hosts
    num_tokens: int = 0  # tokens of all dialogues of the step, on all hosts
    num_sampled: int = 0  # tokens sampled on all hosts in `sampling_s`
    sampling_s: float = 0.0

    def __repr__(self) -> str:
        return f"Run({self.training!r})"

    async def collect(self) -> list[Group] | None:
        """Collects the next step's groups; None after the last step, or if the run has to stop."""
        if not self.training.begin_step("rollout"):
            return None
        return await self.rollouts.next_groups(self.training.step + 1, self.training.directory.unless_stopped)

    async def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Updates the learner while rollouts of later steps continue. Returns the step's metrics."""
        training = self.training
        rollout_s = time.monotonic() - training.began_step_s
        metrics = group_metrics(groups) | self.rollouts.metrics()
        if (staleness := staleness_mean(groups, training.version)) is not None:
            metrics["staleness_mean"] = staleness
        rollouts, limits = [rollout for group in groups for rollout in group.rollouts], self.greedy.agent.config
        remarks = missing_remark(rollouts), no_room_remark(rollouts, limits.max_context_tokens)
        for remark in filter(None, (deadline_remark(metrics, limits.turn_deadline_s), *remarks)):
            training.log.say(f"step {training.step + 1}: {remark}")
        training.log.phase("update")
        start_s = time.monotonic()
        await training.compiled()
        update_metrics = await in_thread(lambda: self.policy_update.run(groups))
        tokens = num_tokens(groups, self.policy.chat)
        await in_thread(lambda: self._share_episodes(groups))
        sampled, self.sampling_s = self._own_sampled(rollout_s)
        updates = await self.hosts.gather_async("update", (update_metrics, tokens, sampled))
        metrics |= updates[0][0]  # all hosts decide on the same numbers
        self.num_tokens = sum(tokens for _, tokens, _ in updates)
        self.num_sampled = sum(sampled for *_, sampled in updates)
        metrics |= {"time/rollout_s": rollout_s, "time/update_s": time.monotonic() - start_s}
        if self.hosts.num > 1:
            devices_s = await in_thread(lambda: self.probe.seconds(training.learner.state))
            update_s = self.policy_update.own_time.seconds
            self.own_s = {"rollout": self.rollouts.rollout_s, "update": update_s, "devices": devices_s}
        self._check_mismatch(metrics)
        training.step += 1
        self.rollouts.cursor.done([group.sample.number for group in groups])
        return metrics

    def _own_sampled(self, rollout_s: float) -> tuple[int, float]:
        """Tokens that this host sampled, and the seconds: since the last update if rollouts continue during updates."""
        if isinstance(self.rollouts, Replay):
            return 0, rollout_s
        num, seconds = self.rollouts.pop_sampled()
        return num, seconds if self.rollouts.runs_ahead else rollout_s

    async def publish(self) -> float:
        """Publishes the learner's weights to the engine; returns the seconds that took."""
        self.training.log.phase("publish")
        start_s = time.monotonic()
        if not isinstance(self.rollouts, Replay):
            await self._publish(self._weights(), self.training.version)
        return time.monotonic() - start_s

    async def _publish(self, weights: Weights, version: int) -> None:
        """Publishes weights. If hosts share servers, they all-gather each tensor, and only host 0 publishes."""
        shares, leads, start_s = self.engine_settings.connects, self.hosts.leads, time.monotonic()
        if leads or not shares:
            await self.engine.publish(weights, version)
        else:
            await in_thread(lambda: deque(weights.tensors(), maxlen=0))
        self.own_s["publish"] = time.monotonic() - start_s
        self.of_hosts = by_host(await self.hosts.gather_async("published", self.own_s))
        if isinstance(self.engine, SGLangEngine) and not leads and shares:
            await self.engine.adopt(version)

    def record(self, groups: Sequence[Group], metrics: dict[str, float], publish_s: float) -> None:
        """Logs the step with its episodes."""
        device_kind = jax.devices()[0].device_kind
        metrics |= {
            "time/publish_s": publish_s,
            **self.of_hosts,
            **self.training.step_metrics(self.num_tokens),
            **self.planned.update_rates(metrics["perf/num_trained_tokens"], metrics["time/update_s"], device_kind),
            **{f"perf/{name}": value for name, value in self.frames.metrics().items()},
        }
        if isinstance(self.rollouts, RolloutScheduler):  # a replay samples nothing
            metrics["perf/sampled_tokens_per_s"] = self.num_sampled / self.sampling_s
        if isinstance(self.engine, SGLangEngine):
            metrics["perf/changed_weights_frac"] = self.engine.fleet.files.changed_frac
        if self.hosts.leads:
            self.training.log.step(self.training.step, metrics, self._rows(groups))
            if self.hosts.num > 1:
                self.training.parts.clear()

    def _rows(self, groups: Sequence[Group]) -> Iterator[Mapping[str, Any] | bytes]:
        """Yields every episode of the step in the order of groups: a record, or a JSON line from another host."""
        remote = self.training.parts.read(self.training.step) if self.hosts.num > 1 else {}
        for group in groups:
            if group.is_remote:
                yield remote[str(group.sample.number)]
            else:
                yield from records([group], self.training.step, self.policy.chat)

    def _share_episodes(self, groups: Sequence[Group]) -> None:
        """Writes this host's episodes to files that host 0 reads, because host 0 logs all episodes."""
        if not self.hosts.leads:
            step, chat = self.training.step + 1, self.policy.chat
            own = [group for group in groups if not group.is_remote]
            self.training.parts.write(step, {str(group.sample.number): records([group], step, chat) for group in own})

    async def validate_if_due(self) -> None:
        """Validates the policy if a validation is due. The resumed run repeats an interrupted validation."""
        training = self.training
        if not self.held_out or not training.validation_due(self.validation):
            return
        training.log.phase("validation")
        prompts = scatter(self.held_out, self.hosts)
        running = evaluate(self.greedy, prompts, self.validation_frames)
        rollouts = await training.directory.unless_stopped(running)
        if rollouts is None:
            training.validation_stopped = True
            return
        if self.hosts.num > 1:
            messages = await self.hosts.gather_async("validation", [rollout.to_message() for rollout in rollouts])
            rollouts = list(map(Rollout.from_message, interleave(messages)))
        if all(rollout.missing for rollout in rollouts):
            self.hosts.all_failed = True
            raise RuntimeError(f"validation: {missing_remark(rollouts)}")
        max_context_tokens = self.greedy.agent.config.max_context_tokens
        for remark in filter(None, (missing_remark(rollouts), no_room_remark(rollouts, max_context_tokens))):
            training.log.say(f"validation: {remark}")
        types = [prompt.question_type for prompt in self.held_out]
        values = rollout_metrics(rollouts) | metrics_in_parts(zip(types, rollouts, strict=True))
        metrics = {f"validation/{name}": value for name, value in values.items()}
        training.log.validation(training.step, metrics | {"policy_version": training.version})

    async def save_if_due(self) -> None:
        """Saves a checkpoint if one is due. Returns once the state is copied; rollouts of later steps continue."""
        await self.training.save_if_due(self.progress)

    def progress(self) -> Progress:
        """The checkpoint's state besides the learner."""
        return {"cursor": self.rollouts.cursor.to_record()}

    def _check_mismatch(self, metrics: dict[str, float]) -> None:
        """Warns if the log-probs of engine and learner differ, and stops the run above the bound."""
        behavior_kl = metrics.get("mismatch/behavior_kl")
        if behavior_kl is None:
            return
        step = self.training.step + 1
        if not behavior_kl < self.mismatch.max_kl:  # also true for NaN
            self.hosts.all_failed = True
            raise RuntimeError(
                f"engine and learner differ by a mean KL of {behavior_kl:.3g} over the tokens of step {step}, more "
                f"than mismatch.max_kl={self.mismatch.max_kl}: the engine samples from another policy. Compare SGLang "
                f"servers with the learner by python -m rollout.check, or lower train.max_staleness if it is above 0"
            )
        if behavior_kl >= self.mismatch.warn_kl:
            self.training.log.say(f"step {step}: engine and learner differ by a KL of {behavior_kl:.3g}")

    def _weights(self) -> ModelWeights | AdapterWeights:
        """The weights to publish: the adapter for SGLang, which merges it itself, else the merged weights."""
        if self.training.adapter is not None and isinstance(self.engine, SGLangEngine):
            return AdapterWeights(self.training.learner.model, self.training.adapter)
        return ModelWeights(self.training.learner.model, np.dtype(jnp.dtype(self.policy.compute.dtype)))
