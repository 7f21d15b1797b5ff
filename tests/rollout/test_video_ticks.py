"""What a probe found comes back from disk as it was, and nothing else does."""

import numpy as np
import pytest

from rollout.video.ticks import pack, unpack

KNOWN = {
    "identity": "ab" * 16,
    "num_frames": 36_000,
    "duration_ticks": 36_000 * 512,
    "time_base": [1, 15_360],
    "height": 1080,
    "width": 1920,
    "frame_px": 1080 * 1920,
}
TICKS = np.arange(36_000, dtype=np.int64) * 512 - 1024
KEYS = TICKS[::250] - 3  # some of which an edit list may have cut off
PROBED = KNOWN, TICKS.tobytes() + KEYS.tobytes()
PACKED = pack(PROBED)


def test_twenty_minutes_come_back_from_a_kilobyte_or_two():
    assert len(PACKED) < 3000 and unpack(PACKED) == PROBED


@pytest.mark.parametrize("packed", [b"", PACKED[:-1], PACKED[:100], bytes([PACKED[0] ^ 1]) + PACKED[1:]])
def test_what_is_damaged_is_none(packed):
    assert unpack(packed) is None
