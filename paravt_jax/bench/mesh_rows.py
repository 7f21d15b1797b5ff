"""Compares meshes, measured or estimated: the run on each mesh, its row, and the table of all rows.

Estimates compile the update ahead of time for other devices, without having them.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from model_port.config import ModelConfig, preset
from model_port.terminal import markdown_table, say
from paravt_jax.bench.mesh_case import config_of, name_of, shapes_of
from paravt_jax.bench.models import MODELS
from paravt_jax.config import Config, MeshConfig, SftConfig, load_training_config
from paravt_jax.plan.calibrate import calibrated
from paravt_jax.plan.devices import DeviceSpec, Rates
from paravt_jax.plan.meshes import MeshEstimate, Shape, estimate
from paravt_jax.plan.plan import MAX_DEVICES, assumed_of_seconds, model_config, next_power_of_two, on_fitting_mesh
from paravt_jax.plan.remat import with_remat
from paravt_jax.plan.roofline import StepSeconds
from paravt_jax.plan.run import PlannedRl, PlannedRun, planned_run
from paravt_jax.plan.step_time import PUBLISHED, Interval, StepRates, step_time
from paravt_jax.plan.topology import topology
from paravt_jax.plan.workload import Step, full_step

Row = dict[str, Any]
SIMILAR_FRAC = 0.01  # difference between step times that the plan cannot resolve
MEASURED = ("tokens", "update_s", "device_tokens_per_s", "efficiency")  # keys of a row that are null if nothing ran


@dataclass(frozen=True)
class BenchedRun:
    """The run to benchmark on every mesh, from a config file or a few flags."""

    title: str
    model: ModelConfig
    remarks: tuple[str, ...]
    args: argparse.Namespace
    config: Config | SftConfig | None  # the config file's settings
    rates: StepRates = dataclasses.field(default_factory=lambda: PUBLISHED)

    @property
    def dtype(self) -> str:
        return self.args.dtype if self.config is None else self.config.model.dtype

    @property
    def num_steps(self) -> int:
        """Steps of the config's run; 0 without a config."""
        if self.config is None:
            return 0
        return self.config.sft.num_steps if isinstance(self.config, SftConfig) else self.config.train.num_steps

    @property
    def server_gpus(self) -> list[int]:
        """GPUs of the servers that the run starts on the learner's machine."""
        return self.config.engine.gpus if isinstance(self.config, Config) else []

    def calibrated_on(self, device: DeviceSpec) -> "BenchedRun":
        """Applies the rates in another run's log, if `--calibrate` names one."""
        if not self.args.calibrate:
            return self
        if isinstance(self.config, SftConfig):
            raise ValueError("--calibrate has rates of rollouts, which a config for SFT does not have")
        calibration = calibrated(Path(self.args.calibrate), device)
        replaced = ", ".join(str(rate) for name, rate in calibration.rates.items() if name not in calibration.kept)
        remark = f"rates from {calibration.source}: {replaced}; the others are published"
        return dataclasses.replace(self, rates=calibration.rates, remarks=(*self.remarks, remark))

    def on(self, shape: Shape, device: DeviceSpec) -> tuple[PlannedRun, Step]:
        if self.config is None:
            args = self.args
            config = config_of(shape, rows=args.rows, row_tokens=args.row_tokens, dtype=args.dtype, remat=args.remat)
            run = PlannedRl.of(config, self.model).on_device(device)
            return run, full_step(run.largest_batch())
        run = planned_run(self.config, self.model).on_mesh(MeshConfig(*shape)).on_device(device)
        return run, run.typical_step()


def estimated_on(
    shape: Shape, run: BenchedRun, device: DeviceSpec, devices: Any | None, rates: Rates | None = None
) -> tuple[PlannedRun | None, Step | None, MeshEstimate]:
    """Estimates the run on this mesh. The estimate has a problem if the run rejects the mesh."""
    own, step = None, None
    try:
        own, step = run.on(shape, device)
        own = with_remat(own, device)
        estimated = estimate(own, step, device, devices, rates)
        if run.config is not None and isinstance(own, PlannedRl) and estimated.fits:
            run_step = step_time(own, device, estimated.est_step_s, run.rates)
            estimated = dataclasses.replace(estimated, run_step_s=run_step.seconds if run_step else None)
        return own, step, estimated
    except ValueError as problem:
        return own, step, MeshEstimate(shape, problem=str(problem))


