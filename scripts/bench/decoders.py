"""Counts correct frames per container for PyAV, which runs use, and decord, which the original uses.

Every frame of a clip is different. All frames are read in random order, so that each needs a seek. A frame is correct
if it equals the frame from decoding the whole clip, pixel for pixel.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np

from paravt_jax.bench.camera import FPS, camera
from rollout.video.decode import decode, probe
from rollout.video.encode import X264
from rollout.video.errors import VideoError

NUM_S, CLIP_PX = 4, (96, 128)
GROUP_FRAMES = 30
HEVC = "log-level=none:keyint=30"
# File extension, codec and codec options.
CLIPS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mp4, H.264": ("mp4", "libx264", {}),
    "mov, H.264": ("mov", "libx264", {}),
    "mkv, H.264": ("mkv", "libx264", {}),
    "webm, VP9": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "mp4, H.265, closed groups": ("mp4", "libx265", {"x265-params": f"{HEVC}:open-gop=0"}),
    "mp4, H.265, open groups": ("mp4", "libx265", {"x265-params": HEVC}),
    "mp4, H.264, open groups": ("mp4", "libx264", {"x264-params": "open-gop=1:keyint=30:bframes=3:scenecut=0"}),
    "flv, H.264": ("flv", "libx264", {}),
    "avi, MPEG-4": ("avi", "mpeg4", {}),
    "MPEG-TS, H.264": ("ts", "libx264", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments: this benchmark has none."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name, (ending, codec, options) in CLIPS.items():
            path = Path(folder) / f"clip.{ending}"
            _write(path, codec, options)
            rows.append({"clip": name, **_exactness(path)})
            print(rows[-1], file=sys.stderr, flush=True)
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    lines = ["| clip | frames | PyAV right | decord right |", "|---" * 4 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row.values()))} |" for row in result["rows"])])


def _exactness(path: Path) -> dict[str, Any]:
    import decord  # an optional package

    with av.open(str(path)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    info, raw = probe(str(path))
    ticks, keys = np.split(np.frombuffer(raw, np.int64), [info["num_frames"]])
    decord.logging.set_level(decord.logging.QUIET)

    def by_pyav(frame: int, emit: Callable[[int, np.ndarray], None]) -> None:
        key = int(keys[keys <= ticks[frame]][-1])
        decode(str(path), info["identity"], [(key, [int(ticks[frame])])], (info["height"], info["width"]), emit)

    def by_decord(frame: int, emit: Callable[[int, np.ndarray], None]) -> None:
        try:
            emit(frame, decord.VideoReader(str(path), num_threads=1)[frame].asnumpy())
        except (decord.DECORDError, IndexError):
            raise VideoError("decord cannot read this frame") from None

    num_right = [_num_right(read, expected) for read in (by_pyav, by_decord)]
    return {"frames": len(expected), "pyav": num_right[0], "decord": num_right[1]}


def _num_right(read: Callable[[int, Callable[[int, np.ndarray], None]], None], expected: list[np.ndarray]) -> int:
    num = 0
    for frame in np.random.default_rng(0).permutation(len(expected)).tolist():
        frames: list[np.ndarray] = []
        try:
            read(frame, lambda _, pixels, frames=frames: frames.append(pixels))
        except VideoError:
            continue
        num += len(frames) == 1 and np.array_equal(frames[0], expected[frame])
    return num


def _write(path: Path, codec: str, options: dict[str, str]) -> None:
    options = {**(X264 if codec == "libx264" else {}), **options}
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        (stream.height, stream.width), stream.pix_fmt = CLIP_PX, "yuv420p"
        stream.codec_context.gop_size = GROUP_FRAMES
        for pixels in camera(*CLIP_PX, NUM_S):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
