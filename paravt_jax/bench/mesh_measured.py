"""Measures an update on every mesh of this machine's devices, with the compiler's statistics.

A mesh that runs out of memory, in the plan, in the compiler or at run time, is rejected; the benchmark continues with
the next mesh. The largest batch that the config allows runs first; then a typical step is timed.
"""

import argparse
import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError

from model_port.sharding import make_mesh, platform
from model_port.terminal import say
from model_port.weights import num_params
from paravt_jax.bench.mesh_case import make_learner, name_of, shapes_of, take_step
from paravt_jax.bench.mesh_rows import (
    MEASURED,
    BenchedRun,
    Row,
    benched_run,
    estimated_on,
    result_of,
    row_of,
    servers_remark,
    summary,
)
from paravt_jax.config import Config, computed_on, written_dtype
from paravt_jax.learner.batch_shape import make_batch
from paravt_jax.plan.devices import NO_ROOM, DeviceSpec, Rates, device_of
from paravt_jax.plan.meshes import MeshEstimate, Shape
from paravt_jax.plan.plan import assumed_of_seconds
from paravt_jax.plan.run import PlannedRun
from paravt_jax.plan.workload import Step, full_step
from paravt_jax.run.gpu_assignment import place_servers, visible_gpus
from paravt_jax.run.process import claim_resources
from paravt_jax.run.start import describe_devices, find_devices, start_line

CPU_DEVICES = 8  # default without an accelerator
SHOWN_CHARS = 200
ONE_DEVICE = (1, 1, 1)


def measured_meshes(args: argparse.Namespace) -> dict[str, Any]:
    run = benched_run(args)
    if run.config is not None and run.config.hosts.coordinator:
        raise ValueError(
            f"hosts.coordinator={run.config.hosts.coordinator} needs several hosts; use --topology to estimate "
            "them, or add hosts.coordinator= to measure on this host"
        )
    of_servers = _prepare(run, args.devices or CPU_DEVICES)
    devices, device = find_devices(), device_here()
    run = run.calibrated_on(device)
    if run.config is not None:
        run = dataclasses.replace(run, config=computed_on(run.config, devices[0].platform))
    written = run.dtype if run.config is None else written_dtype(run.config)
    say(start_line(describe_devices(devices), num_params(run.model), run.dtype, written, model=run.title))
    num_devices = args.devices or len(devices)
    if num_devices > len(devices):
        raise ValueError(f"--devices {num_devices} exceeds the {len(devices)} {devices[0].device_kind} devices here")
    rates, rows = _rates(run.dtype), {}
    shapes = shapes_of(args, num_devices)
    for shape in dict.fromkeys([ONE_DEVICE, *shapes] if args.mesh is None else shapes):
        say(f"{name_of(shape)}: measuring")
        rows[shape] = _row(run, device, shape, rates)
        if rows[shape]["fits"] and rows.get(ONE_DEVICE, {}).get("fits"):
            alone = rows[ONE_DEVICE]["device_tokens_per_s"]
            rows[shape]["efficiency"] = rows[shape]["device_tokens_per_s"] / alone
        say(f"{name_of(shape)}: {summary(rows[shape])}")
    about = {"device": devices[0].device_kind, "num_devices": num_devices, "num_hosts": 1}
    assumed = [*run.remarks, *of_servers, *_assumed(device, run.dtype, rates, num_devices)]
    measured_rates = {"rates": None if rates is None else _finite(rates)}
    return result_of(run, [*rows.values()], about | measured_rates, assumed, device)


def _prepare(run: BenchedRun, num_cpu_devices: int) -> list[str]:
    """Sets memory, CPU devices and visible GPUs as a run would, before jax starts a backend. Returns remarks."""
    # Affects only CPUs; the last flag has precedence.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_cpu_devices}"
    os.environ["XLA_FLAGS"] = flags
    claim_resources()
    if not isinstance(run.config, Config) or not run.server_gpus:
        return []
    place_servers(run.config.engine, 0)
    return [*servers_remark(run.server_gpus, len(visible_gpus(os.environ, 0)))]


