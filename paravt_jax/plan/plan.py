"""The plan of a run, before anything is loaded: parameters, memory, tokens, FLOPs, seconds, largest sizes.

Memory is for the largest batch that the config allows; tokens and FLOPs are for a typical step, which the output
describes; seconds are an estimate from these and stated rates (roofline.py), not a measurement.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.config import PRESETS, ModelConfig, config_from_hf, preset, read_hf_config
from model_port.layout import hf_files_of
from model_port.sharding import over_hosts
from model_port.tiny import tiny_config
from paravt_jax.config import TINY, Config, ImitationConfig, MeshConfig, SftConfig
from paravt_jax.learner.packing import TOKEN_STEP
from paravt_jax.plan.batch import BatchShape
from paravt_jax.plan.devices import DEVICES, LINK_FRAC, MEMORY_FRAC, PEAK_FRAC, DeviceSpec
from paravt_jax.plan.hosts import HostPart, host_part, num_hosts
from paravt_jax.plan.memory import Memory, SamplerShape, memory_of, param_shapes
from paravt_jax.plan.roofline import StepSeconds, batch_works, step_seconds
from paravt_jax.plan.step_time import StepTime, step_time
from paravt_jax.plan.update import PlannedUpdate, update_of
from paravt_jax.plan.workload import (
    Step,
    Workload,
    adapter_params,
    flops_of,
    largest_batch,
    trace_tokens,
    typical_step,
    workload_of,
)
from paravt_jax.run.process import RESERVE_FRAC

MAX_DEVICES = 1024  # largest mesh to suggest
MAX_ROWS_PER_PART = 64  # search limit


@dataclass(frozen=True)
class ParamCounts:
    text: int
    vision: int
    trainable: int


@dataclass(frozen=True)
class Fit:
    """Whether the peak leaves the reserve free, the largest sizes that do, and changes that help."""

    fits: bool | None
    row_tokens: int  # the most with the config's pack.num_rows; 0: none fits
    num_rows: int  # the most with the config's pack.row_tokens; 0: none fits
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    mesh: MeshConfig
    device: DeviceSpec
    host: HostPart
    params: ParamCounts
    batch: BatchShape
    memory: Memory
    workload: Workload
    flops: dict[str, float]  # per step, over all devices, by pass
    update: StepSeconds | None  # of a typical step
    step: StepTime | None
    fit: Fit
    assumptions: tuple[str, ...]

    @property
    def update_s(self) -> float | None:
        return None if self.update is None else self.update.total


def model_config(path: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """Dimensions of `model.path` without weights or network, with a remark if they come from its name."""
    if path == TINY:
        return tiny_config(), ()
    hf_dir = hf_files_of(Path(path))  # for an adapter it may be the id of its base
    if hf_dir.is_dir():
        return config_from_hf(read_hf_config(hf_dir), source=str(hf_dir / "config.json")), ()
    size = re.search(rf"(?<![0-9.])({'|'.join(PRESETS)})(?![a-z0-9])", str(hf_dir).lower())
    if size is None:
        raise ValueError(
            f"model.path={path} is not a local directory, and its name has none of the sizes {', '.join(PRESETS)}; "
            f"give a directory with a config.json"
        )
    return preset(size[0]), (f"{path} is not a local directory: dimensions of Qwen3-VL {size[0].upper()}, by its name",)


def make_plan(config: Config, model: ModelConfig, *, device: DeviceSpec = DEVICES["h100"]) -> Plan:
    workload = workload_of(config, model)
    flops = flops_of(config, model, workload, device.platform)
    update = update_of(config)
    memory, params = planned_memory(config, model, device), param_counts(update, model)
    seconds = update_seconds(update, model, device, typical_step(config, model))
    return Plan(
        mesh=config.mesh,
        device=device,
        host=host_part(
            workload,
            num_hosts(config.hosts, config.mesh.num_devices, device),
            num_masters=params.trainable if config.lora.rank else params.text + params.vision,
            num_trainable=params.trainable,
        ),
        params=params,
        batch=largest_batch(config, model),
        memory=memory,
        workload=workload,
        flops=flops,
        update=seconds,
        step=step_time(config, model, device, None if seconds is None else seconds.total),
        fit=fit_of(config, model, memory, device),
        assumptions=tuple(
            _assumptions(workload, device, config.model.dtype, config.mesh.num_devices, gating=config.video.gating)
        ),
    )


def planned_memory(config: Config | SftConfig, model: ModelConfig, device: DeviceSpec) -> Memory:
    """A mesh that does not divide the model, or that its hosts do not split, is refused."""
    mesh, sampler = config.mesh, None
    hosts = num_hosts(config.hosts, mesh.num_devices, device)
    if isinstance(config, Config) and config.engine.kind == "jax":
        sampler = SamplerShape(
            max_rows=config.engine.max_rows,
            max_context_tokens=config.rollout.max_context_tokens,
            prompt_tokens=workload_of(config, model).max_prompt_tokens,
            beside_update=config.train.max_staleness > 0,
            hosts_over_fsdp=hosts // math.gcd(mesh.data, hosts),
        )
    memory = memory_of(update_of(config), model, largest_batch(config, model), sampler, device.platform)
    over_hosts(mesh.data, mesh.fsdp, mesh.tensor, hosts)
    return memory


def config_on(config: Config | SftConfig, mesh: MeshConfig) -> Any:
    """The same run on another mesh, with as many rows in each part."""
    num_rows = -(-config.pack.num_rows // config.mesh.num_row_parts) * mesh.num_row_parts
    changed: dict[str, Any] = {"mesh": mesh, "pack": replace(config.pack, num_rows=num_rows)}
    if isinstance(config, SftConfig):
        changed["sft"] = _in_batches_of(num_rows, config.sft)
    return replace(config, **changed)


def _in_batches_of(num_rows: int, sft: ImitationConfig) -> ImitationConfig:
    """Rounds rows_per_step up to whole batches."""
    return replace(sft, rows_per_step=-(-sft.rows_per_step // num_rows) * num_rows)


def param_counts(update: PlannedUpdate, model: ModelConfig) -> ParamCounts:
    shapes = param_shapes(model)
    text, vision = (
        sum(math.prod(shape) for path, shape in shapes.items() if path.startswith(tower))
        for tower in ("text.", "vision.")
    )
    return ParamCounts(
        text, vision, adapter_params(update.lora.rank, model) or (text + vision if update.optim.train_vision else text)
    )


def update_seconds(update: PlannedUpdate, model: ModelConfig, device: DeviceSpec, step: Step) -> StepSeconds | None:
    rates = device.rates(update.policy.dtype, update.mesh.num_devices)
    if rates is None:
        return None
    return step_seconds(batch_works(update, model, step.shape, device.platform), step, rates)


def fit_of(config: Config | SftConfig, model: ModelConfig, memory: Memory, device: DeviceSpec) -> Fit:
    if device.memory_gib is None:
        return Fit(None, 0, 0, ())
    most_tokens, parts = max(config.pack.row_tokens, model.text.max_positions), config.mesh.num_row_parts
    row_tokens = TOKEN_STEP * _largest(
        lambda n: _fits(_changed(config, row_tokens=n * TOKEN_STEP), model, device), most_tokens // TOKEN_STEP
    )
    num_rows = parts * _largest(lambda n: _fits(_changed(config, num_rows=n * parts), model, device), MAX_ROWS_PER_PART)
    fits = memory.peak_bytes <= device.usable_bytes
    return Fit(fits, row_tokens, num_rows, () if fits else tuple(_advice(config, model, device, row_tokens)))


def _advice(config: Config | SftConfig, model: ModelConfig, device: DeviceSpec, row_tokens: int) -> Iterator[str]:
    """Single changes that make the run fit."""
    if config.model.remat == "none" and _fits(_changed(config, remat="full"), model, device):
        yield "model.remat=full"
    offloaded = replace(config, optim=replace(config.optim, offload=True))
    if not config.optim.offload and _fits(offloaded, model, device):
        yield "optim.offload=true"
    fewest = config.mesh.num_row_parts
    if fewest < config.pack.num_rows and _fits(_changed(config, num_rows=fewest), model, device):
        yield f"pack.num_rows={fewest}"
    needed, said = _needed_tokens(config, model)
    if row_tokens >= needed:
        cut = isinstance(config, Config) and row_tokens < config.rollout.max_context_tokens
        shorter = f" and rollout.max_context_tokens={row_tokens}" * cut
        yield f"pack.row_tokens={row_tokens}{shorter}; {said} {needed}"
    for mesh in _meshes(config.mesh.num_devices):
        changed = _changed(config, mesh=mesh, num_rows=mesh.num_row_parts)
        if mesh != config.mesh and _fits(changed, model, device):
            yield (
                f"mesh.fsdp={mesh.fsdp} mesh.tensor={mesh.tensor} pack.num_rows={mesh.num_row_parts}"
                f"{_more_rows(config, changed)}, which takes {mesh.num_devices} devices"
            )
            return
    yield f"no mesh of up to {MAX_DEVICES} devices is enough: lower pack.row_tokens, or take devices with more memory"


def _needed_tokens(config: Config | SftConfig, model: ModelConfig) -> tuple[int, str]:
    """The shortest rows that hold everything, and the reason."""
    if isinstance(config, SftConfig):
        return trace_tokens(config, model), "a trace has"
    return workload_of(config, model).row_tokens, "the rows of a typical step have"


def _more_rows(config: Config | SftConfig, changed: Config | SftConfig) -> str:
    if isinstance(config, Config) or isinstance(changed, Config) or changed.sft == config.sft:
        return ""
    return f" sft.rows_per_step={changed.sft.rows_per_step}"


def _meshes(num_devices: int) -> Iterator[MeshConfig]:
    """Meshes of at least this many devices. Splitting rows comes before splitting heads, which communicates more."""
    while num_devices <= MAX_DEVICES:
        for tensor in (1, 2, 4, 8):
            if num_devices % tensor == 0:
                yield MeshConfig(1, num_devices // tensor, tensor)
        num_devices *= 2


def _changed(
    config: Config | SftConfig,
    *,
    mesh: MeshConfig | None = None,
    remat: Any = None,
    num_rows: int = 0,
    row_tokens: int = 0,
) -> Config | SftConfig:
    """The config with other sizes. Contexts shrink to fit their rows."""
    pack = replace(
        config.pack, num_rows=num_rows or config.pack.num_rows, row_tokens=row_tokens or config.pack.row_tokens
    )
    policy = replace(config.model, remat=remat or config.model.remat)
    if isinstance(config, SftConfig):
        sft = _in_batches_of(pack.num_rows, config.sft)
        return replace(config, mesh=mesh or config.mesh, model=policy, pack=pack, sft=sft)
    context = min(config.rollout.max_context_tokens, pack.row_tokens)
    new_tokens = min(config.rollout.max_new_tokens, context)
    rollout = replace(config.rollout, max_context_tokens=context, max_new_tokens=new_tokens)
    return replace(config, mesh=mesh or config.mesh, model=policy, pack=pack, rollout=rollout)


def _fits(config: Config | SftConfig, model: ModelConfig, device: DeviceSpec) -> bool:
    try:
        return planned_memory(config, model, device).peak_bytes <= device.usable_bytes
    except ValueError:  # a mesh that does not divide the model fits nothing
        return False


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if smaller numbers always fit too; 0 if none fits."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _assumptions(work: Workload, device: DeviceSpec, dtype: str, num_devices: int, *, gating: bool) -> Iterator[str]:
    drawn = "mean of video.frame_budgets" if gating else "video.overview_frames"
    yield (
        f"a prompt: {work.frames:.1f} frames ({drawn}) x {work.frame_tokens} tokens (video.max_pixels, and its time) "
        f"+ text, {work.prompt_tokens:,} in all"
    )
    yield (
        f"an episode: {work.response_tokens} tokens after the prompt, {work.calls} call of {work.call_frames} frames "
        f"with a report of {work.report_tokens}"
    )
    yield f"rows of the update: {work.row_tokens:,} tokens, as the largest group needs ({work.max_frames} frames)"
    if device.memory_gib is not None:
        yield f"usable memory: {1 - RESERVE_FRAC:.0%}; the rest is for layouts, collectives, fragments and the runtime"
    yield from assumed_of_seconds(device, dtype, num_devices)


def assumed_of_seconds(device: DeviceSpec, dtype: str, num_devices: int) -> Iterator[str]:
    rates = device.rates(dtype, num_devices)
    if rates is None:
        yield f"no seconds: {device.name} has no stated peak"
        return
    network = "" if math.isinf(rates.network_bytes) else f", {rates.network_bytes / 1e9:.0f} GB/s to other hosts"
    yield (
        f"seconds: products at {rates.flops / 1e12:.0f} TFLOP/s ({PEAK_FRAC:.0%} of the peak for {dtype}), then "
        f"memory traffic at {rates.memory_bytes / 1e12:.2f} TB/s ({MEMORY_FRAC:.0%}), then collectives at "
        f"{rates.link_bytes / 1e9:.0f} GB/s a device{network} ({LINK_FRAC:.0%}): nothing overlaps"
    )
    yield "FLOPs include recomputation and padding; memory traffic counts weights, activations, scores, logits"
