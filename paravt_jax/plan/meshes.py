"""Estimates memory and step time of a run on a mesh, from compiled programs or only from the plan.

Memory is for the largest batch that the config allows, and programs are compiled for this batch. Seconds are for a
typical step: they come from the compiled FLOPs and collectives, scaled to typical batches by ratios from the plan.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model_port.sharding import make_mesh
from paravt_jax.learner.packing import BatchShape
from paravt_jax.plan.aot import NoRoom, Program, compiled_update
from paravt_jax.plan.collectives import bytes_by_kind
from paravt_jax.plan.devices import GIB, DeviceSpec, Rates
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.roofline import ProgramWork, StepSeconds, batch_works, step_seconds
from paravt_jax.plan.run import PlannedRun
from paravt_jax.plan.step_time import Interval
from paravt_jax.plan.workload import Step, needed_flops

UNPRINTED = {"collective_bytes": "the compiler cannot print this program; seconds use the plan's own estimate"}
UNCOMPILED = dict.fromkeys(("collective_bytes", "compile_s", "compiled_flops"), "nothing is compiled")
UNTIMED = ("est_step_s", "seconds", "tokens_per_s")  # unknown if the device has no data sheet
Shape = tuple[int, int, int]  # a mesh: data, fsdp, tensor


@dataclass(frozen=True)
class MeshEstimate:
    """Estimates for a mesh; None if unknown, with the reason in `unknown`."""

    mesh: Shape
    fits: bool = False
    hbm_gib: float | None = None  # peak per device
    model_flops: float | None = None  # per step over all devices, only mathematically required FLOPs
    compiled_flops: float | None = None  # per step over all devices, everything computed
    collective_bytes: dict[str, int] | None = None  # per step and device
    compile_s: float | None = None
    est_step_s: float | None = None
    seconds: StepSeconds | None = None  # the parts of est_step_s
    tokens_per_s: float | None = None  # over all devices
    run_step_s: Interval | None = None  # the whole step with rollouts, for a run from a config file
    problem: str | None = None  # the reason if the mesh is rejected
    unknown: dict[str, str] = field(default_factory=dict)


def mesh_shapes(num_devices: int) -> Iterator[Shape]:
    """Yields all meshes (data, fsdp, tensor) with this number of devices."""
    for tensor in range(1, num_devices + 1):
        for data in range(1, num_devices // tensor + 1):
            if num_devices % (data * tensor) == 0:
                yield data, num_devices // (data * tensor), tensor


def estimate(
    run: PlannedRun, step: Step, device: DeviceSpec, devices: Any | None, rates: Rates | None = None
) -> MeshEstimate:
    """Estimates the run on its mesh. Without `devices` nothing is compiled. `rates` override the device's rates."""
    update, model, mesh = run.update, run.model, run.update.mesh
    shape = (mesh.data, mesh.fsdp, mesh.tensor)
    memory, largest = planned_memory(run, device), run.largest_batch()
    resident = sum(memory.resident.values())
    if resident > device.usable_bytes:
        problem = f"{resident / GIB:.1f} GiB are always resident, of {device.usable_bytes / GIB:.1f} usable"
        return MeshEstimate(shape, hbm_gib=resident / GIB, problem=problem)
    programs, compile_s = list[Program](), None
    if devices is not None:
        start_s = time.perf_counter()
        try:
            programs = compiled_update(update, model, largest, make_mesh(*shape, devices))
        except NoRoom as problem:
            return MeshEstimate(shape, problem=str(problem))
        compile_s = time.perf_counter() - start_s
    num_bytes = compiled_bytes(programs, memory) if programs else memory.peak_bytes
    fits = num_bytes <= device.usable_bytes
    works = _works(run, step, largest, device.platform, programs)
    is_printed = bool(programs) and all(program.collectives is not None for program in programs)
    unknown = {} if is_printed else UNPRINTED if programs else UNCOMPILED
    rates = device.rates(update.policy.dtype) if rates is None else rates
    seconds = None if rates is None else step_seconds(works, step, rates)
    if seconds is None:
        unknown = unknown | dict.fromkeys(UNTIMED, f"{device.name} has no data sheet")
    flops = step.num_batches * mesh.num_devices * sum(work.flops for work in works.values())
    return MeshEstimate(
        shape,
        fits=fits,
        hbm_gib=num_bytes / GIB,
        model_flops=needed_flops(update, model, step),
        compiled_flops=flops if programs else None,
        collective_bytes=_collective_bytes(works, step) if is_printed else None,
        compile_s=compile_s,
        est_step_s=None if seconds is None else seconds.total,
        seconds=seconds,
        tokens_per_s=None if seconds is None else step.num_tokens / seconds.total,
        problem=None if fits else f"{num_bytes / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} usable",
        unknown=unknown,
    )


def compiled_bytes(programs: Iterable[Program], memory: Memory) -> int:
    """Peak memory, either of a program with an engine on the same device, or of the engine's phases."""
    engine, always = sum(memory.engine.values()), sum(memory.resident.values())
    own = [always + size for name, size in memory.phase_bytes.items() if name in ("rollout", "publish")]
    return max([engine + program.peak_bytes for program in programs] + own)


def _works(
    run: PlannedRun, step: Step, largest: BatchShape, platform: str, programs: Sequence[Program]
) -> dict[str, ProgramWork]:
    """A device's planned work for a batch of the step, by program.

    With compiled programs, it is corrected by the ratio of compiled to planned work on the largest batch.
    """
    planned, of_largest = (batch_works(run.update, run.model, shape, platform) for shape in (step.shape, largest))
    by_name: dict[str, list[Program]] = {}
    for program in programs:
        by_name.setdefault(program.name, []).append(program)
    compiled = {name: _corrected(planned[name], of_largest[name], same, run) for name, same in by_name.items()}
    return compiled or planned


def _corrected(
    planned: ProgramWork, of_largest: ProgramWork, programs: Sequence[Program], run: PlannedRun
) -> ProgramWork:
    compiled_flops = sum(program.flops for program in programs) / run.num_devices
    flops = planned.flops * compiled_flops / of_largest.flops if of_largest.flops else 0.0
    ratio = planned.sent_bytes / of_largest.sent_bytes if of_largest.sent_bytes else 1.0
    collectives = tuple(
        replace(each, num_bytes=round(each.num_bytes * ratio))
        for program in programs
        for each in program.collectives or ()
    )
    return ProgramWork(flops, planned.memory_bytes, collectives or planned.collectives)


def _collective_bytes(works: Mapping[str, ProgramWork], step: Step) -> dict[str, int]:
    return bytes_by_kind(
        [
            replace(each, num_bytes=step.num_runs(name) * each.num_bytes)
            for name, work in works.items()
            for each in work.collectives
        ]
    )
