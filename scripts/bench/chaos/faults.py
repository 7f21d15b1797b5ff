"""The fault schedule: which faults occur, when and for how long. It follows from a seed.

A fault names a role; two fractions choose one target of that role and one of its processes when the fault occurs.
"""

import asyncio
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
FIRST_S, PAUSE_S = 3.0, (3.0, 13.0)  # seconds until the first fault; minimum and maximum between faults
TRAINER, SERVICE = "trainer", "service"
SECOND = "second trainer"  # a trainer of another run that tries to take the same servers
OLDER, ROLL_BACK = "older weights", "roll back"  # a server restarts with older weights, or loads them while it runs
# Relative frequency, fault, role, maximum duration in seconds.
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
    (2, OLDER, "server", 0.0),
    (2, ROLL_BACK, "server", 0.0),
    # Most of these end the trainer, which then needs time to restart.
    (2, "kill", TRAINER, 0.0),
    (1, "restart", TRAINER, 0.0),
    (1, "no files", TRAINER, 10.0),
    (1, "no memory", TRAINER, 10.0),
    (1, "no disk", TRAINER, 15.0),
    (2, "stop", TRAINER, 20.0),
    (2, "slow", TRAINER, 15.0),
)
SERVICE_KINDS = tuple(
    (weight, kind, SERVICE if role == TRAINER else role, max_s)
    for weight, kind, role, max_s in KINDS
    if role != SECOND and kind not in (OLDER, ROLL_BACK)
)
SLOW_STOPPED_S, SLOW_RUNNING_S = 0.4, 0.1
SPARE_BYTES, SPARE_FILES, FILE_BYTES = 2**24, 1, 2**12  # remaining memory, open files and file size under a limit


class Fault(NamedTuple):
    at_s: float
    kind: str
    role: str
    lasts_s: float
    target: float  # fraction in [0, 1) that selects a server, decoder or host
    process: float  # fraction that selects a process of the target

    @property
    def name(self) -> str:
        return f"{self.kind} {self.role}"


def schedule(seed: int, seconds: float, kinds: Sequence[tuple[int, str, str, float]] = KINDS) -> list[Fault]:
    chance, faults, at_s = random.Random(seed), [], FIRST_S
    while at_s < seconds:
        ((_, kind, role, most_s),) = chance.choices(kinds, [kind[0] for kind in kinds])
        lasts_s = most_s * chance.uniform(0.2, 1.0)
        faults.append(Fault(at_s, kind, role, lasts_s, chance.random(), chance.random()))
        at_s += chance.uniform(*PAUSE_S)
    return faults


def chosen(fault: Fault, targets: Sequence[T]) -> T:
    return targets[int(fault.target * len(targets))]


async def inject(fault: Fault, targets: Sequence[Sequence[int]], videos: Path) -> bool:
    """Injects a fault and undoes it afterwards. Returns False if no process has the fault's role.

    `targets` lists the processes of each target; the first is the process that a user started.
    """
    if fault.role == "videos":
        await _hidden(videos, fault.lasts_s)
        return True
    if not targets:
        return False
    pids = chosen(fault, targets)
    pid = pids[int(fault.process * len(pids))]
    match fault.kind:
        case "kill":
            _send([pid], signal.SIGKILL)
        case "restart":
            _send(pids[:1], signal.SIGTERM)
        case "stop":
            await _stopped(pids, fault.lasts_s)
        case "slow":
            for _ in range(int(fault.lasts_s / (SLOW_STOPPED_S + SLOW_RUNNING_S))):
                await _stopped(pids, SLOW_STOPPED_S)
                await asyncio.sleep(SLOW_RUNNING_S)
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


async def _limited(pid: int, limit: int, usage: Callable[[int], int], spare: int, seconds: float) -> None:
    """Limits a resource to the current usage plus `spare`."""
    with suppress(OSError):  # the process has exited
        soft, hard = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (usage(pid) + spare, hard))
        try:
            await asyncio.sleep(seconds)
        finally:
            resource.prlimit(pid, limit, (soft, hard))


async def _hidden(videos: Path, seconds: float) -> None:
    with _renamed(videos, videos.with_name("hidden")):
        await asyncio.sleep(seconds)


@contextmanager
def _renamed(path: Path, other: Path) -> Iterator[None]:
    if not path.exists():  # already hidden
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
    """Returns the highest descriptor plus one, to which the limit applies; 0 if the process has just exited."""
    return max((int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()), default=-1) + 1
