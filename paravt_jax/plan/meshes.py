"""Memory and step time of a run on a mesh, from compiled programs or from the plan alone.

Memory is for the largest batch that the config allows; programs are compiled for this batch. Seconds are for a typical
step: the compiled programs' FLOPs and collectives, scaled to its batches by the ratio of the plan's estimates.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from model_port.config import ModelConfig
from model_port.sharding import make_mesh
from paravt_jax.config import Config, SftConfig
from paravt_jax.plan.aot import NoRoom, Program, compiled_update
from paravt_jax.plan.batch import BatchShape
from paravt_jax.plan.collectives import bytes_by_kind
from paravt_jax.plan.devices import GIB, DeviceSpec, Rates
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.plan import planned_memory
from paravt_jax.plan.roofline import ProgramWork, StepSeconds, batch_works, step_seconds
from paravt_jax.plan.step_time import Interval
from paravt_jax.plan.update import PlannedUpdate, update_of
from paravt_jax.plan.workload import Step, largest_batch, needed_flops

UNPRINTED = {"collective_bytes": "the compiler cannot print this program; seconds are with the plan's own estimate"}
UNCOMPILED = dict.fromkeys(("collective_bytes", "compile_s", "compiled_flops"), "nothing is compiled")
UNTIMED = ("est_step_s", "seconds", "tokens_per_s")  # unknown if a device has no stated rates
Shape = tuple[int, int, int]  # a mesh: data, fsdp, tensor


@dataclass(frozen=True)
class MeshEstimate:
    """Estimates for a mesh; None if unknown, with the reason in `unknown`."""

    mesh: Shape
    fits: bool = False
    hbm_gib: float | None = None  # peak per device
    model_flops: float | None = None  # of a step over all devices, required by the mathematics
    compiled_flops: float | None = None  # of a step over all devices, everything computed
    collective_bytes: dict[str, int] | None = None  # of a step, per device
    compile_s: float | None = None
    est_step_s: float | None = None
    seconds: StepSeconds | None = None  # the parts of est_step_s
    tokens_per_s: float | None = None  # over all devices
    run_step_s: Interval | None = None  # the whole step with rollouts, for a run from a config file
    problem: str | None = None  # the reason if it is rejected
    unknown: dict[str, str] = field(default_factory=dict)


def mesh_shapes(num_devices: int) -> Iterator[Shape]:
    """All (data, fsdp, tensor) with this number of devices."""
    for tensor in range(1, num_devices + 1):
        for data in range(1, num_devices // tensor + 1):
            if num_devices % (data * tensor) == 0:
                yield data, num_devices // (data * tensor), tensor


def estimate(
    config: Config | SftConfig,
    model: ModelConfig,
    step: Step,
    device: DeviceSpec,
    devices: Any | None,
    rates: Rates | None = None,
) -> MeshEstimate:
    """The estimate for the config's mesh. Without `devices` nothing is compiled. `rates` override the device's."""
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    memory, largest = planned_memory(config, model, device), largest_batch(config, model)
    always, programs = sum(memory.resident.values()), []
    if always > device.usable_bytes:
        said = f"{always / GIB:.1f} GiB are always resident, of {device.usable_bytes / GIB:.1f} usable"
        return MeshEstimate(shape, hbm_gib=always / GIB, problem=said)
    begun_s = time.perf_counter()
    if devices is not None:
        try:
            programs = compiled_update(config, model, largest, make_mesh(*shape, devices))
        except NoRoom as problem:
            return MeshEstimate(shape, problem=str(problem))
    compile_s = time.perf_counter() - begun_s
    num_bytes = compiled_bytes(programs, memory) if programs else memory.peak_bytes
    fits = num_bytes <= device.usable_bytes
    found = MeshEstimate(
        shape,
        fits=fits,
        hbm_gib=num_bytes / GIB,
        compile_s=compile_s if programs else None,
        problem=None if fits else f"{num_bytes / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} usable",
    )
    rates = device.rates(config.model.dtype, config.mesh.num_devices) if rates is None else rates
    return _timed(found, update_of(config), model, step, largest, device, programs, rates)


def compiled_bytes(programs: Iterable[Program], memory: Memory) -> int:
    """Peak memory: of a program with an engine beside it, or of the engine's phases."""
    engine, always = sum(memory.engine.values()), sum(memory.resident.values())
    own = [always + phase.num_bytes for phase in memory.phases if phase.name in ("rollout", "publish")]
    return max([engine + program.peak_bytes for program in programs] + own)


def _timed(
    found: MeshEstimate,
    update: PlannedUpdate,
    model: ModelConfig,
    step: Step,
    largest: BatchShape,
    device: DeviceSpec,
    programs: list[Program],
    rates: Rates | None,
) -> MeshEstimate:
    num_devices = update.mesh.num_devices
    works = batch_works(update, model, step.shape, device.platform)
    if programs:
        of_largest = batch_works(update, model, largest, device.platform)
        compiled = _by_name(programs, num_devices)
        works = {name: _as_compiled(work, of_largest[name], compiled[name]) for name, work in works.items()}
    printed = bool(programs) and all(program.collectives is not None for program in programs)
    unknown = {} if printed else UNPRINTED if programs else UNCOMPILED
    flops = step.num_batches * num_devices * sum(work.flops for work in works.values())
    found = replace(
        found,
        model_flops=needed_flops(update, model, step),
        compiled_flops=flops if programs else None,
        collective_bytes=_sent(works, step) if printed else None,
        unknown=unknown,
    )
    if rates is None:
        return replace(found, unknown=unknown | dict.fromkeys(UNTIMED, f"{device.name} has no stated rates"))
    seconds = step_seconds(works, step, rates)
    return replace(found, est_step_s=seconds.total, seconds=seconds, tokens_per_s=step.num_tokens / seconds.total)


def _by_name(programs: Iterable[Program], num_devices: int) -> dict[str, ProgramWork]:
    """A device's compiled work for a batch, without unknown collectives."""
    found: dict[str, list[Program]] = {}
    for program in programs:
        found.setdefault(program.name, []).append(program)
    return {
        name: ProgramWork(
            sum(one.flops for one in same) / num_devices,
            0.0,
            tuple(chain.from_iterable(one.collectives or () for one in same)),
        )
        for name, same in found.items()
    }


def _as_compiled(planned: ProgramWork, of_largest: ProgramWork, compiled: ProgramWork) -> ProgramWork:
    """The planned work, corrected by the ratio of compiled to planned work on the largest batch."""
    flops = planned.flops * compiled.flops / of_largest.flops if of_largest.flops else 0.0
    if not compiled.collectives:
        return ProgramWork(flops, planned.memory_bytes, planned.collectives)
    ratio = planned.sent_bytes / of_largest.sent_bytes if of_largest.sent_bytes else 1.0
    collectives = tuple(replace(one, num_bytes=round(one.num_bytes * ratio)) for one in compiled.collectives)
    return ProgramWork(flops, planned.memory_bytes, collectives)


def _sent(works: Mapping[str, ProgramWork], step: Step) -> dict[str, int]:
    times = {name: step.num_updates if name == "apply_gradients" else step.num_batches for name in works}
    each = [
        replace(one, num_bytes=times[name] * one.num_bytes) for name, work in works.items() for one in work.collectives
    ]
    return bytes_by_kind(each)
