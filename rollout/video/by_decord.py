"""The second decoder: decord, which the original uses, for those who must have its very frames.

It knows a frame by its number among all, and finds it by counting from a keyframe on. Where it counts wrong it gives
another picture at a plausible time, and nothing that it says would tell. So it is given only files that it is known to
count right, by what PyAV has read of their packets; others are refused. What no packet tells stays: behind damage it
counts wrong. `python -m paravt_jax.bench decoders` shows what it makes of each container.
"""

from collections.abc import Callable, Sequence

import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from rollout.video.box import Box
from rollout.video.decode import DAMAGED, identity_of, resized
from rollout.video.errors import VideoError

FORMATS = ("mov", "matroska")  # whose index says where each frame is; with them mp4 and webm
# Kinds of units (NAL) of which a keyframe must have one: others may be shown behind frames that refer to older ones.
CLEAN_UNITS = {"h264": (5,), "hevc": (19, 20)}
CODECS = (*CLEAN_UNITS, "vp9")
TOLERANCE_S = 2e-3  # some containers count milliseconds


class Countable:
    """Hears every packet of a video, and then knows whether decord counts its frames right."""

    def __init__(self, format_name: str, stream: VideoStream):
        self._codec = stream.codec_context.name
        self._extra = stream.codec_context.extradata or b""
        self._problem = ""
        if format_name.split(",")[0] not in FORMATS:
            self._problem = f"{format_name} files"
        elif self._codec not in CODECS:
            self._problem = f"{self._codec} videos"

    def hear(self, packet: "Packet[VideoStream]") -> None:
        if self._problem:
            return
        if packet.pts is None or packet.is_corrupt:
            self._problem = "files with damaged frames"
        elif packet.is_discard:
            self._problem = "files with frames that an edit list cuts off"
        elif packet.is_keyframe and self._codec in CLEAN_UNITS and not self._begins_anew(bytes(packet)):
            self._problem = "videos with open groups of pictures"

    def check(self) -> None:
        if self._problem:
            raise VideoError(f"the video cannot be decoded: decord miscounts {self._problem}; set video.decoder=pyav")

    def _begins_anew(self, content: bytes) -> bool:
        """Every unit has its length before it, in as many bytes as the header of the stream says."""
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
    wanted: Sequence[tuple[int, int, float]],
    num_frames: int,
    size_px: tuple[int, int],
    emit: Callable[[int, np.ndarray], None],
    box: Box | None = None,
) -> None:
    """Gives each frame, or this part of it, to `emit`: its tick and uint8 [height, width, 3].

    Of each `wanted` are its number, tick and time.
    """
    import decord  # an optional package, loaded where it decodes

    if identity_of(path) != identity:
        raise VideoError("the video was replaced while it was being read")
    decord.logging.set_level(decord.logging.QUIET)
    try:
        reader = decord.VideoReader(path, num_threads=1)
        if len(reader) != num_frames:
            raise VideoError(f"the video cannot be decoded: decord counts {len(reader)} of its {num_frames} frames")
        (begin_s, _), *_ = reader.get_frame_timestamp([0])
        for number, tick, time_s in wanted:
            ((shown_s, _),) = reader.get_frame_timestamp([number])
            if abs(shown_s - begin_s - time_s) > TOLERANCE_S:
                raise VideoError(f"the video cannot be decoded: decord takes frame {number} for another")
            emit(tick, resized(reader[number].asnumpy(), size_px, box))
    except decord.DECORDError:
        raise VideoError(DAMAGED) from None
