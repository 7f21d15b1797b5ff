"""Concurrent reads of frames: each is decoded once or comes from memory or disk, and faults stay isolated."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from async_tests import Decorator, Work, make_test, until
from make_video import HEIGHT, WIDTH, at_fps, damage, number_of, truncate, turn, write_video

from rollout.video import pool as pool_module, reader as reader_module
from rollout.video.box import Box
from rollout.video.decode import identity_of
from rollout.video.errors import VideoError, VideoTimeout, VideoUnavailable
from rollout.video.info import TimedPicture, VideoInfo
from rollout.video.pool import WorkerPool, workers_within
from rollout.video.reader import FrameReader, _Video
from rollout.video.times import crop_times, overview_times

PATIENCE_S = 60.0  # generous, because the machine may be busy
INDEX_FIRST = {"movflags": "faststart"}  # an mp4 with its index at the start, as on the web


def same_size(height: int, width: int) -> tuple[int, int]:
    return height, width


def small(height: int, width: int) -> tuple[int, int]:
    return 64, 96


def with_reader(test: Callable[[FrameReader], Awaitable[Any]], **options: Any) -> Any:
    async def body() -> Any:
        async with FrameReader(options.pop("frame_size", same_size), **{"num_workers": 2, **options}) as reader:
            return await test(reader)

    result = asyncio.run(body())
    assert workers() == []
    return result


def reading(*, slow: bool = True, **options: Any) -> Decorator:
    """Makes a test whose first argument is an open reader; the others are fixtures."""

    def decorate(work: Work) -> Callable[..., None]:
        test = make_test(work, 1, partial(with_reader, **options))
        return pytest.mark.slow(test) if slow else test

    return decorate


@reading()
async def test_a_hanging_disk_does_not_block_other_threads(reader, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(reader_module, "identity_and_bytes", lambda name: released.wait())
    try:
        reads = (reader.info(f"{number}.mp4", 0.2) for number in range(64))
        assert {type(each) for each in await asyncio.gather(*reads, return_exceptions=True)} == {VideoTimeout}
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # like the engine's client when it encodes a request
    finally:
        released.set()


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and "rollout.video.worker" in process.cmdline()
    return False


def shown(frames: list[TimedPicture]) -> list[tuple[float, int]]:
    return [(round(frame.time_s, 3), number_of(frame.picture.pixels)) for frame in frames]


async def fails_with(kind: type[VideoError], message: str, awaitable: Awaitable[Any]) -> None:
    with pytest.raises(kind, match=message):
        await awaitable


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds, 30 frames a second."""
    return write_video(tmp_path_factory.mktemp("video") / "video.mp4", at_fps(30, 300))


