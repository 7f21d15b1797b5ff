"""python -m paravt_jax.data materialize | inspect | split [options]"""

import argparse
import sys

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.terminal import say


def main() -> None:
    parser = argparse.ArgumentParser(prog=prog_of("paravt_jax.data"), description="Prepares and looks at data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="materialize|inspect|split")
    summaries = {
        "materialize": "joins the published sentinel paths to a local directory, as file:// URIs",
        "inspect": "what a file of rows holds: columns, questions or calls, bad rows, missing files, lengths",
        "split": "holds rows out for validation, by video: none is in both files",
    }
    by_name = {name: commands.add_parser(name, help=text, description=text) for name, text in summaries.items()}
    _materialize_arguments(by_name["materialize"])
    _inspect_arguments(by_name["inspect"])
    _split_arguments(by_name["split"])
    for name, command in by_name.items():
        if name != "split":
            command.add_argument("--force", action="store_true", help="replace files also if this did not write them")
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


def _materialize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, metavar="R", help="where the archives of videos were unpacked")
    parser.add_argument("--parquet-dir", required=True, metavar="P", help="the published *.parquet files")
    parser.add_argument("--output-dir", required=True, metavar="O", help="gets a file of the same name for each")
    parser.add_argument(
        "--report", metavar="FILE", help="what was rewritten and what is missing (default O/report.json)"
    )
    parser.add_argument(
        "--num-workers", type=int, default=8, metavar="N", help="threads that look for files (default 8)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 when a file is missing; all is written before"
    )


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a .parquet or .jsonl file, a directory, or OWNER/NAME on the hub")
    parser.add_argument(
        "--tokenizer",
        default="tiny",
        metavar="HF_DIR_OR_ID",
        help="what lengths are counted with (default: that of the tiny model, whose numbers mean little)",
    )
    parser.add_argument("--png", metavar="FILE", help="also draw the lengths there")
    parser.add_argument("--video-root", default="", metavar="R", help="what relative paths begin from (default: PATH)")
    parser.add_argument("--json", metavar="FILE", help="also write everything there")


def _split_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--src", required=True, metavar="S", help="rows: a file, a directory, or OWNER/NAME on the hub")
    parser.add_argument("--train", required=True, metavar="T", help="gets the rows to train on; must not exist")
    parser.add_argument("--validation", required=True, metavar="V", help="gets the rows held out; must not exist")
    parser.add_argument("--num-rows", type=int, default=256, metavar="N", help="held out, about (default 256)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones are held out (default 0)")


if __name__ == "__main__":
    run_cli(main)
