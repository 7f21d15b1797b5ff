"""Messages between the reader and its workers: a line with a JSON object, then raw bytes, over a socket pair."""

import json
import socket
from typing import Any, BinaryIO

Message = tuple[dict[str, Any], bytes]


def send(link: socket.socket, message: dict[str, Any], raw: bytes = b"") -> None:
    link.sendall(json.dumps(message | {"raw_bytes": len(raw)}).encode() + b"\n")
    link.sendall(raw)


def receive(messages: BinaryIO) -> Message:
    """The next message; raises EOFError if the other side is gone. `messages` is the link's file."""
    line = messages.readline()
    if line.endswith(b"\n"):
        message = json.loads(line)
        raw = messages.read(message["raw_bytes"])
        if len(raw) == message["raw_bytes"]:
            return message, raw
    raise EOFError("the other side of the link is gone")
