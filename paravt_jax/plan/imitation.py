"""The plan of a cold start: nothing is sampled, so a step is its update, and its seconds go by its rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from model_port.config import ModelConfig
from paravt_jax.config import Config, EngineConfig, SftConfig, TrainConfig
from paravt_jax.learner.packing import FRAME_ROW_STEP, stepped
from paravt_jax.learner.settings import LossConfig
from paravt_jax.plan.memory import BatchShape, Memory, memory_of
from paravt_jax.plan.plan import UTILISATION, DeviceSpec, ParamCounts, make_plan
from paravt_jax.plan.workload import RESPONSE_TOKENS, Workload, flops_of

ROWS_OF_STEPS = (0.5, 1, 2, 4)  # of sft.rows_per_step, to compare


@dataclass(frozen=True)
class ImitationPlan:
    config: SftConfig
    device: DeviceSpec
    params: ParamCounts
    memory: Memory
    batch: BatchShape
    flops: dict[str, float]  # of a batch, over all devices, by pass
    batch_s: float | None
    num_frames: int  # of a batch
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.device.memory_gib is None else self.memory.peak_bytes <= self.device.usable_bytes

    @property
    def steps(self) -> Iterator[tuple[int, int, float | None]]:
        """Rows of a step, their batches, and its seconds; whole batches only."""
        rows, of_batch = self.config.sft.rows_per_step, self.batch.num_rows
        for times in ROWS_OF_STEPS:
            if rows * times >= of_batch and rows * times % of_batch == 0:
                batches = int(rows * times) // of_batch
                yield batches * of_batch, batches, None if self.batch_s is None else batches * self.batch_s


def make_imitation_plan(config: SftConfig, model: ModelConfig, device: DeviceSpec) -> ImitationPlan:
    policy = _as_policy(config)
    alike = make_plan(policy, model, device=device)
    batch, work = _batch(config, model, alike.workload), _of_a_batch(config, alike.workload)
    flops = {name: flop for name, flop in flops_of(policy, model, work).items() if name.startswith("update")}
    batch_s = None
    if device.peak_tflops is not None and config.model.dtype == "bfloat16":
        batch_s = sum(flops.values()) / (config.mesh.num_devices * device.peak_tflops * 1e12 * UTILISATION)
    return ImitationPlan(
        config=config,
        device=device,
        params=alike.params,
        memory=memory_of(policy, model, batch, None, device.platform),
        batch=batch,
        flops=flops,
        batch_s=batch_s,
        num_frames=work.num_groups * work.max_frames,
        assumptions=tuple(_assumptions(config, work, device)),
    )


def _as_policy(config: SftConfig) -> Config:
    """A run of RL with this learner, which samples elsewhere and has no reference."""
    room = min(config.rollout.max_context_tokens, config.pack.row_tokens)
    rollout = replace(
        config.rollout, max_context_tokens=room, max_new_tokens=min(config.rollout.max_new_tokens, room), top_p=1.0
    )
    return Config(
        model=config.model,
        mesh=config.mesh,
        video=replace(config.video, gating=False),
        rollout=rollout if rollout.temperature else replace(rollout, temperature=1.0),
        engine=EngineConfig(kind="sglang"),
        loss=LossConfig(kl_coef=0.0),
        optim=config.optim,
        lora=config.lora,
        pack=config.pack,
        train=TrainConfig(),
    )


def _traces_of_a_row(config: SftConfig, work: Workload) -> int:
    return max(1, config.pack.row_tokens // (work.prompt_tokens + RESPONSE_TOKENS))


def _batch(config: SftConfig, model: ModelConfig, work: Workload) -> BatchShape:
    pack, traces = config.pack, _traces_of_a_row(config, work)
    room = max(1, pack.num_rows * pack.row_tokens // work.frame_tokens)
    return BatchShape(
        num_rows=pack.num_rows,
        row_tokens=pack.row_tokens,
        row_actions=min(pack.row_tokens, traces * RESPONSE_TOKENS),
        num_frame_rows=stepped(min(room, pack.num_rows * traces * work.max_frames), FRAME_ROW_STEP),
        row_patches=max(model.vision.merge_unit, config.video.max_pixels // model.vision.patch_px**2),
    )


def _of_a_batch(config: SftConfig, work: Workload) -> Workload:
    """Rows full of traces, each with a prompt of its own."""
    return replace(
        work,
        response_tokens=RESPONSE_TOKENS,
        num_groups=config.pack.num_rows * _traces_of_a_row(config, work),
        group_size=1,
        calls=0,
        row_tokens=config.pack.row_tokens,
        num_rows=config.pack.num_rows,
        batch_rows=config.pack.num_rows,
    )


def _assumptions(config: SftConfig, work: Workload, device: DeviceSpec) -> Iterator[str]:
    yield (
        f"a trace: {work.max_frames} frames (video.overview_frames) x {work.frame_tokens} tokens + text, "
        f"{work.prompt_tokens:,}, and {RESPONSE_TOKENS} that are learnt from"
    )
    yield "rows are computed whole, whatever they hold; frames are decoded beside the update, and are not in it"
    if device.peak_tflops is not None:
        yield f"seconds: {UTILISATION:.0%} of {device.peak_tflops:.0f} TFLOP/s a device, everything computed counts"
