"""What is asked of the made-up videos is truly to be seen in them; making them again makes nothing."""

import hashlib
import json
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

import paravt_jax.data.synthetic as synthetic
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.synthetic import COLOURS, LETTERS, frames, make_clip, make_synthetic, questions
from paravt_jax.rewards.answers import interval, interval_iou
from rollout.video.decode import probe


def load(path: Path):
    found = load_prompts(str(path), video_root="", max_bad_frac=0.0)
    return found.prompts


@cache
def seen_in(path: str) -> tuple[str, tuple[float, float]]:
    """The colour that is shown, and from when to when, by the pixels of the file alone."""
    with av.open(path) as container:
        shown = [(float(frame.time), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    coloured = [(time_s, pixels) for time_s, pixels in shown if np.ptp(pixels.astype(int), axis=2).max() > 60]
    height, width, _ = coloured[0][1].shape
    middle = coloured[0][1][height // 2, width // 2]
    colour = min(COLOURS, key=lambda name: np.abs(middle - np.array(COLOURS[name])).sum())
    times_s = [time_s for time_s, _ in coloured]
    assert np.allclose(np.diff(times_s), 1 / synthetic.FPS), "one event, not several"
    return colour, (times_s[0], times_s[-1] + 1 / synthetic.FPS)


def files_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_synthetic(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
def test_every_answer_is_what_the_video_shows(world):
    asked = [*load(world), *load(world.with_name("validation.jsonl"))]
    assert len(asked) == 24
    for prompt in asked:
        colour, (start_s, end_s) = seen_in(prompt.videos[0])
        if prompt.question_type == "mcq":
            at_s = float(prompt.question.split(" seconds?")[0].split()[-1])
            assert prompt.answer == LETTERS[colour] and start_s < at_s < end_s
            assert f"\n{prompt.answer}. {colour}" in prompt.question
        elif prompt.question_type == "tvg":
            assert interval_iou(interval(prompt.answer), (start_s, end_s)) == pytest.approx(1)
        else:
            assert prompt.answer == colour


def test_videos_are_as_long_as_planned_and_of_many_lengths(world):
    lengths = set()
    for number in range(8):
        known, _ = probe(str(world.parent / make_clip(0, number).video))
        numerator, denominator = known["time_base"]
        lengths.add(known["duration_ticks"] * numerator / denominator)
        assert known["duration_ticks"] * numerator / denominator == make_clip(0, number).duration_s
    assert len(lengths) > 4 and all(8 <= length <= 64 for length in lengths)


def test_held_out_videos_are_not_trained_on(world):
    train, held_out = load(world), load(world.with_name("validation.jsonl"))
    assert not {prompt.videos for prompt in train} & {prompt.videos for prompt in held_out}
    for part, num_videos in ((train, 6), (held_out, 2)):
        assert len({prompt.videos for prompt in part}) == num_videos and len(part) == 3 * num_videos
        assert {prompt.question_type for prompt in part} == {"mcq", "tvg", "oe"}


def test_a_complete_world_is_not_made_again(world):
    before = files_of(world.parent)
    assert make_synthetic(world.parent) == world
    assert files_of(world.parent) == before


@pytest.mark.slow
def test_an_interrupted_world_is_completed_with_what_is_there(tmp_path, monkeypatch):
    whole = make_synthetic(tmp_path / "whole", num_videos=3)
    written = []

    def write_until_the_second(path, pictures, fps):
        if len(written) == 1:
            path.write_bytes(b"half a vid")
            raise KeyboardInterrupt
        written.append(path)
        write(path, pictures, fps)

    write = synthetic.write_video
    monkeypatch.setattr(synthetic, "write_video", write_until_the_second)
    with pytest.raises(KeyboardInterrupt):
        make_synthetic(tmp_path / "cut", num_videos=3)
    monkeypatch.undo()
    finished = files_of(tmp_path / "cut" / "videos")
    assert not (tmp_path / "cut" / "train.jsonl").exists() and sum(path.endswith(".mp4") for path in finished) == 1
    path = make_synthetic(tmp_path / "cut", num_videos=3)
    assert path.read_text() == whole.read_text() and len(load(path)) == 6
    first = str(tmp_path / "cut" / make_clip(0, 0).video)
    assert files_of(tmp_path / "cut")[first] == finished[first]
    for prompt in load(path):
        seen_in(prompt.videos[0])


def test_a_world_can_be_moved(tmp_path):
    path = make_synthetic(tmp_path / "old", num_videos=2)
    ids = [prompt.id for prompt in load(path)]
    (tmp_path / "old").rename(tmp_path / "new")
    moved = load(tmp_path / "new" / "train.jsonl")
    assert [prompt.id for prompt in moved] == ids and all("/new/" in prompt.videos[0] for prompt in moved)


def test_another_seed_in_the_same_directory_is_another_world(tmp_path):
    of_0 = load(make_synthetic(tmp_path, num_videos=2))
    of_1 = load(make_synthetic(tmp_path, seed=1, num_videos=2))
    assert not {prompt.videos for prompt in of_0} & {prompt.videos for prompt in of_1}
    assert seen_in(of_1[0].videos[0])[0] == of_1[2].answer != of_0[2].answer


def test_pixels_and_questions_follow_from_the_seed_in_every_process():
    content = (
        b"".join(frame.tobytes() for frame in frames(make_clip(3, 5))) + repr([*questions(make_clip(3, 5))]).encode()
    )
    assert hashlib.sha256(content).hexdigest() == "100e3b257bc8a1a55933031ff8d54821013c72d18783360d1ae820ece1d8b4be"
    first, second = (next(frames(make_clip(3, number))) for number in (5, 6))
    assert (first != second).any()


def test_colours_are_balanced():
    assert [make_clip(2, number).colour for number in range(8)].count("red") == 2


def test_one_video_cannot_be_both_trained_on_and_held_out(tmp_path):
    with pytest.raises(ValueError, match="num_videos=1 must be at least 2"):
        make_synthetic(tmp_path, num_videos=1)


def test_rows_are_written_as_they_are_published(world):
    row = json.loads(world.read_text().splitlines()[0])
    assert row.keys() == {"prompt", "videos", "extra_info"} and row["prompt"][0]["content"].startswith("<video>\n")
    assert json.loads(row["extra_info"]).keys() == {"answer", "question_type"}
