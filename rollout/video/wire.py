"""Messages between the reader and its workers: a JSON object and raw bytes, over a socket pair."""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

SIZES = struct.Struct("<II")  # bytes of the JSON object, raw bytes


def send(link: socket.socket, message: dict[str, Any], raw: bytes = b"") -> None:
    text = json.dumps(message).encode()
    link.sendall(SIZES.pack(len(text), len(raw)) + text)
    link.sendall(raw)


def receive(link: socket.socket, before_wait: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], bytearray]:
    """The next message; raises EOFError if the other side is gone.

    `before_wait` is called before each wait; it may set the link's timeout or raise.
    """
    num_text, num_raw = SIZES.unpack(_exactly(link, SIZES.size, before_wait))
    message = json.loads(_exactly(link, num_text, before_wait))
    return message, _exactly(link, num_raw, before_wait)


def _exactly(link: socket.socket, num_bytes: int, before_wait: Callable[[], None]) -> bytearray:
    buffer = bytearray(num_bytes)
    unread = memoryview(buffer)
    while unread:
        before_wait()
        try:
            num_received = link.recv_into(unread)
        except TimeoutError:
            continue
        except ConnectionError:
            num_received = 0
        if num_received == 0:
            raise EOFError("the other side of the link is gone")
        unread = unread[num_received:]
    return buffer
