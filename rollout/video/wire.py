"""Messages between the reader and its workers over a socket pair: a line with a JSON object, then raw bytes."""

import json
import socket
from typing import Any, BinaryIO

Message = tuple[dict[str, Any], bytes]


def send(link: socket.socket, message: dict[str, Any], raw: bytes = b"") -> None:
    link.sendall(json.dumps(message | {"raw_bytes": len(raw)}).encode() + b"\n")
    link.sendall(raw)


def receive(messages: BinaryIO) -> Message:
    """Reads the next message from the link's file. Raises EOFError if the other side has ended."""
    line = messages.readline()
    if line.endswith(b"\n"):
        message = json.loads(line)
        raw = messages.read(message["raw_bytes"])
        if len(raw) == message["raw_bytes"]:
            return message, raw
    raise EOFError("the other side of the link has ended")
