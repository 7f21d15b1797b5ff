"""Handles errors for all commands: one readable line on stderr and a failing exit code; `--debug` adds the trace.

A command's module adds the flag to its parser with `add_debug_flag` and ends with `run_cli(main)`.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from model_port.terminal import guard_stdout, open_closed_streams, say

DEBUG_FLAG = "--debug"
FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells report Ctrl-C
EXPECTED_ERRORS = (ValueError, OSError, RuntimeError)  # their messages are written for users


def prog_of(module: str) -> str:
    """Returns the command's name for its help: `paravt NAME` if started that way, else `python -m MODULE`."""
    return sys.argv[0] if sys.argv[0].startswith("paravt ") else f"python -m {module}"


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(DEBUG_FLAG, action="store_true", help="show the stack trace of an error")


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end the process until `raise_on_interrupt`, while a command's modules are imported.

    A KeyboardInterrupt would print the stack trace of an import, and extension modules turn it into ImportError.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)


def raise_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_interrupted(*_: object) -> NoReturn:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Runs a command and exits, with code 0 only if `main` returned and its output could be written."""
    if os.getpid() == 1:  # in a container, where the kernel ignores a SIGTERM without a handler
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        raise_on_interrupt()
        open_closed_streams()
        guard_stdout()
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has ended, for example `head`; the flush at exit would raise too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as problem:
        if DEBUG_FLAG in sys.argv[1:]:
            say(traceback.format_exc().rstrip())
        say(f"error: {one_line(problem)}")
        sys.exit(FAILED)
    sys.exit(0)


def one_line(problem: BaseException) -> str:
    """Returns an error's message without line breaks, or the first error's message of an exception group."""
    if isinstance(problem, BaseExceptionGroup):
        return one_line(problem.exceptions[0])
    if isinstance(problem, OSError) and problem.strerror:
        names = [str(name) for name in (problem.filename, problem.filename2) if name is not None]
        return " ".join(": ".join([*names, problem.strerror]).split())
    message = " ".join(str(problem).split())
    if isinstance(problem, EXPECTED_ERRORS) and message:
        return message
    return f"{type(problem).__name__} {message} (unexpected; {DEBUG_FLAG} shows the stack trace)"
