"""An optional second decoder: decord, which the original uses, for exact comparisons with it.

decord addresses a frame by its number and counts from a keyframe to find it. If it miscounts, it returns another frame
with a plausible time and no error. So it is used only for files that it is known to count correctly, judged by the
packets that PyAV reads; other files are rejected. Packets do not reveal damage, behind which decord miscounts.
`python -m scripts.bench decoders` compares the decoders on each container.
"""

from collections.abc import Callable, Sequence

import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from rollout.video.box import Box
from rollout.video.decode import DAMAGED, identity_of, resized
from rollout.video.errors import VideoError

FORMATS = ("mov", "matroska")  # these have an index of all frames; includes mp4 and webm
# NAL unit types of clean keyframes. After other keyframes, frames may refer to frames before them.
CLEAN_UNITS = {"h264": (5,), "hevc": (19, 20)}
CODECS = (*CLEAN_UNITS, "vp9")
TOLERANCE_S = 2e-3  # some containers count in milliseconds


class FrameCountCheck:
    """Decides from a video's packets if decord counts its frames correctly."""

    def __init__(self, format_name: str, stream: VideoStream):
        self._codec = stream.codec_context.name
        self._extra = stream.codec_context.extradata or b""
        self._problem = ""
        if format_name.split(",")[0] not in FORMATS:
            self._problem = f"{format_name} files"
        elif self._codec not in CODECS:
            self._problem = f"{self._codec} videos"

    def add(self, packet: "Packet[VideoStream]") -> None:
        if self._problem:
            return
        if packet.pts is None or packet.is_corrupt:
            self._problem = "files with damaged frames"
        elif packet.is_discard:
            self._problem = "files with frames that an edit list cuts off"
        elif packet.is_keyframe and self._codec in CLEAN_UNITS and not self._is_clean_keyframe(bytes(packet)):
            self._problem = "videos with open groups of pictures"

    def check(self) -> None:
        if self._problem:
            raise VideoError(f"the video cannot be decoded: decord miscounts {self._problem}; set video.decoder=pyav")

    def _is_clean_keyframe(self, content: bytes) -> bool:
        """Each unit is preceded by its length; the stream header gives the number of length bytes."""
        hevc = self._codec == "hevc"
        header = self._extra[21 if hevc else 4 :][:1]
        length_bytes, at = (header[0] & 3) + 1 if header else 4, 0
        while at + length_bytes < len(content):
            first = content[at + length_bytes]
            if (first >> 1 & 63 if hevc else first & 31) in CLEAN_UNITS[self._codec]:
                return True
            at += length_bytes + int.from_bytes(content[at : at + length_bytes])
        return False


def decode(
    path: str,
    identity: str,
    requests: Sequence[tuple[int, int, float]],
    num_frames: int,
    size_px: tuple[int, int],
    emit: Callable[[int, np.ndarray], None],
    box: Box | None = None,
) -> None:
    """Passes the tick and pixels, uint8 [height, width, 3], of each frame or its box to `emit`.

    A request is a frame's number, tick and time.
    """
    import decord  # an optional package

    if identity_of(path) != identity:
        raise VideoError("the video was replaced while it was being read")
    decord.logging.set_level(decord.logging.QUIET)
    try:
        reader = decord.VideoReader(path, num_threads=1)
        if len(reader) != num_frames:
            raise VideoError(f"the video cannot be decoded: decord counts {len(reader)} of its {num_frames} frames")
        (begin_s, _), *_ = reader.get_frame_timestamp([0])
        for number, tick, time_s in requests:
            ((shown_s, _),) = reader.get_frame_timestamp([number])
            if abs(shown_s - begin_s - time_s) > TOLERANCE_S:
                raise VideoError(f"the video cannot be decoded: decord takes frame {number} for another")
            emit(tick, resized(reader[number].asnumpy(), size_px, box))
    except decord.DECORDError:
        raise VideoError(DAMAGED) from None
