"""Copies a run's stderr to RUN/log.txt, except redraws of the progress bar."""

import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from datetime import UTC, datetime
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

LOG_FILE = "log.txt"


def log_file(host: int) -> str:
    return LOG_FILE if host == 0 else f"log.{host}.txt"


@contextmanager
def tee_stderr(path: Path) -> Iterator[None]:
    """Appends stderr to a file, after a line with the time and the command. An exception adds its traceback."""
    with path.open("ab", buffering=0) as file:
        copied: Any = _Tee(sys.stderr, file)
        copied.copy(f"{datetime.now(UTC).isoformat(timespec='seconds')}  {shlex.join(sys.orig_argv)}\n")
        with redirect_stderr(copied):
            try:
                yield
            except Exception:
                copied.copy(traceback.format_exc())
                raise


class _Tee:
    """Writes to stderr and to the file, except redraws of the bar, which start with a carriage return.

    Errors of both are ignored, so that a full disk, a closed terminal or a `tee` ended by Ctrl-C does not end the run.
    Handlers of logging may use it after the run.
    """

    def __init__(self, stderr: IO[str], file: RawIOBase) -> None:
        self._stderr, self._file = stderr, file

    def write(self, text: str) -> int:
        if not text.startswith("\r"):
            self.copy(text)
        with suppress(OSError):
            self._stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stderr.flush()

    def copy(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: the run has ended
            self._file.write(text.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)
