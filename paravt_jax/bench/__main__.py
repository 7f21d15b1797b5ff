"""python -m paravt_jax.bench NAME [options] [--json OUT]

A benchmark is a module with three functions: `add_arguments(parser)`, `run(args)`, which returns results as JSON types,
and `table(result)`, which formats them as a few aligned lines.
"""

import argparse
import datetime
import importlib
import sys
from collections.abc import Mapping

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.progress import Meter
from paravt_jax.bench import machine
from paravt_jax.run.output_file import OutputFile

BENCHES = {
    "mesh": "an update on every mesh: measured on this machine, or estimated for other devices",
    "rollout": "episodes on a real SGLang server: parallel crops, throughput, caches, publishing",
}


def run_bench(package: str, benches: Mapping[str, str]) -> None:
    """Runs the module of `package` named on the command line. `benches` maps module names to summaries."""
    parser = argparse.ArgumentParser(prog=prog_of(package), description="Measure this machine.")
    subparsers = parser.add_subparsers(dest="bench", required=True, metavar="|".join(benches))
    for name, summary in benches.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in sys.argv[1:2]:  # imports only this benchmark
            importlib.import_module(f"{package}.{name}").add_arguments(subparser)
        subparser.add_argument("--json", metavar="OUT", help="also write all results to this JSON file")
        subparser.add_argument("--force", action="store_true", help="replace OUT even if another command wrote it")
        add_debug_flag(subparser)
    args = parser.parse_args()
    inputs = [getattr(args, name, None) or "" for name in ("model", "config")]
    out = args.json and OutputFile(args.json, f"bench {args.bench}", inputs=inputs, force=args.force)
    exit_on_sigterm()
    bench = importlib.import_module(f"{package}.{args.bench}")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with Meter(f"bench {args.bench}"):
        result = bench.run(args)
    print(bench.table(result))
    if out is not None:
        out.write_json({"bench": args.bench, "date": date, "machine": machine(), **result})
    if problem := result.get("problem"):
        raise RuntimeError(problem)
    if violations := result.get("violations"):
        raise RuntimeError(f"{len(violations)} violations, listed above; the first: {violations[0]}")


def main() -> None:
    run_bench("paravt_jax.bench", BENCHES)


if __name__ == "__main__":
    run_cli(main)
