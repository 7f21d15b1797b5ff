"""What goes wrong, when and for how long: all of it follows from a seed.

A fault names a role, and how far through the role's processes the one lies that it finds, whichever there are then.
"""

import asyncio
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

FIRST_S, PAUSE_S = 3.0, (3.0, 13.0)  # until the first fault, and between two
SECOND = "second trainer"  # of another run, for the same servers
# How often, as parts of the sum: what goes wrong, to whom, and for how many seconds at most.
KINDS = (
    (4, "kill", "server", 0.0),
    (4, "stop", "server", 40.0),
    (4, "slow", "server", 15.0),
    (2, "restart", "server", 0.0),
    (2, "no files", "server", 10.0),
    (2, "no memory", "server", 10.0),
    (3, "kill", "decoder", 0.0),
    (3, "stop", "decoder", 20.0),
    (2, "no memory", "decoder", 10.0),
    (3, "hide", "videos", 10.0),
    (1, "start", SECOND, 40.0),
    # Mostly the trainer ends with these, and must have the time to come back.
    (2, "kill", "trainer", 0.0),
    (1, "restart", "trainer", 0.0),
    (1, "no files", "trainer", 10.0),
    (1, "no memory", "trainer", 10.0),
    (1, "no disk", "trainer", 15.0),
    (2, "stop", "trainer", 20.0),
    (2, "slow", "trainer", 15.0),
)
SLOW_STOPPED_S, SLOW_GOING_S = 0.4, 0.1
SPARE_BYTES, SPARE_FILES, FILE_BYTES = 2**24, 1, 2**12  # what is left of memory, open files and the size of a file


class Fault(NamedTuple):
    at_s: float
    kind: str
    role: str
    lasts_s: float
    which: float  # of several servers or decoders, from 0 to below 1
    part: float  # and of the processes of that one

    @property
    def name(self) -> str:
        return f"{self.kind} {self.role}"


def schedule(seed: int, seconds: float) -> list[Fault]:
    chance, faults, at_s = random.Random(seed), [], FIRST_S
    while at_s < seconds:
        ((_, kind, role, most_s),) = chance.choices(KINDS, [kind[0] for kind in KINDS])
        lasts_s = most_s * chance.uniform(0.2, 1.0)
        faults.append(Fault(at_s, kind, role, lasts_s, chance.random(), chance.random()))
        at_s += chance.uniform(*PAUSE_S)
    return faults


async def happen(fault: Fault, families: Sequence[Sequence[int]], videos: Path) -> bool:
    """Returns when it is over, and everything as before but for what died of it; False where it met nobody.

    `families` are the processes of each that has the role, the one first that a user started.
    """
    if fault.role == "videos":
        await _hidden(videos, fault.lasts_s)
        return True
    if not families:
        return False
    pids = families[int(fault.which * len(families))]
    pid = pids[int(fault.part * len(pids))]
    match fault.kind:
        case "kill":
            _send([pid], signal.SIGKILL)
        case "restart":
            _send(pids[:1], signal.SIGTERM)
        case "stop":
            await _stopped(pids, fault.lasts_s)
        case "slow":
            for _ in range(int(fault.lasts_s / (SLOW_STOPPED_S + SLOW_GOING_S))):
                await _stopped(pids, SLOW_STOPPED_S)
                await asyncio.sleep(SLOW_GOING_S)
        case "no memory":
            await _limited(pid, resource.RLIMIT_AS, _memory_bytes, SPARE_BYTES, fault.lasts_s)
        case "no files":
            await _limited(pid, resource.RLIMIT_NOFILE, _num_files, SPARE_FILES, fault.lasts_s)
        case "no disk":
            await _limited(pid, resource.RLIMIT_FSIZE, lambda pid: 0, FILE_BYTES, fault.lasts_s)
    return True


async def _stopped(pids: Sequence[int], seconds: float) -> None:
    try:
        _send(pids, signal.SIGSTOP)
        await asyncio.sleep(seconds)
    finally:
        _send(pids, signal.SIGCONT)


async def _limited(pid: int, limit: int, taken: Callable[[int], int], spare: int, seconds: float) -> None:
    """It may take so much more than it has now, and no more than that."""
    with suppress(OSError):  # it ended meanwhile
        soft, hard = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (taken(pid) + spare, hard))
        try:
            await asyncio.sleep(seconds)
        finally:
            resource.prlimit(pid, limit, (soft, hard))


async def _hidden(videos: Path, seconds: float) -> None:
    with _renamed(videos, videos.with_name("hidden")):
        await asyncio.sleep(seconds)


@contextmanager
def _renamed(path: Path, other: Path) -> Iterator[None]:
    if not path.exists():  # hidden already
        yield
        return
    path.rename(other)
    try:
        yield
    finally:
        other.rename(path)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def _num_files(pid: int) -> int:
    """The limit is on the number of a file, not on how many are open; a process that has just ended has none."""
    return max((int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()), default=-1) + 1
