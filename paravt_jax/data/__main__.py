"""python -m paravt_jax.data materialize | inspect | split | parallelize [options]"""

import argparse
import sys

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import exit_on_sigterm
from model_port.terminal import say


def main() -> None:
    parser = argparse.ArgumentParser(prog=prog_of("paravt_jax.data"), description="Prepares and looks at data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="materialize|inspect|split|parallelize")
    summaries = {
        "materialize": "joins the published sentinel paths to a local directory, as file:// URIs",
        "inspect": "what a file of rows holds: columns, questions or calls, bad rows, missing files, lengths",
        "split": "holds rows out for validation, by video: none is in both files",
        "parallelize": "merges sequential tool turns that are independent, and makes frames text",
    }
    by_name = {name: commands.add_parser(name, help=text, description=text) for name, text in summaries.items()}
    _materialize_arguments(by_name["materialize"])
    _inspect_arguments(by_name["inspect"])
    _split_arguments(by_name["split"])
    _parallelize_arguments(by_name["parallelize"])
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
    elif args.command == "split":
        from paravt_jax.data import split

        print(split.split(args.src, args.train, args.validation, args.num_rows, args.seed))
    else:
        from paravt_jax.data import parallelize

        parallelize.run(args)


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


def _parallelize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--src", required=True, metavar="S", help="SFT rows: a file, a directory, or OWNER/NAME")
    parser.add_argument("--dst", required=True, metavar="D", help="where to write them, .parquet or .jsonl")
    parser.add_argument(
        "--summaries",
        metavar="column:NAME|engine:URL",
        help="where the text comes from that replaces frames: a column of the rows, or an OpenAI-compatible engine "
        "(URL up to /v1), whose summaries are kept in D with the suffix .summaries.jsonl and not asked for twice; "
        "without it, rows with frames stay as they are",
    )
    parser.add_argument("--model", metavar="NAME", help="of the engine")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the engine's key")
    parser.add_argument("--report", metavar="FILE", help="counts and reasons (default: D with the suffix .report.json)")
    parser.add_argument("--max-parallel", type=int, default=5, metavar="N", help="calls in a turn (default 5)")
    parser.add_argument("--max-concurrent", type=int, default=16, metavar="N", help="requests at once (default 16)")
    parser.add_argument("--max-attempts", type=int, default=4, metavar="N", help="of one summary (default 4)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="of a summary, thinking included (default 512)"
    )
    parser.add_argument("--deadline-s", type=float, default=120.0, metavar="S", help="of an attempt (default 120)")
    parser.add_argument("--video-root", default="", metavar="R", help="what relative paths begin from (default: S)")


if __name__ == "__main__":
    run_cli(main)
