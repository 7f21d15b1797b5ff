"""The moments of a video that are looked at: an overview of all of it, and the close look at one window."""

import math

CROP_FPS = 1.0
CROP_MAX_FRAMES = 16


def overview_times(duration_s: float | int, num_frames: int) -> list[float]:
    """`num_frames` moments spread evenly over the video, its first and its last included; a single one lies midway."""
    if num_frames < 1:
        raise ValueError(f"num_frames={num_frames} must be at least 1")
    if not (math.isfinite(duration_s) and duration_s >= 0):
        raise ValueError(f"duration_s={duration_s} must be finite and not negative")
    return [duration_s / 2] if num_frames == 1 else _evenly(0.0, duration_s, num_frames)


def crop_times(start_s: float | int, end_s: float | int, max_frames: int = CROP_MAX_FRAMES) -> list[float]:
    """One moment a second from the start on; where that is too many, `max_frames` evenly from the start to the end."""
    if max_frames < 1:
        raise ValueError(f"max_frames={max_frames} must be at least 1")
    if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s < end_s):
        raise ValueError(f"a window must be finite and start before it ends, got {start_s} to {end_s}")
    num_frames = math.ceil((end_s - start_s) * CROP_FPS)
    if num_frames <= max_frames:
        return [start_s + number / CROP_FPS for number in range(max(1, num_frames))]
    return [(start_s + end_s) / 2] if max_frames == 1 else _evenly(start_s, end_s, max_frames)


def _evenly(start_s: float | int, end_s: float | int, num_frames: int) -> list[float]:
    last = num_frames - 1
    return [start_s + (end_s - start_s) * (number / last) for number in range(last)] + [end_s]
