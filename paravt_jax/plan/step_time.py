"""Step time as an interval: each part is its work divided by a rate, at the best rate and at the worst.

At the low end, parts that run on different hardware overlap; at the high end nothing overlaps. docs/training.md,
section "Seconds of a step", lists the source of each rate.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from model_port.config import ModelConfig
from paravt_jax.config import Config, EngineConfig, MeshConfig
from paravt_jax.plan.collectives import among
from paravt_jax.plan.devices import GIB, DeviceSpec
from paravt_jax.plan.hosts import num_hosts
from paravt_jax.plan.memory import FLOAT32_BYTES, values_on
from paravt_jax.plan.workload import (
    BF16_BYTES,
    Workload,
    cached_bytes,
    decoded_bytes,
    frame_flops,
    row_patches,
    token_flops,
    with_calls,
    workload_of,
)
from rollout.server import ServerSettings

MAX_RUNNING = 256  # a server's decode batch, if memory allows
SERVER_WEIGHTS_FRAC = 0.6  # of a server's memory, for weights; a larger model gets more devices per server
TENSOR_SIZES = (1, 2, 4, 8)


class StepRates(NamedTuple):
    """The numbers that a step's seconds depend on."""

    calls: float  # per episode
    turns: int  # requests per main agent; each sends all pictures again
    tail: float  # the longest dialogue over the mean
    matmul_frac: float  # fraction of peak FLOPs, in prefill and the vision tower
    memory_frac: float  # fraction of memory bandwidth, in decoding
    cache_passes: int  # times the embedded sampler moves its whole key/value cache per token
    hop_s: float  # latency of an all-reduce over mesh.tensor
    overview_s: float  # CPU core seconds to decode the frames of an overview
    picture_s: float  # server CPU seconds per picture in a request
    publish_bytes_per_s: float  # from the learner into all servers
    update: float  # an update's time relative to its roofline
    overlaps: bool


LOW = StepRates(1.0, 2, 1.0, 0.55, 0.8, 1, 5e-6, 5.0, 0.008, 3e9, 1.0, overlaps=True)
HIGH = StepRates(2.5, 3, 2.0, 0.18, 0.5, 5, 2e-5, 15.6, 0.030, 1e9, 2.0, overlaps=False)


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        """Both ends with two digits."""
        low, high = (f"{float(f'{seconds:.2g}'):g}" for seconds in self)
        return f"{low} to {high}"


@dataclass(frozen=True)
class StepTime:
    seconds: Interval
    parts: dict[str, Interval]

    def __str__(self) -> str:
        least_certain = " and ".join(self.least_certain)
        return f"{self.seconds} s, bound by {self.bound_by}; least certain: {least_certain}"

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: sum(self.parts[name]))

    @property
    def least_certain(self) -> list[str]:
        """The two parts that widen the interval most."""
        return sorted(self.parts, key=lambda name: self.parts[name].low - self.parts[name].high)[:2]


def step_time(config: Config, model: ModelConfig, device: DeviceSpec, update_s: float | None) -> StepTime | None:
    """None if the device has no stated rates. `update_s` is the update's roofline."""
    if update_s is None or device.rates("bfloat16") is None:
        return None
    low, high = (_parts(config, model, device, update_s, rates) for rates in (LOW, HIGH))
    on_devices = low["vision tower"] + low["prefill"] + low["decode"]
    rollout_s = max(on_devices, low["frames on CPUs"], low["pictures on servers' CPUs"])
    step_s = max(rollout_s, low["update"]) if config.train.steps_ahead else rollout_s + low["update"]
    parts = {name: Interval(low[name], high[name]) for name in low if high[name]}
    return StepTime(Interval(step_s + low["publish"], sum(high.values())), parts)


