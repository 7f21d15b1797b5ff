"""Serves a model with SGLang, in SGLang's own environment, until SIGINT or SIGTERM.

    python -m rollout.serve --model HF_DIR [--device cpu|cuda] [--port P] [-- options of sglang.launch_server]

Prints one line to stdout when the server is ready: its URL and the model. Exits with 0 after SIGINT or SIGTERM. All
processes of the server end with this one.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from rollout.cli import add_debug_flag, prog_of, run_cli
from rollout.receiver import Receiver
from rollout.server import DTYPES, PYTHON_VARIABLE, Dtype, Server, ServerSettings, check_port, settled_port
from rollout.terminal import visible

PROGRESS_EVERY_S = 5  # if stderr is not a terminal, so that each report is a new line
CLEAR_LINE = "\r\x1b[K"


class StartLine:
    """Shows the server's latest line and the elapsed seconds; on a terminal, redraws them in place."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._next_s = 0.0
        self._in_place = sys.stderr.isatty()
        self.has_lines = False

    def show(self, line: str) -> None:
        line, elapsed_s, self.has_lines = visible(line), time.monotonic() - self._started_s, True
        if self._in_place:
            room = shutil.get_terminal_size().columns - len("starting, 000 s  ") - 1  # a wrapped line can't be redrawn
            print(f"{CLEAR_LINE}starting, {elapsed_s:.0f} s  {line[:room]}", end="", file=sys.stderr, flush=True)
        elif elapsed_s >= self._next_s:
            print(f"starting, {elapsed_s:.0f} s  {line}".rstrip(), file=sys.stderr, flush=True)
            self._next_s += PROGRESS_EVERY_S

    def finish(self, outcome: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        print(f"{CLEAR_LINE if self._in_place else ''}{outcome} after {elapsed_s:.1f} s", file=sys.stderr, flush=True)


async def serve(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Runs the server, and a receiver for weights from learners on other hosts."""
    check_port(f"--weights-port {args.weights_port}", args.weights_port)
    weights_port = settled_port(settings.host, args.weights_port)
    async with Receiver.open(settings.host, weights_port) as receiver:
        await _serve(args, replace(settings, weights_port=weights_port), receiver)


async def _serve(args: argparse.Namespace, settings: ServerSettings, receiver: Receiver) -> None:
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    stopping = asyncio.create_task(stop_requested.wait())

    progress = StartLine()
    starting = asyncio.create_task(
        Server.start(settings, deadline_s=args.deadline_s, on_progress=progress.show, log_file=args.log_file)
    )
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    if starting.cancelled():
        progress.finish("stopped while starting")
        return
    if starting.exception() and progress.has_lines:  # without lines, no server was started
        progress.finish("failed")
    server = starting.result()
    progress.finish("ready")
    receiver.server_url = server.url

    report = {"url": server.url, "model": str(settings.model), "pid": server.pid}
    try:
        print(json.dumps(report) if args.json else f"{server.url} {settings.model}", flush=True)
        ending = asyncio.create_task(server.wait())
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stop_requested.is_set():
            raise server.exit_error()
    finally:
        await server.stop(args.grace_s)


def parse(argv: list[str]) -> tuple[argparse.Namespace, ServerSettings]:
    ours, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    default = ServerSettings(model=Path())
    parser = argparse.ArgumentParser(
        prog=prog_of("rollout.serve"),
        description="Serves a model with SGLang until SIGINT or SIGTERM. Images are never resized.",
        epilog="Options after -- are passed to sglang.launch_server and override the ones above.",
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="HF_DIR", help="model directory in Hugging Face format")
    add("--device", choices=list(DTYPES), default=default.device, help=f"default {default.device}")
    add("--host", default=default.host, help=f"address to listen on (default {default.host})")
    add("--port", type=int, default=default.port, help="port to listen on (default 0: any free port)")
    add(
        "--weights-port",
        type=int,
        default=0,
        metavar="P",
        help="port that receives weights from other hosts (default: any free port)",
    )
    add("--dtype", choices=get_args(Dtype), help="compute type (default float32 on cpu, bfloat16 on cuda)")
    add(
        "--context-length",
        type=int,
        default=default.context_length,
        metavar="N",
        help="context length in tokens (default 32768)",
    )
    add(
        "--max-total-tokens", type=int, metavar="N", help="KV pool's tokens (default two contexts on cpu, auto on cuda)"
    )
    add(
        "--memory-frac",
        type=float,
        default=default.memory_frac,
        help=f"on cuda: fraction of GPU memory for weights and KV pool (default {default.memory_frac})",
    )
    add(
        "--max-running-requests",
        type=int,
        metavar="N",
        help="concurrent requests (default 16 on cpu, SGLang's on cuda)",
    )
    add("--trainable-vision", action="store_true", help="for training the vision tower: cache no image embeddings")
    add("--tensor-parallel", type=int, default=default.tensor_parallel, metavar="N", help="number of GPUs (default 1)")
    add("--python", type=Path, help=f"Python of SGLang's environment (default: {PYTHON_VARIABLE}, or .venv-sglang)")
    add("--deadline-s", type=float, default=600, metavar="S", help="time limit for starting (default 600)")
    add("--grace-s", type=float, default=30, metavar="S", help="time to finish requests when stopping (default 30)")
    add("--log-file", type=Path, metavar="FILE", help="append the server's output to this file")
    add("--json", action="store_true", help="print the stdout line as JSON, with the process id")
    add_debug_flag(parser)
    args = parser.parse_args(ours)
    values = {field.name: getattr(args, field.name) for field in fields(ServerSettings) if hasattr(args, field.name)}
    return args, ServerSettings(**values, extra_args=tuple(extra))


def main() -> None:
    asyncio.run(serve(*parse(sys.argv[1:])))


if __name__ == "__main__":
    run_cli(main)