def device_here() -> DeviceSpec:
    """The plan's spec of this device. Unknown devices have no memory check and no estimated seconds."""
    kind = jax.devices()[0].device_kind
    return device_of(kind) or DeviceSpec(kind, kind, None, None, None, None, platform=platform())


def _rates(dtype: str) -> Rates | None:
    """This device's rates: from its data sheet; for a CPU, measured on a large matrix product and a large sum."""
    if jax.default_backend() != "cpu":
        return device_here().rates(dtype)
    square, long = jnp.ones((2048, 2048), dtype), jnp.ones(2**26, jnp.float32)
    flops = 2 * 2048**3 / _best_s(jax.jit(jnp.matmul), square, square)
    memory_bytes = 2 * long.nbytes / _best_s(jax.jit(lambda x: x + 1), long)
    return Rates(flops, memory_bytes, memory_bytes / 2)  # sent data is read and written


def _finite(rates: Rates) -> dict[str, float | None]:
    """Replaces infinite rates, for example to absent hosts, by None, because JSON has no infinity."""
    numbers = {name: rate for name, rate in vars(rates).items() if isinstance(rate, float)}
    return {name: rate if math.isfinite(rate) else None for name, rate in numbers.items()}


def _best_s(function: Callable[..., Any], *arguments: Any) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _assumed(device: DeviceSpec, dtype: str, rates: Rates | None, num_devices: int) -> list[str]:
    if rates is None or device.platform != "cpu":
        return list(assumed_of_seconds(device, dtype, num_devices))
    return [
        f"seconds: from {rates.flops / 1e12:.2f} TFLOP/s of a product and {rates.memory_bytes / 1e9:.0f} GB/s of a "
        "sum, measured at the start and shared by all CPU devices"
    ]


def _row(run: BenchedRun, device: DeviceSpec, shape: Shape, rates: Rates | None) -> Row:
    if rates is not None and device.platform == "cpu":
        rates = rates.shared_by(math.prod(shape))
    own, estimated = None, MeshEstimate(shape)
    measured: dict[str, float] = {}
    try:
        own, step, estimated = estimated_on(shape, run, device, jax.devices(), rates)
        if estimated.fits and own is not None and step is not None:
            measured = _measured(run, own, step)
    except JaxRuntimeError as problem:
        estimated = dataclasses.replace(estimated, fits=False, problem=no_room(problem))
    gc.collect()  # frees the memory of a mesh that did not fit
    # Measured values replace estimated ones.
    tokens_per_s = measured["tokens"] / measured["update_s"] if measured else None
    unknown = {name: why for name, why in estimated.unknown.items() if name != "tokens_per_s"}
    estimated = dataclasses.replace(estimated, tokens_per_s=tokens_per_s, unknown=unknown)
    return row_of(estimated, own, run, 1) | dict.fromkeys(MEASURED) | measured


def no_room(problem: RuntimeError) -> str:
    """The message of an out-of-memory error. Raises other errors again."""
    if NO_ROOM not in str(problem):
        raise problem
    return str(problem).partition("\n")[0][:SHOWN_CHARS]


def _measured(run: BenchedRun, own: PlannedRun, step: Step) -> dict[str, float]:
    update, num_devices = own.update, own.update.mesh.num_devices
    mesh = make_mesh(update.mesh.data, update.mesh.fsdp, update.mesh.tensor) if num_devices > 1 else None
    learner, largest = make_learner(update, run.model, mesh), own.largest_batch()
    take_step(learner, update, make_batch(largest, run.model), full_step(largest))
    seconds, batch = [], make_batch(step.shape, run.model)
    for turn in range(run.args.repeats + 1):
        start = time.perf_counter()
        take_step(learner, update, batch, step)
        if turn:  # the first turn warms up
            seconds.append(time.perf_counter() - start)
    update_s = statistics.median(seconds)
    tokens_per_s = step.num_tokens / update_s / num_devices
    return {"tokens": step.num_tokens, "update_s": update_s, "device_tokens_per_s": tokens_per_s}
