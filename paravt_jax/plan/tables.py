"""Formats a plan as text for a terminal."""

import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from model_port.terminal import aligned
from paravt_jax.config import Config, MeshConfig, PackConfig, SftConfig, computed_on
from paravt_jax.plan.calibrate import Calibration, calibrated
from paravt_jax.plan.devices import DEVICES, SLICES, DeviceSpec
from paravt_jax.plan.memory import Memory, Parts
from paravt_jax.plan.plan import Fit, Plan, make_plan, model_config
from paravt_jax.plan.run import PlannedRl, PlannedRun, planned_run
from paravt_jax.plan.step_time import PUBLISHED, StepTime

MIB, GIB = 2**20, 2**30
COLUMNS = 100


def plan_of(config: Config | SftConfig, device: str = "h100", run_dir: Path | None = None) -> str:
    """Formats the plan of a run on a device, optionally with the rates in another run's log."""
    name = SLICES.get(device, device).partition(":")[0]
    if name not in DEVICES:
        raise ValueError(f"--device {device} is unknown; choose one of {', '.join(DEVICES)}")
    spec = DEVICES[name]
    used = computed_on(config, spec.platform)
    model, remarks = model_config(used.model.path)
    if used is not config:
        slower = f"on a CPU {config.model.dtype} is slower and takes more memory"
        remarks = (f"computed in {used.model.dtype}: {slower}", *remarks)
    calibration = None if run_dir is None else calibrated(run_dir, spec)
    rates = PUBLISHED if calibration is None else calibration.rates
    return render(make_plan(planned_run(used, model), spec, rates), remarks, calibration)


def render(plan: Plan, remarks: Iterable[str] = (), calibration: Calibration | None = None) -> str:
    blocks = [
        [_title(plan.run.update.mesh, plan.device, plan.run.update.num_hosts)],
        ["parameters", *_aligned([[name, f"{count:,}"] for name, count in vars(plan.params).items()])],
        _memory_lines(plan.memory),
        _step_lines(plan),
        *([_host_lines(plan)] if plan.host_work and plan.run.update.num_hosts > 1 else []),
        *([] if calibration is None else [_calibration_lines(calibration)]),
        *([_step_time_lines(plan.step)] if isinstance(plan.run, PlannedRl) else []),
        ["what fits", *_wrapped([plan.remat, *_fit_lines(plan.fit, plan.run.pack, plan.memory, plan.device)])],
        ["assumptions", *_wrapped([*remarks, *plan.assumptions])],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _title(mesh: MeshConfig, device: DeviceSpec, hosts: int) -> str:
    devices = f"{mesh.num_devices} x {device.name}" + (f" of {device.memory_gib} GiB" if device.memory_gib else "")
    places = f"{devices} on {hosts} hosts" if hosts > 1 else devices
    return f"{places}, mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"


def _aligned(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows).splitlines()]


def _wrapped(lines: Iterable[str]) -> list[str]:
    wrap = partial(textwrap.wrap, width=COLUMNS, break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in wrap(line, initial_indent="  ", subsequent_indent="    ")]


def _memory_lines(memory: Memory) -> list[str]:
    unit, name = (GIB, "GiB") if memory.peak_bytes >= GIB else (MIB, "MiB")

    def formatted(num_bytes: int) -> str:
        return f"{num_bytes / unit:.2f}"

    def lines(parts: Parts) -> list[list[str]]:
        """Formats parts, largest first, without parts that round to zero."""
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        return [[f"  {part}", formatted(num_bytes)] for part, num_bytes in ordered if num_bytes >= unit / 200]

    phase_bytes = memory.phase_bytes
    worst = max(phase_bytes, key=phase_bytes.__getitem__)
    rows = [
        ["always resident", formatted(sum(memory.resident.values()))],
        *lines(memory.resident),
        [f"peak phase: {worst}", formatted(phase_bytes[worst])],
        *lines(memory.phases[worst]),
        ["peak", formatted(memory.peak_bytes)],
    ]
    other_phases = ", ".join(f"{name} {formatted(phase_bytes[name])}" for name in phase_bytes if name != worst)
    return [f"memory per device, {name}", *_aligned(rows), *_wrapped([f"other phases: {other_phases}"])]


