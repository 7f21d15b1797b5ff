"""Generates a synthetic film: a camera that moves over colored clouds, with cuts."""

import functools
from collections.abc import Iterator

import numpy as np
from PIL import Image

FPS = 30
SHOT_S, MARGIN_PX = 8, 200


def camera(height: int, width: int, num_s: int) -> Iterator[np.ndarray]:
    """Yields `FPS` frames per second, with a cut every `SHOT_S` seconds."""
    for number in range(num_s * FPS):
        scene = _scene(number // (SHOT_S * FPS), height + 2 * MARGIN_PX, width + 2 * MARGIN_PX)
        y, x = (round(MARGIN_PX * (1 + np.sin(number / period))) for period in (70, 43))
        yield np.ascontiguousarray(scene[y : y + height, x : x + width])


@functools.lru_cache(1)
def _scene(shot: int, height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(shot).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
