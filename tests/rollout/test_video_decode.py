"""A worker decodes the requested frames with their times, upright, and in the learner's size."""

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from make_video import (
    HEIGHT,
    WIDTH,
    at_fps,
    number_of,
    numbered_frame,
    trim_without_encoding,
    truncate,
    turn,
    write_sound,
    write_video,
)

from model_port.processing import VisionContract, resize, settled_size
from rollout.video.decode import decode, identity_of, probe
from rollout.video.errors import VideoError

RECIPE = VisionContract(16, 2, 2, 784, 50176, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OPEN_GROUPS = {"x264-params": "open-gop=1:keyint=30:bframes=3:scenecut=0"}
CONTAINERS = {
    **{ending: {} for ending in ("mp4", "mkv", "mov", "flv", "ts")},
    "avi": dict(codec="mpeg4", time_base=Fraction(1, 30)),
    "webm": dict(codec="libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8"}),
    "ivf": dict(codec="libvpx", options={"deadline": "realtime", "cpu-used": "8"}),
    "hevc.mp4": dict(codec="libx265", options={"x265-params": "log-level=none"}),
    "open.mp4": dict(options=OPEN_GROUPS),
    "refresh.mp4": dict(options={"x264-params": "intra-refresh=1:keyint=30:bframes=0"}),
    "one_keyframe.mp4": dict(gop_frames=1000),
    "all_keyframes.mp4": dict(gop_frames=1),
}  # file extensions and how to write such files


class Probed:
    def __init__(self, path: Path):
        known, raw = probe(str(path))
        self.path, self.known = str(path), known
        self.ticks, self.key_ticks = np.split(np.frombuffer(raw, np.int64), [known["num_frames"]])
        self.time_base = Fraction(*known["time_base"])
        self.size_px = known["height"], known["width"]

    @property
    def duration_s(self) -> float:
        return float(self.known["duration_ticks"] * self.time_base)

    @property
    def times_s(self) -> np.ndarray:
        return (self.ticks - self.ticks[0]) * float(self.time_base)

    def decoded(self, frames: Sequence[int], size_px: tuple[int, int] | None = None) -> dict[int, np.ndarray]:
        """Decodes each frame in a separate group, so that each needs a seek."""
        found = {}
        keys = [int(self.key_ticks[self.key_ticks <= self.ticks[frame]][-1]) for frame in frames]
        groups = [(key, [int(self.ticks[frame])]) for key, frame in zip(keys, frames, strict=True)]
        decode(self.path, self.known["identity"], groups, size_px or self.size_px, found.__setitem__)
        return {int(np.searchsorted(self.ticks, tick)): pixels for tick, pixels in found.items()}


@pytest.mark.parametrize("ending", CONTAINERS)
def test_every_requested_frame_is_correct(tmp_path, ending):
    video = Probed(write_video(tmp_path / f"video.{ending}", at_fps(30, 120), **CONTAINERS[ending]))
    frames = [0, 1, 2, 27, 28, 29, 30, 31, 32, 59, 60, 61, 88, 89, 90, 118, 119]
    found = {frame: number_of(pixels) for frame, pixels in video.decoded(frames).items()}
    assert found == {frame: frame for frame in frames}
    assert len(video.ticks) == 120 and video.duration_s == pytest.approx(4, abs=0.002)
    # Some containers have millisecond timestamps.
    np.testing.assert_allclose(video.times_s, at_fps(30, 120), atol=0.001)


