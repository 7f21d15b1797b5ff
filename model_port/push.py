"""Uploads an exported model to the hub: python -m model_port.push DIR OWNER/NAME"""

import argparse
import re
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.hub import check_repo_id, model_files, push_to_hub
from model_port.progress import BYTES, in_units
from model_port.terminal import aligned

MESSAGE = "Upload model"
BRANCH = re.compile(r"[\w.-]+(/[\w.-]+)*")


def add_push_flags(parser: argparse.ArgumentParser, condition: str = "") -> None:
    parser.add_argument("--public", action="store_true", help=f"{condition}make the repository public")
    parser.add_argument(
        "--revision", type=_branch, metavar="BRANCH", help=f"{condition}a branch, created if it does not exist"
    )
    parser.add_argument("--message", default=MESSAGE, help=f"{condition}commit message (default {MESSAGE!r})")


def _branch(text: str) -> str:
    if not BRANCH.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a branch")
    return text


def push(directory: Path, repo: str, args: argparse.Namespace) -> str:
    return push_to_hub(directory, repo, public=args.public, revision=args.revision, commit_message=args.message)


def dry_run(directory: Path, repo: str, args: argparse.Namespace) -> str:
    """Describes what a push would send. Makes no request."""
    check_repo_id(repo)
    sizes = {name: (directory / name).stat().st_size for name in model_files(directory)}
    total = f"{len(sizes)} files", in_units([sum(sizes.values())], BYTES)
    visibility, branch = "public" if args.public else "private", args.revision or "main"
    return "\n".join(
        [
            f"{repo}, {visibility}, branch {branch}, as one commit {args.message!r}:",
            aligned([*((name, in_units([size], BYTES)) for name, size in sizes.items()), total]),
            "dry run: nothing was sent",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.push"),
        description="Uploads a model in Hugging Face format: weights, side files and card, in one commit.",
        epilog="If the upload is interrupted, run the command again: it sends only what is missing.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory written by model_port.export")
    parser.add_argument("repo", metavar="OWNER/NAME", help="created as a private repository if it does not exist")
    add_push_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the files and their sizes, and send nothing")
    add_debug_flag(parser)
    args = parser.parse_args()
    if args.dry_run:
        print(dry_run(args.directory, args.repo, args))
        return
    print(push(args.directory, args.repo, args))


if __name__ == "__main__":
    run_cli(main)
