"""What a run will need, before anything is loaded: parameters, memory, tokens, FLOPs, seconds, and what fits.

Memory is that of the largest batch that the config allows; tokens and FLOPs are those of a typical step, which the
output describes; seconds are these FLOPs at a stated part of the peak, not a measurement.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.config import PRESETS, ModelConfig, config_from_hf, preset, read_hf_config
from model_port.layout import hf_files_of
from model_port.tiny import tiny_config
from paravt_jax.config import TINY, Config, MeshConfig
from paravt_jax.learner.packing import FRAME_ROW_STEP, TOKEN_STEP, stepped
from paravt_jax.plan.memory import BatchShape, Memory, SamplerShape, memory_of, param_shapes
from paravt_jax.plan.workload import Workload, adapter_params, flops_of, workload_of

MIB, GIB = 2**20, 2**30
COLUMNS = 100
RESERVE_FRAC = 0.1  # of a device's memory, for what no plan sees: layouts, collectives, fragments, the runtime
UTILISATION = 0.4  # of the peak, with everything counted that is computed
MAX_DEVICES = 1024  # of meshes to suggest
MAX_ROWS_PER_PART = 64  # to look for


@dataclass(frozen=True)
class DeviceSpec:
    name: str
    memory_gib: float | None  # as its runtime reports it; None: not judged
    peak_tflops: float | None  # dense, in bfloat16
    memory_tb_per_s: float | None
    platform: str = "gpu"

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_gib is None else self.memory_gib * GIB * (1 - RESERVE_FRAC)


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("h100", 79.1, 989.0, 3.35),
        DeviceSpec("h200", 139.0, 989.0, 4.8),
        DeviceSpec("a100", 79.1, 312.0, 2.04),
        DeviceSpec("l4", 22.0, 121.0, 0.3),
        DeviceSpec("v5p", 95.0, 459.0, 2.77, "tpu"),
        DeviceSpec("v6e", 31.2, 918.0, 1.64, "tpu"),
        DeviceSpec("cpu", None, None, None, "cpu"),
    )
}


@dataclass(frozen=True)
class ParamCounts:
    text: int
    vision: int
    trainable: int


@dataclass(frozen=True)
class Fit:
    """Whether the peak leaves the reserve; the largest rows and the most of them that would; what to change."""

    fits: bool | None
    row_tokens: int  # with pack.num_rows as it is; 0: none
    num_rows: int  # with pack.row_tokens as it is; 0: none
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    mesh: MeshConfig
    device: DeviceSpec
    utilisation: float
    params: ParamCounts
    batch: BatchShape
    memory: Memory
    workload: Workload
    flops: dict[str, float]  # of a step, over all devices, by pass
    update_s: float | None
    fit: Fit
    assumptions: tuple[str, ...]


def model_config(path: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """The dimensions of `model.path` without weights or network, and a remark where only its name says them."""
    if path == TINY:
        return tiny_config(), ()
    hf_dir = hf_files_of(Path(path))  # of an adapter it may be the id of its base
    if hf_dir.is_dir():
        return config_from_hf(read_hf_config(hf_dir), source=str(hf_dir / "config.json")), ()
    size = re.search(rf"(?<![0-9.])({'|'.join(PRESETS)})(?![a-z0-9])", str(hf_dir).lower())
    if size is None:
        raise ValueError(
            f"model.path={path} is no directory here, and its name has none of the sizes {', '.join(PRESETS)}; "
            f"give a directory with a config.json"
        )
    return preset(size[0]), (f"{path} is not here: the dimensions are those of Qwen3-VL {size[0].upper()}",)


def make_plan(
    config: Config, model: ModelConfig, *, device: DeviceSpec = DEVICES["h100"], utilisation: float = UTILISATION
) -> Plan:
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation} must be above 0 and at most 1")
    shapes = param_shapes(model)
    text, vision = (
        sum(math.prod(shape) for path, shape in shapes.items() if path.startswith(tower))
        for tower in ("text.", "vision.")
    )
    trainable = adapter_params(config, model) or (text + vision if config.optim.train_vision else text)
    workload = workload_of(config, model)
    flops = flops_of(config, model, workload)
    memory = _memory(config, model, device)
    return Plan(
        mesh=config.mesh,
        device=device,
        utilisation=utilisation,
        params=ParamCounts(text, vision, trainable),
        batch=_batch(config, model),
        memory=memory,
        workload=workload,
        flops=flops,
        update_s=_update_s(config, flops, device, utilisation),
        fit=_fit(config, model, memory, device),
        assumptions=tuple(_assumptions(config, workload, device, utilisation)),
    )


def _memory(config: Config, model: ModelConfig, device: DeviceSpec) -> Memory:
    sampler = None
    if config.engine.kind == "jax":
        sampler = SamplerShape(
            max_rows=config.engine.max_rows,
            max_context_tokens=config.rollout.max_context_tokens,
            prompt_tokens=workload_of(config, model).max_prompt_tokens,
            beside_update=config.train.max_staleness > 0,
        )
    return memory_of(config, model, _batch(config, model), sampler, device.platform)


def _batch(config: Config, model: ModelConfig) -> BatchShape:
    """The largest that the config allows."""
    pack, work = config.pack, workload_of(config, model)
    room = pack.num_rows * pack.row_tokens // work.frame_tokens
    num_frames = max(1, min(config.train.prompts_per_step * work.max_frames, room))
    num_parts = config.mesh.num_row_parts
    return BatchShape(
        num_rows=pack.num_rows,
        row_tokens=pack.row_tokens,
        row_actions=min(pack.row_tokens, config.train.group_size * work.response_tokens),
        num_frame_rows=num_parts * stepped(-(-num_frames // num_parts), FRAME_ROW_STEP),
        row_patches=max(model.vision.merge_unit, config.video.max_pixels // model.vision.patch_px**2),
    )


def _update_s(config: Config, flops: dict[str, float], device: DeviceSpec, utilisation: float) -> float | None:
    if device.peak_tflops is None or config.model.dtype != "bfloat16":
        return None
    total = sum(value for name, value in flops.items() if name.startswith("update"))
    return total / (config.mesh.num_devices * device.peak_tflops * 1e12 * utilisation)


def _fit(config: Config, model: ModelConfig, memory: Memory, device: DeviceSpec) -> Fit:
    if device.memory_gib is None:
        return Fit(None, 0, 0, ())
    most_tokens, parts = max(config.pack.row_tokens, model.text.max_positions), config.mesh.num_row_parts
    row_tokens = TOKEN_STEP * _largest(
        lambda n: _fits(_changed(config, row_tokens=n * TOKEN_STEP), model, device), most_tokens // TOKEN_STEP
    )
    num_rows = parts * _largest(lambda n: _fits(_changed(config, num_rows=n * parts), model, device), MAX_ROWS_PER_PART)
    fits = memory.peak_bytes <= device.usable_bytes
    return Fit(fits, row_tokens, num_rows, () if fits else tuple(_advice(config, model, device, row_tokens)))


def _advice(config: Config, model: ModelConfig, device: DeviceSpec, row_tokens: int) -> Iterator[str]:
    """Changes that suffice, each alone."""
    if config.model.remat == "none" and _fits(_changed(config, remat="full"), model, device):
        yield "model.remat=full"
    fewest = config.mesh.num_row_parts
    if fewest < config.pack.num_rows and _fits(_changed(config, num_rows=fewest), model, device):
        yield f"pack.num_rows={fewest}"
    needed = workload_of(config, model).row_tokens
    if row_tokens >= needed:
        shorter = f" and rollout.max_context_tokens={row_tokens}" * (row_tokens < config.rollout.max_context_tokens)
        yield f"pack.row_tokens={row_tokens}{shorter}; the rows of a typical step have {needed}"
    for mesh in _meshes(config.mesh.num_devices):
        if mesh != config.mesh and _fits(_changed(config, mesh=mesh, num_rows=mesh.num_row_parts), model, device):
            yield (
                f"mesh.fsdp={mesh.fsdp} mesh.tensor={mesh.tensor} pack.num_rows={mesh.num_row_parts}, "
                f"which takes {mesh.num_devices} devices"
            )
            return
    yield f"no mesh of up to {MAX_DEVICES} devices is enough: lower pack.row_tokens, or take devices with more memory"


def _meshes(num_devices: int) -> Iterator[MeshConfig]:
    """From as many devices on; rows are split before heads are, which costs less communication."""
    while num_devices <= MAX_DEVICES:
        for tensor in (1, 2, 4, 8):
            if num_devices % tensor == 0:
                yield MeshConfig(1, num_devices // tensor, tensor)
        num_devices *= 2


def _changed(
    config: Config, *, mesh: MeshConfig | None = None, remat: Any = None, num_rows: int = 0, row_tokens: int = 0
) -> Config:
    """The config with other sizes; contexts shrink with the rows that must hold them."""
    pack = replace(
        config.pack, num_rows=num_rows or config.pack.num_rows, row_tokens=row_tokens or config.pack.row_tokens
    )
    context = min(config.rollout.max_context_tokens, pack.row_tokens)
    new_tokens = min(config.rollout.max_new_tokens, context)
    return replace(
        config,
        mesh=mesh or config.mesh,
        model=replace(config.model, remat=remat or config.model.remat),
        pack=pack,
        rollout=replace(config.rollout, max_context_tokens=context, max_new_tokens=new_tokens),
    )


def _fits(config: Config, model: ModelConfig, device: DeviceSpec) -> bool:
    try:
        return _memory(config, model, device).peak_bytes <= device.usable_bytes
    except ValueError:  # a mesh that does not divide the model fits nothing
        return False


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _assumptions(config: Config, work: Workload, device: DeviceSpec, utilisation: float) -> Iterator[str]:
    drawn = "mean of video.frame_budgets" if config.video.gating else "video.overview_frames"
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
        yield f"usable memory: {1 - RESERVE_FRAC:.0%}; the rest is for layouts, collectives, fragments, the runtime"
        if device.name[0] != "v":
            yield f"JAX takes 75 % of a GPU by default: set XLA_CLIENT_MEM_FRACTION={1 - RESERVE_FRAC:.2f}"
    if device.peak_tflops is None:
        yield f"no seconds: {device.name} has no stated peak"
    elif config.model.dtype != "bfloat16":
        yield f"no seconds: the peak is that of bfloat16, model.dtype is {config.model.dtype}"
    else:
        yield f"seconds: {utilisation:.0%} of {device.peak_tflops:.0f} TFLOP/s a device, everything computed counts"
