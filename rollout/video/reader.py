"""Frames of videos on demand: the public face of the decoders and of the frame store.

    async with FrameReader(frame_size) as reader:
        info = await reader.info(path, deadline_s=60)
        overview = await reader.frames(path, overview_times(info.duration_s, 64), deadline_s=60)

A frame is decoded once, however many ask for it and whoever of them gives up. Nothing that takes time happens in the
event loop: decoding in worker processes, hashing and disk in threads.
"""

import asyncio
import importlib.util
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from rollout.picture import Picture
from rollout.video.box import Box
from rollout.video.errors import VideoError, VideoTimeout
from rollout.video.pool import Deadline, Message, WorkerPool
from rollout.video.store import DiskStore, FrameKey, MemoryStore

__all__ = ["FrameReader", "TimedPicture", "VideoInfo", "VideoError", "VideoTimeout"]

Decoder = Literal["pyav", "decord"]

GIB = 2**30
MAX_WORKERS = 8  # by default; more pay off only where many prompts are decoded at once
MAX_KNOWN_VIDEOS = 1024  # of whose frames the times are kept, a few hundred KiB each
TIME_TOLERANCE_S = 1e-6  # a moment computed in floats belongs to the frame that begins with it


@dataclass(frozen=True)
class VideoInfo:
    identity: str  # equal for equal content
    duration_s: float | int  # from the beginning of the first frame to the end of the last
    num_frames: int
    height: int  # upright, before any resizing
    width: int


@dataclass(frozen=True, eq=False)
class TimedPicture:
    time_s: float | int  # when this very frame begins, counted from the first one
    picture: Picture


