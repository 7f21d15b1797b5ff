"""What jax takes for the coordinator: a port of this machine that leads there, and never closes a connection.

Once its coordinator is gone, with the machine of host 0 or its container, jax ends a process on the spot, in C++ and
with a stack trace. Behind this port it hears nothing instead, and the watch over the hosts says who is lost.
"""

import socket
import threading
from contextlib import suppress

AT_ONCE = 2**18  # bytes
KEPT: list[socket.socket] = []  # a socket that nobody has any more would be closed


def port_that_leads_to(address: tuple[str, int]) -> int:
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_connect_all, args=(server, address), name="relay", daemon=True).start()
    return server.getsockname()[1]


def _connect_all(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        here, _ = server.accept()
        KEPT.append(here)
        with suppress(OSError):  # then nobody answers it
            there = socket.create_connection(address)
            KEPT.append(there)
            for one, other in ((here, there), (there, here)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(one, other), name="relay", daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while said := one.recv(AT_ONCE):
            other.sendall(said)