@pytest.fixture(scope="module")
def long_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of twenty seconds, which takes at least a second to decode."""
    path = tmp_path_factory.mktemp("video") / "long.mp4"
    return write_video(path, at_fps(30, 600), size_px=(480, 640), options={"preset": "ultrafast"}, gop_frames=300)


@reading()
async def test_frames_are_those_shown_at_the_requested_times(reader: FrameReader, video):
    info = await reader.info(video, PATIENCE_S)
    assert (info.duration_s, info.num_frames, info.fps, info.height, info.width) == (10.0, 300, 30.0, HEIGHT, WIDTH)
    frames = await reader.frames(video, [9.99, 0.0, 5.01, 5.02, 99.0, -1.0], PATIENCE_S)
    assert shown(frames) == [(0.0, 0), (5.0, 150), (9.967, 299)]
    frames = await reader.frames(video, overview_times(info.duration_s, info.num_frames, 4), PATIENCE_S)
    assert shown(frames) == [(0.0, 0), (3.333, 100), (6.633, 199), (9.967, 299)]
    assert await reader.frames(video, [], PATIENCE_S) == []
    with pytest.raises(ValueError, match="must be finite"):
        await reader.frames(video, [float("nan")], PATIENCE_S)
    with pytest.raises(ValueError, match="deadline_s=0 must be greater than 0"):
        await reader.frames(video, [1.0], 0)


@reading()
async def test_repeated_frames_come_from_memory_and_missing_ones_are_decoded_in_one_job(reader: FrameReader, video):
    first = await reader.frames(video, [1, 2, 3], PATIENCE_S)
    jobs = reader.metrics()["video/jobs"]
    second = await reader.frames(video, [2, 3, 4, 5, 6], PATIENCE_S)
    assert [second[0].picture, second[1].picture] == [first[1].picture, first[2].picture]
    metrics = reader.metrics()
    assert metrics["video/jobs"] - jobs == 1 and metrics["video/decoded_frames"] == 6
    assert metrics["video/memory_hit_frac"] == 2 / 8 and metrics["video/memory_bytes"] > 0


@reading()
async def test_concurrent_requests_decode_a_frame_once(reader: FrameReader, video):
    asked = [range(number, 5 + number) for number in range(4)]
    found = await asyncio.gather(*(reader.frames(video, seconds, PATIENCE_S) for seconds in asked))
    assert [shown(frames) for frames in found] == [[(second, 30 * second) for second in seconds] for seconds in asked]
    metrics = reader.metrics()
    assert metrics["video/decoded_frames"] == 8 and metrics["video/shared_frac"] == 12 / 20


@reading()
async def test_cancelling_the_first_request_does_not_affect_the_others(reader: FrameReader, video):
    first = asyncio.create_task(reader.frames(video, [1, 2], PATIENCE_S))
    second = asyncio.create_task(reader.frames(video, [1, 2], PATIENCE_S))
    await asyncio.sleep(0)  # the probe is under way
    first.cancel()
    assert [number for _, number in shown(await second)] == [30, 60]
    third = asyncio.create_task(reader.frames(video, [3], PATIENCE_S))
    fourth = asyncio.create_task(reader.frames(video, [3], PATIENCE_S))
    await asyncio.sleep(0)  # the frame is under way
    third.cancel()
    assert [number for _, number in shown(await fourth)] == [90]
    assert reader.metrics()["video/decoded_frames"] == 3


@reading(num_workers=1)
async def test_waiting_for_a_busy_decoder_does_not_count_toward_the_deadline(reader: FrameReader, video):
    await reader.info(video, PATIENCE_S)
    (worker,) = workers()
    worker.suspend()
    first = asyncio.create_task(reader.frames(video, [1], PATIENCE_S))
    second = asyncio.create_task(reader.frames(video, [2], 2.0))
    await asyncio.sleep(2.5)
    worker.resume()
    assert shown(await second) == [(2.0, 60)] and shown(await first) == [(1.0, 30)]
    assert reader.metrics()["video/timeouts"] == 0 and reader.metrics()["video/queue_s"] > 2


@reading()
async def test_a_hung_worker_is_killed_at_the_deadline_and_the_others_continue(reader: FrameReader, video):
    await all_up(reader, video)
    stuck, _ = workers()
    stuck.suspend()
    start = time.monotonic()
    asked = [reader.frames(video, [second], 2.0) for second in (8, 9)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert 2 <= time.monotonic() - start < 10
    assert {type(outcome) for outcome in outcomes} == {list, VideoTimeout}
    assert len(await reader.frames(video, range(10), PATIENCE_S)) == 10
    assert not is_worker(stuck) and reader.metrics()["video/timeouts"] == 1


@reading()
async def test_a_killed_worker_fails_only_its_job(reader: FrameReader, video):
    await all_up(reader, video)
    victim, _ = workers()
    victim.suspend()
    asked = [asyncio.create_task(reader.frames(video, [second], PATIENCE_S)) for second in range(4, 10)]
    while sum(task.done() for task in asked) < 5:  # the last request waits for the victim
        await asyncio.sleep(0.01)
    victim.kill()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["VideoUnavailable", *["list"] * 5]
    assert "its decoder was killed" in str(outcomes)  # like the kernel's OOM killer, so not the video's fault
    assert len(await reader.frames(video, range(10), PATIENCE_S)) == 10
    assert reader.metrics()["video/worker_deaths"] == 1


@reading()
async def test_a_crashing_worker_blames_its_video(reader: FrameReader, video):
    await all_up(reader, video)
    for worker in workers():
        worker.suspend()
    asked = asyncio.create_task(reader.frames(video, [8], PATIENCE_S))
    await asyncio.sleep(0.2)
    for worker in workers():
        worker.send_signal(signal.SIGSEGV)
        worker.resume()
    with pytest.raises(VideoError, match="the decoder crashed on it") as caught:
        await asked
    assert not isinstance(caught.value, VideoUnavailable)


@reading()
async def test_an_idle_worker_that_dies_fails_no_job(reader: FrameReader, video):
    await all_up(reader, video)
    for worker in workers():
        worker.kill()
        worker.wait(PATIENCE_S)
    assert len(await reader.frames(video, range(10), PATIENCE_S)) == 10


def test_a_decoder_that_cannot_start_does_not_blame_the_video(video, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def test(reader: FrameReader) -> None:
        await fails_with(VideoUnavailable, "no decoder can start", reader.info(video, PATIENCE_S))

    with_reader(test)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        with_reader(test)


@reading(num_workers=1, frame_size=small)
async def test_a_decoding_timeout_keeps_the_frames_decoded_so_far(reader: FrameReader, long_video, monkeypatch):
    monkeypatch.setattr(reader_module, "SLOWEST_PX_PER_S", 1e12)
    await reader.info(long_video, PATIENCE_S)
    start_s = time.monotonic()
    await fails_with(VideoTimeout, "in time", reader.frames(long_video, at_fps(30, 300), 0.2))
    assert time.monotonic() - start_s < 5
    monkeypatch.undo()
    assert len(await reader.frames(long_video, at_fps(30, 300), PATIENCE_S)) == 300
    metrics = reader.metrics()
    assert metrics["video/timeouts"] == 1
    assert metrics["video/decoded_frames"] in (300, 301)  # one frame may have been in transit


@reading(num_workers=1, frame_size=small)
async def test_many_pixels_extend_a_deadline(reader: FrameReader, long_video):
    await reader.info(long_video, PATIENCE_S)
    assert len(await reader.frames(long_video, at_fps(30, 300), 0.05)) == 300  # 92 million: 4.6 s more
    assert reader.metrics()["video/timeouts"] == 0


def test_a_part_decodes_from_its_keyframes_on_and_its_pixels_are_counted(monkeypatch):
    info = VideoInfo("a" * 32, 10.0, 300, 1000, 2000)
    film = _Video("a.mp4", info, 3 * np.arange(300), 3 * np.arange(0, 300, 100), Fraction(1, 90), 2_000_000)
    # 50 frames of the first hundred, 100 of the next, 2 of the last
    groups = [(0, [0, 147]), (300, [450, 597]), (600, [603])]
    whole, halves = [(groups, 152 * 2e6)], [(groups[:1], 100e6), (groups[1:], 204e6)]

    def parts(num_workers: int = 1) -> list[tuple]:
        return [tuple(part) for part in film.parts([0, 49, 150, 199, 201], num_workers)]

    assert parts() == whole and parts(2) == halves
    monkeypatch.setattr(reader_module, "MIN_JOB_PX", 200e6)
    assert parts(2) == whole
    monkeypatch.setattr(reader_module, "JOB_PX", 210e6)
    assert parts() == halves
    monkeypatch.setattr(reader_module, "JOB_PX", 1)
    assert parts() == [(groups[:1], 100e6), (groups[1:2], 200e6), (groups[2:], 4e6)]
    assert film.parts([]) == []
    later = replace(film, ticks=film.ticks + 9)  # a container need not begin at 0
    assert later.frames_at(map(later.time_s, range(300))) == list(range(300))


def overview_pixels(path: Path, **options: Any) -> tuple[list[np.ndarray], float]:
    """Returns an overview's frames, and the number of jobs that decoded them."""

    async def test(reader: FrameReader) -> tuple[list[np.ndarray], float]:
        info = await reader.info(path, PATIENCE_S)
        jobs = reader.metrics()["video/jobs"]
        frames = await reader.frames(path, overview_times(info.duration_s, info.num_frames, 32), PATIENCE_S)
        return [frame.picture.pixels for frame in frames], reader.metrics()["video/jobs"] - jobs

    return with_reader(test, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gop_frames", "options", "num_jobs"),
    [(30, {}, 3), (30, {"bf": "3", "x264-params": "open-gop=1"}, 3), (10_000, {"sc_threshold": "0"}, 1)],
    ids=["ten keyframes", "open groups with B-frames", "one keyframe"],
)
def test_an_overview_split_over_workers_equals_the_whole_one(tmp_path, monkeypatch, gop_frames, options, num_jobs):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 300), gop_frames=gop_frames, options=options)
    monkeypatch.setattr(reader_module, "MIN_JOB_PX", 1)
    whole, one = overview_pixels(path, num_workers=1)
    split, jobs = overview_pixels(path, num_workers=3)
    assert (one, jobs, len(whole)) == (1, num_jobs, 32)
    np.testing.assert_array_equal(split, whole)


