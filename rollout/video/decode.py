"""The work of a decoder process: finds the times of a video's frames, and decodes the requested frames.

A frame is identified by its tick: its presentation time in the container's unit. The decoder returns the tick with the
pixels, so that no frame rate, seek or damage can label a frame with a wrong time. Frames are rotated upright and have
the video's display aspect ratio. Only the file itself is read, never files that it refers to, as a playlist does.

DIFFERS: the original shows anamorphic video as stored, squeezed.

DIFFERS: the original decodes with decord. Where both find the right frame their pixels are equal, but decord silently
returns wrong frames in MPEG-TS and AVI files, around open groups of pictures and before the cut of an mp4 that was
trimmed without re-encoding. It cannot decode AV1 and hangs on some files (its issues 269, 373, 375).
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from rollout.video.box import Box
from rollout.video.errors import VideoError

Item = TypeVar("Item")

# Containers that cannot refer to other files, because a playlist in a dataset must not make us read other files. Images
# are excluded too.
FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mxf,nut,gif,ivf"
# Codecs in which no other frame needs a frame that is marked as non-reference. Skipping such frames between the
# keyframe and the requested frame halves the work and changes no pixel. In H.265 the mark covers only one temporal
# layer.
SKIPPABLE_CODECS = ("h264",)
STEPS_BACK_S = (0.0, *(0.5 * 2**doublings for doublings in range(16)))  # up to four and a half hours
# Accepts titles that are not UTF-8. PyAV 18 needs an option for this; PyAV 19 does it by default.
ANY_TITLE: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
RAW_FORMATS = "h264,hevc,obu,mpegvideo"
START_CODE = re.compile(rb"\x00?\x00\x00\x01")  # every raw stream but AV1's starts with it
DEFAULT_FPS = 25  # of a single frame without a duration, as ffmpeg's for raw streams
DAMAGED = "the video cannot be decoded: the file is damaged or not a video"
RAW = (
    "the video cannot be decoded: it is a raw H.264, H.265, AV1 or MPEG-2 stream, whose frames have no times; put it "
    "into a container at its frame rate: ffmpeg -r FPS -i FILE FILE.mp4"
)
# The highest levels of H.264 and H.265 allow this, more than 8K. A file of 1 MB can contain a frame of a gigabyte.
MAX_FRAME_PIXELS = 8192 * 4352
# libav rejects larger frames before it allocates memory, even if the file's header gives a smaller size.
SIZE_OPTIONS = {"max_pixels": str(MAX_FRAME_PIXELS)}


def probe(path: str) -> tuple[dict[str, Any], bytes]:
    """Returns the metadata for decoding any frame later, and the int64 ticks of all frames, then of the keyframes."""
    identity = identity_of(path)
    frame_times: list[tuple[int, int]] = []  # tick and duration
    key_ticks: list[int] = []
    first: VideoFrame | None = None
    with _open(path) as (container, stream):
        for packet in _packets(container, stream):
            if first is None:
                first = next(_up_to_damage(packet.decode), None)
            tick = _tick(packet)
            if tick is None or packet.is_corrupt:
                continue
            if packet.is_keyframe:
                key_ticks.append(tick)
            if not packet.is_discard:  # frames before a cut in the edit list are only needed to decode later frames
                frame_times.append((tick, packet.duration or 0))
        first = first or next(_up_to_damage(lambda: stream.decode(None)), None)  # a frame in its buffer
        if first is None and not stream.width:  # only the frames have the size, and libav rejected it
            raise VideoError(
                f"the video cannot be decoded: its frames are damaged, or have more than {MAX_FRAME_PIXELS} pixels"
            )
        if first is None:
            raise VideoError("the video cannot be decoded: no frame can be read")
        if not frame_times or not stream.time_base:
            raise VideoError("the video cannot be decoded: its frames have no times")
        ticks = np.unique(np.array([tick for tick, _ in frame_times], np.int64))
        keys = np.unique(np.array(key_ticks or ticks[:1], np.int64))
        span_ticks, (_, last_ticks) = int(ticks[-1] - ticks[0]), max(frame_times)
        if last_ticks <= 0 and span_ticks > 0:  # some containers do not store the duration of frames
            last_ticks = round(span_ticks / (len(ticks) - 1))
        elif last_ticks <= 0:
            last_ticks = max(1, round(1 / ((stream.average_rate or DEFAULT_FPS) * stream.time_base)))
        height, width = _displayed_size_px(stream, first)
        metadata = {
            "identity": identity,
            "num_frames": len(ticks),
            "duration_ticks": span_ticks + last_ticks,
            "time_base": [stream.time_base.numerator, stream.time_base.denominator],
            "height": height,
            "width": width,
            "frame_px": first.height * first.width,
        }
        return metadata, ticks.tobytes() + keys.tobytes()


def decode(
    path: str,
    identity: str,
    groups: Sequence[tuple[int, Sequence[int]]],
    size_px: tuple[int, int],
    emit: Callable[[int, np.ndarray], None],
    box: Box | None = None,
) -> None:
    """Passes the tick and pixels, uint8 [height, width, 3], of each decodable frame or its box to `emit`.

    A group is a keyframe's tick and the ascending ticks of the frames to decode from it.
    """
    if identity_of(path) != identity:
        raise VideoError("the video was replaced while it was being read")
    unreached: list[int] = []
    with _open(path) as (container, stream):
        for key_tick, ticks in groups:
            missing = list(ticks)
            # If frames are missing, also start at the previous keyframe: if this one is only a recovery point, the
            # pictures after it are incomplete at first.
            for start_tick in (key_tick, key_tick - 1):
                if missing and (packets := _packets_from(container, stream, start_tick)):
                    for tick, frame in _frames(stream, packets, missing[:]):
                        emit(tick, _to_pixels(frame, size_px, box))
                        missing.remove(tick)
                elif start_tick == key_tick:
                    unreached += missing
    if unreached:  # seeking fails in an AVI without an index, and for WebM frames before the start
        with _open(path) as (container, stream):
            for tick, frame in _frames(stream, _packets(container, stream), sorted(unreached)):
                emit(tick, _to_pixels(frame, size_px, box))


def identity_of(path: str) -> str:
    return identity_and_bytes(path)[0]


def identity_and_bytes(path: str) -> tuple[str, int]:
    """Returns a hash of the file's path, size and mtime, and the file's size. Does not read its content."""
    try:
        path = os.path.realpath(path)
        status, name = Path(path).stat(), path.encode()
    except OSError as problem:
        raise VideoError(f"the video cannot be opened: {problem.strerror}") from None
    except ValueError:  # a NUL or a lone surrogate
        raise VideoError("the video cannot be opened: its path is not the name of a file") from None
    if not stat.S_ISREG(status.st_mode):
        raise VideoError("the video cannot be opened: it is not a regular file")
    if status.st_size == 0:
        raise VideoError("the video cannot be decoded: the file is empty")
    content = b"%b\0%d\0%d" % (name, status.st_size, status.st_mtime_ns)
    return hashlib.blake2b(content, digest_size=16).hexdigest(), status.st_size


@contextmanager
def _open(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        containers = {"format_whitelist": FORMATS}
        with av.open(
            os.path.realpath(path), options=SIZE_OPTIONS, container_options=containers, **ANY_TITLE
        ) as container:
            pictures = Disposition.attached_pic
            streams = [s for s in container.streams.video if s.codec_context and not s.disposition & pictures]
            if not streams:
                raise VideoError("the video cannot be decoded: the file holds no video of a known codec")
            stream = max(streams, key=lambda stream: stream.width * stream.height)
            if stream.width * stream.height > MAX_FRAME_PIXELS:
                raise VideoError(
                    f"the video cannot be decoded: its frames of {stream.width}x{stream.height} have more than "
                    f"{MAX_FRAME_PIXELS} pixels"
                )
            for other in container.streams:
                other.discard = Discard.default if other is stream else Discard.all
            stream.codec_context.options = SIZE_OPTIONS
            stream.codec_context.thread_count = 1  # parallelism comes from processes; few requests are consecutive
            yield container, stream
    except MemoryError:  # in PyAV also an FFmpegError, but not the file's fault
        raise
    except FFmpegError as problem:
        if isinstance(problem, OSError):
            raise VideoError(f"the video cannot be opened: {problem.strerror}") from None
        raise VideoError(RAW if _is_raw(path) else DAMAGED) from None


def _is_raw(path: str) -> bool:
    """Whether the file is a raw stream. libav also finds a stream in a container without its start."""
    formats = {"format_whitelist": RAW_FORMATS}
    try:
        with av.open(os.path.realpath(path), options=SIZE_OPTIONS, container_options=formats) as container:
            is_av1 = container.format.name == "obu"
    except MemoryError:
        raise
    except FFmpegError:
        return False
    with Path(path).open("rb") as file:
        return is_av1 or START_CODE.match(file.read(4)) is not None


def _to_pixels(frame: VideoFrame, size_px: tuple[int, int], box: Box | None) -> np.ndarray:
    """Returns the upright picture, or the box's part of it, resized once."""
    pixels = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
    height, width = size_px
    image = Image.fromarray(np.ascontiguousarray(pixels if box is None else box.of(pixels)))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _frames(
    stream: VideoStream, packets: "Iterable[Packet[VideoStream]]", ticks: Sequence[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Yields the frames with these ascending ticks, as far as the packets can be decoded."""
    requested, pending, unread = set(ticks), set(ticks), set(ticks)
    skips = stream.codec_context.codec.name in SKIPPABLE_CODECS

    def decoded() -> Iterator[VideoFrame]:
        for packet in packets:
            tick = _tick(packet)
            stream.codec_context.skip_frame = "NONREF" if skips and tick not in requested else "DEFAULT"
            yield from _up_to_damage(packet.decode)  # a damaged packet has no frames
            unread.discard(tick)
            if not unread:
                break
        yield from _up_to_damage(lambda: stream.decode(None))  # the frames that the decoder has buffered

    for frame in decoded():
        tick = _tick(frame)
        if tick is None:
            continue
        if tick in pending:
            pending.remove(tick)
            yield tick, frame
        if not pending or tick > ticks[-1]:  # frames arrive in order of their times
            return


def _packets_from(
    container: InputContainer, stream: VideoStream, key_tick: int
) -> "Iterator[Packet[VideoStream]] | None":
    """Returns the packets from a keyframe on, or None if seeking cannot reach the keyframe.

    If a seek lands after the keyframe, as in MPEG-TS, it is retried from further back.
    """
    assert stream.time_base
    for step_back_s in STEPS_BACK_S:
        try:
            container.seek(key_tick - int(step_back_s / stream.time_base), stream=stream)
        except MemoryError:
            raise
        except FFmpegError:  # the file or this position is not seekable
            return None
        packets = _packets(container, stream)
        for packet in packets:
            tick = _tick(packet)
            if packet.is_keyframe and tick is not None:
                if tick > key_tick:
                    break
                return chain([packet], packets)
    return None


def _packets(container: InputContainer, stream: VideoStream) -> "Iterator[Packet[VideoStream]]":
    """Yields the packets up to the end of the file or its first unreadable part."""
    packets = _up_to_damage(lambda: container.demux(stream))
    return (packet for packet in packets if packet.size)  # the last, empty packet would only flush the decoder


def _up_to_damage(read: Callable[[], Iterable[Item]]) -> Iterator[Item]:
    """Yields what `read` returns, up to where libav cannot continue, but raises if memory ran out."""
    try:
        yield from read()
    except MemoryError:
        raise
    except FFmpegError:
        pass


def _displayed_size_px(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Returns height and width of an upright frame with square pixels; the sample aspect ratio scales the width."""
    height, width = frame.height, max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))
    return (width, height) if _quarter_turns(frame) % 2 else (height, width)


def _tick(timed: "Packet[VideoStream] | VideoFrame") -> int | None:
    return timed.dts if timed.pts is None else timed.pts


def _quarter_turns(frame: VideoFrame) -> int:
    """Returns the number of counter-clockwise quarter turns that make the frame upright."""
    return round(frame.rotation / 90) % 4
