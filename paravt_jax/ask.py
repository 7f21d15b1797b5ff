"""A question about a video, answered by a trained policy: python -m paravt_jax.ask VIDEO… "QUESTION" """

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import get_args

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.terminal import say, visible
from rollout.episode_config import Dispatch
from rollout.output_file import OutputFile

DEFAULT_MODEL = "ParaVT/ParaVT-8B"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.ask"),
        description="Asks a policy about a video, and shows what it looks at.",
        epilog="What happens is told on stderr, the answer on stdout.",
    )
    parser.add_argument("asked", nargs="+", metavar="VIDEO… QUESTION", help="files, and at the end what to ask")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help=f"a Hugging Face directory or id, or a checkpoint (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--url", action="append", default=[], help="of an SGLang server that has the model; repeatable")
    parser.add_argument("--frames", type=int, metavar="N", help="of the overview (default: as the model was trained)")
    parser.add_argument("--dispatch", choices=get_args(Dispatch), help="(default: as the model was trained)")
    parser.add_argument("--interactive", action="store_true", help="ask on, a line at a time, about the same videos")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page of the last question")
    parser.add_argument("--force", action="store_true", help="replace FILE also if this command did not write it")
    parser.add_argument("--json", action="store_true", help="print answer, windows, reports and times as JSON")
    add_debug_flag(parser)
    return parser


async def run(args: argparse.Namespace, videos: list[str], question: str | None) -> None:
    from paravt_jax.asking.asker import open_asker  # imported late: --help and wrong arguments need not wait for jax
    from paravt_jax.asking.page import page_of
    from paravt_jax.asking.terminal import Live, summary

    answer, page = None, None
    if args.html is not None:
        page = OutputFile(args.html, "ask --html", inputs=[*videos, args.model], force=args.force)
    async with open_asker(args.model, args.url, num_frames=args.frames, dispatch=args.dispatch) as answerer:
        for number in range(sys.maxsize):
            question = question if question is not None else await asyncio.to_thread(_next_question)
            if not question:
                break
            answer = await answerer.answer(videos, question, Live(_tell), f"question {number}")
            _tell("\n")
            print(json.dumps(answer.to_record()) if args.json else answer.text, flush=True)
            say("\n".join(summary(answer)))
            question = None
            if not args.interactive:
                break
        if page is not None and answer is not None:
            page.write(page_of(answer, answerer, args.model))
            print(args.html, file=sys.stderr)


def _tell(text: str) -> None:
    print(visible(text), end="", file=sys.stderr, flush=True)


def _next_question() -> str:
    _tell("question  ")
    return sys.stdin.readline().strip()


def _videos_and_question(asked: list[str], interactive: bool) -> tuple[list[str], str | None]:
    """The last argument is the question, which is optional in interactive mode."""
    question = None if interactive and Path(asked[-1]).is_file() else asked[-1]
    videos = asked if question is None else asked[:-1]
    if not videos:
        raise ValueError(f"give a video and a question; {asked[0]!r} is only one of them")
    for video in videos:
        if not Path(video).is_file():
            raise ValueError(f"{video} is no file; videos come first, the question last and in quotes")
    if question is not None and (not question.strip() or Path(question).is_file()):
        raise ValueError(f"{question!r} is no question; it comes last, in quotes")
    return videos, question


def main() -> None:
    args = make_parser().parse_args()
    videos, question = _videos_and_question(args.asked, args.interactive)
    if args.frames is not None and args.frames < 1:
        raise ValueError(f"--frames {args.frames} must be at least 1")
    from paravt_jax.run.compiles import use_compilation_cache

    use_compilation_cache()
    asyncio.run(run(args, videos, question))


if __name__ == "__main__":
    run_cli(main)