@reading()
async def test_after_a_failed_part_of_an_overview_only_its_frames_are_decoded_again(reader, long_video, monkeypatch):
    monkeypatch.setattr(reader_module, "MIN_JOB_PX", 1)
    times_s = overview_times(20, 600, 40)
    await all_up(reader, long_video)  # decodes one frame of the overview, and three others
    asked = asyncio.create_task(reader.frames(long_video, times_s, PATIENCE_S))
    await until(lambda: len(reader._pool._busy) == 2)
    next(iter(reader._pool._busy)).process.kill()
    await fails_with(VideoUnavailable, "its decoder was killed", asked)
    assert not reader._reads and not reader._pool._busy
    assert 20 <= reader.metrics()["video/decoded_frames"] - 3 < 40
    assert len(await reader.frames(long_video, times_s, PATIENCE_S)) == 40
    assert reader.metrics()["video/decoded_frames"] - 3 == 40


@pytest.mark.slow
def test_probe_results_are_cached_for_later_runs(video, tmp_path):
    async def test(reader: FrameReader) -> tuple[VideoInfo, list[tuple[float, int]], float]:
        info = await reader.info(video, PATIENCE_S)
        jobs = reader.metrics()["video/jobs"]
        return info, shown(await reader.frames(video, [1, 9.5], PATIENCE_S)), jobs

    options = {"ticks_directory": tmp_path}
    first, again = with_reader(test, **options), with_reader(test, **options)
    assert (first[2], again[2]) == (1, 0) and first[:2] == again[:2]
    (entry,) = tmp_path.rglob("*.tick")
    assert entry.stat().st_size < 1000
    for spoil in (lambda content: content[:-1], lambda content: b"", lambda content: b"y" + content[1:]):
        entry.write_bytes(spoil(entry.read_bytes()))
        assert with_reader(test, **options) == first  # probed again


