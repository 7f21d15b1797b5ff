"""Several hosts on one machine, each a process forked from a server that has imported everything.

Each host has its own CPU devices, and collectives go through gloo. Tests get each host's output and exit code.
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
class HostExit:
    """A host's exit code and output."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1] if self.output.strip() else ""


class RunningHosts:
    """Started hosts, whose output goes to files in `folder`."""

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

    def wait(self, deadline_s: float = 240) -> list[HostExit]:
        """Waits for all hosts to exit. At the deadline it kills those that still run, and fails the test."""
        give_up_s = time.monotonic() + deadline_s
        for process in self.processes:
            process.join(max(0.1, give_up_s - time.monotonic()))
        late = [number for number, process in enumerate(self.processes) if process.exitcode is None]
        for process in self.processes:
            process.kill()
            process.join()
        outputs = [file.read_text() if file.exists() else "" for file in self.files]
        assert not late, f"hosts {late} did not exit in {deadline_s} s: {[outputs[host][-2000:] for host in late]}"
        codes = [process.exitcode for process in self.processes]
        return [HostExit(-1 if code is None else code, text) for code, text in zip(codes, outputs, strict=True)]


def settings(num: int, port: int | None = None) -> list[HostsConfig]:
    address = f"127.0.0.1:{port or free_port()}"
    return [HostsConfig(address, num, index) for index in range(num)]


def start_work(folder: Path, work: Callable[..., Any], num: int = 2, *arguments: Any, devices: int = 1) -> RunningHosts:
    """Starts `work(hosts, …)`, a module-level function, on each of `num` connected hosts."""
    return RunningHosts(folder, num, devices, _joined, [(work, config, *arguments) for config in settings(num)])


def run_work(folder: Path, work: Callable[..., Any], num: int = 2, *arguments: Any, devices: int = 1) -> list[str]:
    """Runs `work(hosts, …)` on connected hosts, all of which must succeed. Returns the output of each."""
    exits = start_work(folder, work, num, *arguments, devices=devices).wait()
    assert [host.code for host in exits] == [0] * num, "\n\n".join(host.output[-3000:] for host in exits)
    return [host.output for host in exits]


def start_command(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    num: int = 2,
    *,
    devices: int = 1,
    own: Sequence[dict[str, str]] = (),
    work: Callable[..., None] = command,
) -> RunningHosts:
    """Starts a command on each host; `own` has each host's extra environment variables. `work` calls `command`."""
    words = [
        [*arguments, f"hosts.coordinator={host.coordinator}", f"hosts.num={num}", f"hosts.index={host.index}"]
        for host in settings(num)
    ]
    each = [(module, line, more) for line, more in zip(words, own or [{}] * num, strict=True)]
    return RunningHosts(folder, num, devices, work, each)


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
