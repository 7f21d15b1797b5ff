"""Times reading frames for a rollout, compared with the original: qwen_vl_utils with decord, then the HF processor.

A rollout reads an overview, then crops, including patches. The original decodes them again for every rollout, one after
the other; we decode them once (cold), and the other rollouts of the group read them from memory (warm). Both sides read
the same frames of the same file, which is in the page cache, and must agree on the pixels. Workers start before the
measurement.

With --split, only our side reads an overview: decoded in one piece by one decoder, and split over all of them.
"""

import argparse
import asyncio
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from model_port.processing import VisionContract, process_images, settled_size
from paravt_jax.bench.camera import FPS, camera
from rollout.video.encode import write_video
from rollout.video.reader import FrameReader

HALF = (0.5, 0.5, 0.5)
CONTRACT = VisionContract(16, 2, 2, 784, 50176, HALF, HALF)  # the recipe's
SIZES_PX = {"360p": (360, 640), "720p": (720, 1280)}
OVERVIEW_FRAMES, NUM_CROPS, CROP_S = 64, 5, 16
FIRST_FRAMES = 2  # the fewest that qwen_vl_utils reads
DEADLINE_S = 600.0
MAX_DIFFERENCE = 2.0  # of 255, mean: torchvision and Pillow round differently
INSTALL = (
    "pip install --no-deps --target DIR qwen-vl-utils torchvision requests urllib3 idna certifi charset-normalizer"
)

Window = tuple[int, int, int]  # first frame, last frame, number of frames
_KEPT: list[Any] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=[*SIZES_PX, "all"], default="all", help="size of the video (default all)")
    parser.add_argument(
        "--seconds", type=int, default=90, help="length of the video, which is written first (default 90)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed turns per side; the median is reported (default 3)"
    )
    parser.add_argument("--workers", type=int, default=None, help="decoders (default: one per core, up to 8)")
    parser.add_argument(
        "--split", action="store_true", help="compare an overview by one decoder with the same over all, and exit"
    )
    parser.add_argument(
        "--qwen-vl-utils", metavar="DIR", help=f"directory with the packages of the original: {INSTALL}"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("repeats", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.seconds < NUM_CROPS * CROP_S:
        raise ValueError(f"--seconds {args.seconds} must be at least {NUM_CROPS * CROP_S}")
    theirs = None if args.split else _make_original(args.qwen_vl_utils)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in SIZES_PX if args.size == "all" else [args.size]:
            path = Path(folder) / f"{name}.mp4"
            print(f"writing {args.seconds} s of {name} video", file=sys.stderr, flush=True)
            write_video(path, camera(*SIZES_PX[name], args.seconds), FPS)
            if theirs is None:
                compared = [_split_row(path, args.seconds * FPS, args.repeats, args.workers)]
            else:
                compared = _compare(theirs, path, args.seconds * FPS, args.repeats, args.workers)
            for row in compared:
                rows.append({"video": name, **row})
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows, "seconds": args.seconds, "workers": args.workers}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    head = "| video | read | frames | original s | ours s | original frames/s | ours frames/s | original / ours |"
    if "whole_s" in result["rows"][0]:
        head = "| video | read | frames | decoders | in one piece s | split s | in one piece / split |"
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *(_line(row) for row in result["rows"])])


def _line(row: dict[str, Any]) -> str:
    if "whole_s" in row:
        return (
            f"| {row['video']} | {row['read']} | {row['frames']} | {row['decoders']} | {row['whole_s']:.2f} "
            f"| {row['split_s']:.2f} | {row['whole_s'] / row['split_s']:.2f} |"
        )
    theirs_s, ours_s, frames = row["original_s"], row["ours_s"], row["frames"]
    return (
        f"| {row['video']} | {row['read']} | {frames} | {theirs_s:.3f} | {ours_s:.4f} | {frames / theirs_s:.0f} "
        f"| {frames / ours_s:.0f} | {theirs_s / ours_s:.2f} |"
    )


def _compare(theirs: Any, path: Path, num_frames: int, repeats: int, workers: int | None) -> list[dict[str, Any]]:
    rows = []
    for name, steps in reads_of(num_frames).items():
        seconds: dict[str, list[float]] = {"original": [], "cold": [], "warm": []}
        for turn in range(repeats + 1):
            took = asyncio.run(_ours(path, steps, workers))
            start = time.perf_counter()
            pixels = [theirs(path, window) for windows in steps for window in windows]
            took["original"] = time.perf_counter() - start
            _require_same(took.pop("pixels"), pixels)
            took.pop("decoders")
            if turn:  # the first turn warms up
                for side, value in took.items():
                    seconds[side].append(value)
        median = {side: statistics.median(values) for side, values in seconds.items()}
        frames = sum(count for windows in steps for _, _, count in windows)
        for temperature in ("cold", "warm"):
            times = {"original_s": median["original"], "ours_s": median[temperature]}
            rows.append({"read": f"{name}, {temperature}", "frames": frames, **times})
    return rows


