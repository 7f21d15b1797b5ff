"""Shows the progress of long work: a bar on a terminal, otherwise a log line every half minute."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

from model_port.terminal import say, visible

EVERY_S = 30.0
BAR_DELAY_S = 1.0  # shorter work shows no bar
BYTES = "B"
SIZES = {"GB": 10**9, "MB": 10**6, "kB": 10**3}

Item = TypeVar("Item")


class Ticker:
    """Prints `line()` to stderr every `every_s` seconds until closed, unless the line is empty.

    It uses a thread, because the work may be a single long call.
    """

    def __init__(self, line: Callable[[], str], every_s: float | None = None):
        self._line, self._every_s, self._closed = line, every_s or EVERY_S, threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            if line := self._line():
                say(line)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


class Meter:
    """A context manager that shows the progress of its body, which calls `update` for every completed part.

    `total` is the number of `unit`s, if known. Work without a unit has no bar, and its log lines only show the time.
    """

    def __init__(self, task: str, total: int | None = None, unit: str = ""):
        self.task, self.done = visible(task), 0
        self._total, self._unit = total, unit
        self._began_s = time.monotonic()
        self._bar: tqdm | None = None
        self._ticker: Ticker | None = None

    def update(self, num: int = 1) -> None:
        self.at(self.done + num)

    def at(self, done: int, task: str | None = None) -> None:
        self.task, previous, self.done = visible(task or self.task), self.done, done
        if self._bar is not None:
            self._bar.desc = f"{self.task}: "
            self._bar.update(done - previous)

    def line(self) -> str:
        """Returns the log line that is printed if there is no terminal."""
        elapsed_s = time.monotonic() - self._began_s
        so_far = f"{tqdm.format_interval(elapsed_s)} so far"
        if not self._unit:
            return f"{self.task}: {so_far}"
        if self._total is None:
            return f"{self.task}: {in_units([self.done], self._unit)}, {so_far}"
        amounts = in_units([self.done, self._total], self._unit)
        if not self.done:
            return f"{self.task}: {amounts}, {so_far}"
        remaining = tqdm.format_interval(elapsed_s * (self._total - self.done) / self.done)
        return f"{self.task}: {amounts}, {100 * self.done // self._total} %, {remaining} left"

    def __enter__(self) -> "Meter":
        if not sys.stderr.isatty():
            self._ticker = Ticker(self.line)
        elif self._unit:
            self._bar = make_bar(
                desc=self.task,
                total=self._total,
                unit=self._unit,
                unit_scale=self._unit == BYTES,
                delay=BAR_DELAY_S,
                leave=False,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for display in (self._ticker, self._bar):
            if display is not None:
                display.close()


def counted(items: Collection[Item], task: str, unit: str) -> Iterator[Item]:
    """Yields the items and shows progress."""
    with Meter(task, len(items), unit) as meter:
        for item in items:
            yield item
            meter.update()


def make_bar(**settings: Any) -> tqdm:
    """Makes a bar on stderr, which must be a terminal. A container's terminal may have size 0, which would hide it."""
    usual = None if all(os.get_terminal_size(sys.stderr.fileno())) else shutil.get_terminal_size()
    return tqdm(
        file=sys.stderr,
        dynamic_ncols=usual is None,
        ncols=usual.columns if usual else None,
        nrows=usual.lines if usual else None,
        **settings,
    )


def in_units(numbers: list[int], unit: str) -> str:
    """Formats numbers with their unit. The last number, which is the largest, decides the scale of bytes."""
    if unit != BYTES:
        return f"{' of '.join(f'{number:,}' for number in numbers)} {unit}{'s' * (numbers[-1] != 1)}"
    name, size = next(((name, size) for name, size in SIZES.items() if numbers[-1] >= size), ("kB", 1000))
    return f"{' of '.join(f'{number / size:.1f}' for number in numbers)} {name}"
