"""Runs a command: exits with 0 on success, or prints one error message to stderr; `--debug` adds the stack trace."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from rollout.terminal import guard_stdout, open_closed_streams, say

INTERRUPTED = 130  # 128 + SIGINT, as in a shell


def prog_of(module: str) -> str:
    """Returns the command's name for its usage text: `paravt NAME` if started that way, else `python -m MODULE`."""
    return sys.argv[0] if sys.argv[0].startswith("paravt ") else f"python -m {module}"


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the stack trace of an error")


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end the process until `run_cli`, because during imports it would print a stack trace."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)


def _exit_interrupted(*_: object) -> NoReturn:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Runs a command and exits, with code 0 only if `main` returned and its output could be written."""
    try:
        if signal.getsignal(signal.SIGINT) is _exit_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        open_closed_streams()
        guard_stdout()
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as problem:
        if "--debug" in sys.argv[1:]:
            say(traceback.format_exc().rstrip())
        written_for_the_user = isinstance(problem, (ValueError, OSError, RuntimeError))
        message = problem if written_for_the_user else f"{problem!r} (unexpected; --debug shows the stack trace)"
        say(f"error: {message}")
        sys.exit(1)
    sys.exit(0)
