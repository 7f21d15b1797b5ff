"""Serves the agent with its sub-agents as one model behind OpenAI's API: python -m paravt_jax.serve --model M"""

import argparse
import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

from model_port.cli import FAILED, add_debug_flag, prog_of, run_cli
from model_port.terminal import say
from paravt_jax.ask import add_model_arguments
from paravt_jax.asking.access import KEY_VARIABLE, WITHOUT_KEY, access_control
from rollout.owned_directory import owned_directory

CLIENT_FILES = "paravt_serve_"  # prefix of the temporary directory for clients' files


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.serve"),
        description="Serve a policy with its parallel sub-agents as one model, for any client of OpenAI's API.",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: only this machine)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default 8000)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"key that clients must send, as openai.OpenAI(api_key=…) does; because other users of this machine can "
        f"see it in the process list, prefer the environment variable {KEY_VARIABLE}",
    )
    parser.add_argument(
        WITHOUT_KEY,
        action="store_true",
        help="with a --host that other machines can reach: serve everyone without a key",
    )
    parser.add_argument(
        "--video-root", type=Path, metavar="DIR", help="clients may use the videos, images and subtitles in it"
    )
    parser.add_argument(
        "--allow-fetch", action="store_true", help="clients may use videos and images on the public internet"
    )
    parser.add_argument(
        "--max-questions",
        type=int,
        default=4,
        metavar="N",
        help="questions that run at the same time, sampled together (default 4); eight times as many wait",
    )
    parser.add_argument(
        "--deadline-s", type=float, default=600.0, metavar="S", help="deadline of a question in seconds (default 600)"
    )
    add_debug_flag(parser)
    return parser


async def run(args: argparse.Namespace) -> None:
    from paravt_jax.asking.asker import engine_of, open_asker  # imported late, so that --help does not load jax
    from paravt_jax.asking.media import Sources
    from paravt_jax.asking.service import Service, bind_port, serve

    listener = bind_port(args.host, args.port)
    access = access_control(listener, args.host, args.api_key, args.no_api_key)
    with owned_directory(Path(tempfile.gettempdir()), CLIENT_FILES) as directory:
        async with open_asker(
            args.model,
            engine_of(args.model, args.url, args.endpoint, args.endpoint_key_env),
            num_frames=args.frames,
            dispatch=args.dispatch,
            num_questions=args.max_questions,
        ) as answerer:
            stop = stop_on_signals(directory)
            sources = Sources(args.video_root, args.allow_fetch, directory)
            service = Service(answerer, args.model, sources, args.max_questions, args.deadline_s, access)
            host = f"[{args.host}]" if ":" in args.host else args.host
            say(f"serving {args.model} at http://{host}:{listener.getsockname()[1]}/v1")
            await serve(service, listener, stop)


def stop_on_signals(directory: Path) -> asyncio.Event:
    """Returns an event that the first SIGTERM or Ctrl-C sets. The second removes clients' files and exits at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            shutil.rmtree(directory, ignore_errors=True)
            say("stopped again, exiting at once")
            os._exit(FAILED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def main() -> None:
    args = make_parser().parse_args()
    if args.video_root is not None and not args.video_root.is_dir():
        raise ValueError(f"--video-root {args.video_root} is not a directory")
    if args.max_questions < 1:
        raise ValueError(f"--max-questions {args.max_questions} must be at least 1")
    if not args.deadline_s > 0:
        raise ValueError(f"--deadline-s {args.deadline_s:g} must be above 0")
    from paravt_jax.run.compiles import set_up_compilation

    set_up_compilation()
    asyncio.run(run(args))


if __name__ == "__main__":
    run_cli(main)
