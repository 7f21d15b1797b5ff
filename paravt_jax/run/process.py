"""What a run is as a process: its lock, its signals, its threads, what it was started with, how often it compiled."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax

from paravt_jax.config import Config, EvalConfig, SftConfig, to_record

Result = TypeVar("Result")
VERSIONED = ("paravt_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
LOCK_FILE = ".lock"


def write_settings(config: Config | SftConfig | EvalConfig, directory: Path) -> None:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    settings = {
        "config": to_record(config),
        "git_commit": git.stdout.strip() or None,
        "packages": {name: version(name) for name in VERSIONED},
    }
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(settings, indent=2) + "\n")
    partial.replace(directory / "config.json")


def lock(directory: Path) -> Callable[[], None]:
    """Two trainers in one directory would undo each other's files."""
    file = os.open(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RuntimeError(f"another process trains in {directory}; wait for it, or choose another run_dir") from None
    return lambda: os.close(file)


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


async def in_thread(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, but a cancellation waits for the work: half an update would be none."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` gives; or None as soon as somebody wants to stop, and then it is cancelled."""
    working, told = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if stopping.is_set():
        working.cancel()
        await asyncio.wait({working})
        return None
    return working.result()


class Compiles:
    """How often, and how long, XLA compiled: a run that compiles in every step wastes its time."""

    def __init__(self) -> None:
        self._number, self._seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._number += 1
            self._seconds += duration_secs

    def taken(self) -> dict[str, float]:
        """Since the last call."""
        found = {"perf/num_compiles": float(self._number), "time/compile_s": self._seconds}
        self._number, self._seconds = 0, 0.0
        return found


def use_compilation_cache() -> None:
    """Compiled programs are kept on disk, so that a run that goes on does not compile again."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "paravt_jax" / "xla"))
