"""A video's metadata and frames. This module needs no decoder, so that the learner runs without one."""

from dataclasses import dataclass

from rollout.picture import Picture
from rollout.video.box import Box


@dataclass(frozen=True)
class VideoInfo:
    """A video's length and size."""

    identity: str  # of the file: from its path, size and time of change
    duration_s: float | int  # from the start of the first frame to the end of the last
    num_frames: int
    height: int  # upright, before any resizing
    width: int
    stored_width: int = 0  # the width without its sample aspect ratio
    fps: float = 0.0  # the average


@dataclass(frozen=True, eq=False)
class TimedPicture:
    """A frame of a video, or a part of one, with its time."""

    time_s: float | int  # start of this frame, relative to the first
    picture: Picture
    path: str = ""  # of the video
    box: Box | None = None  # the part of the frame that the picture shows; None: all of it
