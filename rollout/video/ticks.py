"""Packs probe results for a cache on disk, because a probe reads the whole file.

An entry is named by the video file's identity (its path, size and mtime), so a replaced file has another entry. The
entry has the metadata as a line of JSON and the frames' times, compressed. Frame intervals repeat, so the differences
of the times compress to about a kilobyte. Entries are validated when they are read: a damaged, truncated or forged
entry is removed, and the video is probed again.
"""

import json
import zlib
from typing import Any

import numpy as np

from rollout.video.decode import MAX_FRAME_PIXELS

VERSION = 3  # of the entry's format and of `probe`; part of the name
SUFFIX = ".tick"
MAX_BYTES = 64 * 2**20  # for all entries, about 50,000
MAX_TICKS = 2**24  # per video, 150 hours at 30 fps; longer videos are not cached
INTEGERS = ("num_frames", "duration_ticks", "height", "width", "frame_px")

Probed = tuple[dict[str, Any], bytes | bytearray]


def name_of(identity: str) -> str:
    return f"{identity}-pyav-{VERSION}{SUFFIX}"


def pack(probed: Probed) -> bytes | None:
    """Packs a probe result. Returns None if the video has too many frames."""
    metadata, raw = probed
    ticks = np.frombuffer(raw, np.int64)
    if len(ticks) > MAX_TICKS:
        return None
    return zlib.compress(json.dumps(metadata).encode() + b"\n" + np.diff(ticks, prepend=0).tobytes())


def unpack(packed: bytes, identity: str) -> Probed | None:
    """Unpacks a probe result. Returns None if it cannot be a probe of this video."""
    decoder = zlib.decompressobj()  # verifies the checksum at the end
    try:
        text, _, steps = decoder.decompress(packed, 9 * MAX_TICKS).partition(b"\n")
        metadata = json.loads(text)
        if not decoder.eof or metadata["identity"] != identity or not _is_valid(metadata):
            return None
        ticks = np.cumsum(np.frombuffer(steps, np.int64))
    except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
        return None
    frames, keys = np.split(ticks, [metadata["num_frames"]])
    if len(ticks) > MAX_TICKS or len(keys) < 1 or (np.diff(frames) <= 0).any() or (np.diff(keys) <= 0).any():
        return None
    return metadata, ticks.tobytes()


def _is_valid(metadata: dict[str, Any]) -> bool:
    numbers = [metadata[name] for name in INTEGERS] + metadata["time_base"]
    return (
        all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62 for number in numbers)
        and len(metadata["time_base"]) == 2
        and min(metadata["num_frames"], metadata["height"], metadata["width"], *metadata["time_base"]) >= 1
        and 1 <= metadata["frame_px"] <= MAX_FRAME_PIXELS
    )
