"""Writes test videos with PyAV; every frame encodes its number, so that tests can identify decoded frames."""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from rollout.video.encode import X264

HEIGHT, WIDTH = 96, 128
NUM_BITS = 12
BITS_ACROSS = 4


def numbered_frame(number: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Draws the number as white and black cells on a background whose colors and corners all differ."""
    rows = NUM_BITS // BITS_ACROSS
    cells = np.zeros((rows + 1, BITS_ACROSS, 3), np.uint8)
    for bit in range(NUM_BITS):
        cells[divmod(bit, BITS_ACROSS)] = 255 * (number >> bit & 1)
    cells[rows] = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (128, 128, 128)]
    return np.asarray(Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST))


def number_of(pixels: np.ndarray) -> int:
    height, width, _ = pixels.shape
    rows = NUM_BITS // BITS_ACROSS + 1
    middles = pixels[height // (2 * rows) :: height // rows, width // (2 * BITS_ACROSS) :: width // BITS_ACROSS]
    bits = middles[: rows - 1, :BITS_ACROSS].mean(axis=2).ravel() > 127
    return sum(1 << bit for bit in np.flatnonzero(bits).tolist())


def write_video(
    path: Path,
    times_s: Sequence[float],
    *,
    codec: str = "libx264",
    size_px: tuple[int, int] = (HEIGHT, WIDTH),
    gop_frames: int = 30,
    time_base: Fraction = Fraction(1, 90_000),
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    title: str = "",
    pixel_ratio: Fraction | None = None,
) -> Path:
    """Writes a video whose frame n is shown from `times_s[n]`."""
    height, width = size_px
    always = X264 if codec == "libx264" else {}
    unnamed = {"fflags": "+bitexact"}  # a Matroska file would have a random id
    with av.open(str(path), "w", container_options={**unnamed, **(container_options or {})}) as container:
        container.metadata["title"] = title
        stream = container.add_stream(codec, rate=30, options={**always, **(options or {})})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.time_base = stream.codec_context.time_base = time_base
        stream.codec_context.gop_size = gop_frames
        if pixel_ratio is not None:
            stream.codec_context.sample_aspect_ratio = pixel_ratio
        for number, time_s in enumerate(times_s):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, height, width), format="rgb24")
            frame.pts, frame.time_base = round(time_s / time_base), time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def at_fps(fps: float, num_frames: int) -> list[float]:
    return [number / fps for number in range(num_frames)]


def write_sound(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def trim_without_encoding(source: Path, path: Path, num_frames: int, fps: float) -> Path:
    """Drops the first frames as `ffmpeg -ss -c copy` does: they stay in the file, but an edit list hides them."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(video=0):
            if packet.dts is not None and packet.pts is not None:
                shift = round(num_frames / fps / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                new.mux(packet)
    return path


def turn(path: Path, degrees: int) -> Path:
    """Sets the rotation matrix in an mp4's track header, so that it is shown turned clockwise."""
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    a, b, c, d = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    content[matrix : matrix + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


def damage(path: Path, start_frac: float, end_frac: float) -> Path:
    """Overwrites a part of a file with zeros."""
    content = bytearray(path.read_bytes())
    start, end = round(len(content) * start_frac), round(len(content) * end_frac)
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    return path


def truncate(path: Path, keep_frac: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: round(len(content) * keep_frac)])
    return path
