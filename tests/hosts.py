"""Several hosts on one machine: a process for each, all forked from one that has imported everything.

Each has CPU devices of its own, and collectives go through gloo. Their words come back by host, with exit codes.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from forked import command, forks

from paravt_jax.config import HostsConfig
from paravt_jax.run import hosts


@dataclass(frozen=True)
class Ended:
    """How a host ended."""

    code: int
    said: str

    @property
    def last(self) -> str:
        return self.said.strip().splitlines()[-1] if self.said.strip() else ""


class Started:
    """Hosts that run; they write to files of `folder`."""

    def __init__(self, folder: Path, num: int, devices: int, work: Callable[..., Any], each: Sequence[tuple[Any, ...]]):
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"host{index}" for index in range(num)]
        self.processes: list[ForkServerProcess] = [
            forks.Process(target=_host, args=(str(file), devices, work, arguments), daemon=True)
            for file, arguments in zip(self.files, each, strict=True)
        ]
        for file, process in zip(self.files, self.processes, strict=True):
            file.touch()
            process.start()

    def ended(self, deadline_s: float = 240) -> list[Ended]:
        """How they ended; whoever is still there at the deadline is killed, which fails the test."""
        give_up_s = time.monotonic() + deadline_s
        for process in self.processes:
            process.join(max(0.1, give_up_s - time.monotonic()))
        late = [number for number, process in enumerate(self.processes) if process.exitcode is None]
        for process in self.processes:
            process.kill()
            process.join()
        said = [file.read_text() if file.exists() else "" for file in self.files]
        assert not late, f"hosts {late} did not end in {deadline_s} s: {[said[host][-2000:] for host in late]}"
        codes = [process.exitcode for process in self.processes]
        return [Ended(-1 if code is None else code, text) for code, text in zip(codes, said, strict=True)]


def settings(num: int, port: int | None = None) -> list[HostsConfig]:
    address = f"127.0.0.1:{port or free_port()}"
    return [HostsConfig(address, num, index) for index in range(num)]


def start_work(folder: Path, work: Callable[..., Any], num: int = 2, *arguments: Any, devices: int = 1) -> Started:
    """`work(hosts, …)` on each of the joined hosts; a function of a module that can be imported."""
    return Started(folder, num, devices, _joined, [(work, one, *arguments) for one in settings(num)])


def run_work(folder: Path, work: Callable[..., Any], num: int = 2, *arguments: Any, devices: int = 1) -> list[str]:
    """What each host said, all of which ended well."""
    ended = start_work(folder, work, num, *arguments, devices=devices).ended()
    assert [one.code for one in ended] == [0] * num, "\n\n".join(one.said[-3000:] for one in ended)
    return [one.said for one in ended]


def start_command(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    num: int = 2,
    *,
    devices: int = 1,
    own: Sequence[dict[str, str]] = (),
    work: Callable[..., None] = command,
) -> Started:
    """A command on each host; `own` are more variables of the environment of each one. `work` calls `command`."""
    told = [
        [*arguments, f"hosts.coordinator={one.coordinator}", f"hosts.num={num}", f"hosts.index={one.index}"]
        for one in settings(num)
    ]
    each = [(module, words, more) for words, more in zip(told, own or [{}] * num, strict=True)]
    return Started(folder, num, devices, work, each)


def _joined(work: Callable[..., Any], config: HostsConfig, *arguments: Any) -> None:
    with hosts.joined(config) as joined:
        work(joined, *arguments)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _host(output: str, devices: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    file = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in (0, 1, 2):
        os.dup2(file, number)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
    hosts.JOIN_S, hosts.HEARTBEAT_S, hosts.SHUTDOWN_S, hosts.LAST_WORDS_S = 60, 10, 20, 2.0
    work(*arguments)
