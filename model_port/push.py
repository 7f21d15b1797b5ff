"""Uploads an exported model to the hub: python -m model_port.push DIR OWNER/NAME"""

import argparse
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.hub import check_hub_access, push_to_hub

MESSAGE = "Upload model"


def add_push_flags(parser: argparse.ArgumentParser, condition: str = "") -> None:
    parser.add_argument("--public", action="store_true", help=f"{condition}make the repository public")
    parser.add_argument("--revision", metavar="BRANCH", help=f"{condition}a branch, created if it does not exist")
    parser.add_argument("--message", default=MESSAGE, help=f"{condition}commit message (default {MESSAGE!r})")


def push(directory: Path, repo: str, args: argparse.Namespace) -> str:
    return push_to_hub(directory, repo, public=args.public, revision=args.revision, commit_message=args.message)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.push"),
        description="Uploads a model in Hugging Face format: weights, side files and card, in one commit.",
        epilog="If the upload is interrupted, run the command again: it sends only what is missing.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a directory written by model_port.export")
    parser.add_argument("repo", metavar="OWNER/NAME", help="created as a private repository if it does not exist")
    add_push_flags(parser)
    add_debug_flag(parser)
    args = parser.parse_args()
    check_hub_access(args.repo, public=args.public)
    print(push(args.directory, args.repo, args))


if __name__ == "__main__":
    run_cli(main)
