"""Estimates step time as an interval: the work of each part of a step divided by a rate, at its best and worst value.

docs/machines.md, section "Seconds per step", lists the source of each rate. A run's log replaces some of them
(calibrate.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from model_port.config import ModelConfig
from model_port.sampler.sampler import chunk_tokens
from paravt_jax.config import EngineConfig, MeshConfig
from paravt_jax.plan.collectives import Collective
from paravt_jax.plan.devices import GIB, DeviceSpec
from paravt_jax.plan.memory import FLOAT32_BYTES, sampled_adapter_values, sampling_tensor_on, values_on
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.workload import (
    BF16_BYTES,
    Workload,
    adapter_params,
    cached_bytes,
    decoded_bytes,
    frame_flops,
    token_flops,
)
from rollout.engine.discovery import listed_urls
from rollout.server import ServerSettings
from rollout.video.reader import MAX_WORKERS

MAX_RUNNING = 256  # a server's decode batch, if memory allows
SERVER_WEIGHTS_FRAC = 0.6  # largest fraction of a server's memory for weights; larger models get more devices
TENSOR_SIZES = (1, 2, 4, 8)
ON_DEVICES = ("vision tower", "prefill", "decode")


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        """Formats both ends with two digits."""
        low, high = (f"{float(f'{end:.2g}'):g}" for end in self)
        return low if low == high else f"{low} to {high}"


class Rate(NamedTuple):
    title: str
    best: float
    worst: float
    factor: float = 1.0  # factor from the rate to the printed unit
    unit: str = ""

    @property
    def values(self) -> str:
        return f"{Interval(self.factor * self.best, self.factor * self.worst)}{self.unit}"

    def __str__(self) -> str:
        """Formats a rate, for example `a picture on the server's CPU (8 to 30 ms)`."""
        return f"{self.title} ({self.values})"


StepRates = Mapping[str, Rate]

PUBLISHED: StepRates = {
    "calls": Rate("calls per episode", 0.21, 2.5),
    "turns": Rate("requests of a main agent", 2.0, 4.0),  # each request repeats all pictures
    "length": Rate("sampled tokens over the assumed", 1.0, 1.0),
    "tail": Rate("the longest dialogue over the mean", 1.3, 3.0),
    "matmul_frac": Rate("prefill, of peak FLOPs", 0.7, 0.26, 100, " %"),  # also for the vision tower
    "memory_frac": Rate("decoding, of memory bandwidth", 0.81, 0.5, 100, " %"),
    "weight_passes": Rate("passes over the sampler's weights per token", 1.0, 1.84),
    "hop_s": Rate("an all-reduce of the sampler", 6e-6, 2.6e-5, 1e6, " µs"),  # latency only
    "overview_s": Rate("an overview on a CPU core", 5.0, 22.0, 1, " s"),
    "picture_s": Rate("a picture on the server's CPU", 0.008, 0.030, 1e3, " ms"),
    "publish_bytes_per_s": Rate("new weights into servers", 2e9, 1e9, 1e-9, " GB/s"),  # into all servers together
    "update": Rate("an update over its roofline", 0.78, 1.5),
}


def best(rates: StepRates) -> dict[str, float]:
    return {name: rate.best for name, rate in rates.items()}


def worst(rates: StepRates) -> dict[str, float]:
    return {name: rate.worst for name, rate in rates.items()}


@dataclass(frozen=True)
class StepTime:
    seconds: Interval
    parts: dict[str, Interval]
    depends_on: tuple[str, ...]  # the rates with the largest effect, with their ranges

    def __str__(self) -> str:
        return f"{self.seconds} s, bound by {self.bound_by}; depends most on: {', '.join(self.depends_on)}"

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: sum(self.parts[name]))


def step_time(
    run: PlannedRl, device: DeviceSpec, update_s: float | None, rates: StepRates = PUBLISHED
) -> StepTime | None:
    """Estimates the step time; None if the device has no data sheet. `update_s` is the update's roofline time."""
    if update_s is None or device.rates("bfloat16") is None:
        return None

    def parts(values: Mapping[str, float], *, overlaps: bool = False) -> Mapping[str, float]:
        return StepParts(run, device, values, overlaps).seconds(update_s)

    middle = {name: Interval(rate.best, rate.worst).middle for name, rate in rates.items()}

    def change(name: str) -> float:
        """The change of step time from a rate's best to worst value, with all other rates in the middle."""
        best_s, worst_s = (sum(parts(middle | {name: end}).values()) for end in (rates[name].best, rates[name].worst))
        return worst_s - best_s

    low, high = parts(best(rates), overlaps=True), parts(worst(rates))
    sampler_s = sum(low[name] for name in ON_DEVICES)
    cpus_s = max(low["frames on CPUs"], low["pictures on servers' CPUs"])
    if not run.train.steps_ahead:
        step_s = max(sampler_s, cpus_s) + low["update"]
    elif run.engine.kind == "jax":  # sampler and update share devices
        step_s = max(sampler_s + low["update"], cpus_s)
    else:
        step_s = max(sampler_s, cpus_s, low["update"])
    changes = {name: change(name) for name in rates}
    most = sorted((name for name in changes if changes[name] > 0), key=lambda name: -changes[name])[:2]
    return StepTime(
        Interval(step_s + low["publish"], sum(high.values())),
        {name: Interval(low[name], high[name]) for name in low if high[name]},
        tuple(str(rates[name]) for name in most),
    )


