"""Chooses the times of the frames to show, for an overview of a video or a crop of a window."""

import math

import numpy as np

CROP_FPS = 1.0
MIN_FPS_FRAMES = 4  # in an overview with a frame rate
CROP_MAX_FRAMES = 16


def overview_times(duration_s: float | int, total_frames: int, num_frames: int) -> list[float]:
    """Returns the times of `num_frames` frames, spaced evenly by frame number from the first to the last frame.

    These are the frames that transformers (Qwen3VLVideoProcessor.sample_frames) and qwen_vl_utils, which the original
    uses, select. Each time is in the middle of its frame, so that rounding cannot select a neighbor. DIFFERS: a single
    frame is the middle frame, not the first; with a variable frame rate, frames are spaced evenly in time, not by
    number.
    """
    if num_frames == 1:
        return [duration_s / 2]
    numbers = np.linspace(0, total_frames - 1, num_frames).round()
    return ((numbers + 0.5) / total_frames * duration_s).tolist()


def num_frames_at(fps: float | int, duration_s: float | int, total_frames: int, max_frames: int) -> int:
    """Returns the number of frames in an overview at `fps`, up to `max_frames`; `fps=0` always gives `max_frames`.

    The number is that of qwen_vl_utils (0.0.14, smart_nframes): even, and at least 4 if the video and `max_frames`
    allow it. If they allow only one frame, it is 1.
    """
    if not fps:
        return max_frames
    return max(1, int(min(max(duration_s * fps, MIN_FPS_FRAMES), max_frames, total_frames)) // 2 * 2)


def crop_times(start_s: float | int, end_s: float | int, max_frames: int = CROP_MAX_FRAMES) -> list[float]:
    """Returns one time per second from the start, or `max_frames` times evenly from start to end if that is fewer."""
    num_frames = math.ceil((end_s - start_s) * CROP_FPS)
    if num_frames <= max_frames:
        return [start_s + number / CROP_FPS for number in range(max(1, num_frames))]
    return [(start_s + end_s) / 2] if max_frames == 1 else np.linspace(start_s, end_s, max_frames).tolist()
