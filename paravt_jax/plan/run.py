"""A run to plan: the settings that the plan depends on, the largest batch and a typical step.

The plan varies the sizes of a run to find the largest sizes that fit.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from model_port.config import ModelConfig
from model_port.processing import max_patches
from model_port.sharding import over_hosts
from paravt_jax.config import Config, EngineConfig, MeshConfig, PackConfig, SftConfig, TrainConfig, VideoConfig
from paravt_jax.learner.packing import (
    FRAME_ROW_STEP,
    BatchShape,
    PromptGroup,
    halve_while_fits,
    largest_shape,
    round_up,
)
from paravt_jax.plan.devices import DeviceSpec, peak_flops
from paravt_jax.plan.workload import PlannedUpdate, Step, Workload, active_params, packed_rows
from rollout.episode_config import EpisodeConfig

# Sizes of a typical episode, because most turns end long before the config's bounds.
FRAME_TEXT_TOKENS = 11  # a frame's timestamp, and its start and end tokens
PROMPT_TEXT_TOKENS = 500  # system prompt, tool, question
RESPONSE_TOKENS = 512  # per main agent: sampled tokens and reports, without frames from calls
CALLS = 1  # per episode
REPORT_TOKENS = 256  # per sub-agent


@dataclass(frozen=True)
class PlannedRun(ABC):
    """A run's model and the settings that RL and SFT share."""

    model: ModelConfig
    update: PlannedUpdate
    pack: PackConfig
    video: VideoConfig

    @abstractmethod
    def typical_step(self) -> Step: ...

    name_of_needed: ClassVar[str]  # `needed_row_tokens` in a sentence

    @property
    @abstractmethod
    def needed_row_tokens(self) -> int:
        """The shortest row length that fits every sequence."""

    @abstractmethod
    def largest_batch(self) -> BatchShape:
        """The largest batch that the settings allow."""

    @property
    def num_devices(self) -> int:
        return self.update.mesh.num_devices

    def num_hosts(self, device: DeviceSpec) -> int:
        return self.on_device(device).update.num_hosts

    @property
    def num_server_gpus(self) -> int:
        """GPUs that the learner leaves to servers on each of its hosts."""
        return 0

    def mesh_of_host(self, device: DeviceSpec) -> MeshConfig:
        """The learner's mesh within one host. Raises if the hosts do not divide the mesh."""
        mesh = self.update.mesh
        over_data, over_fsdp = over_hosts(mesh.data, mesh.fsdp, mesh.tensor, self.num_hosts(device))
        return MeshConfig(mesh.data // over_data, mesh.fsdp // over_fsdp, mesh.tensor)

    def on_device(self, device: DeviceSpec) -> Self:
        """The run with the usual number of devices per host, if the config does not set the number of hosts."""
        usual = max(0, device.host_devices - self.num_server_gpus)
        return self.with_update(host_devices=self.update.host_devices or usual)

    @property
    def num_parts(self) -> int:
        return self.update.mesh.num_row_parts

    @property
    def budgets(self) -> list[int]:
        """The possible numbers of frames of an overview, in ascending order."""
        return sorted(self.video.frame_budgets or [self.video.overview_frames])

    @property
    def frame_tokens(self) -> int:
        """The number of tokens per frame, including its text."""
        vision = self.model.vision
        return self.video.max_pixels // (vision.patch_px * vision.merge) ** 2 + FRAME_TEXT_TOKENS

    @property
    def row_patches(self) -> int:
        """Patches of the largest frame."""
        vision = self.model.vision
        return max(vision.merge_unit, max_patches(self.video.max_pixels, vision.patch_px, vision.merge))

    @property
    def trained_token_flops(self) -> float:
        """Only the language layers' products, once each: no head, attention scores, frames or padding."""
        frozen = self.update.lora.rank > 0  # frozen weights have no gradients
        # In forward passes: the gradients of inputs and of weights each cost as much as one.
        passes = 3 - frozen + self.update.num_scores
        return 2.0 * passes * active_params(self.model)

    def update_rates(self, num_tokens: float, update_s: float, device_kind: str) -> dict[str, float]:
        """Metrics of an update that computed `num_tokens` on all devices; empty without tokens."""
        if not num_tokens:
            return {}
        tokens_per_s, peak = num_tokens / update_s / self.num_devices, peak_flops(device_kind)
        mfu = {} if peak is None else {"perf/mfu": tokens_per_s * self.trained_token_flops / peak}
        return {"perf/trained_tokens_per_s_device": tokens_per_s, **mfu}

    def with_update(self, **changes: Any) -> Self:
        return replace(self, update=replace(self.update, **changes))

    def resized(self, *, mesh: MeshConfig | None = None, num_rows: int = 0, row_tokens: int = 0) -> Self:
        pack = PackConfig(row_tokens or self.pack.row_tokens, num_rows or self.pack.num_rows)
        return replace(self.with_update(mesh=mesh or self.update.mesh), pack=pack)

    def on_mesh(self, mesh: MeshConfig) -> Self:
        """The run on another mesh, with the same number of rows per part."""
        return self.resized(mesh=mesh, num_rows=-(-self.pack.num_rows // self.num_parts) * mesh.num_row_parts)


@dataclass(frozen=True)
class PlannedRl(PlannedRun):
    """An RL run, whose steps have rollouts and packed groups."""

    train: TrainConfig
    rollout: EpisodeConfig
    engine: EngineConfig
    step_frames: int  # at most
    name_of_needed = "rows of a typical step have"

    @classmethod
    def of(cls, config: Config, model: ModelConfig) -> Self:
        loss, train = config.loss, config.train
        scores_before = loss.scores_before(train.updates_per_step)
        trained = config.mesh, config.model, config.lora, config.optim
        update = PlannedUpdate(*trained, loss, config.rollout.temperature, scores_before, host_devices(config))
        frames = config.step_frames
        return cls(model, update, config.pack, config.video, train, config.rollout, config.engine, frames)

    @property
    def num_server_gpus(self) -> int:
        return len(self.engine.gpus)

    @cached_property
    def work(self) -> Workload:
        train, rollout, budgets, frame_tokens = self.train, self.rollout, self.budgets, self.frame_tokens
        num_groups, frames = train.prompts_per_step, sum(budgets) / len(budgets)
        room = rollout.max_context_tokens - 1
        response = min(RESPONSE_TOKENS, rollout.max_new_tokens * (rollout.tool_turns + 1), room)
        calls = min(CALLS, rollout.max_calls)
        call_frame_tokens = rollout.subagent_max_frames * frame_tokens
        call_prompt = report = shown = 0
        if rollout.crop_returns == "report":
            call_prompt = min(call_frame_tokens + PROMPT_TEXT_TOKENS, room)
            report = min(REPORT_TOKENS, rollout.subagent_new_tokens)
        else:
            shown = max(0, min(call_frame_tokens, room - response - PROMPT_TEXT_TOKENS))
            response += calls * shown
        drawn = [budgets[(2 * n + 1) * len(budgets) // (2 * num_groups)] for n in range(num_groups)]
        prompts = [min(n * frame_tokens + PROMPT_TEXT_TOKENS, room - response) for n in drawn]
        groups = [PromptGroup(tokens, train.group_size * (response,)) for tokens in prompts]
        trains_subagents = train.subagent_loss and call_prompt > 0
        if trains_subagents:
            num_calls = num_groups * train.group_size * calls
            groups += num_calls * [PromptGroup(0, (min(call_prompt + report, room),))]
        row_tokens, num_batches = packed_rows(tuple(groups), self.pack, train.updates_per_step, self.update.num_hosts)
        return Workload(
            frames=frames,
            prompt_tokens=min(round(frames * frame_tokens) + PROMPT_TEXT_TOKENS, room),
            response_tokens=response,
            num_groups=num_groups,
            group_size=train.group_size,
            calls=calls,
            call_frames=rollout.subagent_max_frames,
            call_prompt_tokens=call_prompt,
            report_tokens=report,
            shown_tokens=shown,
            trains_subagents=trains_subagents,
            row_tokens=row_tokens,
            num_batches=num_batches,
        )

    def largest_batch(self) -> BatchShape:
        rows, tokens, unit = self.pack.num_rows, self.pack.row_tokens, self.model.vision.merge_unit
        patches = self.row_frames * self.row_patches
        return largest_shape(rows, tokens, patches, unit, self.num_parts, self.step_frames)

    def typical_step(self) -> Step:
        work = self.work
        if self.pack.one_shape:
            return Step(self.largest_batch(), work.num_batches, self.train.updates_per_step, work.shared_tokens)
        response_tokens = work.response_tokens - round(work.calls * work.shown_tokens)
        actions = work.num_episodes * response_tokens + work.num_calls * work.report_tokens * work.trains_subagents
        frames = work.num_groups * work.frames + work.num_call_frames
        shape = BatchShape(
            num_rows=self.pack.num_rows,
            row_tokens=work.row_tokens,
            row_actions=max(1, math.ceil(actions / (work.num_batches * self.pack.num_rows))),
            num_frame_rows=self.num_parts
            * math.ceil(round(frames / work.num_batches) / (self.num_parts * self.row_frames)),
            row_patches=self.row_frames * self.row_patches,
            num_parts=self.num_parts,
        )
        return Step(shape, work.num_batches, self.train.updates_per_step, work.shared_tokens)

    @property
    def row_frames(self) -> int:
        """The number of overview frames that fit into a row of patches."""
        return self.rollout.detail_factor

    @property
    def needed_row_tokens(self) -> int:
        return self.work.row_tokens

    def resized(self, *, mesh: MeshConfig | None = None, num_rows: int = 0, row_tokens: int = 0) -> Self:
        """The run with other sizes. Contexts shrink to fit the rows."""
        run = super().resized(mesh=mesh, num_rows=num_rows, row_tokens=row_tokens)
        context = min(self.rollout.max_context_tokens, run.pack.row_tokens)
        new_tokens = min(self.rollout.max_new_tokens, context)
        return replace(run, rollout=replace(self.rollout, max_context_tokens=context, max_new_tokens=new_tokens))


@dataclass(frozen=True)
class PlannedSft(PlannedRun):
    """An SFT run, whose steps have full rows of traces."""

    rows_per_step: int
    name_of_needed = "a trace has"

    @classmethod
    def of(cls, config: SftConfig, model: ModelConfig) -> Self:
        trained = config.mesh, config.model, config.lora, config.optim
        update = PlannedUpdate(*trained, host_devices=host_devices(config))
        return cls(model, update, config.pack, config.video, config.sft.rows_per_step)

    def largest_batch(self) -> BatchShape:
        rows, tokens = self.pack.num_rows, self.pack.row_tokens
        frames = max(1, min(self.max_frames, rows * tokens // self.frame_tokens))
        return BatchShape(
            num_rows=rows,
            row_tokens=tokens,
            row_actions=halve_while_fits(tokens, min(tokens, self.max_row_actions)),
            num_frame_rows=self.num_parts * round_up(-(-frames // self.num_parts), FRAME_ROW_STEP, 1),
            row_patches=self.row_patches,
            num_parts=self.num_parts,
        )

    def typical_step(self) -> Step:
        shape = self.largest_batch()
        num_batches = self.rows_per_step // shape.num_rows
        return Step(shape, num_batches, 1, num_batches * shape.num_rows * shape.row_tokens)

    def _trace_tokens(self, frames: int) -> int:
        return frames * self.frame_tokens + PROMPT_TEXT_TOKENS + RESPONSE_TOKENS

    @property
    def needed_row_tokens(self) -> int:
        """The tokens of the longest trace."""
        return self._trace_tokens(self.budgets[-1])

    @property
    def max_frames(self) -> int:
        """The most frames of a batch. A row can have n frames if the fewest traces with n frames in total fit."""
        room, fewest = self.pack.row_tokens, [0.0]  # fewest traces by total number of frames
        for frames in range(1, room // self.frame_tokens + 1):
            fewest.append(1 + min((fewest[frames - each] for each in self.budgets if each <= frames), default=math.inf))
        text_tokens = self._trace_tokens(0)
        fitting = (n for n, traces in enumerate(fewest) if n * self.frame_tokens + traces * text_tokens <= room)
        return self.pack.num_rows * max(self.budgets[-1], *fitting)

    @property
    def max_row_actions(self) -> int:
        """The most scored tokens of a row, if the row is long enough."""
        return max(1, self.pack.row_tokens // self._trace_tokens(self.budgets[0])) * RESPONSE_TOKENS

    def resized(self, *, mesh: MeshConfig | None = None, num_rows: int = 0, row_tokens: int = 0) -> Self:
        """The run with other sizes. Rounds rows_per_step up to whole batches."""
        run = super().resized(mesh=mesh, num_rows=num_rows, row_tokens=row_tokens)
        return replace(run, rows_per_step=-(-self.rows_per_step // run.pack.num_rows) * run.pack.num_rows)


def host_devices(config: Config | SftConfig) -> int:
    """The learner's devices on each host; 0 if the config does not set the number of hosts."""
    num, num_devices = config.hosts.num, config.mesh.num_devices
    if num > 1 and num_devices % num:
        raise ValueError(f"the mesh's {num_devices} devices do not split evenly over hosts.num={num}")
    return num_devices // num if num > 1 else 0


def planned_run(config: Config | SftConfig, model: ModelConfig) -> PlannedRl | PlannedSft:
    return PlannedSft.of(config, model) if isinstance(config, SftConfig) else PlannedRl.of(config, model)
