"""What a run is as a process: how it is told to stop, and what it says before and after it has a log."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def stop_on_signals(stopping: asyncio.Event, grace_s: float) -> Callable[[], None]:
    """SIGTERM and Ctrl-C end a run after the step it is in; a second one, or the end of the grace, ends it at once."""
    loop = asyncio.get_running_loop()
    timers: list[threading.Timer] = []

    def stop() -> None:
        if stopping.is_set():
            _exit("stopped again")
        stopping.set()
        say(f"stopping: a checkpoint follows, within checkpoint.grace_s={grace_s:g}")
        timers.append(threading.Timer(grace_s, _exit, (f"no checkpoint within checkpoint.grace_s={grace_s:g}",)))
        timers[0].daemon = True
        timers[0].start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    def undo() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        for timer in timers:
            timer.cancel()

    return undo


def _exit(reason: str) -> NoReturn:
    say(f"{reason}; the newest checkpoint on disk is where a restart goes on")
    os._exit(1)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
