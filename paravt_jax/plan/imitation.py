"""The plan of a cold start: without sampling, a step is only its update, and its time depends on the rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from model_port.config import ModelConfig
from paravt_jax.config import MeshConfig
from paravt_jax.learner.batch_shape import BatchShape
from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.hosts import num_hosts
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.plan import Fit, ParamCounts, assumed_of_seconds, fit_of, param_counts, update_seconds
from paravt_jax.plan.remat import planned_memory, remat_line, with_remat
from paravt_jax.plan.run import PlannedSft
from paravt_jax.plan.workload import RESPONSE_TOKENS, PlannedUpdate, Step, batch_flops

ROWS_OF_STEPS = (0.5, 1, 2, 4)  # multiples of sft.rows_per_step to compare


@dataclass(frozen=True)
class ImitationStep:
    num_rows: int
    num_batches: int
    seconds: float | None


@dataclass(frozen=True)
class ImitationPlan:
    mesh: MeshConfig
    num_hosts: int
    device: DeviceSpec
    rows_per_step: int
    params: ParamCounts
    memory: Memory
    batch: BatchShape
    flops: dict[str, float]  # per batch, over all devices, by pass
    steps: tuple[ImitationStep, ...]  # fewest rows first
    remat: str  # what the backward pass recomputes, and why
    fit: Fit
    assumptions: tuple[str, ...]


def make_imitation_plan(run: PlannedSft, device: DeviceSpec) -> ImitationPlan:
    remat, given, run = remat_line(run, device), run, with_remat(run, device)
    model, update, step = run.model, run.update, run.typical_step()
    memory = planned_memory(run, device)
    return ImitationPlan(
        mesh=update.mesh,
        num_hosts=num_hosts(run.hosts, run.num_devices, device),
        device=device,
        rows_per_step=run.rows_per_step,
        params=param_counts(update, model),
        memory=memory,
        batch=step.shape,
        flops=batch_flops(update, model, step.shape, device.platform),
        steps=tuple(_steps(update, model, device, step)),
        remat=remat,
        fit=fit_of(given, memory, device),
        assumptions=tuple(_assumptions(run, device, step)),
    )


def _steps(update: PlannedUpdate, model: ModelConfig, device: DeviceSpec, step: Step) -> Iterator[ImitationStep]:
    """Step sizes of whole batches only."""
    for num_batches in (times * step.num_batches for times in ROWS_OF_STEPS):
        if num_batches >= 1 and num_batches == int(num_batches):
            resized = replace(step, num_batches=int(num_batches))
            seconds = update_seconds(update, model, device, resized)
            total_s = None if seconds is None else seconds.total
            yield ImitationStep(resized.num_batches * step.shape.num_rows, resized.num_batches, total_s)


def _assumptions(run: PlannedSft, device: DeviceSpec, step: Step) -> Iterator[str]:
    yield (
        f"a trace has {run.video.overview_frames} frames (video.overview_frames) of {run.frame_tokens} tokens, text, "
        f"and {RESPONSE_TOKENS} trained tokens"
    )
    yield "every row is computed whole, with its padding"
    yield (
        f"decoding is not included: the up to {step.num_batches * step.shape.num_frame_rows:,} frames of a step are "
        f"decoded during the update; if decoding takes longer, it determines the step's time"
    )
    yield from assumed_of_seconds(device, run.update.policy.dtype, run.num_devices)
