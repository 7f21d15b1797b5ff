"""Reads frames of videos, from the frame stores or the decoders.

    async with FrameReader(frame_size) as reader:
        info = await reader.info(path, deadline_s=60)
        overview = await reader.frames(path, overview_times(info.duration_s, info.num_frames, 64), deadline_s=60)

A frame is decoded once for all concurrent requests, even if some of the requests are cancelled. The event loop never
blocks: worker processes decode, and threads hash pixels and access the disk.

A job's deadline starts when a worker takes the job. It is `deadline_s` plus the time for the job's pixels at a rate
below any working decoder's. This detects a hanging decoder, but leaves enough time for a large film.
"""

import asyncio
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from rollout.picture import Picture
from rollout.threads import in_daemon_thread
from rollout.video import ticks
from rollout.video.box import Box
from rollout.video.decode import identity_and_bytes
from rollout.video.errors import VideoError, VideoTimeout, VideoUnavailable
from rollout.video.info import TimedPicture, VideoInfo
from rollout.video.pool import WorkerPool
from rollout.video.store import DiskStore, FileStore, FrameKey, MemoryStore
from rollout.video.wire import Message

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

GIB = 2**30
MAX_WORKERS = 8  # default; more workers only help if many prompts are decoded concurrently
MAX_CACHED_VIDEOS = 1024  # a video's frame times take a few hundred KiB of memory
# A tenth of a thread's slowest H.264 rate (docs/results/video.md), because other codecs are slower and cores shared.
SLOWEST_PX_PER_S = 20e6
SLOWEST_BYTES_PER_S = 10e6  # for a network disk
JOB_PX = 1e9  # a job decodes about this many pixels at most, which takes some seconds
MIN_JOB_PX = 50e6  # a request is not split into smaller jobs, because each job opens the file again
TIME_TOLERANCE_S = 1e-6  # so that a rounded time still maps to the frame that starts at this time


