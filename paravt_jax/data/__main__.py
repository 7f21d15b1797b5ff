"""python -m paravt_jax.data materialize | inspect | split [options]"""

import argparse
import sys

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.terminal import say


def main() -> None:
    parser = argparse.ArgumentParser(prog=prog_of("paravt_jax.data"), description="Prepare and inspect data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="materialize|inspect|split")
    for name, text, add_arguments in (
        ("materialize", "replace the published sentinel paths with file:// URIs of a local directory", _materialize),
        ("inspect", "count columns, question types or calls, bad rows, missing files and lengths", _inspect),
        ("split", "hold rows out for validation by video, so that no video is in both files", _split),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        if name != "split":
            command.add_argument("--force", action="store_true", help="replace files that this command did not write")
        add_debug_flag(command)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.command == "materialize":
        from paravt_jax.data import materialize

        warning = materialize.run(args)
        if warning and args.strict:
            raise ValueError(f"--strict: {warning}")
        if warning:
            sys.stdout.flush()
            say(f"warning: {warning}")
    elif args.command == "inspect":
        from paravt_jax.data import inspect

        inspect.run(args)
    else:
        from paravt_jax.data import split

        print(split.split(args.src, args.train, args.validation, args.num_rows, args.seed))


def _materialize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, metavar="R", help="directory of the unpacked video archives")
    parser.add_argument("--parquet-dir", required=True, metavar="P", help="directory of the published *.parquet files")
    parser.add_argument("--output-dir", required=True, metavar="O", help="directory for the output, same file names")
    parser.add_argument("--report", metavar="FILE", help="JSON report of rewritten and missing paths (O/report.json)")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="write everything, but exit with 1 if a file is missing, a path is invalid or a row is unreadable",
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a .parquet or .jsonl file, a directory, or OWNER/NAME on the hub")
    parser.add_argument(
        "--tokenizer",
        default="tiny",
        metavar="HF_DIR_OR_ID",
        help="tokenizer for the lengths (default: the tiny model's, whose counts do not match real models)",
    )
    parser.add_argument("--video-root", default="", metavar="R", help="directory of the videos (default: PATH's)")
    parser.add_argument("--json", metavar="FILE", help="also write all counts as JSON")


def _split(parser: argparse.ArgumentParser) -> None:
    like_source = ", .jsonl or .parquet as S; must not exist"
    parser.add_argument("--src", required=True, metavar="S", help="rows: a file, a directory, or OWNER/NAME on the hub")
    parser.add_argument("--train", required=True, metavar="T", help=f"output for training{like_source}")
    parser.add_argument("--validation", required=True, metavar="V", help=f"output for validation{like_source}")
    parser.add_argument(
        "--num-rows", type=int, default=256, metavar="N", help="about how many rows to hold out (default 256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed that selects rows (default 0)")


if __name__ == "__main__":
    run_cli(main)
