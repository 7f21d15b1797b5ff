"""Cached probe results are read back unchanged, and damaged or foreign entries are ignored."""

import json
import zlib

import numpy as np
import pytest

from rollout.video.decode import MAX_FRAME_PIXELS
from rollout.video.ticks import pack, unpack

IDENTITY = "ab" * 16
KNOWN = {"identity": IDENTITY, "num_frames": 36_000, "duration_ticks": 36_000 * 512, "time_base": [1, 15_360]}
KNOWN |= {"height": 1080, "width": 1920, "frame_px": 1080 * 1920}
TICKS = np.arange(36_000, dtype=np.int64) * 512 - 1024
KEYS = TICKS[::250] - 3  # some of which an edit list may have cut off
RAW = TICKS.tobytes() + KEYS.tobytes()


def crafted(ticks=TICKS, keys=KEYS, **changed) -> bytes:
    """Makes a cache entry of ticks, keys and changed header fields."""
    steps = np.diff(np.concatenate([ticks, keys]), prepend=0).tobytes()
    return zlib.compress(json.dumps(KNOWN | changed).encode() + b"\n" + steps)


def test_probe_results_of_twenty_minutes_take_about_a_kilobyte():
    packed = pack((KNOWN, RAW))
    assert packed is not None and len(packed) < 3000
    assert unpack(packed, IDENTITY) == (KNOWN, RAW) == unpack(crafted(), IDENTITY)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        crafted()[:-1],
        crafted()[:100],
        crafted()[:-1] + bytes([crafted()[-1] ^ 1]),
        bytes([crafted()[0] ^ 1]) + crafted()[1:],
        crafted(identity="cd" * 16),
        *(crafted(num_frames=number) for number in (35_999, 0, -1, 10**12, True)),
        crafted(height="1080"),
        crafted(width=0),
        *(crafted(frame_px=number) for number in (0, MAX_FRAME_PIXELS + 1)),
        *(crafted(time_base=base) for base in ([1, 0], [1], None)),
        *(crafted(duration_ticks=number) for number in (-1, 2**62)),
        *(crafted(ticks=ticks) for ticks in (TICKS[::-1], np.zeros_like(TICKS))),
        *(crafted(keys=keys) for keys in (KEYS[:0], KEYS[::-1])),
    ],
)
def test_a_damaged_or_foreign_entry_is_ignored(packed):
    assert unpack(packed, IDENTITY) is None


@pytest.mark.slow
def test_an_entry_that_unpacks_too_large_is_ignored():
    bomb = zlib.compress(json.dumps(KNOWN).encode() + b"\n" + bytes(2**28), 1)  # far more than the times of the frames
    assert unpack(bomb, IDENTITY) is None
