"""A plan as text for a terminal, and rows of cells in columns."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from paravt_jax.config import Config, MeshConfig, SftConfig, computed_on
from paravt_jax.plan.batch import BatchShape
from paravt_jax.plan.devices import DEVICES, DeviceSpec
from paravt_jax.plan.hosts import HostPart, num_hosts
from paravt_jax.plan.imitation import ImitationPlan, make_imitation_plan
from paravt_jax.plan.memory import Memory, Parts
from paravt_jax.plan.plan import Fit, Plan, make_plan, model_config
from paravt_jax.plan.rollouts import DeviceSplit, RolloutPlan, make_rollout_plan
from paravt_jax.plan.service import load_service
from rollout.output_file import OutputFile

Planned = TypeVar("Planned", Config, SftConfig)
MIB, GIB = 2**20, 2**30
COLUMNS = 100


def plan_of(config: Config, device: str = "h100", service: Path | None = None, png: OutputFile | None = None) -> str:
    """The plan of a config as text, for a device by its name.

    `service` is a file of measured service times of the engine, in place of the device's; `png` one to draw in.
    """
    config, remarks = _used_on(config, device)
    model, more = model_config(config.model.path)
    plan, remarks = make_plan(config, model, device=_known(device)), (*remarks, *more)
    rollouts = make_rollout_plan(config, model, plan, None if service is None else load_service(service))
    if png is not None:
        _draw(config, plan, rollouts, png)
    assumptions = (*remarks, *plan.assumptions, *(() if rollouts is None else rollouts.assumptions))
    return render(replace(plan, assumptions=assumptions), rollouts)


def imitation_plan_of(config: SftConfig, device: str = "h100", png: OutputFile | None = None) -> str:
    """The same of a cold start."""
    config, remarks = _used_on(config, device)
    model, more = model_config(config.model.path)
    plan, remarks = make_imitation_plan(config, model, _known(device)), (*remarks, *more)
    if png is not None:
        _draw_imitation(plan, png)
    return render_imitation(replace(plan, assumptions=(*remarks, *plan.assumptions)))


def _used_on(config: Planned, device: str) -> tuple[Planned, tuple[str, ...]]:
    """The settings that a run there computes with, and a remark where they are others than were written."""
    used = computed_on(config, _known(device).platform)
    if used is config:
        return config, ()
    return used, (f"computed in {used.model.dtype}: a CPU is slower in {config.model.dtype}, and takes more memory",)


def _known(device: str) -> DeviceSpec:
    if device not in DEVICES:
        raise ValueError(f"--device {device} is not known; known are {', '.join(DEVICES)}")
    return DEVICES[device]


def _draw(config: Config, plan: Plan, rollouts: RolloutPlan | None, png: OutputFile) -> None:
    if rollouts is None or plan.update_s is None:
        raise ValueError(f"--png {png.path} has nothing to compare: the seconds of {plan.device.name} are not known")
    if len(rollouts.splits) < 2:
        total = f"{rollouts.now.num_devices} x {plan.device.name}"
        raise ValueError(f"--png {png.path} has nothing to compare: {_only_split(rollouts.now, total)}")
    from paravt_jax.plan.plots import draw_splits  # late: matplotlib takes a second

    with png.partial() as file:
        draw_splits(rollouts, f"{rollouts.now.num_devices} x {plan.device.name}, {config.model.path}", file)


def _only_split(now: DeviceSplit, total: str) -> str:
    """Why so many devices are shared out in one way."""
    if not now.server_devices:
        return f"with engine.kind=jax all of {total} learn and sample, so there is one way to share them"
    return (
        f"{total} can be shared in one way only, {_devices(now)}: no learner on another number of them fits beside a "
        f"server, and no other mesh of {now.mesh.num_devices} is quicker"
    )


def _draw_imitation(plan: ImitationPlan, png: OutputFile) -> None:
    if plan.device.rates(plan.config.model.dtype) is None:
        raise ValueError(f"--png {png.path} has nothing to draw: the seconds of {plan.device.name} are not known")
    from paravt_jax.plan.plots import draw_imitation  # late: matplotlib takes a second

    title = f"{plan.config.mesh.num_devices} x {plan.device.name}, {plan.config.model.path}"
    with png.partial() as file:
        draw_imitation(plan, title, file)


def render(plan: Plan, rollouts: RolloutPlan | None = None) -> str:
    """For a terminal of 100 columns."""
    blocks = [
        [_title(plan.mesh, plan.device, plan.host.num_hosts)],
        ["parameters", *_aligned([[name, f"{count:,}"] for name, count in vars(plan.params).items()])],
        _memory_lines(plan.memory),
        _step_lines(plan),
        *([_host_lines(plan.host)] if plan.host.num_hosts > 1 else []),
        _simulated_lines(plan, rollouts),
        ["what fits", *_wrapped(_fit_lines(plan.fit, plan.batch, plan.memory, plan.device))],
        ["assumed", *_wrapped(plan.assumptions)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def render_imitation(plan: ImitationPlan) -> str:
    """For a terminal of 100 columns."""
    batch = plan.step.shape
    rows = [["rows", "batches", "tokens", "PFLOP", "seconds", ""]]
    for step in plan.steps:
        pflop = step.num_batches * sum(plan.flops.values()) / 1e15
        remark = "sft.rows_per_step" if step.num_rows == plan.config.sft.rows_per_step else ""
        tokens = f"{step.num_rows * batch.row_tokens:,}"
        rows.append([str(step.num_rows), str(step.num_batches), tokens, f"{pflop:.2f}", _seconds(step.seconds), remark])
    mesh, hosts = plan.config.mesh, plan.config.hosts
    blocks = [
        [_title(mesh, plan.device, num_hosts(hosts, mesh.num_devices, plan.device))],
        ["parameters", *_aligned([[name, f"{count:,}"] for name, count in vars(plan.params).items()])],
        _memory_lines(plan.memory),
        ["a step by its rows", *_aligned(rows)],
        ["what fits", *_wrapped(_fit_lines(plan.fit, batch, plan.memory, plan.device))],
        ["assumed", *_wrapped(plan.assumptions)],
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

    def shown(num_bytes: int) -> str:
        return f"{num_bytes / unit:.2f}"

    def lines(parts: Parts) -> list[list[str]]:
        """Largest first, without what rounds to nothing."""
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        return [[f"  {part}", shown(num_bytes)] for part, num_bytes in ordered if num_bytes >= unit / 200]

    worst = memory.worst
    rows = [
        ["always", shown(sum(memory.resident.values()))],
        *lines(memory.resident),
        [f"in the worst phase: {worst.name}", shown(worst.num_bytes)],
        *lines(worst.parts),
        ["peak", shown(memory.peak_bytes)],
    ]
    others = ", ".join(f"{phase.name} {shown(phase.num_bytes)}" for phase in memory.phases if phase is not worst)
    return [f"memory of a device, {name}", *_aligned(rows), *_wrapped([f"other phases: {others}"])]


def _step_lines(plan: Plan) -> list[str]:
    work, total = plan.workload, sum(plan.flops.values())
    unit, name = next(
        ((unit, name) for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP")) if total >= unit), (1e9, "GFLOP")
    )
    rows = [
        ["tokens of the update, a prompt once for its group", f"{work.shared_tokens:,}"],
        ["  with a row for each episode they would be", f"{work.separate_tokens:,}"],
        [
            f"  computed, in {work.computed_rows} rows of {work.row_tokens:,}",
            f"{work.computed_rows * work.row_tokens:,}",
        ],
        ["tokens sampled", f"{work.sampled_tokens:,}"],
        [name, f"{total / unit:,.2f}"],
        *([f"  {part}", f"{value / unit:,.2f}"] for part, value in plan.flops.items()),
        ["seconds of the update", _seconds(plan.update_s)],
        *([f"  {part}", _seconds(value)] for part, value in (plan.update._asdict() if plan.update else {}).items()),
    ]
    return ["a typical step", *_aligned(rows)]


def _host_lines(host: HostPart) -> list[str]:
    rows = [
        ["rows of a batch", f"{host.rows:,}"],
        ["visits of a step, at most", f"{host.visits:,}"],
        ["frames that it decodes for them", f"{host.frames:,}"],
        ["GiB of a checkpoint", f"{host.checkpoint_bytes / GIB:.1f}"],
        ["MB that it hears of the others", f"{host.heard_bytes / 1e6:.1f}"],
    ]
    return [f"each of {host.num_hosts} hosts", *_aligned(rows)]


def _simulated_lines(plan: Plan, rollouts: RolloutPlan | None) -> list[str]:
    if rollouts is None:
        return ["a step of the run", "  not simulated: no service times are known"]
    known = plan.update_s is not None
    head = ["learner + servers", "rollout", "update", "publish", "step", "idle", ""]
    rows = [head, *(_split_cells(split, rollouts, known) for split in rollouts.splits or (rollouts.now,))]
    bound = f"bound by {rollouts.best.times.bound_by}"
    if not known:
        bound = "at least: the seconds of the update are not known"
    elif rollouts.splits and rollouts.best != rollouts.now:
        bound = f"take {_devices(rollouts.best)}, {bound}: {rollouts.now.times.step_s:.1f} s as the config has it"
    source = "measured service times" if rollouts.measured else f"the table of {plan.device.name}"
    return [f"a step of the run, simulated with {source}, seconds", *_aligned(rows), f"  {bound}"]


def _split_cells(split: DeviceSplit, rollouts: RolloutPlan, known: bool) -> list[str]:
    times = split.times
    remark = "config" if split == rollouts.now and rollouts.splits else ""
    seconds = [times.rollout_s, times.update_s if known else None, times.publish_s, times.step_s]
    return [_devices(split), *map(_seconds, seconds), f"{split.idle_frac:.0%}", remark]


def _devices(split: DeviceSplit) -> str:
    mesh = f"{split.mesh.data} x {split.mesh.fsdp} x {split.mesh.tensor}"
    if not split.server_devices:
        return f"{mesh}, which sample too"
    return f"{mesh} + {split.num_servers}" + f" of {split.server_devices}" * (split.server_devices > 1)


def _fit_lines(fit: Fit, batch: BatchShape, memory: Memory, device: DeviceSpec) -> Iterator[str]:
    if fit.fits is None:
        yield f"not judged: the memory of {device.name} is not known"
        return
    peak_gib, usable_gib = memory.peak_bytes / GIB, device.usable_bytes / GIB
    verdict = "fits" if fit.fits else "DOES NOT FIT"
    yield f"{batch.num_rows} x {batch.row_tokens:,} tokens {verdict}: {peak_gib:.2f} of {usable_gib:.1f} GiB"
    yield f"largest pack.row_tokens with pack.num_rows={batch.num_rows}: {fit.row_tokens or 'none'}"
    yield f"largest pack.num_rows with pack.row_tokens={batch.row_tokens}: {fit.num_rows or 'none'}"
    for advice in fit.advice:
        yield f"enough: {advice}"


def _seconds(value: float | None) -> str:
    return "not estimated" if value is None else f"{value:.1f}"


def aligned(rows: list[list[str]]) -> str:
    """Rows of cells as text: the first column flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
