"""Runs every config of a directory on several splits, then prints the published tables with the results."""

import argparse
import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_port.cli import add_debug_flag, prog_of
from model_port.layout import RESULTS_FILE
from model_port.terminal import say
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.config.shipped import config_directory
from paravt_jax.data.splits import SPLITS
from paravt_jax.evaluation.results import Cell, refusal
from paravt_jax.evaluation.table import show
from paravt_jax.run.output_file import OutputFile

ALL = "all"
FOLDERS = {"videomme_subtitles": "videomme"}  # splits that share a repository

RunEval = Callable[[EvalConfig], Coroutine[Any, Any, list[Cell]]]


def jobs_of(
    directory: Path, splits: Sequence[str], run_dir: Path, data_root: Path | None, settings: Sequence[str]
) -> dict[str, EvalConfig]:
    """Returns the settings of a job for every config and split, by name. Checks all before the first job runs."""
    files = sorted(config_directory(directory).glob("*.yaml"))
    if not files:
        raise ValueError(f"{directory} has no *.yaml files")
    jobs = {}
    for file, split in itertools.product(files, splits):
        given = [f"data.split={split}", f"run_dir={run_dir / file.stem / split}"]
        if data_root is not None:
            given.append(f"data.validation={data_root / FOLDERS.get(split, split)}")
        jobs[f"{file.stem}, {split}"] = load_config(file, *given, *settings, schema=EvalConfig)
    return jobs


def run_jobs(jobs: Mapping[str, EvalConfig], run_eval: RunEval) -> dict[str, str]:
    """Runs each job; a finished job only reads its records. Returns the problems by job."""
    problems: dict[str, str] = {}
    for name, config in jobs.items():
        try:
            cells = asyncio.run(run_eval(config))
            problem = refusal(cells)
        except Exception as error:  # any failure only affects this job
            problem = str(error) if isinstance(error, (ValueError, RuntimeError, OSError)) else repr(error)
        if problem:
            say(f"{name}: {problem}")
            problems[name] = problem
    return problems


def splits_of(text: str) -> list[str]:
    names = list(SPLITS) if text == ALL else text.split(",")
    if unknown := [name for name in names if name not in SPLITS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected {ALL}, or some of {', '.join(SPLITS)}")
    return names


def main(arguments: list[str], run_eval: RunEval, set_up: Callable[[], None]) -> None:
    parser = argparse.ArgumentParser(prog=f"{prog_of('paravt_jax.eval')} batch", description=__doc__)
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="directory of evaluation configs, such as configs/reproduce; its subdirectories do not run",
    )
    parser.add_argument("--splits", type=splits_of, default=ALL, help="all, or names separated by commas")
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="R", help="output directory: R/CONFIG/SPLIT; a batch resumes"
    )
    parser.add_argument(
        "--data-root", type=Path, metavar="D", help="D/SPLIT is your copy of a split's repository, unpacked"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the tables as a PNG")
    parser.add_argument("--force", action="store_true", help="replace FILE even if this command did not write it")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings for all evaluations")
    add_debug_flag(parser)
    args = parser.parse_intermixed_args(arguments)
    if args.run_dir.exists() and not args.run_dir.is_dir():
        raise ValueError(f"--run-dir {args.run_dir} is not a directory")
    png = args.png and OutputFile(args.png, "eval batch --png", inputs=[args.directory], force=args.force)
    jobs = jobs_of(args.directory, args.splits, args.run_dir, args.data_root, args.settings)
    set_up()
    problems = run_jobs(jobs, run_eval)
    run_dirs = [Path(config.run_dir) for config in jobs.values()]
    finished = [run_dir for run_dir in run_dirs if (run_dir / RESULTS_FILE).is_file()]
    try:
        if finished:
            show(finished, png)
    except (ValueError, OSError) as problem:
        if not problems:
            raise
        raise RuntimeError(f"{_summary(problems, len(jobs))}; no table: {problem}") from None
    if problems:
        raise RuntimeError(_summary(problems, len(jobs)))


def _summary(problems: Mapping[str, str], num_jobs: int) -> str:
    """Lists every problem once, with the first job that has it."""
    names_of = {problem: [name for name in problems if problems[name] == problem] for problem in problems.values()}
    listing = "; ".join(
        f"{name}{f' and {len(others)} more' if others else ''}: {problem}"
        for problem, (name, *others) in names_of.items()
    )
    return f"{len(problems)} of {num_jobs} evaluations are not complete; run the same command to resume. {listing}"
