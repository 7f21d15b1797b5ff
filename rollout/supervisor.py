"""Runs one command so that nothing of it outlives the process that wanted it.

    python -I supervisor.py PARENT_PID COMMAND…

Every descendant of the command, whatever session or group it moves to, is killed when the command ends, when the parent
is gone (killed by SIGKILL included) or on SIGUSR1. SIGTERM and SIGINT are passed on to the command as SIGTERM. The exit
code is that of the command, 128 + n for signal n, and it comes only after the last descendant is gone.

Linux only, standard library only: it runs as a script, outside the package.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

KILL_NOW = signal.SIGUSR1
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, KILL_NOW)
POLL_S = 0.2  # how soon a dead parent is noticed; PDEATHSIG would also fire when only the thread that forked us ends
TRACKER_S = 2.0  # for a resource tracker to do its work when those are gone whose work it does
ROUND_S = 0.01
NOT_RUN = 127  # what a shell reports for a command that could not be started

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    pid: int
    parent: int
    group: int


def processes() -> Iterator[Process]:
    """All living processes; zombies are not among them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            content = stat.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended after the listing
            continue
        state, parent, group = content.rpartition(")")[2].split()[:3]  # the name before it may hold anything
        if state not in "ZX":
            yield Process(int(stat.parent.name), int(parent), int(group))


def supervised(command: Sequence[str]) -> list[str]:
    """The command line under which `command`, with an absolute path, does not outlive this process."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> int:
    unwatched = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children instead of init's, so none can slip away
    child = _spawn(command, unwatched)
    status = None
    while status is None:
        received = signal.sigtimedwait(WATCHED, POLL_S)
        if os.getppid() != parent or (received is not None and received.si_signo == KILL_NOW):
            break
        if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
            os.kill(child, signal.SIGTERM)
        status = _reap(child)
    status = _kill_descendants(child, status)
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
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # for the case that the supervisor itself is killed
        if os.getppid() != supervisor:
            os._exit(NOT_RUN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        os.execv(command[0], command)
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr, flush=True)
    os._exit(NOT_RUN)


def _reap(child: int) -> int | None:
    """The status of `child` if it ended; orphans that ended are reaped on the way."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return status if pid else None


def is_tracker(pid: int) -> bool:
    """Of the semaphores and shared memory that the processes of a Python program have.

    It removes what others leave in /dev/shm, and ends by itself when they have.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill_descendants(child: int, status: int | None) -> int:
    """Kills what is left; each round turns the children of the killed into children of ours, for the next round."""
    spare_until_s = time.monotonic() + TRACKER_S
    while True:
        for process in processes():
            spared = time.monotonic() < spare_until_s and is_tracker(process.pid)
            if process.parent == os.getpid() and not spared:
                os.kill(process.pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            assert status is not None, "the command is reaped before the last child is"
            return status
        if not pid:
            time.sleep(ROUND_S)
        status = ended if pid == child else status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
