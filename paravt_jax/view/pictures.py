"""Makes thumbnails of the frames in the prompts, overview and crops, each stored once.

They are decoded again from the videos, at the times in the records. A page has a size limit for thumbnails: complete
strips are added, shortest first, and the page shows how many frames are left out.
"""

import asyncio
import base64
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from model_port.progress import counted
from model_port.terminal import visible
from rollout.video.box import Box
from rollout.video.errors import VideoError
from rollout.video.info import TimedPicture
from rollout.video.reader import FrameReader

MAX_BYTES = 6_000_000  # total of all pictures in base64
HEIGHT_PX, WIDTH_PX = 72, 128  # maximum
QUALITY = 45  # WebP quality; a frame has about 2 KB
DEADLINE_S = 60.0
MAX_CONCURRENT = 16  # strips decoded concurrently
MAX_PROBLEMS = 5  # listed on the page


class Strip(NamedTuple):
    """The frames of an overview or of a call."""

    path: str
    times_s: tuple[float, ...]
    box: Box | None = None

    @property
    def keys(self) -> list[str]:
        return [f"{time_s} {self.path} {'' if self.box is None else tuple(self.box)}" for time_s in self.times_s]


@dataclass(eq=False)
class Album:
    """The pictures of a page, up to its size limit."""

    pictures: list[str] = field(default_factory=list)  # base64
    num_bytes: int = 0
    num_left_out: int = 0
    problems: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pictures: Mapping[str, str], episodes: Sequence[Any]) -> "Album":
        """Builds an album from existing pictures, by strip key."""
        album = cls()
        for strip in _all_strips(episodes):
            if all(key in pictures for key in strip.keys):
                album.add(strip, [pictures[key] for key in strip.keys])
        album.number_all(episodes)
        return album

    def add(self, strip: Strip, pictures: Sequence[str]) -> bool:
        """Adds the new pictures of a strip. Returns False if the page has no room for them."""
        new = {key: text for key, text in zip(strip.keys, pictures, strict=True) if key not in self._numbers}
        size = sum(map(len, new.values()))
        if self.num_bytes + size > MAX_BYTES:
            return False
        self._numbers |= {key: len(self.pictures) + index for index, key in enumerate(new)}
        self.pictures += new.values()
        self.num_bytes += size
        return True

    def numbers(self, strip: Strip) -> list[int] | None:
        """Indices of a strip's pictures; None if the album does not have them all."""
        numbers = [self._numbers[key] for key in strip.keys if key in self._numbers]
        return numbers if numbers and len(numbers) == len(strip.times_s) else None

    def number_all(self, episodes: Iterable[dict[str, Any]]) -> None:
        """Sets the picture indices of every overview and call in these episodes."""
        for holder, strips in _strips(episodes):
            numbers = [self.numbers(strip) or [] for strip in strips]
            holder["pictures"] = list(itertools.chain(*numbers)) if numbers and all(numbers) else None

    def to_record(self) -> dict[str, Any]:
        counts = {"num_bytes": self.num_bytes, "num_left_out": self.num_left_out}
        return {"data": self.pictures, **counts, "problems": self.problems}


def make_album(episodes: Sequence[dict[str, Any]]) -> Album:
    """Decodes the frames in these episodes' prompts."""
    strips = sorted(_all_strips(episodes), key=lambda strip: (len(strip.times_s), strip.path))
    album = Album()
    lost = asyncio.run(_decode(strips, album))
    keys = {key for strip in strips if strip.path not in lost for key in strip.keys}
    album.num_left_out = len(keys) - len(album.pictures)
    album.problems = [visible(problem) for problem in list(lost.values())[:MAX_PROBLEMS]]
    if len(lost) > MAX_PROBLEMS:
        album.problems.append(f"and {len(lost) - MAX_PROBLEMS} more videos")
    album.number_all(episodes)
    return album


def thumbnail(pixels: UInt8[np.ndarray, "H W 3"]) -> str:
    """Encodes a thumbnail as base64."""
    image, content = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((WIDTH_PX, HEIGHT_PX))
    image.save(content, "WEBP", quality=QUALITY)
    return base64.b64encode(content.getvalue()).decode()


def thumbnail_size(height: int, width: int) -> tuple[int, int]:
    scale = min(1.0, HEIGHT_PX / height, WIDTH_PX / width)
    return max(1, round(scale * height)), max(1, round(scale * width))


async def _decode(strips: Sequence[Strip], album: Album) -> dict[str, str]:
    """Decodes strips until the album is full. Returns the problems of unreadable videos, by path."""
    lost: dict[str, str] = {}

    async def read(strip: Strip) -> list[TimedPicture]:
        try:
            frames = await reader.frames(strip.path, strip.times_s, DEADLINE_S, strip.box)
        except VideoError as problem:
            lost[strip.path] = f"{Path(strip.path).name}: {problem}"
            return []
        if len(frames) != len(strip.times_s):
            lost[strip.path] = f"{Path(strip.path).name}: the file has changed"
        return frames

    async with FrameReader(thumbnail_size) as reader:
        for first in counted(range(0, len(strips), MAX_CONCURRENT), "reading frames", "part"):
            some = [strip for strip in strips[first : first + MAX_CONCURRENT] if strip.path not in lost]
            for strip, frames in zip(some, await asyncio.gather(*map(read, some)), strict=True):
                if strip.path in lost:
                    continue
                if not album.add(strip, [thumbnail(frame.picture.pixels) for frame in frames]):
                    return lost
    return lost


def _all_strips(episodes: Iterable[Mapping[str, Any]]) -> set[Strip]:
    return {strip for _, strips in _strips(episodes) for strip in strips}


def _strips(episodes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, list[Strip]]]:
    """Yields every video or call of the episodes, with its strips of frames."""
    for episode in episodes:
        videos = episode["videos"]
        for video in videos:
            yield video, [Strip(video["path"], tuple(video["frames_s"]))]
        for call in (call for turn in episode["turns"] for call in turn["calls"]):
            if shown := call.get("shown"):
                yield call, [Strip(path, tuple(times_s), box and Box(*box)) for path, box, times_s in shown]
            elif call["frames_s"] and call["video"] is not None and videos:
                box = None if call["box"] is None else Box(*call["box"])
                yield call, [Strip(videos[call["video"]]["path"], tuple(call["frames_s"]), box)]
