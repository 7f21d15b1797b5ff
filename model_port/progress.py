"""Where long work is: a bar on a terminal; elsewhere a line every half a minute, so that a log is never silent."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from model_port.terminal import say, visible

EVERY_S = 30.0
BAR_DELAY_S = 1.0  # what is over sooner shows no bar
BYTES = "B"
SIZES = {"GB": 10**9, "MB": 10**6, "kB": 10**3}

Item = TypeVar("Item")


class Ticker:
    """Says on stderr, every half a minute until it is closed, what `line` gives; nothing where that is empty.

    From a thread of its own: the work may be one long call.
    """

    def __init__(self, line: Callable[[], str]):
        self._line, self._closed = line, threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            if line := self._line():
                say(line)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


class Meter:
    """Use as a context around the work, and tell it with `update` what is done.

    `total` is how many of `unit` there are, where that is known. Work without a unit cannot be counted: it has no bar,
    and its lines say how long it has taken.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = ""):
        self.what, self.done = visible(what), 0
        self._total, self._unit = total, unit
        self._began_s = time.monotonic()
        self._bar: tqdm | None = None
        self._ticker: Ticker | None = None

    def update(self, num: int = 1) -> None:
        self.at(self.done + num)

    def at(self, done: int, what: str | None = None) -> None:
        self.what, before, self.done = visible(what or self.what), self.done, done
        if self._bar is not None:
            self._bar.desc = f"{self.what}: "
            self._bar.update(done - before)

    def say(self, message: str) -> None:
        """A line of its own, beside the bar."""
        tqdm.write(visible(message), file=sys.stderr)

    def line(self) -> str:
        """As it is said where there is no terminal."""
        elapsed_s = time.monotonic() - self._began_s
        so_far = f"{tqdm.format_interval(elapsed_s)} so far"
        if not self._unit:
            return f"{self.what}: {so_far}"
        if self._total is None:
            return f"{self.what}: {_amounts([self.done], self._unit)}, {so_far}"
        amounts = _amounts([self.done, self._total], self._unit)
        if not self.done:
            return f"{self.what}: {amounts}, {so_far}"
        left = tqdm.format_interval(elapsed_s * (self._total - self.done) / self.done)
        return f"{self.what}: {amounts}, {100 * self.done // self._total} %, {left} left"

    def __enter__(self) -> "Meter":
        if not sys.stderr.isatty():
            self._ticker = Ticker(self.line)
        elif self._unit:
            self._bar = make_bar(
                desc=self.what,
                total=self._total,
                unit=self._unit,
                unit_scale=self._unit == BYTES,
                delay=BAR_DELAY_S,
                leave=False,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shown in (self._ticker, self._bar):
            if shown is not None:
                shown.close()


def counted(items: Collection[Item], what: str, unit: str) -> Iterator[Item]:
    """The items, and how far they are."""
    with Meter(what, len(items), unit) as meter:
        for item in items:
            yield item
            meter.update()


def make_bar(**settings: Any) -> tqdm:
    """On stderr, a terminal. It may have no size, as in a container; a bar as wide as that would show nothing."""
    usual = None if all(os.get_terminal_size(sys.stderr.fileno())) else shutil.get_terminal_size()
    return tqdm(
        file=sys.stderr,
        dynamic_ncols=usual is None,
        ncols=usual and usual.columns,
        nrows=usual and usual.lines,
        **settings,
    )


def _amounts(numbers: list[int], unit: str) -> str:
    """The last one is the largest: it says in what the others are given."""
    if unit != BYTES:
        return f"{' of '.join(f'{number:,}' for number in numbers)} {unit}{'s' * (numbers[-1] != 1)}"
    name, size = next(((name, size) for name, size in SIZES.items() if numbers[-1] >= size), ("kB", 1000))
    return f"{' of '.join(f'{number / size:.1f}' for number in numbers)} {name}"
