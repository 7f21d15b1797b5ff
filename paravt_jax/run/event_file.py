"""Writes scalars for TensorBoard without a library, because these load torch or TensorFlow, which takes seconds.

A record is a length, its checksum, an event and its checksum. Events are encoded as protocol buffers with the fields
1: time, 2: step, 3: format version, 5: values (1) with name (1) and float (2), 7: start of a log.
"""

import socket
import struct
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

CRC32C = 0x82F63B78  # the polynomial, reversed


class EventFile:
    """A TensorBoard file. Each call writes to disk, so that a killed run leaves no gap after resuming."""

    def __init__(self, directory: Path, first_step: int):
        directory.mkdir(exist_ok=True)
        # A run that restarts within the same second appends to the file.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.after_step_{first_step}"
        self._file = (directory / name).open("ab")
        self._add(_part(3, b"brain.Event:2"))
        self._add(_integer(2, first_step + 1) + _part(7, _integer(1, 1)))  # hides older events at and after this step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = (_part(1, name.encode()) + b"\x15" + array("f", [value]).tobytes() for name, value in metrics.items())
        self._add(_integer(2, step) + _part(5, b"".join(_part(1, value) for value in values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _integer(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _part(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encodes seven bits per byte, lowest first; the eighth bit is set if another byte follows."""
    *low, last = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(bits | 128 for bits in low), last])


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _table() -> Iterator[int]:
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ CRC32C * (crc & 1)
        yield crc


TABLE = tuple(_table())
