"""Every answer is visible in its synthetic video, and existing files are reused."""

import errno
import hashlib
import os
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

from paravt_jax.config import DataConfig
from paravt_jax.data import synthetic
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.synthetic import COLOURS, LETTERS, frames, make_clip, make_synthetic, questions, traces
from paravt_jax.data.traces import load_traces
from paravt_jax.rewards.answers import interval, interval_iou
from rollout.video.decode import probe


def load(path: Path):
    return load_prompts(str(path), video_root="", max_bad_frac=0.0).prompts


@cache
def event_in(path: str) -> tuple[str, tuple[float, float]]:
    """Returns the square's color and window, read from the file's pixels."""
    with av.open(path) as container:
        pictures = [(float(frame.time), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    colored = [(time_s, pixels) for time_s, pixels in pictures if np.ptp(pixels.astype(int), axis=2).max() > 60]
    height, width, _ = colored[0][1].shape
    middle = colored[0][1][height // 2, width // 2]
    color = min(COLOURS, key=lambda name: np.abs(middle - np.array(COLOURS[name])).sum())
    times_s = [time_s for time_s, _ in colored]
    assert np.allclose(np.diff(times_s), 1 / synthetic.FPS), "more than one event"
    return color, (times_s[0], times_s[-1] + 1 / synthetic.FPS)


def files_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def train_rows(tmp_path_factory) -> Path:
    return make_synthetic(tmp_path_factory.mktemp("synthetic"))


@pytest.mark.slow
def test_every_answer_is_visible_in_the_video(train_rows):
    prompts = [*load(train_rows), *load(train_rows.with_name("validation.jsonl"))]
    assert len(prompts) == 24
    for prompt in prompts:
        color, (start_s, end_s) = event_in(prompt.videos[0])
        if prompt.question_type == "mcq":
            at_s = float(prompt.question.split(" seconds?")[0].split()[-1])
            assert prompt.answer == LETTERS[color] and start_s < at_s < end_s
            assert f"\n{prompt.answer}. {color}" in prompt.question
        elif prompt.question_type == "tvg":
            assert interval_iou(interval(prompt.answer), (start_s, end_s)) == pytest.approx(1)
        else:
            assert prompt.answer == color


def test_every_trace_is_usable_and_crops_around_the_square(train_rows):
    for name, num_clips in (("train_traces.jsonl", 6), ("validation_traces.jsonl", 2)):
        loaded = load_traces(str(train_rows.with_name(name)), video_root="", max_bad_frac=0.0, allow_outside=False)
        assert len(loaded.traces) == 4 * num_clips and not loaded.bad
    for clip in (make_clip(0, number) for number in range(8)):
        *dialogues, crop = (trace["messages"] for trace in traces(clip))
        shown = crop[0]["content"][0]["video_url"]
        assert 0 <= shown["start_time"] <= clip.start_s and clip.end_s <= shown["end_time"] <= clip.duration_s
        for dialogue, (_, _, answer) in zip(dialogues, questions(clip), strict=True):
            assert f'"start_time": {shown["start_time"]}, "end_time": {shown["end_time"]}' in dialogue[1]["content"]
            assert dialogue[2] == {"role": "tool", "content": crop[1]["content"]}
            assert dialogue[3]["content"].endswith(f"<answer>{answer}</answer>")


@pytest.mark.parametrize("kind", ["", "_traces"])
def test_synthetic_rows_are_written_to_their_directory_and_have_its_root(kind, train_rows):
    folder = train_rows.parent
    mixed = synthetic.row_sources(
        DataConfig(train="synthetic", validation="own.jsonl", video_root="films"), folder, 0, kind
    )
    assert mixed == [(str(folder / f"train{kind}.jsonl"), ""), ("own.jsonl", "films")]
    assert all(
        Path(path).exists() for path, _ in synthetic.row_sources(DataConfig("synthetic", "synthetic"), folder, 0, kind)
    )
    assert synthetic.row_sources(DataConfig("a", ""), folder / "none", 0, kind) == [("a", ""), ("", "")]
    assert not (folder / "none").exists()


def test_videos_have_their_planned_lengths(train_rows):
    clips, lengths = [make_clip(0, number) for number in range(8)], []
    for clip in clips:
        info, _ = probe(str(train_rows.parent / clip.video))
        numerator, denominator = info["time_base"]
        lengths.append(info["duration_ticks"] * numerator / denominator)
    assert lengths == [clip.duration_s for clip in clips]
    assert len(set(lengths)) > 4 and all(8 <= length <= 64 for length in lengths)
    assert [clip.colour for clip in clips].count("red") == 2


def test_validation_has_other_videos_than_training(train_rows):
    train, held_out = load(train_rows), load(train_rows.with_name("validation.jsonl"))
    assert not {prompt.videos for prompt in train} & {prompt.videos for prompt in held_out}
    for part, num_videos in ((train, 6), (held_out, 2)):
        assert len({prompt.videos for prompt in part}) == num_videos and len(part) == 3 * num_videos
        assert {prompt.question_type for prompt in part} == {"mcq", "tvg", "oe"}


def test_complete_data_is_not_written_again(train_rows):
    files = files_of(train_rows.parent)
    assert make_synthetic(train_rows.parent) == train_rows
    assert files_of(train_rows.parent) == files


@pytest.mark.slow
def test_a_second_call_completes_interrupted_data(tmp_path, monkeypatch):
    complete = make_synthetic(tmp_path / "complete", num_videos=3)
    written, write_video = [], synthetic.write_video

    def write_one(path, pictures, fps):
        if len(written) == 1:
            path.write_bytes(b"half a vid")
            raise KeyboardInterrupt
        written.append(path)
        write_video(path, pictures, fps)

    monkeypatch.setattr(synthetic, "write_video", write_one)
    with pytest.raises(KeyboardInterrupt):
        make_synthetic(tmp_path / "cut", num_videos=3)
    monkeypatch.undo()
    finished = files_of(tmp_path / "cut" / "videos")
    assert not (tmp_path / "cut" / "train.jsonl").exists() and sum(path.endswith(".mp4") for path in finished) == 1
    path = make_synthetic(tmp_path / "cut", num_videos=3)
    assert path.read_text() == complete.read_text() and len(load(path)) == 6
    first = str(tmp_path / "cut" / make_clip(0, 0).video)
    assert files_of(tmp_path / "cut")[first] == finished[first]
    for prompt in load(path):
        event_in(prompt.videos[0])


def test_data_can_be_moved_and_another_seed_adds_other_videos(tmp_path):
    ids = [prompt.id for prompt in load(make_synthetic(tmp_path / "old", num_videos=2))]
    (tmp_path / "old").rename(tmp_path / "new")
    of_0 = load(tmp_path / "new" / "train.jsonl")
    assert [prompt.id for prompt in of_0] == ids and all("/new/" in prompt.videos[0] for prompt in of_0)
    of_1 = load(make_synthetic(tmp_path / "new", seed=1, num_videos=2))
    assert not {prompt.videos for prompt in of_0} & {prompt.videos for prompt in of_1}
    assert event_in(of_1[0].videos[0])[0] == of_1[2].answer != of_0[2].answer


def test_pixels_and_questions_depend_only_on_the_seed_and_the_number():
    clip = make_clip(3, 5)
    content = b"".join(frame.tobytes() for frame in frames(clip)) + repr([*questions(clip)]).encode()
    assert hashlib.sha256(content).hexdigest() == "100e3b257bc8a1a55933031ff8d54821013c72d18783360d1ae820ece1d8b4be"
    first, second = (next(frames(make_clip(3, number))) for number in (5, 6))
    assert (first != second).any()


def test_a_failed_write_leaves_no_partial_file(tmp_path):
    def write(partial):
        partial.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: .*train\.jsonl"):
        synthetic.write_atomic(tmp_path / "train.jsonl", write)
    assert not list(tmp_path.iterdir())
