"""Encodes a video's frames as in the release: base64 JPEGs without times."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paravt_jax.evaluation.release.frames import CROP_PX, OVERVIEW_PX, crop_numbers, fitted_size, overview_numbers
from rollout.endpoint.words import image_part
from rollout.video.errors import VideoError, VideoUnavailable
from rollout.video.info import VideoInfo
from rollout.video.reader import FrameReader

JPEG_QUALITY = 85

Part = dict[str, Any]  # a part of a message's content


@dataclass(frozen=True)
class ReleasePictures:
    frames: FrameReader
    deadline_s: float  # for a decoder job

    async def overview(self, path: str) -> list[Part]:
        """The 64 frames of the overview; none if the video is shorter."""
        return await self._parts(path, lambda video: overview_numbers(video.num_frames), OVERVIEW_PX)

    async def crop(self, path: str, start_s: float, end_s: float) -> list[Part]:
        """The frames of a window, at most 16."""
        return await self._parts(path, lambda video: crop_numbers(video.num_frames, video.fps, start_s, end_s), CROP_PX)

    async def _parts(
        self, path: str, numbers_of: Callable[[VideoInfo], Sequence[int]], area_px: tuple[int, int]
    ) -> list[Part]:
        """Encodes frames; none if the file has no readable frames, as in the release."""
        try:
            video = await self.frames.info(path, self.deadline_s)
            size_px = fitted_size(video.height, video.stored_width, area_px)
            shown = await self.frames.numbered(path, numbers_of(video), size_px, self.deadline_s)
        except VideoUnavailable:
            raise
        except VideoError:
            return []
        return await asyncio.to_thread(
            lambda: [image_part(frame.picture.encoded("JPEG", quality=JPEG_QUALITY)) for frame in shown]
        )
