"""A plan as text for a terminal, and rows of cells in columns."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from paravt_jax.config import Config
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.memory import Memory, Parts
from paravt_jax.plan.plan import Plan, make_plan, model_config

MIB, GIB = 2**20, 2**30
COLUMNS = 100


def plan_of(config: Config, device: str = "h100") -> str:
    """The plan of a config as text, for a device by its name."""
    if device not in DEVICES:
        raise ValueError(f"--device {device} is not known; known are {', '.join(DEVICES)}")
    model, remarks = model_config(config.model.path)
    plan = make_plan(config, model, device=DEVICES[device])
    return render(replace(plan, assumptions=(*remarks, *plan.assumptions)))


def render(plan: Plan) -> str:
    """For a terminal of 100 columns."""
    mesh, device = plan.mesh, plan.device
    devices = f"{mesh.num_devices} x {device.name}" + (f" of {device.memory_gib} GiB" if device.memory_gib else "")
    blocks = [
        [f"{devices}, mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"],
        ["parameters", *_aligned([[name, f"{count:,}"] for name, count in vars(plan.params).items()])],
        _memory_lines(plan.memory),
        _step_lines(plan),
        ["what fits", *_wrapped(_fit_lines(plan))],
        ["assumed", *_wrapped(plan.assumptions)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


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
        ["seconds of the update", _seconds(None if plan.update is None else plan.update.total)],
        *([f"  {part}", _seconds(value)] for part, value in (plan.update._asdict() if plan.update else {}).items()),
        ["seconds of the rollout, at least", _seconds(plan.rollout_s)],
    ]
    return ["a typical step", *_aligned(rows)]


def _fit_lines(plan: Plan) -> Iterator[str]:
    fit, batch, device = plan.fit, plan.batch, plan.device
    if fit.fits is None:
        yield f"not judged: the memory of {device.name} is not known"
        return
    peak_gib, usable_gib = plan.memory.peak_bytes / GIB, device.usable_bytes / GIB
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
