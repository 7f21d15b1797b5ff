"""A part of a frame, as fractions of the frame's sides, so that it does not depend on the resolution."""

import math
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def of(self, pixels: np.ndarray) -> np.ndarray:
        """Crops a picture [height, width, …] to every pixel that the box touches, at least one."""
        height, width = pixels.shape[:2]
        top, left, bottom, right = self.edges(height, width)
        return pixels[top:bottom, left:right]

    def edges(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns top, left, bottom and right in pixels, for a frame of this size."""
        top, left = min(int(self.top * height), height - 1), min(int(self.left * width), width - 1)
        bottom, right = math.ceil(self.bottom * height), math.ceil(self.right * width)
        return top, left, max(top + 1, min(bottom, height)), max(left + 1, min(right, width))

    def size_px(self, height: int, width: int) -> tuple[int, int]:
        """Returns the box's height and width in pixels, for a frame of this size."""
        top, left, bottom, right = self.edges(height, width)
        return bottom - top, right - left
