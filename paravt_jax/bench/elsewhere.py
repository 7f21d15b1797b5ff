"""An update on every mesh of devices that are not here: what fits, how fast it would be, what it would cost."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from omegaconf import OmegaConf

from model_port.config import ModelConfig
from paravt_jax.bench.mesh_case import config_of, model_of, name_of, settings_of, shapes_of, table_of, title_of
from paravt_jax.config import Config, MeshConfig, SftConfig, load_config
from paravt_jax.plan.meshes import MeshEstimate, Shape, estimate
from paravt_jax.plan.plan import assumed_of_seconds, config_on, model_config
from paravt_jax.plan.roofline import StepSeconds
from paravt_jax.plan.topology import Topology, topology
from paravt_jax.plan.workload import full_step, largest_batch, typical_step


def estimated_meshes(args: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # nothing of this computes, and compilers look for no device
    place = topology(args.topology)
    devices = None if args.plan_only else place.devices()
    config = None if args.config is None else _config(args)
    model, remarks = (model_of(args), ()) if config is None else model_config(config.model.path)
    rows = []
    for shape in shapes_of(args, place.num_devices):
        print(f"{name_of(shape)}: ", end="", file=sys.stderr, flush=True)
        rows.append(_row(args, config, model, place, devices, shape))
        print(_said(rows[-1]), file=sys.stderr, flush=True)
    dtype = args.dtype if config is None else config.model.dtype
    return {
        "title": title_of(settings_of(args)) if config is None else " ".join(map(str, [args.config, *args.overrides])),
        "topology": args.topology,
        "device": place.device.name,
        "num_devices": place.num_devices,
        "num_hosts": place.num_hosts,
        "price": args.price,
        "assumed": [*remarks, *assumed_of_seconds(place.device, dtype), *_unknowns(rows)],
        "rows": sorted(rows, key=_order),
    }


def estimated_lines(result: dict[str, Any]) -> Iterator[str]:
    """Meshes that fit, the fastest first; the others with what refuses them; what was assumed; which to take."""
    fitting = [row for row in result["rows"] if row["fits"]]
    head = ["data x fsdp x tensor", "rows", "GiB", "compile s", "step s", *StepSeconds._fields, "tokens/s a device"]
    hosts = f" on {result['num_hosts']} hosts" * (result["num_hosts"] > 1)
    yield f"{result['title']}, {result['num_devices']} x {result['device']}{hosts}"
    yield ""
    yield from table_of(head + ["price of 1M tokens"] * bool(result["price"]), [_cells(row, result) for row in fitting])
    yield ""
    for row in result["rows"]:
        if row["problem"]:
            yield f"refused: {name_of(row['mesh'])}, {row['problem']}"
    yield from (f"assumed: {assumed}" for assumed in result["assumed"])
    yield f"take {name_of(fitting[0]['mesh'])}" if fitting else "no mesh of these devices fits"


def _cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    compile_s = "" if row["compile_s"] is None else f"{row['compile_s']:.0f}"
    cells = [name_of(row["mesh"]), str(row["num_rows"]), f"{row['hbm_gib']:.1f}", compile_s]
    cells += [f"{seconds:.2f}" for seconds in (row["est_step_s"], *row["seconds"].values())]
    cells.append(f"{row['tokens_per_s'] / result['num_devices']:,.0f}")
    return [*cells, f"{row['price_per_mtokens']:.2f}"] if result["price"] else cells


def _config(args: argparse.Namespace) -> Config | SftConfig:
    """Of RL, or of imitation where the file has that section."""
    keys = OmegaConf.load(args.config) if Path(args.config).suffix != ".json" else {}
    return load_config(args.config, *args.overrides, schema=SftConfig if "sft" in keys else Config)


def _row(
    args: argparse.Namespace,
    config: Config | SftConfig | None,
    model: ModelConfig,
    place: Topology,
    devices: Any,
    shape: Shape,
) -> dict[str, Any]:
    num_rows = None
    try:
        if config is None:
            own = config_of(shape, rows=args.rows, row_tokens=args.row_tokens, dtype=args.dtype, remat=args.remat)
            step = full_step(largest_batch(own, model))
        else:
            own = config_on(config, MeshConfig(*shape))
            step = typical_step(own, model)
        num_rows = own.pack.num_rows
        found = estimate(own, model, step, place.device, devices)
    except ValueError as problem:
        found = MeshEstimate(shape, problem=str(problem))
    return {
        **dataclasses.asdict(found),
        "seconds": None if found.seconds is None else found.seconds._asdict(),
        "num_rows": num_rows,
        "price_per_mtokens": _price(args.price, found, place.num_devices),
    }


def _price(price: float | None, found: MeshEstimate, num_devices: int) -> float | None:
    """Of a million tokens."""
    if price is None or found.tokens_per_s is None:
        return None
    return price * num_devices / 3600 / found.tokens_per_s * 1e6


def _order(row: dict[str, Any]) -> tuple[bool, float]:
    """What fits first, the fastest of it first."""
    return not row["fits"], -(row["tokens_per_s"] or 0.0)


def _unknowns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({f"{name} is unknown: {why}" for row in rows for name, why in row["unknown"].items()})


def _said(row: dict[str, Any]) -> str:
    compiled = "" if row["compile_s"] is None else f", compiled in {row['compile_s']:.0f} s"
    return row["problem"] or f"{row['hbm_gib']:.1f} GiB{compiled}, a step in {row['est_step_s']:.2f} s"