def _split_row(path: Path, num_frames: int, repeats: int, workers: int | None) -> dict[str, Any]:
    """Seconds of a cold overview in one piece and split; both must have the same pixels."""
    steps = [[(0, num_frames - 1, OVERVIEW_FRAMES)]]
    seconds: dict[str, list[float]] = {"whole_s": [], "split_s": []}
    num_decoders = 0
    for turn in range(repeats + 1):
        whole = asyncio.run(_ours(path, steps, 1))
        split = asyncio.run(_ours(path, steps, workers))
        if any(not np.array_equal(*pair) for pair in zip(whole["pixels"], split["pixels"], strict=True)):
            raise RuntimeError("the split overview has other pixels")
        num_decoders = split["decoders"]
        if turn:  # the first turn warms up
            seconds["whole_s"].append(whole["cold"])
            seconds["split_s"].append(split["cold"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"read": "overview", "frames": OVERVIEW_FRAMES, "decoders": num_decoders, **medians}


def reads_of(num_frames: int) -> dict[str, list[list[Window]]]:
    """The windows that a rollout reads; each list is read at once, one list after the other."""
    last = num_frames - 1
    starts = np.linspace(0, num_frames - CROP_S * FPS, NUM_CROPS).round().astype(int).tolist()
    crops = [(start, start + CROP_S * FPS - 1, CROP_S) for start in starts]
    return {
        "first frames": [[(0, last, FIRST_FRAMES)]],
        "overview and crops": [[(0, last, OVERVIEW_FRAMES)], crops],
    }


async def _ours(path: Path, steps: list[list[Window]], workers: int | None) -> dict[str, Any]:
    took: dict[str, Any] = {}
    small = path.with_name("small.mp4")
    if not small.exists():
        write_video(small, camera(64, 64, 2), FPS)
    async with FrameReader(lambda height, width: settled_size(height, width, CONTRACT), num_workers=workers) as reader:
        for _ in range(4):
            await asyncio.gather(*(reader.frames(small, [n / FPS], DEADLINE_S) for n in range(2 * FPS)))
        for temperature in ("cold", "warm"):
            start = time.perf_counter()
            await reader.info(path, DEADLINE_S)
            pixels = []
            for windows in steps:
                pixels += await asyncio.gather(*(_read(reader, path, window) for window in windows))
            took[temperature] = time.perf_counter() - start
        took |= {"pixels": pixels, "decoders": reader.num_workers}
    return took


async def _read(reader: FrameReader, path: Path, window: Window) -> np.ndarray:
    # The middle of a frame, so that rounding cannot select another one.
    times_s = [(frame + 0.5) / FPS for frame in np.linspace(*window).round().tolist()]
    frames = await reader.frames(path, times_s, DEADLINE_S)
    pixels = [frame.picture.pixels for frame in frames]
    process_images(pixels, CONTRACT)
    return np.stack(pixels)


def _make_original(directory: str | None) -> Callable[[Path, Window], np.ndarray]:
    """Reads a window as the original does, including patches, and returns the frames for comparison."""
    os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
    sys.path += [] if directory is None else [directory]
    try:
        _import_torchvision()
        fetch_video = importlib.import_module("qwen_vl_utils.vision_process").fetch_video
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    except ImportError as missing:
        raise RuntimeError(f"{missing}; the comparison needs: {INSTALL}, then --qwen-vl-utils DIR") from None
    processor = Qwen3VLVideoProcessor(
        size={"shortest_edge": CONTRACT.min_pixels, "longest_edge": OVERVIEW_FRAMES * CONTRACT.max_pixels},
        cap_pixels_per_frame=False,
    )

    def read(path: Path, window: Window) -> np.ndarray:
        first, last, num_frames = window
        video, metadata = fetch_video(
            {
                "video": str(path),
                "video_start": (first - 0.5) / FPS,
                "video_end": (last + 0.5) / FPS,
                "nframes": num_frames,
                "min_pixels": CONTRACT.min_pixels,
                "max_pixels": CONTRACT.max_pixels,
            },
            image_patch_size=CONTRACT.patch_px,
            return_video_metadata=True,
        )
        processor(
            videos=[video], video_metadata=[metadata], do_sample_frames=False, do_resize=False, return_tensors="pt"
        )
        return video.permute(0, 2, 3, 1).numpy()

    return read


def _import_torchvision() -> None:
    """Its wheel is built for CUDA; with a CPU torch it lacks two operators, which are not called here."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # keeps the declarations registered
        importlib.import_module("torchvision")


def _require_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, original in zip(ours, theirs, strict=True):
        if mine.shape != original.shape:
            raise RuntimeError(f"the two sides disagree: our frames are {mine.shape}, the original's {original.shape}")
        difference = float(np.abs(mine - original).mean())
        if difference > MAX_DIFFERENCE:
            raise RuntimeError(f"the two sides disagree: pixels differ by {difference:.1f} of 255 in the mean")
