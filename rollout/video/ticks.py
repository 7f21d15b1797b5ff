"""Probe results on disk, because a probe reads the whole file.

An entry is named by the file's identity (its path, size and mtime), so a replaced file has another entry. It is the
metadata as a line of JSON and the times of the frames, compressed: frame intervals repeat, so their differences take
about a kilobyte. zlib's checksum detects a damaged or truncated entry, which is removed, and the video is probed again.
"""

import json
import zlib
from typing import Any

import numpy as np

VERSION = 2  # of the entry's format and of `probe`; part of the name
SUFFIX = ".tick"
MAX_BYTES = 64 * 2**20  # of all entries, some 50,000

Probed = tuple[dict[str, Any], bytes | bytearray]


def name_of(identity: str) -> str:
    return f"{identity}-pyav-{VERSION}{SUFFIX}"


def pack(probed: Probed) -> bytes:
    metadata, raw = probed
    steps = np.diff(np.frombuffer(raw, np.int64), prepend=0)
    return zlib.compress(json.dumps(metadata).encode() + b"\n" + steps.tobytes())


def unpack(packed: bytes) -> Probed | None:
    """The packed probe, or None if it is damaged."""
    try:
        text, _, steps = zlib.decompress(packed).partition(b"\n")
    except zlib.error:
        return None
    return json.loads(text), np.cumsum(np.frombuffer(steps, np.int64)).tobytes()
