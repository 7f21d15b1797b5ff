"""Serves the agent with its sub-agents as one model, with OpenAI's API: python -m paravt_jax.serve --model M"""

import argparse
import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import get_args

from model_port.cli import FAILED, add_debug_flag, prog_of, run_cli
from model_port.terminal import say
from paravt_jax.ask import DEFAULT_MODEL
from paravt_jax.asking.door import KEY_VARIABLE, WITHOUT_KEY, door_of
from rollout.episode_config import Dispatch


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.serve"),
        description="Serves a policy with its parallel sub-agents as one model, to any client of OpenAI's API.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="M", help=f"as for ask (default {DEFAULT_MODEL})")
    parser.add_argument("--url", action="append", default=[], help="of an SGLang server that has the model; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="(default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="(default 8000)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"that clients must send, as openai.OpenAI(api_key=…) does; other users of this machine see it in the "
        f"list of processes, so better set the environment variable {KEY_VARIABLE}",
    )
    parser.add_argument(
        WITHOUT_KEY,
        action="store_true",
        help="with a --host that others reach: whoever reaches it may ask, without a key",
    )
    parser.add_argument("--frames", type=int, metavar="N", help="of the overview (default: as the model was trained)")
    parser.add_argument("--dispatch", choices=get_args(Dispatch), help="(default: as the model was trained)")
    parser.add_argument("--video-root", type=Path, metavar="DIR", help="files below it may be asked about")
    parser.add_argument("--allow-fetch", action="store_true", help="videos of the public web may be, too")
    parser.add_argument("--max-questions", type=int, default=4, metavar="N", help="at the same time (default 4)")
    parser.add_argument("--deadline-s", type=float, default=600.0, metavar="S", help="of a question (default 600)")
    add_debug_flag(parser)
    return parser


async def run(args: argparse.Namespace) -> None:
    from paravt_jax.asking.asker import open_asker
    from paravt_jax.asking.client_files import client_files  # imported late so that --help need not wait for jax
    from paravt_jax.asking.media import Sources
    from paravt_jax.asking.service import Service, bound, serve

    place = bound(args.host, args.port)
    door = door_of(place, args.host, args.api_key, args.no_api_key)
    with client_files() as directory:
        stop = stop_on_signals(directory)
        async with open_asker(
            args.model, args.url, num_frames=args.frames, dispatch=args.dispatch, num_questions=args.max_questions
        ) as answerer:
            sources = Sources(args.video_root, args.allow_fetch, directory)
            service = Service(answerer, args.model, sources, args.max_questions, args.deadline_s, door)
            say(f"serving {args.model} at http://{args.host}:{place.getsockname()[1]}/v1")
            await serve(service, place, args.deadline_s, stop)


def stop_on_signals(directory: Path) -> asyncio.Event:
    """Set by the first SIGTERM or Ctrl-C. A second one removes clients' files and exits at once."""
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            shutil.rmtree(directory, ignore_errors=True)
            say("stopped again")
            os._exit(FAILED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return stop


def main() -> None:
    args = make_parser().parse_args()
    if args.video_root is not None and not args.video_root.is_dir():
        raise ValueError(f"--video-root {args.video_root} is no directory")
    if args.max_questions < 1 or not args.deadline_s > 0:
        raise ValueError(f"--max-questions {args.max_questions} and --deadline-s {args.deadline_s:g} must be above 0")
    from paravt_jax.run.compiles import use_compilation_cache

    use_compilation_cache()
    asyncio.run(run(args))


if __name__ == "__main__":
    run_cli(main)
