"""A video's frames as the release sends them: JPEG pictures in base64, without times."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paravt_jax.evaluation.release.frames import CROP_PX, OVERVIEW_PX, crop_numbers, fitted_size, overview_numbers
from rollout.endpoint.words import image_part
from rollout.video.errors import VideoError
from rollout.video.info import StoredVideo, TimedPicture

JPEG_QUALITY = 85

Part = dict[str, Any]  # of a message


class NumberedFrames(Protocol):
    """The part of FrameReader that chooses frames by number."""

    async def stored(self, path: str, deadline_s: float) -> StoredVideo: ...

    async def numbered(
        self, path: str, numbers: Sequence[int], size_px: tuple[int, int], deadline_s: float
    ) -> list[TimedPicture]: ...


@dataclass(frozen=True)
class ReleasePictures:
    frames: NumberedFrames
    deadline_s: float  # for a decoder job

    async def overview(self, path: str) -> list[Part]:
        """64 frames; none if the video is shorter or cannot be read, as in the release."""
        try:
            video = await self.frames.stored(path, self.deadline_s)
            return await self._parts(path, video, overview_numbers(video.num_frames), OVERVIEW_PX)
        except VideoError:
            return []

    async def crop(self, path: str, start_s: float, end_s: float) -> list[Part]:
        """Up to 16 frames of a window; none if it cannot be read."""
        try:
            video = await self.frames.stored(path, self.deadline_s)
            return await self._parts(path, video, crop_numbers(video.num_frames, video.fps, start_s, end_s), CROP_PX)
        except VideoError:
            return []

    async def _parts(
        self, path: str, video: StoredVideo, numbers: Sequence[int], area_px: tuple[int, int]
    ) -> list[Part]:
        size_px = fitted_size(video.height, video.width, area_px)
        shown = await self.frames.numbered(path, numbers, size_px, self.deadline_s)
        return await asyncio.to_thread(lambda: [_part(frame) for frame in shown])


def _part(frame: TimedPicture) -> Part:
    return image_part(frame.picture.encoded("JPEG", quality=JPEG_QUALITY))
