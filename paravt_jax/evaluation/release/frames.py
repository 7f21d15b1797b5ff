"""Frame numbers and sizes, computed like qwen_vl_utils 0.0.14 with the release's arguments."""

import math

import numpy as np

from rollout.video.errors import VideoError

OVERVIEW_FRAMES = 64
PATCH_PX = 28  # both sides of a frame are multiples of it
OVERVIEW_PX = (128 * PATCH_PX**2, 768 * PATCH_PX**2)  # smallest and largest area, the library's defaults
CROP_PX = (784, 50_176)
CROP_FPS, CROP_MIN_FRAMES, CROP_MAX_FRAMES = 1, 2, 16
FRAME_FACTOR = 2  # numbers of frames are even
MAX_ASPECT = 200


def overview_numbers(num_frames: int) -> list[int]:
    """The frames of an overview. A shorter video raises an error, because the release then sends no frames."""
    if num_frames < OVERVIEW_FRAMES:
        raise VideoError(f"the video has {num_frames} frames, fewer than {OVERVIEW_FRAMES}")
    return spread(0, num_frames - 1, OVERVIEW_FRAMES)


def crop_numbers(num_frames: int, fps: float, start_s: float, end_s: float) -> list[int]:
    """The frames of a window: one per second, and an even number of them."""
    if not fps:
        raise VideoError("the video has no duration")
    first = math.ceil(_clamped(start_s, num_frames, fps) * fps)
    last = min(math.floor(_clamped(end_s, num_frames, fps) * fps), num_frames - 1)
    if first == last and 0 < start_s * fps < first:
        return [first - 1, first]  # here the library falls back to a reader that adds the frame before a single frame
    if first >= last:
        raise VideoError("the window has fewer than two frames")
    num_inside = last - first + 1
    wanted = min(max(num_inside / fps * CROP_FPS, CROP_MIN_FRAMES), CROP_MAX_FRAMES, num_inside)
    num = math.floor(wanted / FRAME_FACTOR) * FRAME_FACTOR
    return spread(first, last, num)


def _clamped(time_s: float, num_frames: int, fps: float) -> float:
    return max(0.0, min(time_s, num_frames / fps))  # in this order, NaN becomes 0 as in the library


def spread(first: int, last: int, num: int) -> list[int]:
    """`num` evenly spaced frame numbers, rounded like torch's linspace: float32 with a fused multiply-add."""
    step = float((np.float32(last) - np.float32(first)) / np.float32(num - 1))
    at = np.arange(num)
    values = np.where(at < num // 2, first + step * at, last - step * (num - 1 - at))
    return values.astype(np.float32).round().astype(int).tolist()


def fitted_size(height: int, width: int, area_px: tuple[int, int]) -> tuple[int, int]:
    """A frame's size: multiples of PATCH_PX, an area within bounds, and about the same aspect ratio."""
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise VideoError(f"one side of {width} x {height} is more than {MAX_ASPECT} times the other")
    sides = [max(PATCH_PX, round(side / PATCH_PX) * PATCH_PX) for side in (height, width)]
    smallest_px, largest_px = area_px
    if sides[0] * sides[1] > largest_px:
        shrink = math.sqrt(height * width / largest_px)
        sides = [math.floor(side / shrink / PATCH_PX) * PATCH_PX for side in (height, width)]
    elif sides[0] * sides[1] < smallest_px:
        grow = math.sqrt(smallest_px / (height * width))
        sides = [math.ceil(side * grow / PATCH_PX) * PATCH_PX for side in (height, width)]
    if 0 in sides:
        raise VideoError(f"{width} x {height} does not fit into {largest_px} pixels")
    return sides[0], sides[1]
