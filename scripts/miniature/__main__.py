"""Runs the paper's experiment at laptop size: a cold start, the arms, their evaluations, a table and a figure.

python -m scripts.miniature --arms grpo,anchoring,gating,para_grpo --seeds 0,1,2
python -m scripts.miniature map
python -m scripts.miniature crops
python -m scripts.miniature contrast
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local, exit_on_sigterm
from paravt_jax.run.log import whole_file
from scripts.miniature.arms import ARMS, COLD_STARTS, TABLE_B, VARIANTS
from scripts.miniature.dials import WORLDS, load_world
from scripts.miniature.experiment import Experiment, run_jobs, share_programs

TABLE_FILE, FIGURE_FILE = "table.md", "figure.png"


def main() -> None:
    if sys.argv[1:2] in (["map"], ["crops"], ["contrast"]):
        import_module(f"scripts.miniature.{sys.argv[1]}").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog=prog_of("scripts.miniature"),
        description="Run SFT once and the arms from it, on a small synthetic world. Re-running the command resumes it. "
        "`map` runs the arms in worlds that differ in the reliability of reports and in the first rate of calls; "
        "`crops` compares parallel and sequential calls; `contrast` compares tool priors and families of models.",
        epilog=f"Arms: {', '.join(ARMS)}; {' and '.join(COLD_STARTS)} for a cold start only; variants "
        f"for para_grpo and {', '.join(VARIANTS)}.",
    )
    parser.add_argument("--arms", default=",".join(TABLE_B), help=f"comma-separated arms (default {','.join(TABLE_B)})")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds of the arms (default 0,1,2)")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/miniature"), help="output directory (default runs/miniature)"
    )
    parser.add_argument(
        "--world",
        default="default",
        help=f"a world, or your own .yaml: {', '.join(sorted(path.stem for path in WORLDS.glob('*.yaml')))}",
    )
    parser.add_argument("--quick", action="store_true", help="the same as --world quick: smaller, fewer steps")
    parser.add_argument("--report", action="store_true", help="only write the table and figure of finished runs")
    parser.add_argument("--dial", action="append", default=[], metavar="a.b=c", help="a dial of the world; repeatable")
    for name, target in (("train", "arm"), ("sft", "cold start"), ("eval", "evaluation")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="a.b=c", help=f"a setting for every {target}; repeatable"
        )
    add_debug_flag(parser)
    args = parser.parse_args()
    check_local(args.dir)
    experiment = Experiment(
        args.dir.absolute(),
        arms_of(args.arms),
        numbers_of("--seeds", args.seeds),
        load_world("quick" if args.quick else args.world, *args.dial),
        train=args.train,
        sft=args.sft,
        eval=args.eval,
    )
    if not args.report:
        exit_on_sigterm()  # handles SIGTERM like Ctrl-C: the runs save a checkpoint and exit
        share_programs()
        experiment.make_data()
        run_jobs(experiment.jobs())
    from scripts.miniature.report import draw, missing_seeds, table  # importing matplotlib takes a second

    text = table(experiment)
    with whole_file(experiment.directory / TABLE_FILE) as file:
        file.write(text.encode() + b"\n")
    draw(experiment, experiment.directory / FIGURE_FILE)
    print(text)
    for line in missing_seeds(experiment):
        print(line)
    print(f"\n{experiment.directory / TABLE_FILE}\n{experiment.directory / FIGURE_FILE}")


def arms_of(text: str) -> list[str]:
    """Splits the list, and expands `variants` to para_grpo and all of its variants."""
    arms = [
        part
        for name in text.split(",")
        for part in (("para_grpo", *VARIANTS, "recommended") if name == "variants" else (name,))
    ]
    return list(dict.fromkeys(arms))


def numbers_of(flag: str, text: str, kind: type = int) -> list:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{flag} {text}: expected comma-separated numbers, for example 0,1,2") from None


if __name__ == "__main__":
    run_cli(main)