def test_skipping_intermediate_frames_changes_no_pixel(tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 60), options={"bf": "5", "b_strategy": "0"})
    with av.open(str(path)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    for frame, pixels in Probed(path).decoded(range(0, 60, 7)).items():
        np.testing.assert_array_equal(pixels, plain[frame])


def test_times_of_a_variable_frame_rate_are_the_frames_times(tmp_path):
    times_s = np.cumsum(np.random.default_rng(0).uniform(0.01, 0.3, 90)).tolist()
    video = Probed(write_video(tmp_path / "video.mp4", times_s))
    np.testing.assert_allclose(video.times_s, np.array(times_s) - times_s[0], atol=1e-4)
    assert {frame: number_of(pixels) for frame, pixels in video.decoded([3, 50]).items()} == {3: 3, 50: 50}


def test_frames_removed_by_an_edit_list_are_excluded(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", at_fps(30, 90))
    video = Probed(trim_without_encoding(whole, tmp_path / "video.mp4", 13, 30))
    assert len(video.ticks) == 90 - 13 and video.duration_s == pytest.approx(77 / 30)
    assert [number_of(pixels) for pixels in video.decoded([0, 5, 40, 76]).values()] == [13, 18, 53, 89]


def test_without_seeking_frames_are_decoded_from_the_start(tmp_path):
    avi = write_video(tmp_path / "video.avi", at_fps(30, 90), time_base=Fraction(1, 30), options={"bf": "0"})
    avi.write_bytes(avi.read_bytes()[: avi.read_bytes().rindex(b"idx1")])
    vp9 = CONTAINERS["webm"] | {"container_options": {"avoid_negative_ts": "disabled"}}
    webm = write_video(tmp_path / "video.webm", [time_s - 1 for time_s in at_fps(30, 90)], **vp9)
    for video in (Probed(avi), Probed(webm)):
        assert len(video.ticks) == 90
        found = video.decoded([1, 31, 32, 62, 89])
        assert {frame: number_of(pixels) for frame, pixels in found.items()} == {n: n for n in (1, 31, 32, 62, 89)}


def test_a_title_in_another_encoding_is_ignored(tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 2), title="Cafe in May")
    path.write_bytes(path.read_bytes().replace(b"Cafe in May", "Café in May".encode("latin-1")))
    assert len(Probed(path).ticks) == 2


def test_the_video_of_a_file_is_its_largest_stream_without_cover_pictures(tmp_path):
    with av.open(str(tmp_path / "video.mp4"), "w") as container:
        streams = [container.add_stream("mjpeg", width=16 * n, height=16, pix_fmt="yuvj420p") for n in (2, 3, 9)]
        streams[-1].disposition = Disposition.attached_pic
        for stream in streams:
            container.mux(stream.encode(av.VideoFrame(stream.width, stream.height, "yuvj420p")))
            container.mux(stream.encode())
    assert Probed(tmp_path / "video.mp4").size_px == (16, 48)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotated_video_is_shown_upright(tmp_path, degrees):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 10))
    flat = Probed(path).decoded([7])[7]
    video = Probed(turn(path, degrees))
    assert video.size_px == ((HEIGHT, WIDTH) if degrees == 180 else (WIDTH, HEIGHT))
    np.testing.assert_array_equal(video.decoded([7])[7], np.rot90(flat, -degrees // 90))


@pytest.mark.parametrize("size_px", [(180, 320), (320, 180), (HEIGHT, WIDTH), (500, 350)])
def test_frames_are_resized_as_the_learner_resizes_them(tmp_path, size_px):
    video = Probed(write_video(tmp_path / "video.mp4", at_fps(30, 3), size_px=size_px))
    settled = settled_size(*size_px, RECIPE)
    (original,), (resized,) = (video.decoded([1], size).values() for size in (size_px, settled))
    np.testing.assert_array_equal(resized, resize(original, RECIPE))
    np.testing.assert_array_equal(resized, resize(resized, RECIPE))  # resizing again changes nothing


@pytest.mark.parametrize(("ending", "fps"), [("mp4", 30), ("ts", 25)])  # this ts has no frame rate
def test_a_single_frame_lasts_one_frame(tmp_path, ending, fps):
    video = Probed(write_video(tmp_path / f"video.{ending}", [0.0]))
    assert (len(video.ticks), video.duration_s) == (1, pytest.approx(1 / fps, rel=0.01))
    assert np.abs(video.decoded([0])[0].astype(int) - numbered_frame(0)).mean() < 5


@pytest.mark.slow
def test_8k_is_read(tmp_path):
    video = Probed(write_video(tmp_path / "video.mp4", [0.0], size_px=(4320, 7680)))
    assert video.size_px == (4320, 7680) and number_of(video.decoded([0], (96, 128))[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "codec", "message"),
    [("mp4", "libx264", "its frames of 8200x4400 have more than"), ("ts", "mpeg2video", "damaged, or have more than")],
)
def test_frames_larger_than_8k_are_rejected_wherever_the_size_is_declared(tmp_path, ending, codec, message):
    path = tmp_path / f"video.{ending}"
    write_video(path, [0.0], size_px=(4400, 8200), codec=codec, time_base=Fraction(1, 30))
    with pytest.raises(VideoError, match=message):
        probe(str(path))


@pytest.mark.slow
def test_a_later_frame_larger_than_8k_is_skipped(tmp_path):
    path = write_video(tmp_path / "video.ts", [0.0])
    large = write_video(tmp_path / "large.ts", [10.0], size_px=(4400, 8200))
    path.write_bytes(path.read_bytes() + large.read_bytes())
    video = Probed(path)
    assert len(video.ticks) == 2 and list(video.decoded([0, 1])) == [0]


def raw_stream(path: Path, ending: str = "h264", codec: str = "libx264") -> None:
    write_video(path.with_suffix(f".{ending}"), at_fps(30, 10), codec=codec, time_base=Fraction(1, 30)).rename(path)


def without_start(path: Path, ending: str, codec: str) -> None:
    raw_stream(path, ending, codec)
    path.write_bytes(path.read_bytes()[1000:])


def playlist(path: Path) -> None:
    write_video(path.with_name("other.mp4"), at_fps(30, 10))
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n")


def unknown_codec(path: Path) -> None:
    path.write_bytes(write_video(path, at_fps(30, 10)).read_bytes().replace(b"avc1", b"zzzz"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("not a video\n" * 1000), "damaged or not a video"),
        (unknown_codec, "no video of a known codec"),
        (playlist, "damaged or not a video"),
        (lambda path: truncate(write_video(path, at_fps(30, 30)), 0.6), "damaged or not a video"),  # has no index
        (write_sound, "no video of a known codec"),
        (raw_stream, "a raw H.264, .* stream, .* ffmpeg -r FPS -i FILE FILE.mp4"),
        (lambda path: raw_stream(path, "obu", "libsvtav1"), "a raw .* AV1 or MPEG-2 stream, whose frames"),
        (lambda path: raw_stream(path, "m2v", "mpeg2video"), "a raw .* AV1 or MPEG-2 stream, whose frames"),
        (lambda path: without_start(path, "avi", "libx264"), "damaged or not a video"),
        (lambda path: without_start(path, "mp4", "mpeg2video"), "damaged or not a video"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_bytes(bytes(100_000)), "damaged or not a video"),
        (lambda path: path.write_bytes(os.urandom(100_000)), "damaged or not a video"),
        (lambda path: None, "No such file"),
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_an_unreadable_video_is_a_one_line_error_without_its_path(tmp_path, make, message):
    path = tmp_path / "video.mp4"
    make(path)
    with pytest.raises(VideoError, match=message) as caught:
        probe(str(path))
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("name", ["nul\0.mp4", "half\ud800.mp4", "byte\udcff.mp4"])
def test_an_invalid_path_is_a_video_error(tmp_path, name):
    with pytest.raises(VideoError, match="cannot be opened"):
        probe(str(tmp_path / name))


def test_the_identity_depends_on_the_file_not_on_its_name(tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 3))
    (tmp_path / "link.mp4").symlink_to(path)
    first = identity_of(str(path))
    assert identity_of(str(tmp_path / "link.mp4")) == first
    write_video(path, at_fps(30, 4))
    assert identity_of(str(path)) != first


def test_frames_of_a_replaced_file_are_rejected(tmp_path):
    path = write_video(tmp_path / "video.mp4", at_fps(30, 3))
    video = Probed(path)
    write_video(path, at_fps(30, 9))
    with pytest.raises(VideoError, match="was replaced"):
        video.decoded([0])