@dataclass(frozen=True, eq=False)
class _Video:
    """A probed video: its metadata and the mapping from times to frames."""

    path: str
    info: VideoInfo
    ticks: np.ndarray  # start of each frame, in units of time_base
    key_ticks: np.ndarray
    time_base: Fraction
    frame_px: int  # pixels of a frame as stored
    undecodable: set[int] = field(default_factory=set)  # numbers of frames that could not be decoded

    def time_s(self, frame: int) -> float:
        return float(int(self.ticks[frame] - self.ticks[0]) * self.time_base)

    def frames_at(self, times_s: Iterable[float | int]) -> list[int]:
        """Returns the distinct frames shown at these times. Times outside the video map to its first or last frame."""
        ticks = (np.array(list(times_s), np.float64) + TIME_TOLERANCE_S) / float(self.time_base)
        if not np.isfinite(ticks).all():
            raise ValueError("the times of frames must be finite")
        frames = np.searchsorted(self.ticks - self.ticks[0], ticks, side="right") - 1
        return np.unique(frames.clip(0)).tolist()

    def parts(self, frames: Sequence[int], num_workers: int = 1) -> list["_Part"]:
        """Splits ascending frames into parts of similar size: one per worker, or more if parts would exceed JOB_PX.

        Frames that are decoded from the same keyframe stay together, so that the split adds no decoding work.
        """
        groups = self._groups(frames)
        total_px = sum(group.pixels for group in groups)
        num_parts = max(math.ceil(total_px / JOB_PX), min(num_workers, int(total_px // MIN_JOB_PX)), 1)
        by_number: dict[int, list[_Part]] = {}
        done_px = 0.0
        for group in groups:
            middle_px = done_px + group.pixels / 2
            by_number.setdefault(int(middle_px * num_parts / total_px), []).append(group)
            done_px += group.pixels
        return [_joined(part) for part in by_number.values()]

    def _groups(self, frames: Sequence[int]) -> list["_Part"]:
        """Returns a part for each keyframe from which any of the frames is decoded."""
        groups: list[_Part] = []
        keys = np.searchsorted(self.key_ticks, self.ticks[list(frames)], side="right") - 1
        for key, pairs in groupby(zip(keys.tolist(), frames, strict=True), lambda pair: pair[0]):
            group = [frame for _, frame in pairs]
            key_tick = int(self.key_ticks[key] if key >= 0 else self.ticks[group[0]])
            first = int(np.searchsorted(self.ticks, key_tick))
            groups.append(_Part([(key_tick, self.ticks[group].tolist())], (group[-1] - first + 1) * self.frame_px))
        return groups


class _Part(NamedTuple):
    """The frames that one job decodes."""

    groups: list[tuple[int, list[int]]]  # a keyframe's tick, and the ticks of the frames to decode from it
    pixels: float  # number of pixels to decode


def _joined(parts: Sequence[_Part]) -> _Part:
    return _Part([group for part in parts for group in part.groups], sum(part.pixels for part in parts))


@dataclass(eq=False)
class _Shared:
    """Work that several requests may share. It continues if they are cancelled."""

    task: asyncio.Task[Any] = field(init=False)
    pictures: dict[FrameKey, Picture] = field(default_factory=dict)  # read so far


class FrameReader:
    """Reads frames at any times, and caches them in memory and optionally on disk.

    `frame_size` maps a video's height and width to the size of its frames, and `detail_size` a box's height and width
    to the size of its picture. `num_workers` processes decode, by default one per core, but at most MAX_WORKERS. Probe
    results are cached in `ticks_directory`.
    """

    def __init__(
        self,
        frame_size: Callable[[int, int], tuple[int, int]],
        *,
        detail_size: Callable[[int, int], tuple[int, int]] | None = None,
        num_workers: int | None = None,
        memory_bytes: int = 2 * GIB,
        disk_directory: str | Path | None = None,
        disk_bytes: int = 64 * GIB,
        ticks_directory: str | Path | None = None,
    ):
        self._frame_size, self._detail_size = frame_size, detail_size or frame_size
        self._pool = WorkerPool(num_workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS))
        self._memory = MemoryStore(memory_bytes)
        self._disk: DiskStore | None = None
        self._ticks: FileStore | None = None
        self._ticks_directory = ticks_directory
        self._disk_settings = None if disk_directory is None else (disk_directory, disk_bytes)
        self._videos: OrderedDict[str, _Video] = OrderedDict()  # by absolute path
        self._probes: dict[str, _Shared] = {}
        self._reads: dict[FrameKey, _Shared] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = False
        self._totals: dict[str, int] = dict(asked=0, from_memory=0, shared=0, from_disk=0, decoded=0, undecodable=0)

    @property
    def num_workers(self) -> int:
        return self._pool.num_workers

    async def __aenter__(self) -> Self:
        if self._disk_settings is not None:
            self._disk = await asyncio.to_thread(DiskStore, *self._disk_settings)
        if self._ticks_directory is not None:
            self._ticks = await asyncio.to_thread(_ticks_store, self._ticks_directory)
        try:
            await asyncio.to_thread(self._pool.start)
        except OSError:
            await self.close()
            raise
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the workers; pending requests raise VideoError."""
        self._open = False
        await asyncio.to_thread(self._pool.close)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def info(self, path: str | Path, deadline_s: float | int) -> VideoInfo:
        """Returns the video's metadata. Checks whether the file was replaced since it was last probed."""
        return (await self._video(path, deadline_s, recheck=True)).info

    async def frames(
        self, path: str | Path, times_s: Iterable[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        """Returns the distinct frames shown at these times, in the video's order; with `box`, that part of each frame.

        Undecodable frames are left out. Raises a VideoError if no frame can be decoded.
        """
        video = await self._video(path, deadline_s)
        try:
            full_px = video.info.height, video.info.width
            size_px = self._frame_size(*full_px) if box is None else self._detail_size(*box.size_px(*full_px))
        except ValueError as problem:
            raise VideoError(f"the video cannot be shown: {problem}") from None
        keys = [FrameKey(video.info.identity, frame, *size_px, box) for frame in video.frames_at(times_s)]
        read = await self._pictures(video, keys, deadline_s)
        return [replace(frame, path=str(path), box=box) for frame in read]

    async def numbered(
        self, path: str | Path, numbers: Iterable[int], size_px: tuple[int, int], deadline_s: float | int
    ) -> list[TimedPicture]:
        """Returns the frames with these ascending numbers, at this height and width."""
        video = await self._video(path, deadline_s)
        keys = [FrameKey(video.info.identity, number, *size_px, None) for number in numbers]
        return await self._pictures(video, keys, deadline_s)

    async def _pictures(self, video: _Video, keys: Sequence[FrameKey], deadline_s: float | int) -> list[TimedPicture]:
        self._totals["asked"] += len(keys)
        pictures: dict[FrameKey, Picture] = {}
        missing: list[FrameKey] = []
        shares: set[_Shared] = set()
        for key in keys:
            if picture := self._memory.get(key):
                pictures[key] = picture
                self._totals["from_memory"] += 1
            elif shared := self._reads.get(key):
                shares.add(shared)
                self._totals["shared"] += 1
            elif key.frame not in video.undecodable:
                missing.append(key)
        if missing:
            shared = self._launch(lambda shared: self._read(video, missing, shared, deadline_s))
            self._reads |= dict.fromkeys(missing, shared)
            shares.add(shared)
        await _ended(shares)
        for shared in shares:
            pictures |= shared.pictures
        for shared in shares:
            if not all(key in pictures or key.frame in video.undecodable for key in keys):
                shared.task.result()  # raises the error of one of the missing frames
        if keys and not any(key in pictures for key in keys):
            raise VideoError("the video cannot be decoded: it is damaged at the requested times")
        return [TimedPicture(video.time_s(key.frame), pictures[key]) for key in keys if key in pictures]

    def fitted(self, picture: Picture) -> Picture:
        """Resizes a picture that is not a frame as `detail_size` says."""
        return picture.resized(*self._detail_size(*picture.size_px))

    def metrics(self) -> dict[str, float]:
        """Returns totals since the reader was opened. Fractions are relative to all requested frames."""
        totals, pool = self._totals, self._pool.totals
        requested = max(totals["asked"], 1)
        metrics = {
            "video/asked_frames": totals["asked"],
            "video/memory_hit_frac": totals["from_memory"] / requested,
            "video/shared_frac": totals["shared"] / requested,  # already being read for another request
            "video/disk_hit_frac": totals["from_disk"] / requested,
            "video/decoded_frames": totals["decoded"],
            "video/undecodable_frames": totals["undecodable"],
            "video/decode_s": pool["worked_s"],
            "video/queue_s": pool["waited_s"],
            "video/jobs": pool["jobs"],
            "video/timeouts": pool["timeouts"],
            "video/worker_deaths": pool["worker_deaths"],
            "video/workers_retired": pool["workers_retired"],
            "video/memory_bytes": self._memory.num_bytes,
        }
        if self._disk is not None:
            metrics |= {
                "video/disk_bytes": self._disk.num_bytes,
                "video/disk_damaged_files": self._disk.totals["damaged"],
                "video/disk_failed_writes": self._disk.totals["failed_writes"],
            }
        return metrics

    async def _video(self, path: str | Path, deadline_s: float | int, recheck: bool = False) -> _Video:
        if not self._open:
            raise RuntimeError("the frame reader is not open; use it inside `async with FrameReader(...)`")
        if not deadline_s > 0:
            raise ValueError(f"{deadline_s=} must be greater than 0")
        name = str(Path(path).absolute())
        if video := self._videos.get(name):
            identity = video.info.identity
            if recheck:
                identity, _ = await _in_thread(lambda: identity_and_bytes(name), deadline_s)
            if identity == video.info.identity:
                self._videos[name] = video
                self._videos.move_to_end(name)
                return video
        if (shared := self._probes.get(name)) is None:
            shared = self._probes[name] = self._launch(lambda _: self._probe(name, deadline_s))
        await _ended([shared])
        return shared.task.result()

    async def _probe(self, name: str, deadline_s: float | int) -> _Video:
        try:
            identity, num_bytes = await _in_thread(lambda: identity_and_bytes(name), deadline_s)
            video = await self._load_probe(name, identity, deadline_s)
            if video is None:
                job = {"do": "probe", "path": name}
                probed = await self._work(job, deadline_s + num_bytes / SLOWEST_BYTES_PER_S)
                await self._save_probe(probed, deadline_s)
                video = _video_of(name, probed)
        finally:
            del self._probes[name]
        self._videos[name] = video
        if len(self._videos) > MAX_CACHED_VIDEOS:
            self._videos.popitem(last=False)
        return video

    async def _load_probe(self, name: str, identity: str, deadline_s: float | int) -> _Video | None:
        """Returns an earlier probe of the same file from disk, or None."""
        if (store := self._ticks) is None:
            return None
        entry = ticks.name_of(identity)
        probed = None
        with suppress(VideoTimeout):  # the cache may be on a slower disk than the video
            probed = await _in_thread(
                lambda: store.read(entry, lambda packed: ticks.unpack(packed, identity)), deadline_s
            )
        return probed and _video_of(name, probed)

    async def _save_probe(self, probed: Message, deadline_s: float | int) -> None:
        if (store := self._ticks) is not None and (packed := ticks.pack(probed)) is not None:
            entry = ticks.name_of(probed[0]["identity"])
            with suppress(VideoTimeout):
                await _in_thread(lambda: store.write(entry, packed), deadline_s)

    async def _read(self, video: _Video, keys: list[FrameKey], shared: _Shared, deadline_s: float | int) -> None:
        """Reads frames from the disk store, or decodes them in several jobs, into memory and `shared`."""
        try:
            if (disk := self._disk) is not None:
                on_disk = await _in_thread(lambda: [(key, disk.get(key)) for key in keys], deadline_s)
                for key, picture in on_disk:
                    if picture is not None:
                        self._arrive(key, picture, shared, "from_disk")
            if to_decode := [key for key in keys if key not in shared.pictures]:
                await self._decode(video, to_decode, shared, deadline_s)
        finally:
            for key in keys:
                del self._reads[key]

    async def _decode(self, video: _Video, keys: list[FrameKey], shared: _Shared, deadline_s: float | int) -> None:
        by_tick = {int(video.ticks[key.frame]): key for key in keys}
        size_px = keys[0].height, keys[0].width
        loop = asyncio.get_running_loop()

        def on_message(message: Message) -> None:
            frame, raw = message
            key = by_tick[frame["tick"]]
            picture = Picture.of(np.frombuffer(raw, np.uint8).reshape(*size_px, 3))
            if self._disk is not None:
                self._disk.put(key, picture)
            loop.call_soon_threadsafe(self._arrive, key, picture, shared, "decoded")

        job = {
            "do": "decode",
            "path": video.path,
            "identity": video.info.identity,
            "size_px": size_px,
            "box": keys[0].box,
        }
        work = [
            self._work(job | {"groups": part.groups}, deadline_s + part.pixels / SLOWEST_PX_PER_S, on_message)
            for part in video.parts([key.frame for key in keys], self.num_workers)
        ]
        outcomes = await asyncio.gather(*work, return_exceptions=True)  # one failure must not discard the other frames
        problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if any(not isinstance(problem, VideoUnavailable) for problem in problems):
            self._videos.pop(video.path, None)  # probe it again, in case the file was replaced or repaired
        for problem in problems:
            raise problem
        failed = {key.frame for key in keys if key not in shared.pictures}
        video.undecodable.update(failed)
        self._totals["undecodable"] += len(failed)

    def _arrive(self, key: FrameKey, picture: Picture, shared: _Shared, source: str) -> None:
        shared.pictures[key] = picture
        self._memory.put(key, picture)
        self._totals[source] += 1

    async def _work(
        self, job: dict[str, Any], deadline_s: float | int, on_message: Callable[[Message], None] = lambda _: None
    ) -> Message:
        return await asyncio.wrap_future(self._pool.submit(job, deadline_s, on_message))

    def _launch(self, work: Callable[[_Shared], Coroutine[Any, Any, Any]]) -> _Shared:
        shared = _Shared()
        shared.task = asyncio.create_task(work(shared))
        self._tasks.add(shared.task)
        shared.task.add_done_callback(self._shared_done)
        return shared

    def _shared_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.remove(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because no request may be waiting for it


async def _ended(shares: Collection[_Shared]) -> None:
    """Waits for shared work without cancelling it. Results and errors are in its tasks."""
    if shares:
        await asyncio.wait([shared.task for shared in shares])


async def _in_thread(work: Callable[[], Result], deadline_s: float | int) -> Result:
    """Runs work that accesses a disk, and so may hang, with a deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            return await in_daemon_thread(work)
    except TimeoutError:
        raise VideoTimeout("the video could not be read in time") from None


def _ticks_store(directory: str | Path) -> FileStore | None:
    """Opens the cache of probe results. Returns None if the directory is not writable, because it is optional."""
    try:
        return FileStore(directory, ticks.MAX_BYTES, ticks.SUFFIX)
    except OSError as problem:
        logger.warning("probe results cannot be kept in %s: %s", directory, problem.strerror)
        return None


def _video_of(name: str, probed: ticks.Probed) -> _Video:
    metadata, raw = probed
    time_base = Fraction(*metadata["time_base"])
    duration = metadata["duration_ticks"] * time_base
    identity, num_frames, height, width = (metadata[key] for key in ("identity", "num_frames", "height", "width"))
    stored_width, rest = divmod(metadata["frame_px"], height)
    fps = float(num_frames / duration) if duration else 0.0
    info = VideoInfo(identity, float(duration), num_frames, height, width, width if rest else stored_width, fps)
    frames, keys = np.split(np.frombuffer(raw, np.int64), [info.num_frames])
    return _Video(name, info, frames, keys, time_base, metadata["frame_px"])
