"""The coordinator of several hosts, as a process of its own beside host 0.

    python -m paravt_jax.run.coordinator PORT NUM_HOSTS JOIN_S      started by host 0, whose end closes its stdin

First it calls the roll, so that whoever is missing is named; then it is jax's. Within host 0 it would end with it, and
jax then ends all others at once with a stack trace, before one of them could say whose end that was. So it stays until
they have left, or for LINGER_S.
"""

import importlib
import json
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LINGER_S = 60.0  # after host 0: longer than the others take to notice
HEARTBEAT_S, SHUTDOWN_S = 120, 30  # jax's own, which only counts where ours does not get to a host
MAX_WORDS_CHARS = 100  # of a host's line
WORDS_S = 5.0  # for whoever connects to say which host it is
READY, DONE, HELLO, GO = "ready", "done", "paravt", "go"


def main() -> None:
    jaxlib: Any = importlib.import_module("jaxlib._jax")  # late: a trainer imports this module for its words
    port, num_hosts = map(int, sys.argv[1:3])
    with socket.create_server(("", port), backlog=num_hosts) as server:
        print(READY, flush=True)
        if call_roll(server, num_hosts, float(sys.argv[3])):
            return
    service = jaxlib.get_distributed_runtime_service(
        f"[::]:{port}", num_hosts, heartbeat_timeout=HEARTBEAT_S, shutdown_timeout=SHUTDOWN_S
    )
    give_up_s = time.monotonic() + LINGER_S if sys.stdin.readline().strip() != DONE else 0.0
    while time.monotonic() < give_up_s and num_connected(port):
        time.sleep(0.5)
    service.shutdown()


def call_roll(server: socket.socket, num_hosts: int, join_s: float) -> str:
    """Waits for every host, and tells all of them to go on, or what is wrong; that, or nothing."""
    hosts: dict[int, socket.socket] = {}
    refused: list[socket.socket] = []
    give_up_s, problem = time.monotonic() + join_s, ""
    while len(hosts) < num_hosts and not problem:
        server.settimeout(max(0.01, give_up_s - time.monotonic()))
        try:
            host, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(index) for index in range(num_hosts) if index not in hosts)
            problem = f"of hosts.num={num_hosts} hosts these did not come within {join_s:.0f} s: {missing}; start them"
            continue
        except OSError:  # it did not wait to be heard
            continue
        try:
            index, num = _words(host)
        except (OSError, TypeError, ValueError):  # somebody else
            host.close()
            continue
        before = hosts.pop(index, None)
        if num != num_hosts:
            problem = f"host {index} has hosts.num={num}, host 0 has {num_hosts}; give both the same"
        elif before is not None and _is_there(before):
            problem = f"two hosts have hosts.index={index}; give each its own"
            refused.append(before)
        elif before is not None:
            before.close()
        hosts[index] = host
    for host in (*hosts.values(), *refused):
        with host, suppress(OSError):  # one that has gone in the meantime is missed by jax
            host.sendall(f"{problem or GO}\n".encode())
    return problem


def _words(host: socket.socket) -> tuple[int, int]:
    """Index and number of hosts, as a host says them."""
    host.settimeout(None)
    host.sendall(f"{HELLO}\n".encode())
    host.settimeout(WORDS_S)
    try:
        index, num = map(int, json.loads(host.makefile().readline(MAX_WORDS_CHARS)))
    except TimeoutError:
        raise ValueError("it says nothing") from None
    return index, num


def _is_there(host: socket.socket) -> bool:
    """One that was started again has left its first connection."""
    host.settimeout(0)
    try:
        return host.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def num_connected(port: int) -> int:
    """Connections of others to this port of ours, as Linux lists them: state 01 is established."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return sum(line[3] == "01" and line[1].endswith(f":{port:04X}") for line in lines)


if __name__ == "__main__":
    main()
