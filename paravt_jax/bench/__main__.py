"""python -m paravt_jax.bench NAME [options] [--json OUT]

A bench is a module of this package with `add_arguments(parser)`, `run(args)` that returns what it found as JSON types,
and `table(found)` that says it in a few aligned lines.
"""

import argparse
import datetime
import importlib
import json
import sys

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.progress import Meter
from paravt_jax.bench import machine
from rollout.output_file import OutputFile

BENCHES = {
    "chaos": "the smoke run on two real SGLang servers while everything around it fails",
    "checkpoint": "a learner's state saved, and restored with and without comparing its checksums",
    "convert": "time and memory of model_port.convert and model_port.export, beside a plain copy",
    "decoders": "PyAV beside decord: whose frames are right in which container, and how fast each is",
    "gpu_check": "one NVIDIA GPU in ten minutes: attention, the update, torch beside it, weights for servers",
    "hosts": "one run and a checkpoint on 1, 2 and 4 processes of this machine, and new weights to 1, 2 and 4 servers",
    "learner": "forward and forward+backward of the policy, beside transformers in torch",
    "mesh": "one update on every mesh: measured on the devices of this machine, or compiled for others and estimated",
    "rollout": "episodes against a real SGLang server: parallel crops, throughput, caches, publishing",
    "simulation": "simulated steps beside real ones: the smoke run on one and two real SGLang servers, and embedded",
    "soak": "the smoke run or a service for hours: memory, open files, threads and the time of a step",
    "video": "frames of a video, decoded and again from memory, beside qwen_vl_utils with decord",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=prog_of("paravt_jax.bench"), description="Measures this machine.")
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="|".join(BENCHES))
    for name, summary in BENCHES.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in sys.argv[1:2]:  # the others, and what they import, stay unloaded
            importlib.import_module(f"paravt_jax.bench.{name}").add_arguments(subparser)
        subparser.add_argument("--json", metavar="OUT", help="also write everything measured to this file")
        subparser.add_argument("--force", action="store_true", help="replace OUT also if this bench did not write it")
        add_debug_flag(subparser)
    args = parser.parse_args()
    read = [getattr(args, name, None) or "" for name in ("model", "config")]
    out = args.json and OutputFile(args.json, f"bench {args.bench}", inputs=read, force=args.force)
    exit_on_sigterm()
    bench = importlib.import_module(f"paravt_jax.bench.{args.bench}")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with Meter(f"bench {args.bench}"):
        result = bench.run(args)
    print(bench.table(result))
    if out is not None:
        out.write(json.dumps({"bench": args.bench, "date": date, "machine": machine(), **result}, indent=2) + "\n")
    if violations := result.get("violations"):
        raise RuntimeError(f"{len(violations)} violations, see above; the first: {violations[0]}")


if __name__ == "__main__":
    run_cli(main)
