"""What a worker does with a video file: finds when its frames are shown, and decodes those that are asked for.

A frame is known by its tick, its presentation time in the container's own unit. The decoder returns the tick with the
pixels, so a frame can only be labelled with its own time, whatever the frame rate, the seeking and the damage. Frames
are turned upright, and shown in the video's display aspect ratio. Only the file itself is read, never what a playlist
in it points to.

DIFFERS: the original shows anamorphic video as it is stored, squeezed.

DIFFERS: the original decodes with decord. Where both find the frame their pixels are equal, but decord, without a word,
finds others than asked for in MPEG-TS and AVI files, around open groups of pictures and before the cut of an mp4 that
was trimmed without re-encoding. It has no AV1, and hangs for good on some files (its issues 269, 373, 375).
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

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

# Containers of one file each: a playlist in a dataset must not make us read other files, nor a picture pass as a video.
FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mxf,nut,gif"
# Codecs in which a picture marked as no reference is a reference for nobody: leaving those out between the keyframe and
# the frame asked for halves the work and changes no pixel. In H.265 the mark speaks of one temporal layer only.
SKIPPABLE_CODECS = ("h264",)
STEPS_BACK_S = (0.0, *(0.5 * 2**doublings for doublings in range(16)))  # to four and a half hours
# A title that is not UTF-8 is no reason to refuse a video: PyAV 18 has to be told so, 19 knows and takes no such word.
ANY_TITLE: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
ASSUMED_FPS, ASSUMED_GOP_FRAMES = 30, 250  # x264's default, where a header does not tell
DAMAGED = "the video cannot be decoded: the file is damaged or not a video"
# Of the highest levels of H.264 and H.265, so 8K passes. A file of one megabyte can hold a frame of a gigabyte.
MAX_FRAME_PIXELS = 8192 * 4352
# Makes libav refuse larger frames before it takes memory for one, also where they are larger than the file says.
SIZE_OPTIONS = {"max_pixels": str(MAX_FRAME_PIXELS)}


class Hearer(Protocol):
    """Judges a video by its packets."""

    def hear(self, packet: "Packet[VideoStream]") -> None: ...

    def check(self) -> None: ...


def probe(path: str, judge: Callable[[str, VideoStream], Hearer] | None = None) -> tuple[dict[str, Any], bytes]:
    """All there is to know of a video for reading it once and decoding one frame.

    Its ticks come as int64, those of the keyframes last.
    """
    identity = identity_of(path)
    shown: list[tuple[int, int]] = []  # tick and duration
    key_ticks: list[int] = []
    first: VideoFrame | None = None
    with _opened(path) as (container, stream):
        hearer = judge(container.format.name, stream) if judge is not None else None
        for packet in _packets(container, stream):
            if first is None:
                first = next(_decoded(packet), None)
            if hearer is not None:
                hearer.hear(packet)
            tick = _tick(packet)
            if tick is None or packet.is_corrupt:
                continue
            if packet.is_keyframe:
                key_ticks.append(tick)
            if not packet.is_discard:  # else cut off by an edit list, yet needed to decode what follows
                shown.append((tick, packet.duration or 0))
        first = first or next(_rest(stream), None)
        if first is None and not stream.width:  # the size stands in the frames, and libav refused it
            raise VideoError(
                f"the video cannot be decoded: its frames are damaged, or have more than {MAX_FRAME_PIXELS} pixels"
            )
        if first is None:
            raise VideoError("the video cannot be decoded: not a single frame of it can")
        if not shown or not stream.time_base:
            raise VideoError("the video cannot be decoded: its frames have no times")
        if hearer is not None:
            hearer.check()
        ticks = np.unique(np.array([tick for tick, _ in shown], np.int64))
        keys = np.unique(np.array(key_ticks or ticks[:1], np.int64))
        span_ticks, (_, last_ticks) = int(ticks[-1] - ticks[0]), max(shown)
        if last_ticks <= 0 and span_ticks > 0:  # not every container says how long a frame lasts
            last_ticks = round(span_ticks / (len(ticks) - 1))
        elif last_ticks <= 0 and stream.average_rate:
            last_ticks = round(1 / (stream.average_rate * stream.time_base))
        height, width = _displayed_size_px(stream, first)
        known = {
            "identity": identity,
            "num_frames": len(ticks),
            "duration_ticks": span_ticks + last_ticks,
            "time_base": [stream.time_base.numerator, stream.time_base.denominator],
            "height": height,
            "width": width,
            "frame_px": first.height * first.width,
        }
        return known, ticks.tobytes() + keys.tobytes()


def measure(path: str) -> dict[str, float]:
    """How many frames a video has, how many of them between keyframes, and their pixels, as far as its header tells."""
    with _opened(path) as (container, stream):
        duration_s = (container.duration or 0) / av.time_base
        num_frames = round(duration_s * (stream.guessed_rate or ASSUMED_FPS)) or stream.frames
        entries = stream.index_entries  # of every frame in mp4 and avi, of a few in others
        num_keys = sum(entry.is_keyframe for entry in entries) if len(entries) > num_frames / 2 else 0
        gop_frames = num_frames / num_keys if num_keys else ASSUMED_GOP_FRAMES
        return {"num_frames": num_frames, "gop_frames": gop_frames, "frame_px": stream.height * stream.width}


def decode(
    path: str,
    identity: str,
    groups: Sequence[tuple[int, Sequence[int]]],
    size_px: tuple[int, int],
    emit: Callable[[int, np.ndarray], None],
    box: Box | None = None,
) -> None:
    """Gives each frame that can be decoded, or this part of it, to `emit`: its tick and uint8 [height, width, 3].

    A group is the tick of a keyframe and, ascending, those of the frames that are decoded from it on.
    """
    if identity_of(path) != identity:
        raise VideoError("the video was replaced while it was being read")
    unreached: list[int] = []
    with _opened(path) as (container, stream):
        for key_tick, ticks in groups:
            if packets := _packets_from(container, stream, key_tick):
                for tick, frame in _frames(stream, packets, ticks):
                    emit(tick, _shown(frame, size_px, box))
            else:
                unreached += ticks
    if unreached:  # no seeking leads there: in an AVI without its index, or to what WebM has before its beginning
        with _opened(path) as (container, stream):
            for tick, frame in _frames(stream, _packets(container, stream), sorted(unreached)):
                emit(tick, _shown(frame, size_px, box))


def identity_of(path: str) -> str:
    return identity_and_bytes(path)[0]


def identity_and_bytes(path: str) -> tuple[str, int]:
    """A name for the content, of place, size and time of change, and the size: reads nothing."""
    try:
        path = os.path.realpath(path)
        status, place = Path(path).stat(), path.encode()
    except OSError as problem:
        raise VideoError(f"the video cannot be opened: {problem.strerror}") from None
    except ValueError:  # a NUL, or half of a character that has two
        raise VideoError("the video cannot be opened: its path is not the name of a file") from None
    if not stat.S_ISREG(status.st_mode):
        raise VideoError("the video cannot be opened: it is not a regular file")
    if status.st_size == 0:
        raise VideoError("the video cannot be decoded: the file is empty")
    content = b"%b\0%d\0%d" % (place, status.st_size, status.st_mtime_ns)
    return hashlib.blake2b(content, digest_size=16).hexdigest(), status.st_size


@contextmanager
def _opened(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        containers = {"format_whitelist": FORMATS}
        with av.open(
            os.path.realpath(path), options=SIZE_OPTIONS, container_options=containers, **ANY_TITLE
        ) as container:
            streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
            if not streams:
                raise VideoError("the video cannot be decoded: the file holds no video")
            stream = max(streams, key=lambda stream: stream.width * stream.height)
            if stream.width * stream.height > MAX_FRAME_PIXELS:
                raise VideoError(
                    f"the video cannot be decoded: its frames of {stream.width}x{stream.height} have more than "
                    f"{MAX_FRAME_PIXELS} pixels"
                )
            for other in container.streams:
                other.discard = Discard.default if other is stream else Discard.all
            stream.codec_context.options = SIZE_OPTIONS
            stream.codec_context.thread_count = 1  # the processes are the threads: frames in a row are rarely wanted
            yield container, stream
    except MemoryError:  # PyAV's is an FFmpegError as well, but says nothing about the file
        raise
    except FFmpegError as problem:
        if isinstance(problem, OSError):
            raise VideoError(f"the video cannot be opened: {problem.strerror}") from None
        raise VideoError(DAMAGED) from None


def _shown(frame: VideoFrame, size_px: tuple[int, int], box: Box | None) -> np.ndarray:
    upright = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
    return resized(upright, size_px, box)


def resized(pixels: np.ndarray, size_px: tuple[int, int], box: Box | None = None) -> np.ndarray:
    """The picture, or this part of it, resized once."""
    height, width = size_px
    image = Image.fromarray(np.ascontiguousarray(pixels if box is None else box.of(pixels)))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _frames(
    stream: VideoStream, packets: "Iterable[Packet[VideoStream]]", ticks: Sequence[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """The frames with these ascending ticks, as far as they can be decoded from these packets."""
    wanted, unread = set(ticks), set(ticks)
    skips = stream.codec_context.codec.name in SKIPPABLE_CODECS

    def decoded() -> Iterator[VideoFrame]:
        for packet in packets:
            tick = _tick(packet)
            stream.codec_context.skip_frame = "NONREF" if skips and tick not in wanted else "DEFAULT"
            yield from _decoded(packet)
            unread.discard(tick)
            if not unread:
                break
        yield from _rest(stream)

    for frame in decoded():
        tick = _tick(frame)
        if tick is None:
            continue
        if tick in wanted:
            wanted.remove(tick)
            yield tick, frame
        if not wanted or tick > ticks[-1]:  # frames come in the order of time
            return


def _packets_from(
    container: InputContainer, stream: VideoStream, key_tick: int
) -> "Iterator[Packet[VideoStream]] | None":
    """The packets from a keyframe on, or None where seeking does not lead there.

    Where it lands behind the keyframe, as in MPEG-TS, it is tried from further back.
    """
    assert stream.time_base
    for step_back_s in STEPS_BACK_S:
        try:
            container.seek(key_tick - int(step_back_s / stream.time_base), stream=stream)
        except MemoryError:
            raise
        except FFmpegError:  # libav has no way to seek in this file, or none to this moment
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
    """The packets up to the end, which in a damaged file is where the container cannot be read any further."""
    with _up_to_damage():
        for packet in container.demux(stream):
            if packet.size:  # the empty one at the end would only flush the decoder
                yield packet


def _decoded(packet: "Packet[VideoStream]") -> Iterator[VideoFrame]:
    """The frames that come out when a packet goes in; none for a damaged one, behind which the decoder goes on."""
    with _up_to_damage():
        yield from packet.decode()


def _rest(stream: VideoStream) -> Iterator[VideoFrame]:
    """The frames that the decoder holds back until it hears that nothing follows."""
    with _up_to_damage():
        yield from stream.decode(None)


@contextmanager
def _up_to_damage() -> Iterator[None]:
    """Ends quietly where libav cannot go on, except for want of memory, which says nothing about the file."""
    try:
        yield
    except MemoryError:
        raise
    except FFmpegError:
        pass


def _displayed_size_px(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Height and width of an upright frame with square pixels: the width is scaled by the shape of a stored pixel."""
    height, width = frame.height, max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))
    return (width, height) if _quarter_turns(frame) % 2 else (height, width)


def _tick(timed: "Packet[VideoStream] | VideoFrame") -> int | None:
    return timed.dts if timed.pts is None else timed.pts


def _quarter_turns(frame: VideoFrame) -> int:
    """Counter-clockwise, to bring the frame upright."""
    return round(frame.rotation / 90) % 4
