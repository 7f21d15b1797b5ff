"""Pseudo-terminals that capture a test's output."""

import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def a_terminal(monkeypatch, *names: str, rows_and_columns: tuple[int, int] = (0, 0)) -> Iterator[Callable[[], str]]:
    """Connects `names` of sys to a terminal; yields a function that closes it and returns its content."""
    test_end, terminal_end = os.openpty()
    fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, struct.pack("HHHH", *rows_and_columns, 0, 0))
    monkeypatch.setenv("NO_COLOR", "1")  # set here, so that the command does not set it
    with os.fdopen(test_end, "rb", buffering=0) as content, os.fdopen(terminal_end, "w", encoding="utf-8") as screen:
        for name in names:
            monkeypatch.setattr(sys, name, screen)

        def read_screen() -> str:
            screen.close()
            return b"".join(parts_of(content)).decode().replace("\r\n", "\n")  # terminals write \r\n

        yield read_screen


def parts_of(content) -> Iterator[bytes]:
    """Reads to the end; a single read may return only a part of a write."""
    with contextlib.suppress(OSError):  # Linux raises an error at the end of a terminal
        while part := content.read(2**16):
            yield part
