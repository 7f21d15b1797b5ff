"""Process-level setup of a run: memory preallocation, threads, signals, notebooks and exit."""

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from model_port.cli import FAILED, INTERRUPTED
from model_port.malloc import keep_freed_memory
from model_port.output_dir import GIB
from model_port.terminal import say

RESERVE_FRAC = 0.1  # fraction of device memory for layouts, collectives, fragmentation and the runtime, not in plans
ACCELERATORS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")
MEMORY_FRAC = "XLA_CLIENT_MEM_FRACTION"
OLD_MEMORY_FRAC = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the older name; jax rejects both names together
VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
THREADS_PER_DEVICE = 4  # a program that runs and one that waits for it, for each of two threads that start programs


def claim_resources() -> None:
    """Prepares this process's memory and threads before JAX is used."""
    claim_memory()
    claim_threads()


def claim_memory(environment: MutableMapping[str, str] = os.environ) -> None:
    """Prepares this process's memory before JAX is used.

    On a GPU, JAX preallocates as much memory as plans assume, not its default 75 %, unless the user has set it. If JAX
    can only use a CPU, XLA's temporary buffers reuse freed memory, which must be set up before a thread allocates.
    """
    if OLD_MEMORY_FRAC not in environment:
        environment.setdefault(MEMORY_FRAC, f"{1 - RESERVE_FRAC:.2f}")
    if environment.get("JAX_PLATFORMS") == "cpu" or not any(map(find_spec, ACCELERATORS)):
        keep_freed_memory()


def peak_gib(devices: Sequence[Any]) -> float | None:
    """The most memory that one of the devices has used so far; None if their runtimes do not count it."""
    counts = [device.memory_stats() or {} for device in devices]
    peaks = [count["peak_bytes_in_use"] for count in counts if "peak_bytes_in_use" in count]
    return max(peaks) / GIB if peaks else None


def claim_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Gives XLA enough threads for virtual CPU devices, unless the user has set their number.

    XLA has a thread per core, but at least one per device. When 32 programs are in flight, the start of another one
    blocks a thread of each device. If the running program's collectives need those threads, both wait forever, and XLA
    aborts the process.
    """
    devices = VIRTUAL_DEVICES.findall(environment.get("XLA_FLAGS", ""))
    if devices and (num := int(devices[-1])) > 1:  # the last flag has precedence
        threads = max(THREADS_PER_DEVICE * num, len(os.sched_getaffinity(0)))
        environment.setdefault("PJRT_NPROC", str(threads))


Result = TypeVar("Result")
GRACE_S = 120.0  # time to save a checkpoint after SIGTERM
NOTICED_S = 1.0  # a notebook polls for interrupts this often, because one just before a wait does not wake it


class Stopping(asyncio.Event):
    """Set when a signal asks the run to stop, on any host."""

    def __init__(self) -> None:
        super().__init__()
        self.signal = 0  # signal number
        self.saves = False  # from the first step on
        self._timer: threading.Timer | None = None

    def stop(self, number: int) -> None:
        """Starts the grace period, in which the run saves a checkpoint, unless it runs or this signal came before."""
        if self._timer is not None or number == self.signal:
            return
        self.signal = number
        self.set()
        say(f"stopping: saving a checkpoint within {GRACE_S:g} s")
        self._timer = threading.Timer(GRACE_S, _exit, (f"no checkpoint within {GRACE_S:g} s",))
        self._timer.daemon = True
        self._timer.start()

    def interrupt(self) -> None:
        """Stops without a deadline, because the process goes on after an interrupt at a prompt or in a notebook."""
        self.signal = signal.SIGINT
        self.set()
        say("stopping: saving a checkpoint; interrupt again to stop without it")

    def cancel_grace(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def stop_on_signals(stopping: Stopping, before_exit: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Handles SIGTERM and Ctrl-C. The first ends a run, which saves a checkpoint within GRACE_S; a second one kills it.

    Before the first step, the first one calls `before_exit` and ends the process: a thread that loads a model cannot be
    stopped. At a prompt or in a notebook, Ctrl-C never ends the process, because the user's variables would be lost.
    Returns a function that removes the signal handlers.
    """
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        return _stop_on_interrupt(stopping, loop)
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            _exit("stopped again")
        if not stopping.saves:
            before_exit()
            _exit("stopped before the first step", 128 + number)
        received.append(number)
        stopping.stop(int(number))

    numbers = [signal.SIGTERM] if is_interactive() else [signal.SIGTERM, signal.SIGINT]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    undo_interrupt = _stop_on_first_interrupt(stopping, loop) if is_interactive() else lambda: None

    def undo() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        undo_interrupt()
        stopping.cancel_grace()

    return undo


def is_interactive() -> bool:
    """Whether this process is a Python prompt or a notebook's kernel, or becomes a prompt (`python -i`)."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def _stop_on_first_interrupt(stopping: Stopping, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Stops the run at the first interrupt, and leaves further ones to the previous handler."""
    previous = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        undo()
        loop.call_soon_threadsafe(stopping.interrupt)

    def undo() -> None:
        if signal.getsignal(signal.SIGINT) is interrupt:  # a notebook sets its own handler for every cell
            signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, interrupt)
    return undo


_on_interrupt: list[Callable[[], object]] = []  # handlers of notebook interrupts; the last one is used next


def _stop_on_interrupt(stopping: Stopping, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    def interrupt() -> None:
        loop.call_soon_threadsafe(stopping.interrupt)

    _on_interrupt.append(interrupt)

    def undo() -> None:
        if interrupt in _on_interrupt:
            _on_interrupt.remove(interrupt)

    return undo


def run_here(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine like asyncio.run. If an event loop is running, as in a notebook, it runs in another thread.

    Interrupting the notebook then ends the work like a signal; a second interrupt ends it at once.
    """
    if not _in_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, _interruptible(work))
        while True:
            try:
                return running.result(NOTICED_S)
            except TimeoutError:  # raised by the waiting or by the work
                if running.done():
                    return running.result()
            except KeyboardInterrupt:
                if _on_interrupt:
                    _on_interrupt.pop()()
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    _on_interrupt.append(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        return await task
    finally:
        _on_interrupt.clear()


def _exit(reason: str, code: int = FAILED) -> NoReturn:
    say(f"{reason}; a restart resumes from the newest checkpoint, if there is one")
    os._exit(code)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once: a thread that loads a model cannot be stopped, and nothing would be lost.

    It does not at a prompt or in a notebook, where the user's variables would be lost.
    """
    if threading.current_thread() is not threading.main_thread() or is_interactive():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
