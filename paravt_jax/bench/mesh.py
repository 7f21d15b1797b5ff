"""Benchmarks a policy update on every mesh, of this machine's devices or compiled for others (`--topology`).

Rows per data and fsdp shard are constant, so the work grows with both. Efficiency compares a device's tokens/s with
a single device, if the model fits there; CPU devices share the cores. Memory, FLOPs and collectives come from the
compiled programs; the estimated seconds follow from them. On this machine's devices, steps are also timed.
"""

import argparse
from typing import Any

from model_port.config import PRESETS
from paravt_jax.bench.models import MODELS

SETTINGS = {"model": "tiny", "rows": 1, "row_tokens": 1024, "dtype": "float32", "remat": "full"}  # without --config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=[*MODELS, *PRESETS], help="model with random weights (default tiny)")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (default: all; on a CPU, 8)")
    parser.add_argument("--rows", type=int, help="rows per data and fsdp part (default 1)")
    parser.add_argument("--row-tokens", type=int, help="tokens per row (default 1024)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of activations (default float32)")
    parser.add_argument(
        "--remat",
        choices=["auto", "none", "full", "dots", "attention", "offload"],
        help="recomputed activations (default full)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed updates; the median is reported (default 5)")
    parser.add_argument("--mesh", metavar="D,F,T", help="measure only this mesh of data, fsdp, tensor (default: all)")
    parser.add_argument("--topology", metavar="NAME", help="compile for these devices, for example h100:8 or v5p:2x2x2")
    parser.add_argument("--plan-only", action="store_true", help="with --topology: estimate without compiling")
    parser.add_argument("--config", metavar="FILE", help="a run's config, a file or a name, instead of these flags")
    parser.add_argument("--calibrate", metavar="RUN_DIR", help="with --config: rates of a step from this run's log")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that override the config file")
    parser.add_argument("--price", type=float, help="price of a device per hour, in any currency: adds prices")


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    if args.config is None:
        for name, value in SETTINGS.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if args.topology is None:
        from paravt_jax.bench.mesh_measured import measured_meshes

        return measured_meshes(args)
    from paravt_jax.bench.mesh_rows import estimated_meshes

    return estimated_meshes(args)


def _check(args: argparse.Namespace) -> None:
    for name in ("devices", "rows", "row_tokens", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.row_tokens is not None and args.row_tokens < 64:
        raise ValueError(f"--row-tokens {args.row_tokens} must be at least 64, enough for a frame and some text")
    if args.price is not None and not args.price > 0:
        raise ValueError(f"--price {args.price} must be above 0")
    if args.devices is not None and args.topology:
        raise ValueError("--devices has no effect with --topology")
    if args.plan_only and not args.topology:
        raise ValueError("--plan-only needs --topology")
    for name in SETTINGS if args.config else ():
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --config; set it in the file")
    if not args.config and (given := [*args.overrides, *(["--calibrate"] if args.calibrate else [])]):
        raise ValueError(f"{given[0]} needs --config FILE")


def table(result: dict[str, Any]) -> str:
    from paravt_jax.bench.mesh_rows import page

    return "\n".join(page(result))
