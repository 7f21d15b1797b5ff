"""Plans a run before anything is loaded: parameters, memory, tokens, FLOPs, seconds, largest sizes.

Memory is for the largest batch that the config allows. Tokens and FLOPs are for a typical step, which the output
describes. Seconds are estimated from FLOPs and data sheet rates (roofline.py), not measured.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from model_port.config import FAMILIES, PRESETS, ModelConfig, preset, read_config
from model_port.layout import hf_files_of
from model_port.text import LONG_ROW_TOKENS
from model_port.tiny import tiny_config
from paravt_jax.config import TINY, MeshConfig
from paravt_jax.learner.packing import TOKEN_STEP
from paravt_jax.plan.devices import DEVICES, GIB, LINK_FRAC, MEMORY_FRAC, PEAK_FRAC, DeviceSpec
from paravt_jax.plan.memory import Memory, param_shapes
from paravt_jax.plan.remat import largest, planned_memory, recomputing, remat_line, with_remat
from paravt_jax.plan.roofline import StepSeconds, batch_works, step_seconds
from paravt_jax.plan.run import RESPONSE_TOKENS, PlannedRl, PlannedRun, PlannedSft
from paravt_jax.plan.step_time import (
    PUBLISHED,
    StepRates,
    StepTime,
    server_bytes,
    server_devices,
    step_time,
    weight_bytes,
)
from paravt_jax.plan.workload import PlannedUpdate, Step, active_params, adapter_params, batch_flops, layer_params
from paravt_jax.run.process import RESERVE_FRAC

MAX_DEVICES = 1024  # largest mesh to suggest
MASTER_BYTES, TRAINED_BYTES = 4, 12  # checkpoint bytes per parameter: frozen, or trained with moments
EPISODE_BYTES = 1000  # upper bound per episode for the numbers that hosts exchange


@dataclass(frozen=True)
class ParamCounts:
    text: int
    vision: int
    active: int  # parameters of the language tower that compute a token
    trainable: int


@dataclass(frozen=True)
class Fit:
    """Whether the peak leaves the reserve free, the largest sizes that fit, and changes that make the run fit."""

    fits: bool | None
    row_tokens: int  # largest value with the config's pack.num_rows; 0: none fits
    num_rows: int  # largest value with the config's pack.row_tokens; 0: none fits
    advice: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    run: PlannedRl | PlannedSft  # with the chosen recomputation
    device: DeviceSpec
    host_work: dict[str, int | float]  # largest part of a host in a step; empty: SFT
    params: ParamCounts
    memory: Memory
    flops: dict[str, float]  # FLOPs of a step's updates over all devices, by pass
    update: StepSeconds | None  # seconds of a typical step's updates
    step: StepTime | None  # None: SFT, or a device without a data sheet
    remat: str  # text about the backward pass's recomputation
    fit: Fit
    assumptions: tuple[str, ...]

    @property
    def update_s(self) -> float | None:
        return None if self.update is None else self.update.total


def model_config(path: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """Finds the dimensions of `model.path` without weights or network; with a remark if they come from its name."""
    if path == TINY:
        return tiny_config(), ()
    hf_dir = hf_files_of(Path(path))  # for an adapter, this may be the id of its base
    if hf_dir.is_dir():
        return read_config(hf_dir), ()
    size = re.search(rf"(?<![0-9.])({'|'.join(map(re.escape, PRESETS))})(?![a-z0-9])", str(hf_dir).lower())
    if size is None:
        raise ValueError(
            f"model {path} is not a local directory, and its name has none of the sizes {', '.join(PRESETS)}; "
            f"give a directory with a config.json"
        )
    model = preset(size[0])
    title = f"{FAMILIES[model.family].title} {size[0].removeprefix('qwen2.5-vl-').upper()}"
    return model, (f"{path} is not a local directory: dimensions of {title}, by its name",)


def make_plan(run: PlannedRl | PlannedSft, device: DeviceSpec = DEVICES["h100"], rates: StepRates = PUBLISHED) -> Plan:
    """Makes the plan of a run. A step of SFT is only an update, because it has no rollouts."""
    given = run.on_device(device)
    run = with_remat(given, device)
    model, update, step, memory = run.model, run.update, run.typical_step(), planned_memory(run, device)
    seconds = update_seconds(update, model, device, step)
    update_s = None if seconds is None else seconds.total
    passes = batch_flops(update, model, step.shape, device.platform)
    params = param_counts(update, model)
    return Plan(
        run,
        device,
        host_work=_host_work(run, params) if isinstance(run, PlannedRl) else {},
        params=params,
        memory=memory,
        flops={name: step.num_batches * value for name, value in passes.items()},
        update=seconds,
        step=step_time(run, device, update_s, rates) if isinstance(run, PlannedRl) else None,
        remat=remat_line(given, device),
        fit=fit_of(given, memory, device),
        assumptions=tuple(_assumptions(run, device)),
    )


def param_counts(update: PlannedUpdate, model: ModelConfig) -> ParamCounts:
    shapes = param_shapes(model)
    text, vision = (
        sum(math.prod(shape) for path, shape in shapes.items() if path.startswith(tower))
        for tower in ("text.", "vision.")
    )
    active = text - layer_params(model) + active_params(model)
    trained = adapter_params(update.lora.rank, model) or (text + vision if update.optim.train_vision else text)
    return ParamCounts(text, vision, active, trained)


def _host_work(run: PlannedRl, params: ParamCounts) -> dict[str, int | float]:
    """A host's largest work. Frames are decoded for an overview per group and for the windows of calls."""
    work, num_hosts = run.work, run.update.num_hosts
    prompts = -(-work.num_groups // num_hosts)
    num_frozen = 0 if run.update.lora.rank else params.text + params.vision - params.trainable
    checkpoint_bytes = (MASTER_BYTES * num_frozen + TRAINED_BYTES * params.trainable) // num_hosts
    num_remote = work.num_groups - work.num_groups // num_hosts
    return {
        "rows per batch": run.pack.num_rows // num_hosts,
        "prompts per step, at most": prompts,
        "frames decoded per step": round(prompts * (work.frames + work.group_size * work.calls * work.call_frames)),
        "checkpoint size, GiB": checkpoint_bytes / GIB,
        "MB about episodes from other hosts per step": num_remote * work.group_size * EPISODE_BYTES / 1e6,
    }


def update_seconds(update: PlannedUpdate, model: ModelConfig, device: DeviceSpec, step: Step) -> StepSeconds | None:
    rates = device.rates(update.policy.dtype)
    if rates is None:
        return None
    return step_seconds(batch_works(update, model, step.shape, device.platform), step, rates)


def fit_of(run: PlannedRun, memory: Memory, device: DeviceSpec) -> Fit:
    if device.memory_gib is None:
        return Fit(None, 0, 0, ())
    row_tokens, num_parts = _largest_row_tokens(run, device), run.num_parts
    most = int(device.usable_bytes) // run.pack.row_tokens  # one byte per token
    num_rows = num_parts * largest(lambda number: _fits(run.resized(num_rows=number * num_parts), device), most)
    fits = memory.peak_bytes <= device.usable_bytes
    return Fit(fits, row_tokens, num_rows, () if fits else tuple(_advice(run, device, row_tokens)))


def _largest_row_tokens(run: PlannedRun, device: DeviceSpec) -> int:
    def fits(number: int) -> bool:
        return _fits(run.resized(row_tokens=number * TOKEN_STEP), device)

    most, long = max(run.pack.row_tokens, run.model.text.max_positions) // TOKEN_STEP, LONG_ROW_TOKENS // TOKEN_STEP + 1
    # Only long rows are split over tensor between products, so a long row may fit although shorter rows do not.
    return TOKEN_STEP * (largest(fits, most, long) if most >= long and fits(long) else largest(fits, min(most, long)))


def _advice(run: PlannedRun, device: DeviceSpec, row_tokens: int) -> Iterator[str]:
    """Yields single changes that make the run fit."""
    policy, optim, mesh = run.update.policy, run.update.optim, run.update.mesh
    if policy.remat == "none" and _fits(recomputing(run, "full"), device):
        yield "model.remat=full"
    offloaded = run.with_update(optim=replace(optim, offload=True))
    if not optim.offload and _fits(offloaded, device):
        yield "optim.offload=true"
    if run.num_parts < run.pack.num_rows and _fits(run.resized(num_rows=run.num_parts), device):
        yield f"pack.num_rows={run.num_parts}"
    if row_tokens >= run.needed_row_tokens:
        shorter = isinstance(run, PlannedRl) and row_tokens < run.rollout.max_context_tokens
        context = f" and rollout.max_context_tokens={row_tokens}" * shorter
        yield f"pack.row_tokens={row_tokens}{context}; {run.name_of_needed} {run.needed_row_tokens} tokens"
    if resized := on_fitting_mesh(run, device, mesh.num_devices):
        larger, data = resized.update.mesh, "mesh.data=1 " * (mesh.data > 1)
        yield (
            f"{data}mesh.fsdp={larger.fsdp} mesh.tensor={larger.tensor} pack.num_rows={larger.num_row_parts}"
            f"{_more_rows(run, resized)}, on {larger.num_devices} devices"
        )
    else:
        yield f"no mesh of up to {MAX_DEVICES} devices; lower pack.row_tokens, or use devices with more memory"


def on_fitting_mesh(run: PlannedRun, device: DeviceSpec, num_devices: int) -> PlannedRun | None:
    """The run on the smallest other mesh with at least `num_devices` that fits, with one row per part."""
    for mesh in _meshes(num_devices):
        resized = run.resized(mesh=mesh, num_rows=mesh.num_row_parts)
        if mesh != run.update.mesh and _fits(resized, device):
            return resized
    return None


def _more_rows(run: PlannedRun, resized: PlannedRun) -> str:
    """The SFT setting that must change together with pack.num_rows; empty if it stays the same."""
    if not isinstance(run, PlannedSft) or not isinstance(resized, PlannedSft):
        return ""
    return f" sft.rows_per_step={resized.rows_per_step}" if resized.rows_per_step != run.rows_per_step else ""


def _meshes(num_devices: int) -> Iterator[MeshConfig]:
    """Yields meshes of `num_devices`, then of larger powers of two, which divide most models.

    Of a number of devices, fsdp comes before tensor, because tensor communicates more.
    """
    while num_devices <= MAX_DEVICES:
        for tensor in (1, 2, 4, 8):
            if num_devices % tensor == 0:
                yield MeshConfig(1, num_devices // tensor, tensor)
        num_devices = next_power_of_two(num_devices)


def next_power_of_two(number: int) -> int:
    return 1 << number.bit_length()


def _fits(run: PlannedRun, device: DeviceSpec) -> bool:
    """Whether the run fits; with model.remat=auto, whether it fits with full recomputation."""
    if run.update.policy.remat == "auto":
        run = recomputing(run, "full")
    try:
        return planned_memory(run, device).peak_bytes <= device.usable_bytes
    except ValueError:  # the mesh does not divide the model
        return False


def _assumptions(run: PlannedRl | PlannedSft, device: DeviceSpec) -> Iterator[str]:
    yield from _assumed_of_rl(run, device) if isinstance(run, PlannedRl) else _assumed_of_sft(run)
    if device.memory_gib is not None:
        yield (
            f"{1 - RESERVE_FRAC:.0%} of the memory is usable; the rest is reserved for layouts, collectives, "
            f"fragmentation and the runtime"
        )
    yield from assumed_of_seconds(device, run.update.policy.dtype, run.num_devices)


def _assumed_of_rl(run: PlannedRl, device: DeviceSpec) -> Iterator[str]:
    work = run.work
    if run.engine.kind != "jax":
        num_devices, needed = server_devices(run.engine, run.model, device), weight_bytes(run.model)
        if needed > (usable := server_bytes(num_devices, device)):
            yield (
                f"a server on {num_devices} x {device.name} has no room for the model, which takes "
                f"{needed / GIB:.1f} of {usable / GIB:.1f} GiB; raise the number of engine.gpus for each server"
            )
    source = "mean of video.frame_budgets" if run.video.frame_budgets else "video.overview_frames"
    yield (
        f"a prompt has {work.frames:.1f} frames ({source}) of {run.frame_tokens} tokens (video.max_pixels, timestamp) "
        f"and text: {work.prompt_tokens:,} tokens in total"
    )
    context = run.rollout.max_context_tokens
    if (most := run.budgets[-1]) * run.frame_tokens >= context:
        yield (
            f"{most} frames of {run.frame_tokens} tokens do not fit rollout.max_context_tokens={context}; "
            f"such an episode has no answer"
        )
    yield (
        f"an episode has {work.response_tokens} tokens after the prompt and {work.calls} call of {work.call_frames} "
        f"frames "
        + (
            f"that are {work.shown_tokens} of them (rollout.crop_returns=frames)"
            if run.rollout.crop_returns == "frames"
            else f"with a report of {work.report_tokens} tokens"
        )
    )
    yield f"rows of the update have {work.row_tokens:,} tokens, the length with the least work"


def _assumed_of_sft(run: PlannedSft) -> Iterator[str]:
    step, budgets = run.typical_step(), run.budgets
    frames = f"{budgets[0]} to {budgets[-1]} frames (video.frame_budgets)"
    if not run.video.frame_budgets:
        frames = f"{budgets[0]} frames (video.overview_frames)"
    yield f"a trace has {frames} of {run.frame_tokens} tokens, text, and {RESPONSE_TOKENS} trained tokens"
    yield "every row is computed in full, including padding"
    yield (
        f"decoding is not included: the up to {step.num_batches * step.shape.num_frame_rows:,} frames of a step are "
        f"decoded during the update; if decoding is slower than the update, it sets the step time"
    )


def assumed_of_seconds(device: DeviceSpec, dtype: str, num_devices: int) -> Iterator[str]:
    rates = device.rates(dtype)
    if rates is None:
        yield f"no time estimate, because {device.name} has no data sheet"
        return
    network = "" if math.isinf(rates.network_bytes) else f", {rates.network_bytes / 1e9:.0f} GB/s to other hosts"
    yield (
        f"seconds: matrix products at {rates.flops / 1e12:.0f} TFLOP/s ({PEAK_FRAC:.0%} of the peak in {dtype}), "
        f"memory traffic at {rates.memory_bytes / 1e12:.2f} TB/s ({MEMORY_FRAC:.0%}), collectives at "
        f"{rates.link_bytes_among(num_devices) / 1e9:.0f} GB/s per device{network} ({LINK_FRAC:.0%}), without overlap"
    )
    yield "FLOPs include recomputation and padding; memory traffic includes weights, activations, scores and logits"
