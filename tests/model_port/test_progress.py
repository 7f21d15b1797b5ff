"""Long work shows its progress: a bar on a terminal, lines elsewhere, and nothing after it ends."""

import io
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from terminals import a_terminal

from model_port import progress
from model_port.progress import BYTES, Meter, counted


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    return clock


@pytest.mark.parametrize(
    ("total", "unit", "done", "elapsed_s", "line"),
    [
        (16_400_000_000, BYTES, 3_280_000_000, 30, "work: 3.3 of 16.4 GB, 20 %, 02:00 left"),  # 4/5 done, 30 s each
        (2_500_000, BYTES, 2_500_000, 30, "work: 2.5 of 2.5 MB, 100 %, 00:00 left"),
        (700, BYTES, 0, 30, "work: 0.0 of 0.7 kB, 00:30 so far"),
        (5_000, "row", 1_250, 60, "work: 1,250 of 5,000 rows, 25 %, 03:00 left"),
        (1, "prompt", 0, 90, "work: 0 of 1 prompt, 01:30 so far"),
        (None, "row", 12_000, 60, "work: 12,000 rows, 01:00 so far"),
        (None, "", 0, 3_700, "work: 1:01:40 so far"),
    ],
)
def test_a_progress_line_has_the_fraction_and_the_remaining_time(total, unit, done, elapsed_s, line, clock):
    work = Meter("work", total, unit)
    work.update(done)
    clock.now_s += elapsed_s
    assert work.line() == line


class Listener(io.StringIO):
    """A non-terminal stderr on which a test can wait for a word."""

    def __init__(self, word: str):
        super().__init__()
        self._word, self.heard = word, threading.Event()

    def write(self, text: str) -> int:
        if self._word in text:
            self.heard.set()
        return super().write(text)


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]


@pytest.mark.parametrize("problem", [None, OSError("disk full")], ids=["done", "failed"])
def test_one_long_call_is_logged_until_it_returns(problem, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", Listener("copying: 3 of 4 files"))
    with pytest.raises(OSError, match="disk full") if problem else nullcontext(), Meter("copying", 4, "file") as work:
        work.update(3)
        assert sys.stderr.heard.wait(60)  # one call without progress updates
        if problem:
            raise problem
    assert progress_threads() == [] and "\r" not in sys.stderr.getvalue()


def test_an_empty_line_is_not_logged(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", Listener("something"))
    lines = iter(["", "", "something"])
    ticker = progress.Ticker(lambda: next(lines, ""))
    assert sys.stderr.heard.wait(60)
    ticker.close()
    assert sys.stderr.getvalue() == "something\n"


def test_a_terminal_shows_a_bar_until_the_work_is_done(monkeypatch):
    monkeypatch.setattr(progress, "BAR_DELAY_S", 0)
    with a_terminal(monkeypatch, "stderr") as read_screen:
        with Meter("copying", 4_000_000, BYTES) as work:
            work.at(1_000_000, "still copying")
            assert progress_threads() == []
        screen = read_screen()
    assert "copying:   0%" in screen and "/4.00M" in screen and screen.endswith(" \r")


def test_items_are_counted_as_they_are_done(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", Listener("reading: 1 of 2 files, 50 %"))
    items = counted({"a": 1, "b": 2}.items(), "reading", "file")
    assert [next(items), next(items)] == [("a", 1), ("b", 2)]
    assert sys.stderr.heard.wait(60)
    assert list(items) == [] and progress_threads() == []
