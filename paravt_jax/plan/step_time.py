"""Step time as an interval: each part is its work divided by a rate, at the best rate and at the worst."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

from model_port.config import ModelConfig
from model_port.sampler.sampler import CHUNK_TOKENS
from model_port.sharding import sampling_axes
from paravt_jax.config import EngineConfig, MeshConfig
from paravt_jax.plan.devices import GIB, DeviceSpec
from paravt_jax.plan.hosts import mesh_of_host, num_hosts
from paravt_jax.plan.memory import param_shapes, values_on
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_rates import HIGH, LOW, StepRates
from paravt_jax.plan.workload import BF16_BYTES, Workload, cached_bytes, decoded_bytes, frame_flops, token_flops
from rollout.server import ServerSettings

MAX_RUNNING = 256  # a server's decode batch, if memory allows
SERVER_WEIGHTS_FRAC = 0.6  # of a server's memory, for weights; a larger model gets more devices per server
TENSOR_SIZES = (1, 2, 4, 8)


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
        widest = sorted(self.parts, key=lambda name: self.parts[name].low - self.parts[name].high)[:2]
        return f"{self.seconds} s, bound by {self.bound_by}; least certain: {' and '.join(widest)}"

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: sum(self.parts[name]))


def step_time(run: PlannedRl, device: DeviceSpec, update_s: float | None) -> StepTime | None:
    """None if the device has no data sheet. `update_s` is the update's roofline."""
    if update_s is None or device.rates("bfloat16") is None:
        return None
    low, high = (_Parts(run, device, rates).seconds(update_s) for rates in (LOW, HIGH))
    on_devices = low["vision tower"] + low["prefill"] + low["decode"]
    rollout_s = max(on_devices, low["frames on CPUs"], low["pictures on servers' CPUs"])
    step_s = max(rollout_s, low["update"]) if run.train.steps_ahead else rollout_s + low["update"]
    parts = {name: Interval(low[name], high[name]) for name in low if high[name]}
    return StepTime(Interval(step_s + low["publish"], sum(high.values())), parts)