def benched_run(args: argparse.Namespace) -> BenchedRun:
    if args.config is None:
        tokens = f"{args.rows} x {args.row_tokens} tokens per data and fsdp part"
        title = f"{args.model}, {args.dtype}, remat {args.remat}, {tokens}"
        model = MODELS[args.model]() if args.model in MODELS else preset(args.model)
        return BenchedRun(title, model, (), args, None)
    config = load_training_config(args.config, *args.overrides)
    model, remarks = model_config(config.model.path)
    if isinstance(config, Config) and config.engine.urls:
        remarks = (*remarks, "the servers of engine.urls use other devices, which are not in the price")
    return BenchedRun(" ".join(map(str, [args.config, *args.overrides])), model, remarks, args, config)


def estimated_meshes(args: argparse.Namespace) -> dict[str, Any]:
    """Estimates memory, time and price on every mesh of other devices."""
    jax.config.update("jax_platforms", "cpu")  # compilation needs no device
    target = topology(args.topology)
    run = benched_run(args).calibrated_on(target.device)
    learner = target.without_gpus(run.server_gpus)
    remarks = [*run.remarks, *servers_remark(run.server_gpus, len(learner))]
    remarks += assumed_of_seconds(target.device, run.dtype, len(learner))
    everything = None if args.plan_only else target.devices()
    devices = None if everything is None else [everything[number] for number in learner]
    rows = []
    for shape in shapes_of(args, len(learner)):
        if devices is not None:
            say(f"{name_of(shape)}: compiling")
        own, _, mesh_estimate = estimated_on(shape, run, target.device, devices)
        rows.append(row_of(mesh_estimate, own, run, target.num_hosts))
        say(f"{name_of(shape)}: {summary(rows[-1])}")
    about = {"device": target.device.name, "num_devices": len(learner), "num_hosts": target.num_hosts}
    return result_of(run, rows, about, remarks, target.device)


def result_of(
    run: BenchedRun, rows: Sequence[Row], about: dict[str, Any], assumed: Sequence[str], device: DeviceSpec
) -> dict[str, Any]:
    """The benchmark's result. `about` names the devices."""
    unknown = {f"{name} is unknown: {why}" for row in rows for name, why in row["unknown"].items()}
    return {
        "title": run.title,
        "topology": run.args.topology,
        **about,
        "price": run.args.price,
        "num_steps": run.num_steps,
        "assumed": [*assumed, *sorted(unknown)],
        "rows": in_order(rows),
        "problem": problem_of(rows, run, device, about["num_devices"]),
    }


def servers_remark(gpus: Sequence[int], num_devices: int) -> Iterator[str]:
    """Reports the devices that the run's servers leave free; raises ValueError if none are free."""
    if gpus and not num_devices:
        raise ValueError(f"engine.gpus={list(gpus)} leaves no device for the learner")
    if gpus:
        yield f"engine.gpus={list(gpus)} are for servers; {num_devices} devices remain for the learner"


def row_of(estimated: MeshEstimate, own: PlannedRun | None, run: BenchedRun, num_hosts: int) -> Row:
    """Makes a mesh's row. `own` is the run on that mesh, if possible; `num_hosts` also counts hosts of servers."""
    price, tokens_per_s, price_of_mtokens = run.args.price, estimated.tokens_per_s, None
    if price is not None and tokens_per_s is not None:
        price_of_mtokens = price * math.prod(estimated.mesh) / 3600 / tokens_per_s * 1e6
    return {
        **dataclasses.asdict(estimated),
        "run_step_s": estimated.run_step_s and list(estimated.run_step_s),
        "seconds": None if estimated.seconds is None else estimated.seconds._asdict(),
        "num_rows": None if own is None else own.pack.num_rows,
        "price_per_mtokens": price_of_mtokens,
        "run_price": _price_of_run(price, estimated, run, num_hosts),
    }


