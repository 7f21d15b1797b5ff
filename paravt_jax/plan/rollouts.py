"""The rollouts of a plan: typical episodes, servers as fast as a table of accelerators says, and the steps they make.

Where servers have devices of their own, a sweep over how many the learner has and how many they have says which split
loses least time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from model_port.config import ModelConfig
from paravt_jax.config import Config, EngineConfig, MeshConfig
from paravt_jax.plan.devices import MEMORY_FRAC, DeviceSpec
from paravt_jax.plan.memory import MOMENTS, values_on
from paravt_jax.plan.plan import Plan, config_on, make_plan
from paravt_jax.plan.service import EMBEDDED_STRIDE, ServiceTimes
from paravt_jax.plan.simulation import COUNTED_STEPS, CallScript, GroupScript, StepTimes, TurnScript, simulate
from paravt_jax.plan.workload import Workload, frame_flops, layer_params, token_flops

LENGTH_SPREAD = 0.5  # of turns and reports: the standard deviation of the logarithm of their length
ITEM_BYTES = 2  # of a weight and of a key, in bfloat16
REQUEST_S, SHOWN_S = 0.01, 0.004  # of HTTP and of taking a picture apart, on the server's CPU
PUBLISH_BYTES_PER_S = 2e9  # weights to files in memory, and from there to all servers at once
MAX_RUNNING = 256  # of a server, whatever its memory
TABLE_STRIDE = 8  # tokens that are simulated together: few enough for what a table knows
WEIGHTS_FRAC = 0.6  # of a server's device, at most: the rest is for keys and values
TENSOR_SIZES = (1, 2, 4, 8)
MAX_SPLITS = 8  # of the devices of many hosts


@dataclass(frozen=True)
class DeviceSplit:
    """Devices for the learner and for servers, and what a step takes with them."""

    mesh: MeshConfig
    num_servers: int
    server_devices: int  # of each
    times: StepTimes

    @property
    def num_devices(self) -> int:
        return self.mesh.num_devices + self.num_servers * self.server_devices

    @property
    def learner_idle_frac(self) -> float:
        return 1 - self.times.update_s / self.times.step_s

    @property
    def idle_frac(self) -> float:
        """Of the time of all devices."""
        learner, servers = self.mesh.num_devices, self.num_servers * self.server_devices
        idle = learner * self.learner_idle_frac + servers * (1 - self.times.busy_frac)
        return idle / self.num_devices


@dataclass(frozen=True)
class RolloutPlan:
    """A step with its rollouts as the config has them, and with every other split of as many devices."""

    service: ServiceTimes
    measured: bool
    now: DeviceSplit
    splits: tuple[DeviceSplit, ...]  # fewest devices for the learner first; none where learner and sampler are one
    assumptions: tuple[str, ...]

    @property
    def best(self) -> DeviceSplit:
        return min((self.now, *self.splits), key=lambda split: split.times.step_s)


def make_rollout_plan(
    config: Config, model: ModelConfig, plan: Plan, service: ServiceTimes | None = None
) -> RolloutPlan | None:
    """None where the device has no stated peak and no service was measured. Without an update's seconds it has 0."""
    servers = config.engine.kind == "sglang"
    devices = server_devices(config.engine, model, plan.device) if servers else 1
    known = service or service_of_table(config, model, plan, devices)
    if known is None:
        return None
    if known.prefixes != servers:
        raise ValueError(
            f"the service is one of {'SGLang servers' if known.prefixes else 'the embedded engine'}, and "
            f"engine.kind={config.engine.kind}; measure the engine that the run has"
        )
    simulated = partial(_split, config, known, devices)
    assumptions = tuple(_assumptions(known, service is not None))
    count = (len(config.engine.urls) or config.engine.num_servers) if servers else 1
    now = simulated(plan, count)
    if not servers or plan.update_s is None:
        return RolloutPlan(known, service is not None, now, (), assumptions)
    total = plan.mesh.num_devices + count * devices
    splits = [
        now if other is plan else simulated(other, (total - other.mesh.num_devices) // devices)
        for other in _learners(config, model, plan, total, devices)
    ]
    return RolloutPlan(known, service is not None, now, tuple(splits), assumptions)


def _split(config: Config, service: ServiceTimes, devices: int, plan: Plan, num_servers: int) -> DeviceSplit:
    times = simulate(
        partial(typical_groups, config, plan.workload),
        service,
        num_servers=num_servers,
        update_s=plan.update_s or 0.0,
        steps_ahead=config.train.steps_ahead,
    )
    return DeviceSplit(plan.mesh, num_servers, devices if config.engine.kind == "sglang" else 0, times)


def _learners(config: Config, model: ModelConfig, plan: Plan, total: int, server_devices: int) -> Iterator[Plan]:
    """The config's own, and of every number of devices, its own too, the quickest that fits where that is another."""
    own, unit = plan.mesh.num_devices, _unit(plan.device, total)
    for num_devices in sorted({own, *range(unit, total - server_devices + 1, unit)}):
        same = [plan] if num_devices == own else []
        others = (_on_mesh(config, model, plan, mesh) for mesh in _meshes(num_devices) if mesh != plan.mesh)
        fitting = [one for one in (*same, *others) if one and one.memory.peak_bytes <= plan.device.usable_bytes]
        yield from same
        quickest = min(fitting, key=lambda one: one.update_s or 0.0, default=plan)
        if quickest is not plan:
            yield quickest


def _unit(device: DeviceSpec, total: int) -> int:
    """Devices that a split gives together: of more than two hosts, so many whole ones that there are few splits."""
    num_hosts = device.num_hosts(total)
    return 1 if num_hosts <= 2 else total // num_hosts * -(-num_hosts // MAX_SPLITS)


def _meshes(num_devices: int) -> Iterator[MeshConfig]:
    """Parameters over as many devices as a power of two divides, copies of them over the rest."""
    for tensor in (size for size in TENSOR_SIZES if num_devices % size == 0):
        parts = num_devices // tensor
        fsdp = parts & -parts
        yield MeshConfig(parts // fsdp, fsdp, tensor)


def _on_mesh(config: Config, model: ModelConfig, plan: Plan, mesh: MeshConfig) -> Plan | None:
    """With as many rows as before, or the next number that the mesh divides; None where it cannot be."""
    masters = plan.memory.resident["masters, float32"] * _num_shards(plan.mesh) / _num_shards(mesh)
    if (1 + MOMENTS) * masters > plan.device.usable_bytes:
        return None
    try:
        return make_plan(config_on(config, mesh), model, device=plan.device)
    except ValueError:  # the mesh does not divide the model
        return None


def _num_shards(mesh: MeshConfig) -> int:
    return mesh.fsdp * mesh.tensor


def typical_groups(config: Config, work: Workload, step: int) -> list[GroupScript]:
    """Episodes as `plan.workload` describes them, with frame budgets and lengths drawn at random."""
    random = np.random.default_rng((config.seed, step))
    video = config.video
    drawn = random.choice(video.frame_budgets if video.gating else [video.overview_frames], work.num_groups)
    room = config.rollout.max_context_tokens - work.response_tokens
    return [
        GroupScript(
            name,
            prompt_tokens=min(room, work.prompt_tokens + round((frames - work.frames) * work.frame_tokens)),
            frames=int(frames),
            episodes=tuple(_turns(work, f"{name}/{n}", random) for n in range(work.group_size)),
        )
        for name, frames in ((f"{step}/{number}", frames) for number, frames in enumerate(drawn))
    ]


def _turns(work: Workload, name: str, random: np.random.Generator) -> tuple[TurnScript, ...]:
    """Half of what is said comes before the calls, half after their reports."""

    def length(mean: int) -> int:
        return max(1, round(mean * random.lognormal(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD)))

    calls = tuple(
        CallScript(f"{name}/{number}", work.call_prompt_tokens, work.call_frames, length(work.report_tokens))
        for number in range(work.calls)
    )
    if not calls:
        return (TurnScript(length(work.response_tokens)),)
    reports = sum(call.report_tokens for call in calls)
    said = max(2, work.response_tokens - work.calls * work.report_tokens)
    return (TurnScript(length(said // 2), calls=calls), TurnScript(length(said - said // 2), read_tokens=reports))


def server_devices(engine: EngineConfig, model: ModelConfig, device: DeviceSpec) -> int:
    """What `engine.gpus` gives each; else the fewest that hold the weights and leave room for keys and values."""
    if engine.gpus:
        return len(engine.gpus) // engine.num_servers
    if device.memory_gib is None:
        return 1
    room = WEIGHTS_FRAC * engine.memory_frac * device.memory_gib * 2**30
    return next((n for n in TENSOR_SIZES if _weight_bytes(model) / n <= room), TENSOR_SIZES[-1])


def service_of_table(config: Config, model: ModelConfig, plan: Plan, devices: int) -> ServiceTimes | None:
    """Of a device by its peak and its bandwidth, as far as these are stated for the dtype."""
    rates = plan.device.rates(config.model.dtype)
    if rates is None or config.model.dtype != "bfloat16":
        return None
    engine, embedded = config.engine, config.engine.kind == "jax"
    together = config.mesh.tensor if embedded else devices  # share a prompt
    flops_per_s, bytes_per_s = together * rates.flops, together * rates.memory_bytes
    context = plan.workload.prompt_tokens + plan.workload.response_tokens
    token_s = token_flops(model, context) / flops_per_s
    frame_s = frame_flops(model, plan.batch.row_patches) / flops_per_s
    decoded_s = ITEM_BYTES * _decoded_params(model) / bytes_per_s
    if embedded:  # a token takes the whole cache, whoever samples
        slots = engine.max_rows * config.rollout.max_context_tokens / plan.mesh.num_row_parts
        return ServiceTimes(
            request_s=0.0,
            token_s=token_s,
            shown_s=0.0,
            frame_s=frame_s,
            step_s=decoded_s + slots * _cached_bytes(model) / bytes_per_s,
            row_s=0.0,
            context_token_s=0.0,
            max_running=engine.max_rows,
            stride=EMBEDDED_STRIDE,
            prefixes=False,
            share=1.0,
        )
    assert plan.device.memory_gib is not None
    num_bytes = _weight_bytes(model)
    room = devices * engine.memory_frac * plan.device.memory_gib * 2**30 - num_bytes
    return ServiceTimes(
        request_s=REQUEST_S,
        token_s=token_s,
        shown_s=SHOWN_S,
        frame_s=frame_s,
        step_s=decoded_s,
        row_s=2 * _decoded_params(model) / flops_per_s,
        context_token_s=_cached_bytes(model) / bytes_per_s,
        publish_s=num_bytes / PUBLISH_BYTES_PER_S,
        max_running=int(min(MAX_RUNNING, max(1, room // (context * _cached_bytes(model))))),
        stride=TABLE_STRIDE,
    )


def _decoded_params(model: ModelConfig) -> int:
    """What a sampled token is multiplied with."""
    return layer_params(model) + model.text.vocab_size * model.text.width


def _cached_bytes(model: ModelConfig) -> int:
    """Keys and values of a token."""
    return 2 * ITEM_BYTES * model.text.num_layers * model.text.num_kv_heads * model.text.head_dim


def _weight_bytes(model: ModelConfig) -> int:
    return ITEM_BYTES * values_on(MeshConfig(), model)


def _assumptions(service: ServiceTimes, measured: bool) -> Iterator[str]:
    yield (
        f"simulated steps: {COUNTED_STEPS} of them, episodes of 2 turns, lengths that vary by {LENGTH_SPREAD:.0%}; "
        f"calls of members look at windows of their own; no episode is made again (train.max_resamples)"
    )
    if service.prefixes:
        yield (
            f"a server decodes up to {service.max_running} sequences at once, knows what it has read until its weights "
            f"change, and has room for it"
        )
    if not measured:
        yield f"servers reach {MEMORY_FRAC:.0%} of the bandwidth; videos are decoded by the time they are asked for"
        if service.publish_s:
            yield f"new weights go to servers at {PUBLISH_BYTES_PER_S / 1e9:g} GB/s: {service.publish_s:.1f} s"
