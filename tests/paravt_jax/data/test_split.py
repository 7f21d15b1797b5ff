"""Rows held out for validation: no video on both sides, a share of every kind, unchanged rows, nothing overwritten."""

import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import ANSWER_TURN, CALL_TURN, dialogue, media, rl_row, sft_row, text, write_lines, write_parquet
from hypothesis import given, strategies as st

from paravt_jax.data import __main__ as command
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.split import LEFT_OUT, UNUSABLE, Row, choose, split

ANSWERS = {"mcq": "B", "tvg": "[2.5, 7]", "oe": "a cello"}


def row(question_type: str, *videos: str, number: int = 0) -> dict:
    entries = [{"video": video} for video in videos]
    fixed = {"question": f"Question {number}?", "index": number}
    return rl_row(ANSWERS.get(question_type), question_type, videos=entries, **fixed)


def split_into(directory: Path, source: Path, num_rows: int, seed: int = 0) -> tuple[Path, Path, str]:
    directory.mkdir(exist_ok=True)
    train, validation = (directory / f"{name}{source.suffix}" for name in ("train", "validation"))
    return train, validation, split(str(source), train, validation, num_rows, seed)


def rows_in(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def videos_in(path: Path) -> set[str]:
    return {video["video"] for each in rows_in(path) for video in each["videos"]}


# Seven questions of three types about each of 29 videos.
KINDS = 29 * ("mcq", "mcq", "mcq", "tvg", "tvg", "oe", "oe")
QUESTIONS = [row(kind, f"v{number // 7}.mp4", number=number) for number, kind in enumerate(KINDS)]


@pytest.fixture(params=["parquet", "jsonl"])
def source(request, tmp_path) -> Path:
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        return write_lines(path, QUESTIONS)
    pq.write_table(pa.Table.from_pylist(QUESTIONS).replace_schema_metadata({"made": "by hand"}), path)
    return path


def test_every_row_is_unchanged_in_one_file_and_no_video_is_in_both(source, tmp_path):
    train, validation, _ = split_into(tmp_path / "out", source, 42)
    assert not videos_in(train) & videos_in(validation)
    parts = [rows_in(train), rows_in(validation)]
    assert sorted(parts[0] + parts[1], key=lambda each: each["index"]) == QUESTIONS
    assert all(part == sorted(part, key=lambda each: each["index"]) for part in parts) and len(parts[1]) == 42
    if source.suffix == ".parquet":
        assert pq.read_schema(validation).equals(pq.read_schema(source), check_metadata=True)


def test_the_same_share_of_every_question_type_is_held_out(tmp_path):
    kinds = ["mcq"] * 500 + ["tvg"] * 300 + ["caption"] * 200  # the last type is user-defined
    source = write_lines(tmp_path / "rows.jsonl", [row(kind, f"{n}.mp4", number=n) for n, kind in enumerate(kinds)])
    _, validation, summary = split_into(tmp_path / "out", source, 50)
    held_out = Counter(json.loads(each["extra_info"])["question_type"] for each in rows_in(validation))
    assert held_out == {"mcq": 25, "tvg": 15, "caption": 10}
    table = [" ".join(line.split()) for line in summary.splitlines()[1:4]]
    assert table == ["caption 200 10 10.0", "mcq 500 25 25.0", "tvg 300 15 15.0"]


def test_fewer_rows_than_kinds_can_be_held_out(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [row(kind, f"{kind}.mp4") for kind in ANSWERS])
    train, validation, _ = split_into(tmp_path / "out", source, 1)
    assert [len(rows_in(train)), len(rows_in(validation))] == [2, 1]


def test_a_seed_gives_the_same_files_and_another_seed_other_videos(source, tmp_path):
    first, again, other = (split_into(tmp_path / f"out{n}", source, 42, seed) for n, seed in enumerate((0, 0, 1)))
    assert [path.read_bytes() for path in first[:2]] == [path.read_bytes() for path in again[:2]]
    assert videos_in(first[1]) != videos_in(other[1])


def test_one_file_in_several_spellings_is_one_video(tmp_path):
    (tmp_path / "link.mp4").symlink_to("a b.mp4")
    spellings = ("a b.mp4", "link.mp4", f"{tmp_path}/x/../a b.mp4", f"file://{tmp_path}/a%20b.mp4", "file://a b.mp4")
    rows = [row("oe", name) for name in spellings] + [row("oe", "other.mp4"), row("oe", "https://host/a b.mp4")]
    train, validation, _ = split_into(tmp_path / "out", write_lines(tmp_path / "rows.jsonl", rows), 2)
    assert len(rows_in(train)) == 5 and videos_in(validation) == {"other.mp4", "https://host/a b.mp4"}


def test_rows_that_a_run_would_drop_stay_in_the_training_file(tmp_path):
    bad = [{"prompt": "?"}, "{", row("mcq", "a.mp4") | {"extra_info": "{}"}]
    rows = [*bad, *(row("oe", f"{n}.mp4") for n in range(10))]
    train, validation, summary = split_into(tmp_path / "out", write_lines(tmp_path / "rows.jsonl", rows), 3)
    assert train.read_text().splitlines()[:2] == [json.dumps(bad[0]), "{"]
    assert len(validation.read_text().splitlines()) == 3
    (unusable,) = (line for line in summary.splitlines() if line.startswith(UNUSABLE))
    assert unusable.removeprefix(UNUSABLE).split() == ["3", "0", "0.0"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_without_their_video_are_not_held_out_and_are_counted(tmp_path, suffix):
    for number in range(10):
        (tmp_path / f"{number}.mp4").touch()
    names = [*((f"{number}.mp4",) for number in range(15)), ("0.mp4", "14.mp4")]
    rows = [row("oe", *videos, number=number) for number, videos in enumerate(names)]
    source = (write_lines if suffix == "jsonl" else write_parquet)(tmp_path / f"rows.{suffix}", rows)
    train, validation, summary = split_into(tmp_path / "out", source, 8)
    assert len(rows_in(validation)) == 8 and len(rows_in(train)) == 8
    assert videos_in(validation) <= {f"{number}.mp4" for number in range(1, 10)}  # 0 shares a row with 14
    (lost,) = (line for line in summary.splitlines() if line.startswith("missing file"))
    assert lost.removeprefix("missing file").split() == ["6", "0", "0.0"]
    assert "rows with a missing file (6) and those that share a video with them are not held out; " in summary


def test_rows_without_their_subtitles_are_not_held_out(tmp_path):
    (tmp_path / "a.srt").touch()
    subtitles = ["a.srt", "a.srt", *["lost.srt"] * 6]
    rows = [row("mcq", f"v{n}.mp4", number=n) for n in range(8)]
    for n, (each, name) in enumerate(zip(rows, subtitles, strict=True)):
        (tmp_path / f"v{n}.mp4").touch()
        each["videos"][0]["subtitles"] = name
    _, validation, summary = split_into(tmp_path / "out", write_lines(tmp_path / "rows.jsonl", rows), 1)
    assert [each["index"] < 2 for each in rows_in(validation)] == [True] and "missing file (6)" in summary


def test_without_any_video_rows_are_held_out_and_the_summary_warns(source, tmp_path):
    _, validation, summary = split_into(tmp_path / "out", source, 42)
    assert len(rows_in(validation)) == 42
    assert "not checked: none of the 29 files that the rows name is here" in summary


def test_traces_are_split_with_calls_and_without(tmp_path):
    turns = [ANSWER_TURN if number % 3 else CALL_TURN for number in range(90)]
    rows = [sft_row(dialogue([media("video", f"{n}.mp4"), text("Q")], turn)) for n, turn in enumerate(turns)]
    _, validation, _ = split_into(tmp_path / "out", write_lines(tmp_path / "rows.jsonl", rows), 9)
    assert Counter("tool_call" in line for line in validation.read_text().splitlines()) == {True: 3, False: 6}


def test_a_run_reads_both_files_and_existing_files_are_kept(source, tmp_path):
    for number in range(29):
        (tmp_path / f"v{number}.mp4").touch()
    train, validation, _ = split_into(tmp_path, source, 42)
    read = [load_prompts(path, video_root="", max_bad_frac=0).prompts for path in (train, validation)]
    assert [len(prompts) for prompts in read] == [161, 42]
    content = validation.read_bytes()
    train.unlink()
    with pytest.raises(ValueError, match=r"validation\.\w+ already exists; remove it"):
        split_into(tmp_path, source, 7)
    assert validation.read_bytes() == content and not train.exists()


def test_a_failed_split_leaves_no_files(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    write_parquet(source / "a.parquet", QUESTIONS)
    write_parquet(source / "b.parquet", [each | {"more": 1} for each in QUESTIONS])
    with pytest.raises(ValueError, match=r"b.parquet and a.parquet in .* have different columns"):
        split(str(source), out / "train.parquet", out / "validation.parquet", 42, 0)
    assert not list(out.iterdir())
    with pytest.raises(ValueError, match=r"--validation .* is inside of --src .* its rows twice; choose"):
        split(str(source), out / "train.parquet", source / "more" / "validation.parquet", 42, 0)


@pytest.mark.parametrize(
    ("train", "num_rows", "message"),
    [
        ("t.parquet", 3, r"--train .*t.parquet must end with .jsonl"),
        ("v.jsonl", 3, "are both"),
        ("t.jsonl", 0, r"--num-rows 0 must be at least 1 and fewer than the 203 usable rows"),
        ("t.jsonl", 203, "fewer than the 203 usable rows"),
        ("t.jsonl", 1, r"the smallest such set has 7 of 203 rows"),
    ],
)
def test_an_impossible_split_is_rejected(tmp_path, train, num_rows, message):
    source = write_lines(tmp_path / "rows.jsonl", QUESTIONS)
    with pytest.raises(ValueError, match=message):
        split(str(source), tmp_path / train, tmp_path / "v.jsonl", num_rows, 0)
    assert not (tmp_path / "v.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "", "videos": [], "extra_info": {}}], "none of the 1 rows"),
        ([rl_row(), rl_row()], r"all usable rows \(2\) share videos, .*; add rows with other videos"),
        (None, "rows.jsonl does not exist$"),
    ],
)
def test_without_rows_of_two_sets_nothing_is_held_out(rows, message, tmp_path):
    source = tmp_path / "rows.jsonl"
    if rows is not None:
        write_lines(source, rows)
    with pytest.raises(ValueError, match=message):
        split(str(source), tmp_path / "t.jsonl", tmp_path / "v.jsonl", 1, 0)


def test_the_command_prints_counts_paths_and_the_root_of_relative_videos(source, tmp_path, monkeypatch, capsys):
    names = [f"{tmp_path}/out/{name}{source.suffix}" for name in ("t", "v")]
    arguments = ["split", "--src", str(source), "--train", names[0], "--validation", names[1], "--num-rows", "42"]
    monkeypatch.setattr(sys, "argv", ["data", *arguments])
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
    command.main()
    *_, rows, videos, train, validation, _, advice = capsys.readouterr().out.splitlines()
    assert [rows.split(), videos.split()] == [["rows", "203", "42", "42.0"], ["videos", "29", "6"]]
    assert [train, validation] == names and f"data.video_root={tmp_path}" in advice
    assert "data.video_root" not in split_into(tmp_path, source, 42)[2]


ANY_KIND = st.sampled_from(["mcq", "tvg", "oe", *LEFT_OUT])
ROWS = st.lists(st.tuples(ANY_KIND, st.frozensets(st.integers(0, 30), max_size=3)), min_size=2, max_size=60)


@given(ROWS, st.integers(1, 30), st.integers(0, 5))
def test_no_video_is_ever_on_both_sides_and_training_keeps_usable_rows(drawn, num_rows, seed):
    rows = [Row(kind, frozenset(map(str, videos)) if kind != UNUSABLE else frozenset()) for kind, videos in drawn]
    try:
        chosen = choose(rows, num_rows, seed)
    except ValueError:
        return
    assert not chosen.videos(True) & chosen.videos(False)
    usable = sum(each.kind not in LEFT_OUT for each in rows)
    assert 0 < chosen.num_held_out < usable
    assert chosen.num_held_out < 2 * num_rows + len(chosen.quotas)
