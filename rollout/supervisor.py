"""Runs a command whose processes never outlive the process that started it.

    python -I supervisor.py PARENT_PID COMMAND…

The supervisor kills all descendants of the command, in any session or group, when the command ends, when the parent is
gone (even by SIGKILL) or on SIGUSR1. It forwards SIGTERM and SIGINT to the command as SIGTERM. It exits with the
command's exit code, or 128 + n for signal n, but only after the last descendant has ended, and after it has removed the
semaphores and segments that killed processes leave in /dev/shm.

This file only uses Linux and the standard library, because it runs as a script, outside the package.
"""

import ctypes
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KILL_NOW = signal.SIGUSR1
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, KILL_NOW)
POLL_S = 0.2  # a dead parent is detected by polling, because PDEATHSIG also fires if only the forking thread ends
SCAN_EVERY_S = 2.0  # period of the scans for the descendants' shared memory, if no file appears there
SHARED_MEMORY = Path("/dev/shm")
MAPPED = re.compile(rf"^(?:\S+ ){{4}}(\d+) +{SHARED_MEMORY}/[^/\n]+$", re.MULTILINE)  # /proc/PID/maps, see man proc

# Images in transit from an SGLang process, named by its PID, to its scheduler. No process has them mapped or open.
IN_TRANSIT = re.compile(r"sgl_shm_[a-z_]+_(\d+)_[0-9a-f]+")

NOT_RUN = 127  # a shell's exit code for a command that could not be started

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    pid: int
    parent: int
    group: int


def processes() -> Iterator[Process]:
    """Yields all living processes, without zombies."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            content = file.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # the process has ended in the meantime
            continue
        state, parent, group = content.rpartition(")")[2].split()[:3]  # the name in parentheses may have any characters
        if state not in "ZX":
            yield Process(int(file.parent.name), int(parent), int(group))


def supervised(command: Sequence[str]) -> list[str]:
    """Returns the command line that runs `command`, which has an absolute path, under a supervisor."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


class SharedFiles:
    """The files in /dev/shm that a process's descendants have mapped or open.

    A killed process can no longer be asked for its files, so running processes are scanned periodically, and whenever a
    file appears. Files are identified by inode, because a semaphore is renamed after it is mapped.
    """

    def __init__(self, top: int):
        self._top, self._scanned_s = top, 0.0
        self._preexisting = set(SHARED_MEMORY.glob("*"))
        self._scanned = self._preexisting
        self._ours: set[Path] = set()
        self._pids: set[int] = set()

    def scan_if_due(self) -> None:
        """Scans if a file has appeared since the last scan, or if the last scan was long ago."""
        if set(SHARED_MEMORY.glob("*")) - self._scanned or time.monotonic() > self._scanned_s + SCAN_EVERY_S:
            self.scan()

    def scan(self) -> None:
        paths = set(SHARED_MEMORY.glob("*"))
        self._scanned, self._scanned_s = paths, time.monotonic()
        pids = descendants(self._top)
        self._pids.update(pids)
        ours = mapped_or_open(pids)
        for path in paths - self._preexisting:
            with suppress(OSError):  # already gone
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_ino in ours:
                    self._ours.add(path)

    def remove(self) -> None:
        named = {path: IN_TRANSIT.fullmatch(path.name) for path in set(SHARED_MEMORY.glob("*")) - self._preexisting}
        in_transit = {path for path, match in named.items() if match and int(match[1]) in self._pids}
        for path in self._ours | in_transit:
            with suppress(OSError):  # already gone, or another user's
                path.unlink()


def mapped_or_open(pids: Iterable[int]) -> set[int]:
    """Returns the inodes of the files in /dev/shm that these processes have mapped or open."""
    inodes: set[int] = set()
    for process in (Path(f"/proc/{pid}") for pid in pids):
        with suppress(OSError):  # the process has ended, or is another user's
            inodes |= {int(inode) for inode in MAPPED.findall((process / "maps").read_text(errors="replace"))}
            for file in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed in the meantime
                    inodes |= {file.stat().st_ino} if file.readlink().parent == SHARED_MEMORY else set()
    return inodes


def descendants(top: int) -> list[int]:
    """Returns the ids of all direct and indirect children of a process."""
    children: dict[int, list[int]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process.pid)
    result, below = [], children.get(top, [])
    while below:
        result.append(below.pop())
        below += children.get(result[-1], [])
    return result


def main(parent: int, command: list[str]) -> int:
    unwatched = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process instead of init, so none can escape
    shared = SharedFiles(os.getpid())
    child = _spawn(command, unwatched)
    status = None
    while status is None:
        received = signal.sigtimedwait(WATCHED, POLL_S)
        if os.getppid() != parent or (received is not None and received.si_signo == KILL_NOW):
            break
        if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, signal.SIGTERM)
        shared.scan_if_due()
        status = _reap(child)
    shared.scan()
    status = _kill_descendants(child, status)
    shared.remove()
    exit_code = os.waitstatus_to_exitcode(status)
    return exit_code if exit_code >= 0 else 128 - exit_code


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _spawn(command: list[str], signal_mask: Iterable[int]) -> int:
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the supervisor itself is killed
        if os.getppid() != supervisor:
            os._exit(NOT_RUN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        os.execv(command[0], command)
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr, flush=True)
    os._exit(NOT_RUN)


def _reap(child: int) -> int | None:
    """Reaps orphans that have ended. Returns the status of `child` if it has ended too."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return status if pid else None


def _kill_descendants(child: int, status: int | None) -> int:
    """Kills all descendants and returns the status of `child`.

    Each round kills this process's children, whose own children then become this process's for the next round.
    """
    while True:
        for process in processes():
            if process.parent == os.getpid():
                os.kill(process.pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            assert status is not None, "the command is reaped before the last child"
            return status
        status = ended if pid == child else status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