class Samplers(NamedTuple):
    """The sampling replicas: servers, or the embedded sampler of each host."""

    replicas: int
    devices: int  # per replica
    rows: float  # concurrent requests per replica
    weight_passes: float  # times that a token reads all weights


@dataclass(frozen=True)
class StepParts:
    """The parts of a step at given rates."""

    run: PlannedRl
    device: DeviceSpec
    rates: Mapping[str, float]
    overlaps: bool = False  # work spreads evenly over replicas

    @cached_property
    def work(self) -> Workload:
        rollout = self.run.rollout
        calls = min(self.rates["calls"], rollout.max_calls)
        return self.run.work.with_calls(calls, self.rates["length"])

    @property
    def on_servers(self) -> bool:
        return self.run.engine.kind != "jax"

    @property
    def dtype(self) -> str:
        """The dtype of the sampler's weights and cache."""
        return "bfloat16" if self.on_servers else self.run.update.policy.dtype

    @property
    def item_bytes(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def later_turns(self) -> float:
        """The number of main agents' turns that follow a turn with calls."""
        most = min(self.rates["turns"] - 1, self.run.rollout.tool_turns)
        return self.work.num_episodes * min(most, self.work.calls)

    @property
    def pictures(self) -> float:
        """The number of pictures in requests to servers. Each request of a dialogue repeats its pictures."""
        work = self.work
        return (work.num_episodes + self.later_turns) * work.frames + work.num_calls * work.call_frames

    @property
    def row_bytes(self) -> int:
        return (self.work.prompt_tokens + self.work.response_tokens) * cached_bytes(self.run.model, self.item_bytes)

    def seconds(self, update_s: float) -> Mapping[str, float]:
        """The seconds of every part, as if it ran alone."""
        work, rates, run, sampler, device = self.work, self.rates, self.run, self.sampler, self.device
        assert device.peak_tflops is not None
        groups = -(-work.num_groups // run.num_hosts(device))
        share = 1 / sampler.replicas if self.overlaps else -(-work.num_groups // sampler.replicas) / work.num_groups
        frames = work.num_groups * work.frames + work.num_calls * work.call_frames
        flops_per_s = sampler.devices * rates["matmul_frac"] * 1e12 * device.peak_tflops * device.peak_frac(self.dtype)
        return {
            "frames on CPUs": groups * rates["overview_s"] / (run.video.num_workers or MAX_WORKERS),
            "pictures on servers' CPUs": share * rates["picture_s"] * self.pictures if self.on_servers else 0.0,
            "vision tower": share * frames * frame_flops(run.model, run.row_patches) / flops_per_s,
            "prefill": share * self.prefill_s(flops_per_s),
            "decode": self.decode_s(share),
            "update": rates["update"] * update_s * work.shared_tokens / run.work.shared_tokens,
            "publish": published_bytes(run) / rates["publish_bytes_per_s"] if self.on_servers else 0.0,
        }

    @cached_property
    def sampler(self) -> Samplers:
        run, model, device = self.run, self.run.model, self.device
        hosts = run.num_hosts(device)
        if self.on_servers:
            devices = server_devices(run.engine, model, device)
            room = server_bytes(devices, device) - weight_bytes(model)
            return Samplers(num_servers(run.engine, hosts), devices, min(MAX_RUNNING, room // self.row_bytes), 1.0)
        devices = sampling_tensor_on(run.mesh_of_host(device), model)
        sizes = run.engine.sampler_sizes(run.rollout.max_context_tokens, hosts)
        rows = min(sizes["max_rows"], sizes["cache_tokens"] * cached_bytes(model, self.item_bytes) / self.row_bytes)
        return Samplers(hosts, devices, rows, self.rates["weight_passes"])

    def decode_s(self, share: float) -> float:
        """Seconds until the last token of the busiest replica, which samples this share of the episodes.

        Pages of a finished request are no longer read, but the embedded sampler still computes its row.
        """
        work, tokens = self.work, share * self.work.sampled_tokens
        rows = max(1.0, min(share * work.num_episodes, self.sampler.rows))
        steps = max(self.rates["tail"] * work.longest_tokens, tokens / rows)
        return steps * self.token_s(rows, running=tokens / steps)

    def token_s(self, rows: float, running: float) -> float:
        """Seconds for a token in all rows, of which `running` have a request."""
        return self.weights_s + running * self.row_bytes / self.sampler_bytes_per_s + self.hops_s(rows)

    @property
    def weights_s(self) -> float:
        """Seconds to read the weights, for a token of all rows or a chunk of a prompt."""
        run, devices = self.run, self.sampler.devices
        num_bytes = decoded_bytes(run.model, self.item_bytes)
        if not self.on_servers:  # servers merge adapters
            adapters = sampled_adapter_values(run.model, run.update.lora.rank, devices, self.device.platform)
            num_bytes += devices * adapters * self.item_bytes
        return self.sampler.weight_passes * num_bytes / self.sampler_bytes_per_s

    @property
    def sampler_bytes_per_s(self) -> float:
        assert self.device.memory_tb_per_s is not None
        return self.sampler.devices * self.rates["memory_frac"] * 1e12 * self.device.memory_tb_per_s

    def prefill_s(self, flops_per_s: float) -> float:
        """Seconds of prefill. A group shares its prompt's cache, and a later turn only prefills new tokens.

        The embedded sampler prefills whole chunks and reads all weights for each. A server's chunk has many prompts, so
        that matrix products hide the time to read weights.
        """
        work, num_chunk = self.work, chunk_tokens(self.device.platform)
        chunk_s = self.hops_s(num_chunk) + (0.0 if self.on_servers else self.weights_s)
        together, step = (0, 1) if self.on_servers else (num_chunk, num_chunk)
        prefills = (
            (work.num_groups, -(-work.prompt_tokens // step) * step),
            (self.later_turns, work.response_tokens + together),
            (work.num_calls, -(-work.call_prompt_tokens // step) * step),
        )
        return sum(
            count * length * (token_flops(self.run.model, length, together) / flops_per_s + chunk_s / num_chunk)
            for count, length in prefills
        )

    def hops_s(self, tokens: float) -> float:
        """Seconds of the all-reduces of these tokens' activations over a sampler's devices."""
        text, devices = self.run.model.text, self.sampler.devices
        rates = self.device.rates("bfloat16")
        assert rates is not None
        moved = Collective("all-reduce", round(tokens * text.width * self.item_bytes), devices)
        return (2 * text.num_layers + 1) * (self.rates["hop_s"] * (devices > 1) + moved.seconds(rates))


def num_servers(engine: EngineConfig, hosts: int) -> int:
    """The number of servers. All hosts share running servers; otherwise each host starts its own."""
    if engine.urls_file and Path(engine.urls_file).is_file():
        return len(listed_urls(engine.urls_file))
    return len(engine.urls) or engine.num_servers * hosts


def server_devices(engine: EngineConfig, model: ModelConfig, device: DeviceSpec) -> int:
    """Devices per server: its part of `engine.gpus`, or the fewest that fit the weights and a cache."""
    if engine.gpus:
        return len(engine.gpus) // engine.num_servers
    fits = (size for size in TENSOR_SIZES if weight_bytes(model) <= SERVER_WEIGHTS_FRAC * server_bytes(size, device))
    return next(fits, TENSOR_SIZES[-1])


def server_bytes(num_devices: int, device: DeviceSpec) -> float:
    """A server's memory for weights and cache."""
    return num_devices * ServerSettings.memory_frac * (device.memory_gib or math.inf) * GIB


def weight_bytes(model: ModelConfig) -> int:
    return BF16_BYTES * values_on(MeshConfig(), model)


def published_bytes(run: PlannedRl) -> int:
    """Bytes that servers receive per publish: the model, or only the adapter."""
    rank = run.update.lora.rank
    return FLOAT32_BYTES * adapter_params(rank, run.model) if rank else weight_bytes(run.model)
