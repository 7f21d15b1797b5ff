"""What a probe found, kept on disk: a probe reads the whole file, once for every video, host and start without this.

The name of an entry is the identity of the file, of its path, size and time of change, so a replaced file has another.
Frames follow each other in few different steps, so the differences of their times compress to about a kilobyte. What is
read is checked as a stranger's: a damaged, cut or crafted entry is removed, and the video is probed again.
"""

import hashlib
import json
import math
import struct
import zlib
from typing import Any

import numpy as np

from rollout.video.decode import MAX_FRAME_PIXELS

VERSION = 1  # of what a probe finds; another one has other names
SUFFIX = ".tick"
MAX_BYTES = 64 * 2**20  # of all entries, some 50,000 of them
MAX_TICKS = 2**24  # of one video, 150 hours at 30 frames a second; of more, nothing is kept
DIGEST_BYTES = 16
SIZES = struct.Struct("<II")  # bytes of the object, ticks of keyframes
INTEGERS = ("num_frames", "duration_ticks", "height", "width", "frame_px")

Probed = tuple[dict[str, Any], bytes | bytearray]


def name_of(identity: str, decoder: str) -> str:
    """decord refuses files that PyAV reads, so each decoder has entries of its own."""
    return f"{identity}-{decoder}-{VERSION}{SUFFIX}"


def pack(probed: Probed) -> bytes | None:
    """None of a video with too many frames."""
    known, raw = probed
    ticks = np.frombuffer(raw, np.int64)
    if len(ticks) > MAX_TICKS:
        return None
    text = json.dumps(known).encode()
    sizes = SIZES.pack(len(text), len(ticks) - known["num_frames"])
    content = sizes + text + zlib.compress(np.diff(ticks, prepend=0).tobytes())
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() + content


def unpack(packed: bytes, identity: str) -> Probed | None:
    """What was packed; None where that cannot have been a probe of this video."""
    content = packed[DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != packed[:DIGEST_BYTES]:
        return None
    try:
        num_text, num_keys = SIZES.unpack_from(content)
        known = json.loads(content[SIZES.size : SIZES.size + num_text])
        num_ticks = known["num_frames"] + num_keys
        if known["identity"] != identity or not _sound(known) or num_ticks > MAX_TICKS:
            return None
        steps = zlib.decompressobj().decompress(content[SIZES.size + num_text :], 8 * num_ticks + 1)
        ticks = np.cumsum(np.frombuffer(steps, np.int64))
    except (struct.error, zlib.error, ValueError, KeyError, TypeError, RecursionError):
        return None
    shown, keys = np.split(ticks, [known["num_frames"]])
    if len(keys) != num_keys or num_keys < 1 or (np.diff(shown) <= 0).any() or (np.diff(keys) <= 0).any():
        return None
    return known, ticks.tobytes()


def _sound(known: dict[str, Any]) -> bool:
    numbers = [known[name] for name in INTEGERS] + known["time_base"]
    return (
        all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62 for number in numbers)
        and len(known["time_base"]) == 2
        and min(known["num_frames"], known["height"], known["width"], *known["time_base"]) >= 1
        and 1 <= known["frame_px"] <= MAX_FRAME_PIXELS
        and math.isfinite(known["duration_ticks"] * known["time_base"][0] / known["time_base"][1])
    )
