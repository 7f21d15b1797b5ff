"""Asks a trained policy a question about videos or images: python -m paravt_jax.ask VIDEO… "QUESTION" """

import argparse
import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path, PurePath
from typing import get_args

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.terminal import say, visible
from paravt_jax.run.output_file import OutputFile
from rollout.episode_config import Dispatch
from rollout.threads import in_daemon_thread
from rollout.toolbox.subtitles import subtitles_beside
from rollout.video.errors import ImageError, VideoError

DEFAULT_MODEL = "ParaVT/ParaVT-8B"
AS_TRAINED = "default: as in the model's paravt.json; without that file or with --endpoint,"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=(prog := prog_of("paravt_jax.ask")),
        usage=f"{prog} [-h] [options] [VIDEO …] QUESTION",
        description="Ask a policy a question about videos, images or neither, and follow its thinking and calls.",
        epilog="Progress goes to stderr, the answer to stdout.",
    )
    parser.add_argument(
        "arguments", nargs="+", metavar="[VIDEO …] QUESTION", help="videos or images, then the question"
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--interactive", action="store_true", help="then read questions about the same videos, one per line"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page of the last question")
    parser.add_argument("--force", action="store_true", help="replace FILE even if another command wrote it")
    parser.add_argument("--json", action="store_true", help="print answer, windows, reports and times as JSON")
    add_debug_flag(parser)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help=f"Hugging Face directory or id, or a checkpoint (default {DEFAULT_MODEL})",
    )
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument(
        "--url", action="append", default=[], help="URL of an SGLang server with the model; repeatable"
    )
    servers.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="URL",
        help="base URL of an OpenAI-compatible endpoint that serves M, usually ending in /v1; repeatable. M can be any "
        "model that accepts images",
    )
    parser.add_argument("--endpoint-key-env", default="", metavar="NAME", help="environment variable with its API key")
    parser.add_argument("--frames", type=num_frames, metavar="N", help=f"frames of the overview ({AS_TRAINED} 64)")
    parser.add_argument("--dispatch", choices=get_args(Dispatch), help=f"how calls are run ({AS_TRAINED} parallel)")


def num_frames(text: str) -> int:
    from paravt_jax.config import MAX_FRAMES  # imported late, because --help does not need it

    if not text.isdecimal() or not 1 <= int(text) <= MAX_FRAMES:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {MAX_FRAMES}")
    return int(text)


async def run(args: argparse.Namespace, files: list[str], question: str | None) -> None:
    from paravt_jax.asking.asker import engine_of, open_asker  # imported late, so that --help does not load jax
    from paravt_jax.asking.page import page_of
    from paravt_jax.asking.terminal import Live, summary, why_no_answer
    from paravt_jax.run.process import ended_by_interrupt
    from rollout.picture import is_image

    answer, page, problem = None, None, ""
    if args.html is not None:
        page = OutputFile(args.html, "ask --html", inputs=[*files, args.model], force=args.force)
    images = list(filter(is_image, files))
    videos = [file for file in files if file not in images]
    subtitles = [str(path) if (path := subtitles_beside(video)).is_file() else "" for video in videos]
    engine = engine_of(args.model, args.url, args.endpoint, args.endpoint_key_env)
    async with open_asker(args.model, engine, num_frames=args.frames, dispatch=args.dispatch) as answerer:
        for number in range(sys.maxsize):
            question = question if question is not None else await _next_question()
            if not question:
                break
            try:
                name = f"question {number}"
                with nullcontext() if engine else ended_by_interrupt():  # a compilation cannot be stopped
                    answer = await answerer.answer(
                        videos, question, Live(_write), name, images=images, subtitles=subtitles
                    )
            except ImageError:  # names its file
                raise
            except VideoError as unreadable:
                raise ValueError(f"{' or '.join(videos or files)}: {unreadable}") from None
            _write("\n")
            print(json.dumps(answer.to_record()) if args.json else answer.text, flush=True)
            say("\n".join(summary(answer)))
            problem = why_no_answer(answer, answerer.agent.config, has_recipe=not args.endpoint)
            if not args.interactive:
                break
            if problem:
                say(f"no answer: {problem}")
            question = None
        if page is not None and answer is not None:
            page.write(page_of(answer, answerer, args.model))
            print(args.html, file=sys.stderr)
    if problem and not args.interactive:
        raise RuntimeError(f"no answer: {problem}")


def _write(text: str) -> None:
    print(visible(text), end="", file=sys.stderr, flush=True)


async def _next_question() -> str:
    _write("question  ")
    line = await in_daemon_thread(sys.stdin.readline)
    if not (line and sys.stdin.isatty()):  # a terminal shows the line, but not its end
        _write(f"{line.rstrip()}\n")
    return line.strip()


def _files_and_question(words: list[str], interactive: bool) -> tuple[list[str], str | None]:
    """Splits the arguments: the last one is the question, which is optional in interactive mode."""
    question = None if interactive and _is_file(words[-1]) else words[-1]
    files = words if question is None else words[:-1]
    for file in files or filter(_is_file_name, words):  # without files, the question may be a mistyped file name
        if not _is_file(file):
            raise ValueError(f"{file} is not a file; pass videos and images first, then the question in quotes")
    if question is not None and (not question.strip() or _is_file(question)):
        raise ValueError(f"{question!r} is not a question; pass it last, in quotes")
    return files, question


def _is_file_name(text: str) -> bool:
    return len(text.split()) == 1 and bool(PurePath(text).suffix)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a question can be longer than a file's name
        return False


def main() -> None:
    args = make_parser().parse_args()
    files, question = _files_and_question(args.arguments, args.interactive)
    from paravt_jax.run.compiles import set_up_compilation

    set_up_compilation()
    asyncio.run(run(args, files, question))


if __name__ == "__main__":
    run_cli(main)
