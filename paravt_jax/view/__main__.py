"""python -m paravt_jax.view RUN_DIR… [--frames] [--out FILE] [--max-episodes N] [--force]"""

import argparse
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local
from paravt_jax.run.output_file import OutputFile
from paravt_jax.view.page import make_page

DEFAULT_OUT, DEFAULT_COMPARISON = "report.html", "compare.html"
MAX_EPISODES = 200  # a page of a few MB has room for this many complete episodes


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.view"),
        description="Writes one offline HTML page with the charts and episodes of a training run, a cold start or an "
        "evaluation, finished or not; or of several, to compare.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's run_dir")
    parser.add_argument(
        "--frames", action="store_true", help="add thumbnails of the frames in the prompts, decoded from the videos"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {DEFAULT_OUT} in RUN_DIR; {DEFAULT_COMPARISON} in the first of several)",
    )
    parser.add_argument(
        "--max-episodes",
        type=int,
        default=MAX_EPISODES,
        metavar="N",
        help=f"largest number of episodes, spread evenly over steps or cells (default {MAX_EPISODES})",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE even if this command did not write it")
    add_debug_flag(parser)
    args = parser.parse_args()
    if args.max_episodes < 0:
        raise ValueError(f"--max-episodes={args.max_episodes} must be 0 or more")
    for run_dir in args.run_dirs:
        check_local(run_dir)
        if not run_dir.is_dir():
            raise ValueError(f"{run_dir} is not a directory; give the run_dir of a run")
    path = args.out or args.run_dirs[0] / (DEFAULT_OUT if len(args.run_dirs) == 1 else DEFAULT_COMPARISON)
    out = OutputFile(path, "view", inputs=args.run_dirs, force=args.force)
    out.write(make_page(args.run_dirs, args.max_episodes, frames=args.frames))
    print(path)


if __name__ == "__main__":
    run_cli(main)
