"""The paper's experiment in small: one cold start, the arms from it, an evaluation of each, a table and a figure.

python -m paravt_jax.miniature --arms grpo,anchoring,gating,para_grpo --seeds 0,1,2
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local, exit_on_sigterm
from paravt_jax.miniature.experiment import ARMS, COLD_STARTS, FULL, QUICK, READINGS, VARIANTS, Experiment, Runner, Size
from paravt_jax.run.log import whole_file

TABLE_FILE, FIGURE_FILE = "table.md", "figure.png"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.miniature"),
        description="Runs SFT once and the arms from it, on a small world that it makes itself. Stopped, in whatever "
        "way, the same command goes on where it was.",
        epilog=f"Arms: {', '.join((*ARMS, *READINGS))}; or {' and '.join(COLD_STARTS)} for a cold start alone; or "
        f"variants, for {', '.join(VARIANTS)} beside para_grpo.",
    )
    parser.add_argument("--arms", default=",".join(ARMS), help=f"with commas between them (default {','.join(ARMS)})")
    parser.add_argument("--seeds", default="0,1,2", help="of the arms, with commas between them (default 0,1,2)")
    parser.add_argument("--dir", type=Path, default=Path("runs/miniature"), help="where everything is kept")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="runs at the same time")
    parser.add_argument("--quick", action="store_true", help="a smaller world and fewer steps, for a first look")
    parser.add_argument("--windows", type=int, choices=(1, 2), help="that a question names at most (2, quick: 1)")
    parser.add_argument("--distractors", type=int, choices=range(9), metavar="0..8", help="in a video (default 3)")
    parser.add_argument("--report", action="store_true", help="only write table and figure of what is there")
    for name, whose in (("train", "arm"), ("sft", "cold start"), ("eval", "evaluation")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="a.b=c", help=f"a setting of every {whose}; repeatable"
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
        exit_on_sigterm()  # as on Ctrl-C the runs save and end
        experiment.make_data()
        Runner(args.jobs).run(experiment.parts())
    from paravt_jax.miniature.report import draw, remarks, table  # late: matplotlib takes a second

    text = table(experiment)
    with whole_file(experiment.directory / TABLE_FILE) as file:
        file.write(text.encode() + b"\n")
    draw(experiment, experiment.directory / FIGURE_FILE)
    print(text)
    for remark in remarks(experiment):
        print(remark)
    print(f"\n{experiment.directory / TABLE_FILE}\n{experiment.directory / FIGURE_FILE}")


def _size(args: argparse.Namespace) -> Size:
    asked = {"max_windows": args.windows, "num_distractors": args.distractors}
    return replace(QUICK if args.quick else FULL, **{name: n for name, n in asked.items() if n is not None})


def arms_of(text: str) -> list[str]:
    """`variants` stands for all of them, and what they are variants of."""
    arms = [part for name in text.split(",") for part in (("para_grpo", *VARIANTS) if name == "variants" else (name,))]
    return list(dict.fromkeys(arms))


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text}: expected numbers with commas between them, such as 0,1,2") from None


if __name__ == "__main__":
    run_cli(main)