@dataclass(frozen=True, eq=False)
class _Video:
    path: str
    info: VideoInfo
    ticks: np.ndarray  # when each frame begins, in units of time_base
    key_ticks: np.ndarray
    time_base: Fraction
    undecodable: set[int] = field(default_factory=set)  # frames that were tried in vain

    def time_s(self, frame: int) -> float:
        return float(int(self.ticks[frame] - self.ticks[0]) * self.time_base)

    def frames_at(self, times_s: Iterable[float | int]) -> list[int]:
        """The frames shown at these moments, each once; before the beginning the first, after the end the last."""
        wanted = (np.array(list(times_s), np.float64) + TIME_TOLERANCE_S) / float(self.time_base)
        if not np.isfinite(wanted).all():
            raise ValueError("the times of frames must be finite")
        frames = np.searchsorted(self.ticks - self.ticks[0], wanted, side="right") - 1
        return np.unique(frames.clip(0)).tolist()

    def groups(self, frames: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The ticks of these ascending frames, under that of the keyframe each is decoded from."""
        groups: dict[int, list[int]] = {}
        for tick in self.ticks[list(frames)].tolist():
            key = int(np.searchsorted(self.key_ticks, tick, side="right")) - 1
            groups.setdefault(int(self.key_ticks[key]) if key >= 0 else tick, []).append(tick)
        return list(groups.items())


@dataclass(eq=False)
class _Flight:
    """Work that several may wait for, and that goes on when they stop waiting."""

    deadline: Deadline  # the latest of those who wait
    task: asyncio.Task[Any] = field(init=False)
    pictures: dict[FrameKey, Picture] = field(default_factory=dict)  # what has arrived so far


class FrameReader:
    """`frame_size` says at which height and width to show the frames of a video of a given height and width.

    `detail_size` says it of a part of a frame, by default in the same way. With decord some videos cannot be read, see
    `rollout.video.by_decord`.
    """

    def __init__(
        self,
        frame_size: Callable[[int, int], tuple[int, int]],
        *,
        detail_size: Callable[[int, int], tuple[int, int]] | None = None,
        decoder: Decoder = "pyav",
        num_workers: int | None = None,
        max_jobs_per_worker: int = 256,
        memory_bytes: int = 2 * GIB,
        disk_directory: str | Path | None = None,
        disk_bytes: int = 64 * GIB,
    ):
        if decoder == "decord" and importlib.util.find_spec("decord") is None:
            raise ValueError("video.decoder=decord needs the package decord: pip install decord")
        self._frame_size, self._detail_size, self._decoder = frame_size, detail_size or frame_size, decoder
        self._pool = WorkerPool(num_workers or min(_num_cores(), MAX_WORKERS), max_jobs_per_worker)
        self._memory = MemoryStore(memory_bytes)
        self._disk: DiskStore | None = None
        self._disk_place = None if disk_directory is None else (disk_directory, disk_bytes)
        self._videos: OrderedDict[str, _Video] = OrderedDict()  # by absolute path
        self._probes: dict[str, _Flight] = {}
        self._reads: dict[FrameKey, _Flight] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = False
        self._totals: dict[str, int] = dict(asked=0, from_memory=0, shared=0, from_disk=0, decoded=0, undecodable=0)

    async def __aenter__(self) -> Self:
        if self._disk_place is not None:
            self._disk = await asyncio.to_thread(DiskStore, *self._disk_place)
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
        """Ends the workers; whoever still waits gets a VideoError."""
        self._open = False
        await asyncio.to_thread(self._pool.close)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def info(self, path: str | Path, deadline_s: float | int) -> VideoInfo:
        return (await self._video(path, Deadline.after(deadline_s))).info

    async def frames(
        self, path: str | Path, times_s: Iterable[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        """The frames shown at these moments, or this part of each, in the order of time, each once.

        Frames that cannot be decoded are left out, as long as one can.
        """
        deadline = Deadline.after(deadline_s)
        video = await self._video(path, deadline)
        try:
            size_px = self._size_px(video.info, box)
        except ValueError as problem:
            raise VideoError(f"the video cannot be shown: {problem}") from None
        keys = [FrameKey(video.info.identity, frame, *size_px, box) for frame in video.frames_at(times_s)]
        self._totals["asked"] += len(keys)
        pictures: dict[FrameKey, Picture] = {}
        missing: list[FrameKey] = []
        flights: set[_Flight] = set()
        for key in keys:
            if picture := self._memory.get(key):
                pictures[key] = picture
                self._totals["from_memory"] += 1
            elif (flight := self._reads.get(key)) and flight.deadline.put_off_to(deadline):
                flights.add(flight)
                self._totals["shared"] += 1
            elif key.frame not in video.undecodable:
                missing.append(key)
        if missing:
            flight = self._launch(lambda flight: self._read(video, missing, flight), deadline)
            self._reads |= dict.fromkeys(missing, flight)
            flights.add(flight)
        await self._wait_for(flights, deadline)
        for flight in flights:
            pictures |= flight.pictures
        for flight in flights:
            if not all(key in pictures or key.frame in video.undecodable for key in keys):
                flight.task.result()  # raises, for one of them
        if keys and not any(key in pictures for key in keys):
            raise VideoError("the video cannot be decoded: it is damaged at the moments asked for")
        return [TimedPicture(video.time_s(key.frame), pictures[key]) for key in keys if key in pictures]

    def _size_px(self, info: VideoInfo, box: Box | None) -> tuple[int, int]:
        if box is None:
            return self._frame_size(info.height, info.width)
        return self._detail_size(*box.size_px(info.height, info.width))

    def metrics(self) -> dict[str, float]:
        """Totals since the reader was opened; the fractions are of all frames asked for."""
        totals, pool = self._totals, self._pool.totals
        asked = max(totals["asked"], 1)
        metrics = {
            "video/asked_frames": totals["asked"],
            "video/memory_hit_frac": totals["from_memory"] / asked,
            "video/shared_frac": totals["shared"] / asked,  # already being read for another request
            "video/disk_hit_frac": totals["from_disk"] / asked,
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

    async def _video(self, path: str | Path, deadline: Deadline) -> _Video:
        if not self._open:
            raise RuntimeError("the frame reader is not open; use it inside `async with FrameReader(...)`")
        name = str(Path(path).absolute())
        if video := self._videos.get(name):
            self._videos.move_to_end(name)
            return video
        flight = self._probes.get(name)
        if flight is None or not flight.deadline.put_off_to(deadline):
            flight = self._probes[name] = self._launch(lambda flight: self._probe(name, flight), deadline)
        await self._wait_for([flight], deadline)
        return flight.task.result()

    async def _probe(self, name: str, flight: _Flight) -> _Video:
        try:
            known, raw = await self._work({"do": "probe", "decoder": self._decoder, "path": name}, flight)
        finally:
            if self._probes.get(name) is flight:  # else it was late, and given up for another
                del self._probes[name]
        info = VideoInfo(
            known["identity"],
            float(known["duration_ticks"] * Fraction(*known["time_base"])),
            known["num_frames"],
            known["height"],
            known["width"],
        )
        ticks, key_ticks = np.split(np.frombuffer(raw, np.int64), [info.num_frames])
        self._videos[name] = video = _Video(name, info, ticks, key_ticks, Fraction(*known["time_base"]))
        if len(self._videos) > MAX_KNOWN_VIDEOS:
            self._videos.popitem(last=False)
        return video

    async def _read(self, video: _Video, keys: list[FrameKey], flight: _Flight) -> None:
        """Brings the frames into memory and into `flight`, from disk, or else decoded in one job."""
        try:
            if self._disk is not None:
                on_disk = await asyncio.to_thread(lambda disk: [(key, disk.get(key)) for key in keys], self._disk)
                for key, picture in on_disk:
                    if picture is not None:
                        self._arrive(key, picture, flight, "from_disk")
            if to_decode := [key for key in keys if key not in flight.pictures]:
                await self._decode(video, to_decode, flight)
        finally:
            for key in keys:
                if self._reads.get(key) is flight:
                    del self._reads[key]

    async def _decode(self, video: _Video, keys: list[FrameKey], flight: _Flight) -> None:
        by_tick = {int(video.ticks[key.frame]): key for key in keys}
        size_px = keys[0].height, keys[0].width
        loop = asyncio.get_running_loop()

        def on_message(message: Message) -> None:
            frame, raw = message
            key = by_tick[frame["tick"]]
            picture = Picture.of(np.frombuffer(raw, np.uint8).reshape(*size_px, 3))
            if self._disk is not None:
                self._disk.put(key, picture)
            loop.call_soon_threadsafe(self._arrive, key, picture, flight, "decoded")

        job = {
            "do": "decode",
            "decoder": self._decoder,
            "path": video.path,
            "identity": video.info.identity,
            "size_px": size_px,
            "box": keys[0].box,
        }
        if self._decoder == "pyav":
            job["groups"] = video.groups([key.frame for key in keys])
        else:
            job["wanted"] = [(key.frame, int(video.ticks[key.frame]), video.time_s(key.frame)) for key in keys]
            job["num_frames"] = video.info.num_frames
        try:
            await self._work(job, flight, on_message)
        except VideoTimeout:
            raise
        except VideoError:
            self._videos.pop(video.path, None)  # if it was replaced or repaired, the next request will find out
            raise
        failed = {key.frame for key in keys if key not in flight.pictures}
        video.undecodable.update(failed)
        self._totals["undecodable"] += len(failed)

    def _arrive(self, key: FrameKey, picture: Picture, flight: _Flight, source: str) -> None:
        flight.pictures[key] = picture
        self._memory.put(key, picture)
        self._totals[source] += 1

    async def _work(
        self, job: dict[str, Any], flight: _Flight, on_message: Callable[[Message], None] = lambda _: None
    ) -> Message:
        return await asyncio.wrap_future(self._pool.submit(job, flight.deadline, on_message))

    def _launch(self, work: Callable[[_Flight], Coroutine[Any, Any, Any]], deadline: Deadline) -> _Flight:
        flight = _Flight(Deadline(deadline.at))  # the work's may be put off, that of who asked first may not
        flight.task = asyncio.create_task(work(flight))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._landed)
        return flight

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._tasks.remove(task)
        if not task.cancelled():
            task.exception()  # is for those who wait; that nobody does any more is no event

    async def _wait_for(self, flights: Collection[_Flight], deadline: Deadline) -> None:
        """Waits without cancelling what others may wait for, too; how it ended is in the tasks."""
        if not flights:
            return
        _, late = await asyncio.wait([flight.task for flight in flights], timeout=deadline.left_s)
        if late:
            raise VideoTimeout("the video could not be read in time")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
