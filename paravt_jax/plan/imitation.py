"""The plan of a cold start: nothing is sampled, so a step is its update, and its seconds go by its rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from model_port.config import ModelConfig
from paravt_jax.config import SftConfig
from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.plan import ParamCounts, assumed_of_seconds, param_counts, planned_memory, update_seconds
from paravt_jax.plan.update import PlannedUpdate, update_of
from paravt_jax.plan.workload import RESPONSE_TOKENS, Step, batch_flops, tokens_per_frame, typical_step

ROWS_OF_STEPS = (0.5, 1, 2, 4)  # of sft.rows_per_step, to compare


@dataclass(frozen=True)
class ImitationStep:
    num_rows: int
    num_batches: int
    seconds: float | None


@dataclass(frozen=True)
class ImitationPlan:
    config: SftConfig
    device: DeviceSpec
    params: ParamCounts
    memory: Memory
    step: Step
    flops: dict[str, float]  # of a batch, over all devices, by pass
    steps: tuple[ImitationStep, ...]  # fewest rows first
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.device.memory_gib is None else self.memory.peak_bytes <= self.device.usable_bytes


def make_imitation_plan(config: SftConfig, model: ModelConfig, device: DeviceSpec) -> ImitationPlan:
    step, update = typical_step(config, model), update_of(config)
    return ImitationPlan(
        config=config,
        device=device,
        params=param_counts(update, model),
        memory=planned_memory(config, model, device),
        step=step,
        flops=batch_flops(update, model, step.shape, device.platform),
        steps=tuple(_steps(update, model, device, step)),
        assumptions=tuple(_assumptions(config, model, device)),
    )


def _steps(update: PlannedUpdate, model: ModelConfig, device: DeviceSpec, step: Step) -> Iterator[ImitationStep]:
    """Of whole batches only."""
    for num_batches in (times * step.num_batches for times in ROWS_OF_STEPS):
        if num_batches >= 1 and num_batches == int(num_batches):
            resized = replace(step, num_batches=int(num_batches))
            seconds = update_seconds(update, model, device, resized)
            total_s = None if seconds is None else seconds.total
            yield ImitationStep(resized.num_batches * step.shape.num_rows, resized.num_batches, total_s)


def _assumptions(config: SftConfig, model: ModelConfig, device: DeviceSpec) -> Iterator[str]:
    frame_tokens = tokens_per_frame(config.video.max_pixels, model.vision)
    yield (
        f"a trace: {config.video.overview_frames} frames (video.overview_frames) x {frame_tokens} "
        f"tokens + text, and {RESPONSE_TOKENS} that are learnt from"
    )
    yield "rows are computed whole, whatever they hold; frames are decoded beside the update, and are not in it"
    yield from assumed_of_seconds(device, config.model.dtype)
