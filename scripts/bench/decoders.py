"""PyAV and decord: correct frames per container, and speed.

Every frame of a clip is different. All frames are read in random order, so that each needs a seek, and a right frame
equals the frame from decoding the whole clip, pixel for pixel. decord is also tested on clips that
`video.decoder=decord` rejects. Speed is measured on cold frames in turns, with running decoders and a file in the page
cache.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from paravt_jax.bench.camera import FPS, camera
from rollout.video import by_decord
from rollout.video.decode import decode, probe
from rollout.video.encode import X264, write_video
from rollout.video.errors import VideoError
from rollout.video.reader import Decoder
from scripts.bench.video import SIZES_PX, read_cold, reads_of

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
    parser.add_argument("--seconds", type=int, default=90, help="length of the videos that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each decoder; the median counts")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        exact = []
        for name, (ending, codec, options) in CLIPS.items():
            path = Path(folder) / f"clip.{ending}"
            _write(path, codec, options)
            exact.append({"clip": name, **_exactness(path)})
            print(exact[-1], file=sys.stderr, flush=True)
        speeds = [row for size in SIZES_PX for row in _speeds(Path(folder) / f"{size}.mp4", size, args)]
    return {"exact": exact, "speeds": speeds}


def table(result: dict[str, Any]) -> str:
    """The result as two Markdown tables."""
    lines = ["| clip | frames | PyAV right | decord right | video.decoder=decord |", "|---" * 5 + "|"]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in result["exact"]]
    lines += ["", "| video | read | frames | PyAV s | decord s | decord / PyAV |", "|---" * 6 + "|"]
    for row in result["speeds"]:
        pyav_s, decord_s = row["pyav_s"], row["decord_s"]
        seconds = f"{pyav_s:.3f} | {decord_s:.3f} | {decord_s / pyav_s:.2f}"
        lines.append(f"| {row['video']} | {row['read']} | {row['frames']} | {seconds} |")
    return "\n".join(lines)


def _exactness(path: Path) -> dict[str, Any]:
    with av.open(str(path)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    info, raw = probe(str(path))
    ticks, keys = np.split(np.frombuffer(raw, np.int64), [info["num_frames"]])
    identity, size_px = info["identity"], (info["height"], info["width"])

    def by_pyav(frame: int, emit: Callable[[int, np.ndarray], None]) -> None:
        key = int(keys[keys <= ticks[frame]][-1])
        decode(str(path), identity, [(key, [int(ticks[frame])])], size_px, emit)

    def with_decord(frame: int, emit: Callable[[int, np.ndarray], None]) -> None:
        time_s = float(int(ticks[frame] - ticks[0]) * Fraction(*info["time_base"]))
        by_decord.decode(str(path), identity, [(frame, int(ticks[frame]), time_s)], len(ticks), size_px, emit)

    try:
        probe(str(path), by_decord.FrameCountCheck)
        verdict = "reads it"
    except VideoError:
        verdict = "refuses it"
    num_right = [_num_right(way, expected) for way in (by_pyav, with_decord)]
    return {"frames": len(expected), "pyav": num_right[0], "decord": num_right[1], "verdict": verdict}


def _num_right(way: Callable[[int, Callable[[int, np.ndarray], None]], None], expected: list[np.ndarray]) -> int:
    num = 0
    for frame in np.random.default_rng(0).permutation(len(expected)).tolist():
        frames: list[np.ndarray] = []
        try:
            way(frame, lambda _, pixels, frames=frames: frames.append(pixels))
        except VideoError:
            continue
        num += len(frames) == 1 and np.array_equal(frames[0], expected[frame])
    return num


def _speeds(path: Path, size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    write_video(path, camera(*SIZES_PX[size], args.seconds), FPS)
    rows = []
    for name, steps in reads_of(args.seconds * FPS).items():
        seconds: dict[Decoder, list[float]] = {"pyav": [], "decord": []}
        for turn in range(args.repeats + 1):
            for decoder, took in seconds.items():
                cold_s = asyncio.run(read_cold(path, steps, decoder=decoder))
                took += [cold_s] if turn else []  # the first turn warms up
        frames = sum(count for windows in steps for _, _, count in windows)
        medians = {f"{decoder}_s": statistics.median(took) for decoder, took in seconds.items()}
        rows.append({"video": size, "read": name, "frames": frames, **medians})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _write(path: Path, codec: str, options: dict[str, str]) -> None:
    options = {**(X264 if codec == "libx264" else {}), **options}
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        (stream.height, stream.width), stream.pix_fmt = CLIP_PX, "yuv420p"
        stream.codec_context.gop_size = GROUP_FRAMES
        for pixels in camera(*CLIP_PX, NUM_S):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
