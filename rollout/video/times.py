"""The moments of a video that are looked at: an overview of all of it, and the close look at one window."""

import math

import numpy as np

CROP_FPS = 1.0
CROP_MAX_FRAMES = 16


def overview_times(duration_s: float | int, of_frames: int, num_frames: int) -> list[float]:
    """The moments of `num_frames` of a video's frames, spread evenly by number from its first to its last.

    The frames are those of transformers (Qwen3VLVideoProcessor.sample_frames) and of qwen_vl_utils, with which the
    original samples. A moment is the middle of its frame's time, so that no rounding makes it another one. DIFFERS: a
    single frame is the middle one, where theirs is the first; where the frame rate varies, frames are spread evenly in
    time, where theirs are by number.
    """
    if num_frames < 1 or of_frames < 1:
        raise ValueError(f"num_frames={num_frames} of a video's {of_frames} must both be at least 1")
    if not (math.isfinite(duration_s) and duration_s >= 0):
        raise ValueError(f"duration_s={duration_s} must be finite and not negative")
    if num_frames == 1:
        return [duration_s / 2]
    numbers = np.linspace(0, of_frames - 1, num_frames).round()
    return ((numbers + 0.5) / of_frames * duration_s).tolist()


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
