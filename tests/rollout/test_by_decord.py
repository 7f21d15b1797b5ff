"""decord decodes what it counts right, frame for frame as PyAV does, and is given nothing else."""

import asyncio
import importlib.util

import numpy as np
import pytest
from make_video import at_fps, trim_without_encoding, truncate, turn, write_video
from test_video_decode import CONTAINERS, Probed

from rollout.video import by_decord
from rollout.video.decode import probe
from rollout.video.errors import VideoError
from rollout.video.reader import FrameReader

CLOSED = {"x265-params": "log-level=none:open-gop=0"}
READ = {
    **{ending: CONTAINERS[ending] for ending in ("mp4", "mkv", "mov", "webm", "one_keyframe.mp4", "all_keyframes.mp4")},
    "hevc.mp4": dict(codec="libx265", options=CLOSED),
    "b.mkv": dict(options={"bf": "5", "b_strategy": "0"}),
}
REFUSED = {"flv": "flv files", "ts": "mpegts files", "avi": "avi files", "hevc.mp4": "open groups", "open.mp4": "open"}


def decoded(video: Probed, frames) -> dict[int, np.ndarray]:
    """One after another, so that each needs its own seek."""
    found = {}
    for frame in frames:
        wanted = [(frame, int(video.ticks[frame]), float(video.times_s[frame]))]
        by_decord.decode(
            video.path,
            video.known["identity"],
            wanted,
            len(video.ticks),
            video.size_px,
            lambda _, pixels, frame=frame: found.__setitem__(frame, pixels),
        )
    return found


@pytest.mark.parametrize("ending", READ)
def test_every_frame_is_pyavs(tmp_path, ending):
    video = Probed(write_video(tmp_path / f"video.{ending}", at_fps(30, 90), **READ[ending]))
    probe(video.path, by_decord.FrameCountCheck)
    frames = np.random.default_rng(0).permutation(90)[:40].tolist()
    expected, found = video.decoded(frames), decoded(video, frames)
    assert all(np.array_equal(found[frame], expected[frame]) for frame in frames)


@pytest.mark.parametrize("ending", REFUSED)
def test_what_it_miscounts_is_refused(tmp_path, ending):
    path = write_video(tmp_path / f"video.{ending}", at_fps(30, 90), **CONTAINERS[ending])
    with pytest.raises(VideoError, match=f"decord miscounts .*{REFUSED[ending]}.*; set video.decoder=pyav"):
        probe(str(path), by_decord.FrameCountCheck)


def test_a_trimmed_video_is_refused(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", at_fps(30, 90))
    trimmed = trim_without_encoding(whole, tmp_path / "video.mp4", 13, 30)
    with pytest.raises(VideoError, match="decord miscounts files with frames that an edit list cuts off"):
        probe(str(trimmed), by_decord.FrameCountCheck)
    with pytest.raises(VideoError, match="decord counts 90 of its 77 frames"):
        decoded(Probed(trimmed), [5])


def test_the_reader_gives_the_same_pictures_by_either(tmp_path):
    paths = [
        turn(write_video(tmp_path / "turned.mp4", at_fps(30, 60)), 90),
        truncate(write_video(tmp_path / "cut.mkv", at_fps(30, 90)), 0.7),
        write_video(tmp_path / "uneven.mp4", np.cumsum(np.random.default_rng(0).uniform(0.01, 0.3, 60)).tolist()),
    ]

    async def read(decoder):
        async with FrameReader(lambda height, width: (64, 96), decoder=decoder, num_workers=1) as reader:
            shown = [await reader.frames(path, np.linspace(0, 2, 9).tolist(), 30) for path in paths]
            with pytest.raises(VideoError, match="damaged or not a video"):
                await reader.frames(__file__, [0.0], 30)
        return [[(frame.time_s, frame.picture.key) for frame in frames] for frames in shown]

    assert asyncio.run(read("decord")) == asyncio.run(read("pyav"))


def test_a_reader_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"video.decoder=decord needs the package decord: pip install decord"):
        FrameReader(lambda height, width: (height, width), decoder="decord")
