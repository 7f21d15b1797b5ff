"""Checks that everything works on this machine at a model's size.

python -m paravt_jax.check --quick
python -m paravt_jax.check --model 8b --recipe configs/8b_8x80gb_embedded.yaml [--layers N] [--json OUT]

Each stage runs in its own process; a failed stage does not stop the others. A model size without a directory gets
random weights. The exit code is 0 only if no stage failed.
"""

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from model_port.cli import DEBUG_FLAG, add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.reference import SHARED_GPU
from model_port.terminal import say
from paravt_jax.bench import machine
from paravt_jax.check.model import cut
from paravt_jax.check.page import page
from paravt_jax.check.process import part_of
from paravt_jax.check.quick_flags import QUICK_FLAGS
from paravt_jax.check.report import StageReport, table
from paravt_jax.check.stages import STAGES
from paravt_jax.check.target import Target
from paravt_jax.config import TINY, load_training_config
from paravt_jax.data.hub import local_source
from paravt_jax.plan.plan import model_config
from paravt_jax.run.output_file import OutputFile
from rollout.engine.discovery import check_url
from rollout.owned_directory import owned_directory
from rollout.supervisor import KILL_NOW, descendants

BESIDE = ("weights", "logits", "gradient")  # stages that run concurrently with the others for a tiny model
SHOWN_LINES = 40  # last lines of a failed stage's log


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.check"),
        description="Check whether everything works on this machine, at a model's size. Stages:",
        epilog="Models are written to a new directory in TMPDIR: about 8 bytes per parameter with adapters, 20 if all "
        "weights train.",
    )
    stages = "; ".join(f"{name}: {text}" for name, (*_, text) in STAGES.items())
    parser.description = f"{parser.description} {stages}."
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="SIZE_OR_DIR", help="2b, 4b, 8b, 32b …, or a directory (default: the recipe's)"
    )
    model.add_argument("--quick", action="store_true", help="a tiny model, about a minute")
    parser.add_argument("--recipe", metavar="FILE", help="config of train or sft, for prompts, pictures and the step")
    parser.add_argument(
        "--stage", nargs="+", action="extend", choices=STAGES, metavar="STAGE", help="only these (default: all)"
    )
    parser.add_argument(
        "--layers", type=int, default=0, metavar="N", help="only the first N language layers (default 0: all)"
    )
    parser.add_argument("--server", default="", metavar="URL", help="an SGLang server of the model, for step and gate")
    parser.add_argument(
        "--video",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="videos to read (default: a generated one)",
    )
    parser.add_argument(
        "--data", default="", metavar="FILE", help="rows to check (default: the recipe's, if they exist)"
    )
    parser.add_argument("--json", metavar="OUT", help="also write all results to this file")
    parser.add_argument("--html", metavar="OUT", help="also write a page of all results")
    parser.add_argument("--force", action="store_true", help="replace OUT even if another command wrote it")
    add_debug_flag(parser)
    return parser


def target_of(parser: argparse.ArgumentParser, args: argparse.Namespace, folder: str) -> Target:
    model = TINY if args.quick else args.model
    if args.recipe:
        recipe = load_training_config(args.recipe)
        model = model or recipe.model.path
    if model is None:
        parser.error("give --quick, --model or --recipe")
    if args.layers < 0:
        parser.error(f"--layers {args.layers} must be 0, for all layers, or more")
    cut(model_config(model)[0], args.layers)  # raises before any stage does
    for video in args.video:
        if not Path(video).is_file():
            raise ValueError(f"--video {video} is not a file")
    if args.data and not local_source(args.data).exists():
        raise ValueError(f"--data {args.data} does not exist")
    if args.server:
        check_url("--server", args.server)
    server = args.server.rstrip("/")
    return Target(folder, model, args.layers, args.recipe or "", server, tuple(args.video), args.data)


def run_stage(name: str, target: Target) -> StageReport:
    say(f"{name} …")
    log = target.file(f"{name}.log")
    flags = {} if name == "step" else SHARED_GPU
    if target.model == TINY:
        flags = flags | {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_FLAGS])}
    debug = [DEBUG_FLAG] if DEBUG_FLAG in sys.argv else []
    command = [sys.executable, "-m", "paravt_jax.check.stages", name, target.to_json(), *debug]
    report = StageReport.of(name, part_of(command, log, env=os.environ | flags))
    if report.problem:
        say("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]))
    return report


def run_stages(names: Sequence[str], target: Target) -> list[StageReport]:
    """Runs stages sequentially, because each may need all memory; for a tiny model, two at a time."""
    first, rest = names[:1], names[1:]
    beside = [name for name in rest if target.model == TINY and name in BESIDE]
    reports = [run_stage(name, target) for name in first]  # makes the model
    with ThreadPoolExecutor(1) as pool:
        background = [pool.submit(run_stage, name, target) for name in beside]
        try:
            reports += [run_stage(name, target) for name in rest if name not in beside]
            reports += [stage.result() for stage in background]
        except BaseException:  # for example Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            for process in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(process, KILL_NOW)
            raise
    return sorted(reports, key=lambda report: names.index(report.stage))


def to_record(reports: list[StageReport]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "machine": machine(),
        "stages": [report.to_record() for report in reports],
    }


def main() -> None:
    parser = parser_of()
    args = parser.parse_args()
    inputs = [args.model or "", args.recipe or "", args.data, *args.video]
    out, page_out = (
        path and OutputFile(path, f"check --{kind}", inputs=inputs, force=args.force)
        for kind, path in (("json", args.json), ("html", args.html))
    )
    exit_on_sigterm()
    with owned_directory(Path(tempfile.gettempdir()), "paravt-check-") as folder:
        target = target_of(parser, args, str(folder))
        reports = run_stages([name for name in STAGES if name in (args.stage or STAGES)], target)
    print(table(reports))
    record = to_record(reports)
    if out:
        out.write_json(record)
    if page_out:
        page_out.write(page(record, reports))
    if failed := [report.stage for report in reports if report.failed]:
        raise RuntimeError(f"{len(failed)} of {len(reports)} stages failed: {', '.join(failed)}")


if __name__ == "__main__":
    run_cli(main)