@dataclass(frozen=True)
class _Parts:
    """The parts of a step at one end of the interval."""

    run: PlannedRl
    device: DeviceSpec
    rates: StepRates

    @cached_property
    def work(self) -> Workload:
        rollout = self.run.rollout
        return self.run.work.with_calls(min(self.rates.calls, rollout.tool_turns * rollout.calls_per_turn))

    @property
    def later_turns(self) -> int:
        """Turns after the first, of all main agents."""
        return self.work.num_episodes * min(self.rates.turns - 1, self.run.rollout.tool_turns) if self.work.calls else 0

    def seconds(self, update_s: float) -> dict[str, float]:
        """Seconds of every part, each as if it ran alone."""
        host_groups = -(-self.work.num_groups // num_hosts(self.run.hosts, self.run.num_devices, self.device))
        on_servers = self.run.engine.kind != "jax"
        waves = -(-host_groups // (self.run.video.num_workers or host_groups))
        return {
            "frames on CPUs": waves * self.rates.overview_s,
            **(self.servers() if on_servers else self.embedded()),
            "update": self.rates.update * update_s,
            "publish": weight_bytes(self.run.model) / self.rates.publish_bytes_per_s if on_servers else 0.0,
        }

    def servers(self) -> dict[str, float]:
        """A group stays on the same server, so the prefix cache avoids a second prefill of its prompts."""
        device, engine, model, work, rates = self.device, self.run.engine, self.run.model, self.work, self.rates
        assert device.memory_gib is not None and device.memory_tb_per_s is not None
        servers, devices = len(engine.urls) or engine.num_servers, server_devices(engine, model, device)
        share = 1 / servers if rates.overlaps else -(-work.num_groups // servers) / work.num_groups  # of the busiest
        row_bytes = (work.prompt_tokens + work.response_tokens) * cached_bytes(model)
        room = devices * ServerSettings.memory_frac * device.memory_gib * GIB - weight_bytes(model)
        rows = min(share * work.num_episodes, MAX_RUNNING, max(1.0, room // row_bytes))
        tokens = max(rates.tail * work.longest_tokens, share * work.sampled_tokens / rows)
        token_bytes = decoded_bytes(model) + rows * row_bytes
        call_frames, call_tokens = work.num_calls * work.call_frames, work.report_tokens + work.call_prompt_tokens
        prefills = ((work.num_groups, work.prompt_tokens), (work.num_calls, call_tokens))
        vision_s, prefill_s = self.forward_s(work.num_groups * work.frames + call_frames, prefills, devices)
        pictures = (work.num_episodes + self.later_turns) * work.frames + call_frames
        return {
            "pictures on servers' CPUs": rates.picture_s * share * pictures,
            "vision tower": share * vision_s,
            "prefill": share * prefill_s,
            "decode": tokens * token_bytes / (devices * rates.memory_frac * 1e12 * device.memory_tb_per_s),
        }

    def embedded(self) -> dict[str, float]:
        """Each host samples its own episodes, with the heads split over its devices. Turns prefill what is new."""
        run, model, work, rates, device = self.run, self.run.model, self.work, self.rates, self.device
        assert device.memory_tb_per_s is not None
        hosts = num_hosts(run.hosts, run.num_devices, device)
        local = mesh_of_host(run.update.mesh, hosts)
        tensor = math.prod(asdict(local)[axis] for axis in sampling_axes(param_shapes(model), asdict(local)))
        sizes = run.engine.sampler_sizes(run.rollout.max_context_tokens, hosts)
        share = 1 / hosts if rates.overlaps else -(-work.num_groups // hosts) / work.num_groups  # of the busiest
        row_tokens = work.prompt_tokens + work.response_tokens
        rows = max(1.0, min(share * work.num_episodes, sizes["max_rows"], sizes["cache_tokens"] / row_tokens))
        tokens = max(rates.tail * work.longest_tokens, share * work.sampled_tokens / rows)
        token_bytes = rates.weight_passes * decoded_bytes(model) + rows * row_tokens * cached_bytes(model)
        hops_s = rates.hop_s * (2 * model.text.num_layers + 1) * (tensor > 1)
        token_s = hops_s + token_bytes / (tensor * rates.memory_frac * 1e12 * device.memory_tb_per_s)
        prefills = (
            (work.num_groups, work.prompt_tokens),
            (self.later_turns, work.response_tokens + CHUNK_TOKENS),  # from the start of a chunk
            (work.num_calls, work.call_prompt_tokens),
        )
        frames = work.num_groups * work.frames + work.num_calls * work.call_frames
        vision_s, prefill_s = self.forward_s(frames, prefills, tensor)
        chunks = sum(count * -(-length // CHUNK_TOKENS) for count, length in prefills)
        return {
            "pictures on servers' CPUs": 0.0,
            "vision tower": share * vision_s,
            "prefill": share * (prefill_s + chunks * hops_s),
            "decode": tokens * token_s,
        }

    def forward_s(self, frames: float, prefills: Iterable[tuple[float, int]], devices: int) -> tuple[float, float]:
        """Seconds of the vision tower, and of prefills given as (number, tokens each)."""
        model, peak_tflops = self.run.model, self.device.peak_tflops
        assert peak_tflops is not None
        flops_per_s = devices * self.rates.matmul_frac * 1e12 * peak_tflops
        prefill_flops = sum(count * length * token_flops(model, length) for count, length in prefills)
        return frames * frame_flops(model, self.run.row_patches) / flops_per_s, prefill_flops / flops_per_s


def server_devices(engine: EngineConfig, model: ModelConfig, device: DeviceSpec) -> int:
    """Devices of each server: its part of `engine.gpus`, or the fewest that hold the weights and a cache."""
    if engine.gpus:
        return len(engine.gpus) // engine.num_servers
    room = SERVER_WEIGHTS_FRAC * ServerSettings.memory_frac * (device.memory_gib or math.inf) * GIB
    return next((size for size in TENSOR_SIZES if weight_bytes(model) / size <= room), TENSOR_SIZES[-1])


def weight_bytes(model: ModelConfig) -> int:
    return BF16_BYTES * values_on(MeshConfig(), model)