def _parts(
    config: Config, model: ModelConfig, device: DeviceSpec, update_s: float, rates: StepRates
) -> dict[str, float]:
    """Seconds of every part, each as if it ran alone."""
    rollout, mesh = config.rollout, config.mesh
    work = with_calls(workload_of(config, model), min(rates.calls, rollout.tool_turns * rollout.calls_per_turn))
    later_turns = work.num_episodes * min(rates.turns - 1, rollout.tool_turns) if work.calls else 0
    on_host = -(-work.num_groups // num_hosts(config.hosts, mesh.num_devices, device))
    waves = -(-on_host // (config.video.num_workers or on_host))
    if config.engine.kind != "jax":
        engine = _servers(work, config.engine, model, device, rates)
        pictures = (work.num_episodes + later_turns) * work.frames + work.num_calls * work.call_frames
        publish_s = weight_bytes(model) / rates.publish_bytes_per_s
    else:
        stored_bytes = BF16_BYTES if config.lora.rank else FLOAT32_BYTES
        slots = config.engine.max_rows, rollout.max_context_tokens
        engine = _embedded(work, later_turns, slots, mesh, stored_bytes, model, device, rates)
        pictures, publish_s = 0.0, 0.0
    assert device.peak_tflops is not None
    flops_per_s = engine.devices * rates.matmul_frac * 1e12 * device.peak_tflops
    frame = frame_flops(model, row_patches(config.video.max_pixels, model.vision))
    reads = sum(count * length * token_flops(model, length) for count, length in engine.reads)
    return {
        "frames on CPUs": waves * rates.overview_s,
        "pictures on servers' CPUs": rates.picture_s * engine.share * pictures,
        "vision tower": engine.share * engine.frames * frame / flops_per_s,
        "prefill": engine.share * reads / flops_per_s + engine.weights_s * sum(count for count, _ in engine.reads),
        "decode": engine.decode_s,
        "update": rates.update * update_s,
        "publish": publish_s,
    }


class _EngineWork(NamedTuple):
    """An engine's work in a step."""

    share: float  # fraction of the step's groups
    devices: int  # that share a prompt's prefill
    reads: tuple[tuple[float, int], ...]  # prefills of all groups: (number, tokens each)
    frames: float  # through the vision tower
    decode_s: float
    weights_s: float = 0.0  # gathering the weights for a prefill


def _servers(
    work: Workload, engine: EngineConfig, model: ModelConfig, device: DeviceSpec, rates: StepRates
) -> _EngineWork:
    """A group stays on the same server, so the prefix cache avoids a second prefill of its prompts."""
    assert device.memory_gib is not None and device.memory_tb_per_s is not None
    servers, devices = len(engine.urls) or engine.num_servers, server_devices(engine, model, device)
    share = 1 / servers if rates.overlaps else -(-work.num_groups // servers) / work.num_groups
    row_bytes = (work.prompt_tokens + work.response_tokens) * cached_bytes(model)
    room = devices * ServerSettings.memory_frac * device.memory_gib * GIB - weight_bytes(model)
    rows = min(share * work.num_episodes, MAX_RUNNING, max(1.0, room // row_bytes))
    tokens = max(rates.tail * work.longest_tokens, share * work.sampled_tokens / rows)
    moved = decoded_bytes(model) + rows * row_bytes
    return _EngineWork(
        share,
        devices,
        ((work.num_groups, work.prompt_tokens), (work.num_calls, work.report_tokens + work.call_prompt_tokens)),
        work.num_groups * work.frames + work.num_calls * work.call_frames,
        tokens * moved / (devices * rates.memory_frac * 1e12 * device.memory_tb_per_s),
    )


def _embedded(
    work: Workload,
    later_turns: int,
    slots: tuple[int, int],
    mesh: MeshConfig,
    stored_bytes: int,
    model: ModelConfig,
    device: DeviceSpec,
    rates: StepRates,
) -> _EngineWork:
    """For every token, the learner's sampler gathers the weights over fsdp and passes over every slot of the cache.

    Masters are gathered into a bfloat16 copy, which is written and read; unsharded frozen weights are read in place.
    Every later turn prefills its whole dialogue again.
    """
    learner = device.rates("bfloat16", mesh.num_devices)
    assert learner is not None
    weights, (max_rows, slot_tokens) = decoded_bytes(model) / mesh.tensor, slots
    copied = mesh.fsdp > 1 or stored_bytes > BF16_BYTES
    moved_s = weights * (stored_bytes / BF16_BYTES / mesh.fsdp + 2 if copied else 1) / learner.memory_bytes
    gather_s = among("all-gather", round(weights), mesh.fsdp, mesh.tensor).seconds(learner)
    hops_s = rates.hop_s * (2 * model.text.num_layers + 1) * (mesh.tensor > 1)
    rows = max_rows / mesh.num_row_parts if max_rows % mesh.num_row_parts == 0 else max_rows
    cache_s = rows * slot_tokens * cached_bytes(model) / mesh.tensor / learner.memory_bytes
    token_s = [gather_s, moved_s + rates.cache_passes * cache_s]
    return _EngineWork(
        1.0,
        mesh.tensor,  # a prompt is not split over the rest of the mesh
        (
            (work.num_groups, work.prompt_tokens),
            (later_turns, work.prompt_tokens + work.response_tokens),
            (work.num_calls, work.call_prompt_tokens),
        ),
        (work.num_groups + later_turns) * work.frames + work.num_calls * work.call_frames,
        max(rates.tail * work.longest_tokens, work.sampled_tokens / max_rows)
        * (hops_s + (max(token_s) if rates.overlaps else sum(token_s))),
        hops_s + gather_s + moved_s,
    )


def server_devices(engine: EngineConfig, model: ModelConfig, device: DeviceSpec) -> int:
    """Devices of each server: its part of `engine.gpus`, or the fewest that hold the weights and a cache."""
    if engine.gpus:
        return len(engine.gpus) // engine.num_servers
    room = SERVER_WEIGHTS_FRAC * ServerSettings.memory_frac * (device.memory_gib or math.inf) * GIB
    return next((size for size in TENSOR_SIZES if weight_bytes(model) / size <= room), TENSOR_SIZES[-1])


def weight_bytes(model: ModelConfig) -> int:
    return BF16_BYTES * values_on(MeshConfig(), model)
