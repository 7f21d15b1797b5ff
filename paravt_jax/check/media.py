"""Stages `video` and `data`: read the user's files as a run reads them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

from model_port.progress import BYTES, in_units
from paravt_jax.check.report import Facts, Measured
from paravt_jax.check.target import Target
from paravt_jax.config import SYNTHETIC
from paravt_jax.data.inspect import inspect
from paravt_jax.data.synthetic import FPS, frames, make_clip
from paravt_jax.sampling.engines import frame_reader
from rollout.video.encode import write_video
from rollout.video.errors import VideoError
from rollout.video.reader import FrameReader
from rollout.video.times import crop_times, overview_times

Result = TypeVar("Result")
REST_S = 0.3
CROP_FRAC = 0.1  # length of the crop from the video's middle


def video(target: Target) -> Iterator[Measured]:
    return iter(asyncio.run(_lines(target)))


async def _lines(target: Target) -> list[Measured]:
    paths = [Path(path) for path in target.videos] or [synthetic_video(target)]
    async with frame_reader(target.run_config.video, target.contract) as reader:
        lines = []
        for path in paths:
            try:
                lines += [line async for line in video_lines(reader, path, target)]
            except VideoError as problem:
                lines.append(Measured(str(path), problem=str(problem)))
        return sorted(lines, key=lambda line: bool(line.problem))  # broken files last, where a terminal shows them


def synthetic_video(target: Target) -> Path:
    path = target.file("made.mp4")
    write_video(path, frames(make_clip(0, 0)), FPS)
    return path


async def video_lines(reader: FrameReader, path: Path, target: Target) -> AsyncIterator[Measured]:
    """Compares decoding times with the deadlines of a run."""
    settings, run = target.run_config.rollout, target.run_config.video
    deadline_s = settings.min_video_deadline_s
    seconds, info = await timed(reader.info(path, deadline_s))
    yield Measured(f"{path.name}: probe, seconds", seconds, deadline_s)
    before = await bytes_read_at_rest()
    shape = f"{info.duration_s:.1f} s, {info.num_frames} frames, {info.height} x {info.width} px"
    yield Measured(f"{path.name}: video", shape)
    times = overview_times(info.duration_s, info.num_frames, run.most_frames)
    seconds, shown = await timed(reader.frames(path, times, deadline_s))
    yield Measured(f"{path.name}: overview of {len(shown)} frames, seconds", seconds, deadline_s)
    start_s = info.duration_s / 2
    window = crop_times(start_s, start_s + CROP_FRAC * info.duration_s, settings.subagent_max_frames)
    seconds, shown = await timed(reader.frames(path, window, settings.call_deadline_s))
    yield Measured(f"{path.name}: crop of {len(shown)} frames, seconds", seconds, settings.call_deadline_s)
    size, read = (in_units([number], BYTES) for number in (path.stat().st_size, bytes_read() - before))
    yield Measured(f"{path.name}: read by overview and crop", f"{read}, the file has {size}")


async def timed(work: Awaitable[Result]) -> tuple[float, Result]:
    start_s = time.monotonic()
    result = await work
    return time.monotonic() - start_s, result


async def bytes_read_at_rest() -> int:
    """Waits until no process reads, because starting a decoding process reads its modules; at most 6 s."""
    before, now = -1, bytes_read()
    for _ in range(20):
        if now == before:
            break
        await asyncio.sleep(REST_S)
        before, now = now, bytes_read()
    return now


def bytes_read() -> int:
    """Bytes read by this process's children, which decode; 0 where the system does not report it."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    counts = (Path("/proc", pid, "io").read_text().split() for pid in children)
    return sum(int(words[words.index("rchar:") + 1]) for words in counts)


def data(target: Target) -> Iterator[Measured | Facts]:
    settings = target.run_config.data
    path = target.data or settings.train
    if not target.data and (path == SYNTHETIC or not Path(path).exists()):
        yield Measured("rows", skipped="no --data FILE")
        return
    found = inspect(path, video_root=settings.video_root, tokenizer=str(target.hf_dir))
    bad = sum(found.bad.values())
    reasons = "; ".join(f"{count} x {reason}" for reason, count in found.bad.most_common(3))
    yield Measured(f"bad fraction of {in_units([found.num_rows], 'row')}", bad / found.num_rows, settings.max_bad_frac)
    if reasons:
        yield Measured("reasons", reasons)
    problem = f"for example {sorted(found.missing)[0]}" if found.missing else ""
    yield Measured("missing files", str(len(found.missing)), problem=problem)