def _step_lines(plan: Plan) -> list[str]:
    total = sum(plan.flops.values())
    unit, name = next(
        ((unit, name) for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP")) if total >= unit), (1e9, "GFLOP")
    )
    rows = [
        *_token_rows(plan.run),
        [name, f"{total / unit:,.2f}"],
        *([f"  {part}", f"{value / unit:,.2f}"] for part, value in plan.flops.items()),
        ["update seconds", _seconds(plan.update_s)],
        *([f"  {part}", _seconds(value)] for part, value in (plan.update._asdict() if plan.update else {}).items()),
    ]
    return ["a typical step", *_aligned(rows)]


def _token_rows(run: PlannedRun) -> list[list[str]]:
    step = run.typical_step()
    num_rows, row_tokens = step.num_batches * step.shape.num_rows, step.shape.row_tokens
    computed = [f"computed, in {num_rows} rows of {row_tokens:,}", f"{num_rows * row_tokens:,}"]
    if not isinstance(run, PlannedRl):
        return [["tokens " + computed[0], computed[1]]]
    work = run.work
    separate_tokens = work.num_episodes * (work.prompt_tokens + work.response_tokens) + work.subagent_tokens
    return [
        ["tokens of the update, each group's prompt once", f"{work.shared_tokens:,}"],
        ["  with one row per episode instead", f"{separate_tokens:,}"],
        ["  " + computed[0], computed[1]],
        ["tokens sampled", f"{work.sampled_tokens:,}"],
    ]


def _host_lines(plan: Plan) -> list[str]:
    rows = [[name, f"{n:,}" if isinstance(n, int) else f"{n:.1f}"] for name, n in plan.host_work.items()]
    return [f"per host, of {plan.run.update.num_hosts}", *_aligned(rows)]


def _calibration_lines(calibration: Calibration) -> list[str]:
    measured = [name for name in PUBLISHED if name not in calibration.kept]
    rows = [["", "published", "measured"]]
    rows += [[PUBLISHED[name].title, PUBLISHED[name].values, calibration.rates[name].values] for name in measured]
    by_reason = {
        why: [name for name in calibration.kept if calibration.kept[name] == why] for why in calibration.kept.values()
    }
    kept = [
        f"published: {'; '.join(PUBLISHED[name].title for name in names)}: {why}" for why, names in by_reason.items()
    ]
    remarks = [
        f"measured: {calibration.source}",
        "calls, requests and lengths are of its policy and data; an overview's time is of its videos and CPU",
    ]
    return ["rates", *_aligned(rows), *_wrapped([*remarks, *kept])]


def _step_time_lines(step: StepTime | None) -> list[str]:
    if step is None:
        return ["seconds per step", "  not estimated: the device has no data sheet"]
    rows = [["", "low", "high"], *([name, *map(_seconds, part)] for name, part in step.parts.items())]
    rows += [["a step", *map(_seconds, step.seconds)]]
    return ["seconds per step, with the best and worst rates", *_aligned(rows), *_wrapped([str(step)])]


def _fit_lines(fit: Fit, pack: PackConfig, memory: Memory, device: DeviceSpec) -> Iterator[str]:
    if fit.fits is None:
        yield f"not checked: the memory of {device.name} is unknown"
        return
    peak_gib, usable_gib = memory.peak_bytes / GIB, device.usable_bytes / GIB
    verdict = "fits" if fit.fits else "DOES NOT FIT"
    yield f"{pack.num_rows} x {pack.row_tokens:,} tokens {verdict}: {peak_gib:.2f} of {usable_gib:.1f} GiB"
    yield f"largest pack.row_tokens with pack.num_rows={pack.num_rows}: {fit.row_tokens or 'none'}"
    yield f"largest pack.num_rows with pack.row_tokens={pack.row_tokens}: {fit.num_rows or 'none'}"
    for advice in fit.advice:
        yield f"would fit: {advice}"


def _seconds(value: float | None) -> str:
    return "not estimated" if value is None else f"{value:.1f}"
