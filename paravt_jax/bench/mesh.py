"""An update of the policy on every mesh: measured on the devices of this machine, or of devices that are not here.

Measured, every part of a mesh that rows are split over gets as many rows, so the work grows with data and fsdp.
Efficiency is a device's tokens a second against those of one device alone; the devices of a CPU share its cores. Memory
is the compiler's own analysis of the largest program, beside the plan's estimate of the same. Of devices that are not
here (`--topology`) everything is what their compiler says of the programs, and seconds are an estimate from it.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from model_port.config import PRESETS, ModelConfig
from paravt_jax.bench.learner import MODELS
from paravt_jax.bench.mesh_case import (
    SETTINGS,
    compiled_programs,
    config_of,
    line,
    make_learner,
    model_of,
    name_of,
    planned_program_bytes,
    program_bytes,
    settings_of,
    shapes_of,
    table_of,
    title_of,
)

if TYPE_CHECKING:
    from paravt_jax.plan.devices import Rates
    from paravt_jax.plan.plan import Plan
    from paravt_jax.plan.update import PlannedUpdate

CPU_DEVICES = 8  # by default, where there is no accelerator
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=[*MODELS, *PRESETS], help="default tiny")
    parser.add_argument("--devices", type=int, metavar="N", help=f"default: all; on a CPU, {CPU_DEVICES}")
    parser.add_argument("--rows", type=int, help="for every part that rows are split over (default 1)")
    parser.add_argument("--row-tokens", type=int, help="default 1024")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--remat", choices=["none", "full", "dots", "attention", "offload"], help="default full")
    parser.add_argument("--repeats", type=int, default=5, help="timed updates; the median counts")
    parser.add_argument("--mesh", metavar="D,F,T", help="this one alone: data, fsdp, tensor (default: every one)")
    parser.add_argument("--topology", metavar="NAME", help="devices that are not here, as h100:8 or v5p:2x2x2")
    parser.add_argument("--plan-only", action="store_true", help="with --topology: estimate, and compile nothing")
    parser.add_argument("--config", metavar="FILE", help="with --topology: the run of this file, not of these flags")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings, after those of the file")
    parser.add_argument("--price", type=float, help="with --topology: of a device for an hour, in any currency")


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    if args.config is None:
        for name, value in SETTINGS.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if args.topology is None:
        return _measured_meshes(args)
    from paravt_jax.bench.elsewhere import estimated_meshes

    return estimated_meshes(args)


def _check(args: argparse.Namespace) -> None:
    for name in ("devices", "rows", "row_tokens", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(args, name)} must be at least 1")
    if args.row_tokens is not None and args.row_tokens < 64:
        raise ValueError(f"--row-tokens {args.row_tokens} must be at least 64, the tokens of a frame and a few more")
    if args.price is not None and not args.price > 0:
        raise ValueError(f"--price {args.price} must be above 0")
    for name in ("devices",) if args.topology else ("plan_only", "config", "overrides", "price"):
        if getattr(args, name):
            raise ValueError(f"{_flag(name)} {'does nothing with' if args.topology else 'needs'} --topology")
    for name in SETTINGS if args.config else ():
        if getattr(args, name) is not None:
            raise ValueError(f"{_flag(name)} does nothing with --config, whose file says it")
    if args.overrides and not args.config:
        raise ValueError(f"{args.overrides[0]} changes a setting of --config FILE, and there is none")


def _flag(name: str) -> str:
    return "a.b=c" if name == "overrides" else f"--{name.replace('_', '-')}"


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    if "topology" in result:
        from paravt_jax.bench.elsewhere import estimated_lines

        return "\n".join(estimated_lines(result))
    rows = table_of(MEASURED_HEAD, [_cells(row) for row in result["rows_measured"]])
    return "\n".join([f"{title_of(result)}, {result['device']}", "", *rows])


MEASURED_HEAD = (
    "data x fsdp x tensor",
    "tokens",
    "compile s",
    "update s",
    "estimated s",
    "tokens/s a device",
    "efficiency",
    "MiB",
    "MiB by plan",
)


def _shown(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _cells(row: dict[str, Any]) -> list[str]:
    if "problem" in row:
        return [name_of(row["mesh"]), row["problem"], *[""] * (len(MEASURED_HEAD) - 2)]
    return [
        name_of(row["mesh"]),
        str(row["tokens"]),
        f"{row['compile_s']:.1f}",
        f"{row['update_s']:.3f}",
        _shown(row["est_step_s"], 3),
        f"{row['device_tokens_per_s']:.0f}",
        _shown(row["efficiency"], 2),
        f"{row['compiled_bytes'] / MIB:.1f}",
        f"{row['planned_bytes'] / MIB:.1f}",
    ]


def _measured_meshes(args: argparse.Namespace) -> dict[str, Any]:
    model, count = model_of(args), args.devices or CPU_DEVICES
    # Before jax starts a backend. The flag concerns CPUs only, and the last one counts.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    import jax

    devices = jax.devices()
    num_devices = args.devices or len(devices)
    if num_devices > len(devices):
        raise ValueError(f"--devices {num_devices}: there are {len(devices)} of {devices[0].device_kind}")
    rates, rows = _rates(args.dtype), []
    for shape in dict.fromkeys([(1, 1, 1), *shapes_of(args, num_devices)]):
        rows.append({"mesh": shape, **_measured(args, model, shape, rates)})
        if "update_s" in rows[-1]:
            rows[-1]["efficiency"] = rows[-1]["device_tokens_per_s"] / rows[0]["device_tokens_per_s"]
        print(line(_cells(rows[-1])), file=sys.stderr, flush=True)
    found = None if rates is None else dataclasses.asdict(rates)
    return {**settings_of(args), "device": devices[0].device_kind, "rates": found, "rows_measured": rows}


def _rates(dtype: str) -> "Rates | None":
    """Of a device of this machine: by its data sheet, or of a CPU as a large product and a large sum are measured."""
    import jax
    import jax.numpy as jnp

    from paravt_jax.plan.devices import DEVICES, Rates

    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return next((device.rates(dtype) for device in DEVICES.values() if device.kind == kind), None)
    square, long = jnp.ones((2048, 2048), dtype), jnp.ones(2**26, jnp.float32)
    flops = 2 * 2048**3 / _best_s(jax.jit(jnp.matmul), square, square)
    memory_bytes = 2 * long.nbytes / _best_s(jax.jit(lambda x: x + 1), long)
    return Rates(flops, memory_bytes, memory_bytes / 2)  # what is sent is read and written


def _best_s(function: Callable[..., Any], *arguments: Any) -> float:
    import jax

    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _measured(
    args: argparse.Namespace, model: ModelConfig, shape: tuple[int, int, int], rates: "Rates | None"
) -> dict[str, Any]:
    from model_port.sharding import make_mesh
    from paravt_jax.learner.learner import StepPart
    from paravt_jax.learner.variants import StepCounts
    from paravt_jax.plan.batch import make_batch
    from paravt_jax.plan.devices import DEVICES
    from paravt_jax.plan.plan import make_plan
    from paravt_jax.plan.update import update_of

    config = config_of(shape, rows=args.rows, row_tokens=args.row_tokens, dtype=args.dtype, remat=args.remat)
    try:
        plan = make_plan(config, model, device=DEVICES["cpu"])
    except ValueError as problem:
        return {"problem": str(problem)}
    mesh = make_mesh(*shape) if config.mesh.num_devices > 1 else None
    learner, batch = make_learner(config, model, mesh), make_batch(plan.batch, model)
    start = time.perf_counter()
    programs = compiled_programs(learner, batch)
    compile_s = time.perf_counter() - start
    seconds = []
    for turn in range(args.repeats + 1):
        start = time.perf_counter()
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], config.pack.num_rows)
        if turn:  # the first warms up
            seconds.append(time.perf_counter() - start)
    tokens = batch.text.tokens.size
    update_s = statistics.median(seconds)
    return {
        "tokens": tokens,
        "compile_s": compile_s,
        "update_s": update_s,
        "est_step_s": _expected_s(update_of(config), model, plan, rates),
        "device_tokens_per_s": tokens / update_s / config.mesh.num_devices,
        "compiled_bytes": max(map(program_bytes, programs.values())),
        "planned_bytes": planned_program_bytes(plan),
    }


def _expected_s(update: "PlannedUpdate", model: ModelConfig, plan: "Plan", rates: "Rates | None") -> float | None:
    """The devices of a CPU share what it can do."""
    import jax

    from paravt_jax.plan.roofline import batch_works, step_seconds
    from paravt_jax.plan.workload import full_step

    if rates is None:
        return None
    platform, step = jax.default_backend(), full_step(plan.batch)
    shared = rates.shared_by(update.mesh.num_devices) if platform == "cpu" else rates
    return step_seconds(batch_works(update, model, step.shape, platform), step, shared).total
