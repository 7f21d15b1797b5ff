"""Runs the paper's experiment at laptop size: a cold start, the arms, their evaluations, a table and a figure.

python -m scripts.miniature --arms grpo,anchoring,gating,para_grpo --seeds 0,1,2
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local, exit_on_sigterm
from paravt_jax.run.log import whole_file
from scripts.miniature.experiment import (
    ARMS,
    COLD_STARTS,
    FULL,
    QUICK,
    READINGS,
    VARIANTS,
    Experiment,
    JobRunner,
    Size,
)

TABLE_FILE, FIGURE_FILE = "table.md", "figure.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("scripts.miniature"),
        description="Run SFT once and the arms from it, on a small synthetic world. Re-running the command resumes it.",
        epilog=f"Arms: {', '.join((*ARMS, *READINGS))}; {' and '.join(COLD_STARTS)} for a cold start only; variants "
        f"for para_grpo and {', '.join(VARIANTS)}.",
    )
    parser.add_argument("--arms", default=",".join(ARMS), help=f"comma-separated arms (default {','.join(ARMS)})")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds of the arms (default 0,1,2)")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/miniature"), help="output directory (default runs/miniature)"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="runs in parallel (default: CPU cores)"
    )
    parser.add_argument("--quick", action="store_true", help="smaller world, fewer steps")
    parser.add_argument(
        "--windows", type=int, choices=(1, 2), help="maximum windows per question (default 2, quick: 1)"
    )
    parser.add_argument(
        "--distractors", type=int, choices=range(9), metavar="0..8", help="distractors per video (default 3)"
    )
    parser.add_argument("--report", action="store_true", help="only write the table and figure of finished runs")
    for name, target in (("train", "arm"), ("sft", "cold start"), ("eval", "evaluation")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="a.b=c", help=f"a setting for every {target}; repeatable"
        )
    add_debug_flag(parser)
    args = parser.parse_args()
    check_local(args.dir)
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be at least 1")
    experiment = Experiment(
        args.dir.absolute(),
        arms_of(args.arms),
        _seeds(args.seeds),
        _size(args),
        args.train,
        args.sft,
        args.eval,
    )
    if not args.report:
        exit_on_sigterm()  # like Ctrl-C: the runs save a checkpoint and exit
        experiment.make_data()
        JobRunner(args.jobs).run(experiment.jobs())
    from scripts.miniature.report import draw, missing_seeds, table  # importing matplotlib takes a second

    text = table(experiment)
    with whole_file(experiment.directory / TABLE_FILE) as file:
        file.write(text.encode() + b"\n")
    draw(experiment, experiment.directory / FIGURE_FILE)
    print(text)
    for line in missing_seeds(experiment):
        print(line)
    print(f"\n{experiment.directory / TABLE_FILE}\n{experiment.directory / FIGURE_FILE}")


def _size(args: argparse.Namespace) -> Size:
    changes = {"max_windows": args.windows, "num_distractors": args.distractors}
    return replace(QUICK if args.quick else FULL, **{name: n for name, n in changes.items() if n is not None})


def arms_of(text: str) -> list[str]:
    """Expands `variants` to para_grpo and all of its variants."""
    arms = [part for name in text.split(",") for part in (("para_grpo", *VARIANTS) if name == "variants" else (name,))]
    return list(dict.fromkeys(arms))


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text}: expected comma-separated numbers, for example 0,1,2") from None


if __name__ == "__main__":
    run_cli(main)