def test_an_unwritable_cache_is_not_an_error(video, tmp_path, caplog):
    (tmp_path / "file").touch()

    async def test(reader: FrameReader) -> None:
        assert (await reader.info(video, PATIENCE_S)).num_frames == 300

    with_reader(test, ticks_directory=tmp_path / "file" / "ticks")
    assert "cannot be kept in" in caplog.text


@pytest.mark.parametrize(("ratio", "size_px"), [((2, 1), (96, 256)), ((1, 2), (96, 64)), ((4, 3), (96, 171))])
@reading()
async def test_an_anamorphic_video_is_shown_in_its_display_aspect_ratio(reader: FrameReader, tmp_path, ratio, size_px):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 60), pixel_ratio=Fraction(*ratio))
    info = await reader.info(path, PATIENCE_S)
    assert (info.height, info.width) == size_px
    (frame,) = await reader.frames(path, [1], PATIENCE_S)
    assert frame.picture.size_px == size_px and number_of(frame.picture.pixels) == 30
    (right,) = await reader.frames(path, [1], PATIENCE_S, Box(0.5, 0, 1, 1))
    np.testing.assert_allclose(right.picture.pixels, frame.picture.pixels[:, -right.picture.size_px[1] :], atol=90)


@reading(slow=False)
async def test_a_rotated_anamorphic_video_is_scaled_before_rotation(reader: FrameReader, tmp_path):
    path = turn(write_video(tmp_path / "video.mp4", at_fps(30, 60), pixel_ratio=Fraction(2, 1)), 90)
    info = await reader.info(path, PATIENCE_S)
    assert (info.height, info.width) == (256, 96)


