"""A video's frames as the release sends them: JPEG pictures in base64, without times."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paravt_jax.evaluation.release.frames import CROP_PX, OVERVIEW_PX, crop_numbers, fitted_size, overview_numbers
from rollout.endpoint.words import image_part
from rollout.video.errors import VideoError, VideoUnavailable
from rollout.video.info import StoredVideo
from rollout.video.reader import FrameReader

JPEG_QUALITY = 85

Part = dict[str, Any]  # of a message


@dataclass(frozen=True)
class ReleasePictures:
    frames: FrameReader
    deadline_s: float  # for a decoder job

    async def overview(self, path: str) -> list[Part]:
        """64 frames; none if the video is shorter."""
        return await self._parts(path, lambda video: overview_numbers(video.num_frames), OVERVIEW_PX)

    async def crop(self, path: str, start_s: float, end_s: float) -> list[Part]:
        """Up to 16 frames of a window."""
        return await self._parts(path, lambda video: crop_numbers(video.num_frames, video.fps, start_s, end_s), CROP_PX)

    async def _parts(
        self, path: str, numbers_of: Callable[[StoredVideo], Sequence[int]], area_px: tuple[int, int]
    ) -> list[Part]:
        """No frames if the file has none that can be read, as in the release."""
        try:
            video = await self.frames.stored(path, self.deadline_s)
            size_px = fitted_size(video.height, video.width, area_px)
            shown = await self.frames.numbered(path, numbers_of(video), size_px, self.deadline_s)
        except VideoUnavailable:
            raise
        except VideoError:
            return []
        return await asyncio.to_thread(
            lambda: [image_part(frame.picture.encoded("JPEG", quality=JPEG_QUALITY)) for frame in shown]
        )
