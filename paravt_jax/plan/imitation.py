"""The plan of a cold start: without sampling, a step is only its update, and its time depends on the rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from model_port.config import ModelConfig
from paravt_jax.config import SftConfig
from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.plan import (
    Fit,
    ParamCounts,
    assumed_of_seconds,
    fit_of,
    param_counts,
    planned_memory,
    update_seconds,
)
from paravt_jax.plan.update import PlannedUpdate, update_of
from paravt_jax.plan.workload import RESPONSE_TOKENS, Step, batch_flops, tokens_per_frame, typical_step

ROWS_OF_STEPS = (0.5, 1, 2, 4)  # multiples of sft.rows_per_step to compare


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
    flops: dict[str, float]  # per batch, over all devices, by pass
    steps: tuple[ImitationStep, ...]  # fewest rows first
    peaks: tuple[tuple[int, int], ...]  # (pack.num_rows, peak bytes per device), for divisors of the step, fewest first
    fit: Fit
    assumptions: tuple[str, ...]


def make_imitation_plan(config: SftConfig, model: ModelConfig, device: DeviceSpec) -> ImitationPlan:
    step, update = typical_step(config, model), update_of(config)
    memory = planned_memory(config, model, device)
    return ImitationPlan(
        config=config,
        device=device,
        params=param_counts(update, model),
        memory=memory,
        step=step,
        flops=batch_flops(update, model, step.shape, device.platform),
        steps=tuple(_steps(update, model, device, step)),
        peaks=tuple(_peaks(config, model, device)),
        fit=fit_of(config, model, memory, device),
        assumptions=tuple(_assumptions(config, model, device, step)),
    )


def _steps(update: PlannedUpdate, model: ModelConfig, device: DeviceSpec, step: Step) -> Iterator[ImitationStep]:
    """Step sizes of whole batches only."""
    for num_batches in (times * step.num_batches for times in ROWS_OF_STEPS):
        if num_batches >= 1 and num_batches == int(num_batches):
            resized = replace(step, num_batches=int(num_batches))
            seconds = update_seconds(update, model, device, resized)
            total_s = None if seconds is None else seconds.total
            yield ImitationStep(resized.num_batches * step.shape.num_rows, resized.num_batches, total_s)


def _peaks(config: SftConfig, model: ModelConfig, device: DeviceSpec) -> Iterator[tuple[int, int]]:
    num_rows = config.mesh.num_row_parts
    while config.sft.rows_per_step % num_rows == 0:
        batch = replace(config, pack=replace(config.pack, num_rows=num_rows))
        yield num_rows, planned_memory(batch, model, device).peak_bytes
        num_rows *= 2


def _assumptions(config: SftConfig, model: ModelConfig, device: DeviceSpec, step: Step) -> Iterator[str]:
    frame_tokens = tokens_per_frame(config.video.max_pixels, model.vision)
    yield (
        f"a trace: {config.video.overview_frames} frames (video.overview_frames) x {frame_tokens} "
        f"tokens + text, and {RESPONSE_TOKENS} trained tokens"
    )
    yield "rows are computed whole, padding included"
    yield (
        f"decoding is not in the seconds: up to {step.num_batches * step.shape.num_frame_rows:,} frames of a step are "
        f"decoded beside the update; where that takes longer, a step takes as long as it"
    )
    yield from assumed_of_seconds(device, config.model.dtype, config.mesh.num_devices)
