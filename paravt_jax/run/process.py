"""What a run is as a process: how it is told to stop, and what it says before and after it has a log."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, MutableMapping
from typing import NoReturn, Protocol

from model_port.terminal import say

RESERVE_FRAC = 0.1  # of a device's memory, for what no plan sees: layouts, collectives, fragments, the runtime
MEMORY_FRAC = "XLA_CLIENT_MEM_FRACTION"
MEMORY_FRAC_BEFORE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # its older name: jax refuses both together


def claim_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Of a GPU JAX may take what a plan counts on, and not the 75 % of its own default; a user's word stands."""
    if MEMORY_FRAC_BEFORE not in environment:
        environment.setdefault(MEMORY_FRAC, f"{1 - RESERVE_FRAC:.2f}")


class Stopping(asyncio.Event):
    """Set when a signal asks the run to stop."""

    signal = 0  # its number


GRACE_S = 120.0  # for a checkpoint after SIGTERM


class Others(Protocol):
    """The other hosts of a run, who stop with this one."""

    def stop_all(self, number: int) -> None: ...

    def when_stopped(self, work: Callable[[int], object]) -> None: ...


def stop_on_signals(stopping: Stopping, others: Others) -> Callable[[], None]:
    """SIGTERM and Ctrl-C end a run after the step it is in; a second one, or the end of the grace, ends it at once.

    What one host is told all do.
    """
    loop = asyncio.get_running_loop()
    timers: list[threading.Timer] = []
    told = False

    def signalled(number: int) -> None:
        nonlocal told
        if told:
            _exit("stopped again")
        told = True
        others.stop_all(number)
        stop(number)

    def stop(number: int) -> None:
        if stopping.is_set():
            return
        stopping.signal = number
        stopping.set()
        say(f"stopping: a checkpoint follows, within {GRACE_S:g} s")
        timers.append(threading.Timer(GRACE_S, _exit, (f"no checkpoint within {GRACE_S:g} s",)))
        timers[0].daemon = True
        timers[0].start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    others.when_stopped(lambda number: loop.call_soon_threadsafe(stop, number))

    def undo() -> None:
        others.when_stopped(lambda number: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        for timer in timers:
            timer.cancel()

    return undo


def _exit(reason: str) -> NoReturn:
    say(f"{reason}; the newest checkpoint on disk is where a restart goes on")
    os._exit(1)
