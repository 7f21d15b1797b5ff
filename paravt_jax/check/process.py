"""Runs a part of a check in a separate process, because only the end of a process frees all its memory.

The process runs under `rollout.supervisor`, so that it ends with this process.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.supervisor import KILL_NOW, supervised

SHOWN_CHARS = 300  # characters of a failed part's last line


@dataclass(frozen=True)
class PartResult:
    """The JSON objects that a command printed before it ended or timed out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0  # peak of its largest process


def part_of(
    command: Sequence[str], log: Path, deadline_s: float | None = None, env: Mapping[str, str] | None = None
) -> PartResult:
    """Runs a command, whose program is an absolute path. `log` gets its stderr."""
    start_s, out = time.monotonic(), log.with_suffix(".out")
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(supervised(command), stdout=stdout, stderr=stderr, env=env)
        timer = threading.Timer(deadline_s or threading.TIMEOUT_MAX, process.send_signal, [KILL_NOW])
        timer.daemon = True
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # for example Ctrl-C
            process.send_signal(KILL_NOW)
            process.wait()
            raise
        timed_out = timer.finished.is_set()
        timer.cancel()
    process.returncode = code = os.waitstatus_to_exitcode(status)
    last_line = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
    failed = f"timed out after {deadline_s:g} s" if timed_out else f"ended with exit code {code}: {last_line}"
    return PartResult(
        [*_rows(out.read_text(errors="replace"))],
        failed[:SHOWN_CHARS] if code else "",
        time.monotonic() - start_s,
        usage.ru_maxrss * 1024,
    )


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in a text, and skips other lines, which user code may print."""
    for line in text.splitlines():
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row