@pytest.mark.slow
def test_the_event_loop_is_never_blocked(long_video, tmp_path):
    async def test(reader: FrameReader) -> None:
        start_s = time.thread_time()
        frames = await reader.frames(long_video, at_fps(3, 60), PATIENCE_S)
        assert sum(frame.picture.pixels.nbytes for frame in frames) > 50_000_000
        assert time.thread_time() - start_s < 0.1 * reader.metrics()["video/decode_s"]

    with_reader(test, disk_directory=tmp_path)


@reading(slow=False, num_workers=1)
async def test_closing_fails_waiting_requests(reader: FrameReader, video):
    await all_up(reader, video)
    workers()[0].suspend()
    waiting = [asyncio.create_task(reader.frames(video, [second], PATIENCE_S)) for second in (7, 8)]
    await asyncio.sleep(0.1)
    await reader.close()
    for task in waiting:
        await fails_with(VideoError, "the reader was closed", task)
    with pytest.raises(RuntimeError, match="is not open"):
        await reader.info(video, PATIENCE_S)


KILLED_PARENT = """
import asyncio, os, signal, sys, time
import psutil
from rollout.video.reader import FrameReader

async def main():
    async with FrameReader(lambda height, width: (height, width), num_workers=2) as reader:
        await reader.info(sys.argv[1], 60)
        reading = asyncio.create_task(reader.frames(sys.argv[1], [n / 30 for n in range(600)], 60))
        await asyncio.sleep(0.1)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        if len(sys.argv) > 2 and os.fork() == 0:
            os.closerange(1, 3)  # the test waits for its end
            time.sleep(20)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("survivor", [[], ["a forked child holds the link open"]], ids=["alone", "with a forked child"])
def test_workers_exit_with_a_killed_parent(long_video, survivor):
    command = [sys.executable, "-c", KILLED_PARENT, str(long_video), *survivor]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    start = time.monotonic()
    asyncio.run(until(lambda: not any(psutil.pid_exists(pid) and is_worker(psutil.Process(pid)) for pid in pids)))
    assert time.monotonic() - start < 15


def test_a_worker_that_starts_after_its_parents_death_exits():
    parent = subprocess.Popen(["true"])
    parent.wait()
    link, its_end = socket.socketpair()  # a forked child of the parent may keep it open
    with link, its_end:
        command = [sys.executable, "-m", "rollout.video.worker", str(its_end.fileno()), str(2**31), str(parent.pid)]
        assert subprocess.run(command, pass_fds=[its_end.fileno()], timeout=PATIENCE_S).returncode == 0


@pytest.mark.slow
def test_exceeding_a_workers_memory_fails_only_its_job(video, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "WORKER_BYTES", 300 * 2**20)
    large = write_video(tmp_path / "large.mp4", [0.0], size_px=(4320, 7680))
    with contextlib.closing(WorkerPool(1)) as pool:
        emitted, first_frame = [], {"do": "decode", "groups": [(0, [0])], "size_px": (64, 96)}
        for path in (video, large, video):
            job = {**first_frame, "path": str(path), "identity": identity_of(str(path))}
            problem = pool.submit(job, PATIENCE_S, emitted.append).exception()
            assert ("too much memory" in str(problem)) == (path == large)
        assert len(emitted) == 2 and pool.totals["worker_deaths"] == 0


def test_all_workers_together_use_at_most_half_of_the_memory():
    assert workers_within(32 * 2**30, num_workers=3) == 3
    assert workers_within(32 * 2**30, num_workers=64) == 8  # of 2 GiB each
    assert workers_within(2**30, num_workers=8) == 1


@reading(num_workers=1)
async def test_a_worker_is_replaced_after_its_number_of_jobs(reader: FrameReader, video, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_JOBS", 2)
    before = workers()
    for second in range(4):  # with the probe, five jobs
        await reader.frames(video, [second], PATIENCE_S)
    assert reader.metrics()["video/workers_retired"] == 2 and workers() != before


def test_workers_import_only_what_they_need():
    code = "import sys, rollout.video.worker; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"jax", "torch", "transformers", "asyncio", "model_port", "paravt_jax", "aiohttp"}
    assert not heavy & set(run.stdout.split())


@pytest.mark.slow
def test_a_later_run_reads_frames_from_disk(video, tmp_path):
    async def test(reader: FrameReader) -> tuple[list[bytes], dict[str, float]]:
        frames = await reader.frames(video, range(10), PATIENCE_S)
        return [frame.picture.pixels.tobytes() for frame in frames], reader.metrics()

    first, metrics = with_reader(test, disk_directory=tmp_path)
    assert (metrics["video/decoded_frames"], metrics["video/disk_hit_frac"]) == (10, 0)
    second, metrics = with_reader(test, disk_directory=tmp_path)
    assert (metrics["video/decoded_frames"], metrics["video/disk_hit_frac"]) == (0, 1) and first == second
    for path in sorted(tmp_path.rglob("*.frame"))[:3]:
        truncate(path, 0.5)
    third, metrics = with_reader(test, disk_directory=tmp_path)
    assert (metrics["video/decoded_frames"], metrics["video/disk_damaged_files"]) == (3, 3) and first == third


@reading(memory_bytes=100_000)
async def test_frames_beyond_the_memory_bound_are_still_delivered(reader: FrameReader, video):
    assert len(await reader.frames(video, range(10), PATIENCE_S)) == 10
    assert reader.metrics()["video/memory_bytes"] <= 100_000


@reading(frame_size=lambda height, width: int("too narrow"))
async def test_an_unsupported_frame_shape_is_a_video_error(reader: FrameReader, video):
    await fails_with(VideoError, "cannot be shown: .*'too narrow'", reader.frames(video, [0], PATIENCE_S))


@reading()
async def test_a_replaced_file_is_detected_and_read_again(reader: FrameReader, tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 60))
    await reader.info(path, PATIENCE_S)
    write_video(path, at_fps(10, 90))
    await fails_with(VideoError, "was replaced", reader.frames(path, [1], PATIENCE_S))
    assert shown(await reader.frames(path, [1], PATIENCE_S)) == [(1.0, 10)]


@reading()
async def test_a_replaced_file_is_detected_even_if_its_frames_are_in_memory(reader: FrameReader, tmp_path):
    path = tmp_path / "video.mp4"
    write_video(path, at_fps(30, 10))
    old = await reader.frames(path, [0.0], PATIENCE_S)
    write_video(path, at_fps(30, 20), size_px=(64, 64))
    assert (await reader.info(path, PATIENCE_S)).num_frames == 20
    new = await reader.frames(path, [0.0], PATIENCE_S)
    assert (old[0].picture.size_px, new[0].picture.size_px) == ((HEIGHT, WIDTH), (64, 64))
    path.unlink()
    await fails_with(VideoError, "No such file", reader.info(path, PATIENCE_S))


@reading()
async def test_a_missing_file_is_read_once_it_exists(reader: FrameReader, tmp_path):
    path = tmp_path / "video.mp4"
    await fails_with(VideoError, "No such file", reader.info(path, PATIENCE_S))
    write_video(path, at_fps(30, 30))
    assert (await reader.info(path, PATIENCE_S)).num_frames == 30


@pytest.mark.parametrize(
    ("ending", "fps", "num_frames"), [("mp4", 30, 271), ("mkv", 24000 / 1001, 200), ("ts", 25, 97)]
)
@reading()
async def test_the_frames_of_an_overview_are_those_of_transformers(reader, tmp_path, ending, fps, num_frames):
    path = write_video(tmp_path / f"video.{ending}", at_fps(fps, num_frames), options={"preset": "ultrafast"})
    info = await reader.info(path, PATIENCE_S)
    for budget in (2, 7, 64):
        frames = await reader.frames(path, overview_times(info.duration_s, num_frames, budget), PATIENCE_S)
        # Qwen3VLVideoProcessor.sample_frames
        assert [n for _, n in shown(frames)] == np.linspace(0, num_frames - 1, budget).round().astype(int).tolist()


@pytest.mark.parametrize(
    ("times_s", "num_overview", "num_crop"),
    [(at_fps(30, 15), 8, 1), ([0.0], 1, 1), (at_fps(0.2, 2160), 8, 16)],
    ids=["half a second", "one frame", "three hours"],
)
@reading()
async def test_unusual_lengths_give_frames(reader: FrameReader, tmp_path, times_s, num_overview, num_crop):
    path = write_video(tmp_path / "video.mp4", times_s, options={"preset": "ultrafast"})
    info = await reader.info(path, PATIENCE_S)
    overview = await reader.frames(path, overview_times(info.duration_s, info.num_frames, 8), PATIENCE_S)
    crop = await reader.frames(path, crop_times(0, info.duration_s), PATIENCE_S)
    assert (len(overview), len(crop)) == (num_overview, num_crop)
    for time_s, number in shown(overview + crop):
        assert time_s == pytest.approx(times_s[number], abs=0.001)


@reading()
async def test_a_truncated_video_has_its_remaining_duration(reader: FrameReader, tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 300), container_options=INDEX_FIRST)
    truncate(path, 0.6)
    info = await reader.info(path, PATIENCE_S)
    assert 3 < info.duration_s < 8
    frames = shown(await reader.frames(path, overview_times(info.duration_s, info.num_frames, 8), PATIENCE_S))
    assert len(frames) >= 7 and all(number == round(30 * time_s) for time_s, number in frames)


@reading()
async def test_frames_beyond_the_last_decodable_one_are_skipped_or_an_error(reader: FrameReader, tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 300), container_options=INDEX_FIRST)
    damage(path, 0.6, 1.0)
    info = await reader.info(path, PATIENCE_S)
    assert info.duration_s == pytest.approx(10)  # the index is whole
    frames = shown(await reader.frames(path, overview_times(10, 300, 20), PATIENCE_S))
    assert 7 <= len(frames) <= 15 and all(number == round(30 * time_s) for time_s, number in frames)
    await fails_with(VideoError, "damaged at the requested times", reader.frames(path, [9.0, 9.5], PATIENCE_S))
    jobs = reader.metrics()["video/jobs"]
    await fails_with(VideoError, "damaged at the requested times", reader.frames(path, [9.0, 9.5], PATIENCE_S))
    assert reader.metrics()["video/jobs"] == jobs  # not attempted again


@reading()
async def test_damage_in_the_middle_loses_only_nearby_frames(reader: FrameReader, tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 300), container_options=INDEX_FIRST)
    damage(path, 0.5, 0.6)
    frames = dict(shown(await reader.frames(path, range(10), PATIENCE_S)))
    for second in (0, 1, 2, 8, 9):
        assert frames[second] == 30 * second


async def all_up(reader: FrameReader, video: Path) -> None:
    """Starts all workers: they take turns, so one job each suffices."""
    for second in range(4):
        await reader.frames(video, [second], PATIENCE_S)