def _price_of_run(price: float | None, estimated: MeshEstimate, run: BenchedRun, num_hosts: int) -> list[float] | None:
    """The price of all steps on all devices of learner and servers. For SFT, a step is an update."""
    update_s = estimated.est_step_s if isinstance(run.config, SftConfig) and estimated.fits else None
    step_s = (update_s, update_s) if update_s is not None else estimated.run_step_s
    if price is None or step_s is None:
        return None
    rented = math.prod(estimated.mesh) + num_hosts * len(run.server_gpus)
    return [price * rented * run.num_steps * seconds / 3600 for seconds in step_s]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows: fitting meshes first, then by most devices, then by speed (of the whole step if known)."""
    return sorted(rows, key=lambda row: (not row["fits"], -math.prod(row["mesh"]), _slowness(row)))


def _slowness(row: Row) -> float:
    if row["run_step_s"] is not None:
        return Interval(*row["run_step_s"]).middle
    return -(row["tokens_per_s"] or 0.0)


def _on_all(rows: Iterable[Row], num_devices: int) -> list[Row]:
    """The rows of fitting meshes that use all devices."""
    return [row for row in rows if row["fits"] and math.prod(row["mesh"]) == num_devices]


def problem_of(rows: Iterable[Row], run: BenchedRun, device: DeviceSpec, num_devices: int) -> str | None:
    """The problem if no mesh of all devices fits, with changes that would fit."""
    if _on_all(rows, num_devices):
        return None
    resized = on_fitting_mesh(run.on((1, 1, 1), device)[0], device, next_power_of_two(num_devices))
    if resized is None:
        more = f"neither does one of up to {MAX_DEVICES}; use devices with more memory"
    else:
        mesh = resized.update.mesh
        more = f"{name_of((mesh.data, mesh.fsdp, mesh.tensor))} with {resized.pack.num_rows} rows would"
    other = "set a smaller --row-tokens" if run.config is None else "see the changes that --plan of the run lists"
    return f"no mesh of {num_devices} x {device.name} fits; {more}, or {other}"


def summary(row: Row) -> str:
    """Summarizes a row for progress output."""
    if row["problem"]:
        return row["problem"]
    compiled = "" if row["compile_s"] is None else f", compiled in {row['compile_s']:.0f} s"
    step_s, estimated = row.get("update_s"), row["est_step_s"]
    update = f"{estimated:.2f} s" if step_s is None else f"{step_s:.3f} s measured"
    return f"{_gib(row['hbm_gib'])} GiB{compiled}, an update in {update}"


def page(result: dict[str, Any]) -> Iterator[str]:
    """Yields the report: fitting meshes, fastest first; rejected meshes; assumptions; the recommended mesh."""
    fitting, columns = [row for row in result["rows"] if row["fits"]], _columns(result)
    hosts = f" on {result['num_hosts']} hosts" * (result["num_hosts"] > 1)
    yield f"{result['title']}, {result['num_devices']} x {result['device']}{hosts}"
    yield ""
    if fitting:
        yield markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in fitting])
        yield ""
    for row in result["rows"]:
        if row["problem"]:
            yield f"rejected: {name_of(row['mesh'])}, {row['problem']}"
    yield from (f"assumed: {assumed}" for assumed in result["assumed"])
    full = _on_all(fitting, result["num_devices"])
    if not full:
        return
    most = (1 + SIMILAR_FRAC) * _slowness(full[0])
    if similar := [name_of(row["mesh"]) for row in full[1:] if row["run_step_s"] and _slowness(row) <= most]:
        yield f"within {SIMILAR_FRAC:.0%} of the fastest step: {', '.join(similar)}"
    yield f"recommended: {name_of(full[0]['mesh'])}"


def _columns(result: dict[str, Any]) -> dict[str, Callable[[Row], str]]:
    measured = result["topology"] is None
    columns: dict[str, Callable[[Row], str]] = {
        "data x fsdp x tensor": lambda row: name_of(row["mesh"]),
        "rows": lambda row: str(row["num_rows"]),
        "GiB": lambda row: _gib(row["hbm_gib"]),
    }
    if any(row["compile_s"] is not None for row in result["rows"]):
        columns["compile s"] = lambda row: _formatted(row["compile_s"], 0)
    if measured:
        columns["update s"] = lambda row: _formatted(row["update_s"], 3)
    if any(row["run_step_s"] for row in result["rows"]):
        columns["step s"] = lambda row: str(Interval(*row["run_step_s"]))
    columns["estimated s" if measured else "update s"] = lambda row: _formatted(row["est_step_s"], 3 if measured else 2)
    for part in StepSeconds._fields:
        columns[part] = lambda row, part=part: _formatted((row["seconds"] or {}).get(part), 3 if measured else 2)
    columns["tokens/s a device"] = lambda row: f"{row['tokens_per_s'] / math.prod(row['mesh']):,.0f}"
    if measured:
        columns["efficiency"] = lambda row: _formatted(row["efficiency"], 2)
    if result["price"]:
        columns["price of 1M tokens"] = lambda row: _formatted(row["price_per_mtokens"], 2)
    if any(row["run_price"] for row in result["rows"]):
        columns[f"price of {result['num_steps']} steps"] = lambda row: str(Interval(*row["run_price"]))
    return columns


def _formatted(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _gib(gib: float) -> str:
    """Formats GiB with enough digits for the tiny model."""
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.3f}"
