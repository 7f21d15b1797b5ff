"""Held-out rows: no video on both sides, every kind its share, rows as they stood, nothing overwritten."""

import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data import __main__ as command
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.split import UNUSABLE, Row, choose, split

ANSWERS = {"mcq": "B", "tvg": "[2.5, 7]", "oe": "a cello"}


def row(question_type: str, *videos: str, number: int = 0) -> dict:
    return {
        "prompt": [{"role": "user", "content": f"<video>\nQuestion {number}?"}],
        "videos": [{"video": video} for video in videos],
        "extra_info": json.dumps({"answer": ANSWERS[question_type], "question_type": question_type}),
        "index": number,
    }


def lines(path: Path, rows: list) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return path


def split_into(directory: Path, source: Path, num_rows: int, seed: int = 0) -> tuple[Path, Path, str]:
    directory.mkdir(exist_ok=True)
    train, validation = (directory / f"{name}{source.suffix}" for name in ("train", "validation"))
    return train, validation, split(str(source), train, validation, num_rows, seed)


def rows_in(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def videos_in(path: Path) -> set[str]:
    return {video["video"] for one in rows_in(path) for video in one["videos"]}


@pytest.fixture
def world() -> list[dict]:
    """Seven questions of three types about each of 29 videos."""
    types = ("mcq", "mcq", "mcq", "tvg", "tvg", "oe", "oe")
    pairs = [(kind, f"v{video}.mp4") for video in range(29) for kind in types]
    return [row(kind, video, number=number) for number, (kind, video) in enumerate(pairs)]


@pytest.fixture(params=["parquet", "jsonl"])
def source(request, tmp_path, world) -> Path:
    if request.param == "jsonl":
        return lines(tmp_path / "rows.jsonl", world)
    pq.write_table(pa.Table.from_pylist(world).replace_schema_metadata({"made": "by hand"}), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_every_row_is_in_one_file_as_it_stood_and_no_video_is_in_both(source, tmp_path, world):
    train, validation, _ = split_into(tmp_path / "out", source, 42)
    assert not videos_in(train) & videos_in(validation)
    parts = [rows_in(train), rows_in(validation)]
    assert sorted(parts[0] + parts[1], key=lambda one: one["index"]) == world
    assert all(part == sorted(part, key=lambda one: one["index"]) for part in parts) and len(parts[1]) == 42
    if source.suffix == ".parquet":
        assert pq.read_schema(validation).equals(pq.read_schema(source), check_metadata=True)


def test_of_every_question_type_the_same_share_is_held_out(tmp_path):
    kinds = ["mcq"] * 500 + ["tvg"] * 300 + ["oe"] * 200
    source = lines(tmp_path / "rows.jsonl", [row(kind, f"{n}.mp4", number=n) for n, kind in enumerate(kinds)])
    _, validation, said = split_into(tmp_path / "out", source, 50)
    held_out = Counter(json.loads(one["extra_info"])["question_type"] for one in rows_in(validation))
    assert held_out == {"mcq": 25, "tvg": 15, "oe": 10}
    assert [line.split() for line in said.splitlines()[1:4]] == [
        ["mcq", "500", "25", "25.0"],
        ["oe", "200", "10", "10.0"],
        ["tvg", "300", "15", "15.0"],
    ]


def test_fewer_rows_than_kinds_can_be_held_out(tmp_path):
    source = lines(tmp_path / "rows.jsonl", [row(kind, f"{kind}.mp4") for kind in ANSWERS])
    train, validation, _ = split_into(tmp_path / "out", source, 1)
    assert [len(rows_in(train)), len(rows_in(validation))] == [2, 1]


def test_a_seed_gives_the_same_files_and_another_seed_other_videos(source, tmp_path):
    first, again, other = (split_into(tmp_path / f"out{n}", source, 42, seed) for n, seed in enumerate((0, 0, 1)))
    assert [path.read_bytes() for path in first[:2]] == [path.read_bytes() for path in again[:2]]
    assert videos_in(first[1]) != videos_in(other[1])


def test_one_file_in_several_spellings_is_one_video(tmp_path):
    spellings = ("a b.mp4", "./a b.mp4", f"{tmp_path}/x/../a b.mp4", f"file://{tmp_path}/a%20b.mp4", "file://a b.mp4")
    rows = [row("oe", name) for name in spellings] + [row("oe", "other.mp4"), row("oe", "https://host/a b.mp4")]
    train, validation, _ = split_into(tmp_path / "out", lines(tmp_path / "rows.jsonl", rows), 2)
    assert len(rows_in(train)) == 5 and videos_in(validation) == {"other.mp4", "https://host/a b.mp4"}


def test_rows_that_a_run_would_leave_out_stay_in_the_training_file(tmp_path):
    bad = [{"prompt": "?"}, "{", row("mcq", "a.mp4") | {"extra_info": "{}"}]
    rows = [*bad, *(row("oe", f"{n}.mp4") for n in range(10))]
    train, validation, said = split_into(tmp_path / "out", lines(tmp_path / "rows.jsonl", rows), 3)
    assert train.read_text().splitlines()[:2] == [json.dumps(bad[0]), "{"]
    assert len(validation.read_text().splitlines()) == 3 and [UNUSABLE, "3", "0", "0.0"] in [
        [line[: len(UNUSABLE)], *line[len(UNUSABLE) :].split()] for line in said.splitlines()
    ]


def test_traces_are_split_with_calls_and_without(tmp_path):
    call = '<think>\nHm.\n</think>\n<tool_call>{"name": "crop_video", "arguments": {}}</tool_call>'

    def trace(number: int, said: str) -> dict:
        shown = [{"type": "video_url", "video_url": {"url": f"{number}.mp4"}}, {"type": "text", "text": "What?"}]
        return {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]}

    rows = [trace(number, call if number % 3 == 0 else "<answer>a</answer>") for number in range(90)]
    _, validation, _ = split_into(tmp_path / "out", lines(tmp_path / "rows.jsonl", rows), 9)
    assert Counter("tool_call" in line for line in validation.read_text().splitlines()) == {True: 3, False: 6}


def test_a_run_reads_both_files(source, tmp_path):
    for number in range(29):
        (tmp_path / f"v{number}.mp4").touch()
    parts = split_into(tmp_path, source, 42)[:2]
    read = [load_prompts(path, video_root="", max_bad_frac=0).prompts for path in parts]
    assert [len(part) for part in read] == [161, 42]


def test_files_that_are_there_are_kept(source, tmp_path, world):
    train, validation, _ = split_into(tmp_path, source, 42)
    before = validation.read_bytes()
    train.unlink()
    with pytest.raises(ValueError, match=r"validation\.\w+ already exists; remove it"):
        split_into(tmp_path, source, 7)
    assert validation.read_bytes() == before and not train.exists()


def test_a_split_that_fails_leaves_nothing_behind(tmp_path, world):
    for name, rows in (("a", world), ("b", [one | {"more": 1} for one in world])):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"b.parquet and a.parquet in .* have different columns"):
        split(str(tmp_path), out / "train.parquet", out / "validation.parquet", 42, 0)
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("train", "num_rows", "problem"),
    [
        ("t.parquet", 3, r"--train .*t.parquet must end with .jsonl"),
        ("v.jsonl", 3, "are both"),
        ("t.jsonl", 0, r"--num-rows 0 must be at least 1 and fewer than the 203 usable rows"),
        ("t.jsonl", 203, "fewer than the 203 usable rows"),
        ("t.jsonl", 1, r"the smallest such set has 7 of 203 rows"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_way_out(tmp_path, world, train, num_rows, problem):
    source = lines(tmp_path / "rows.jsonl", world)
    with pytest.raises(ValueError, match=problem):
        split(str(source), tmp_path / train, tmp_path / "v.jsonl", num_rows, 0)
    assert not (tmp_path / "v.jsonl").exists()


def test_relative_paths_that_would_lead_elsewhere_are_pointed_out(source, tmp_path):
    assert "data.video_root" in split_into(tmp_path / "out", source, 42)[2]
    assert "data.video_root" not in split_into(tmp_path, source, 42)[2]


def test_the_command_says_what_it_did(source, tmp_path, monkeypatch, capsys):
    names = [f"{tmp_path}/{name}{source.suffix}" for name in ("t", "v")]
    arguments = ["split", "--src", str(source), "--train", names[0], "--validation", names[1], "--num-rows", "42"]
    monkeypatch.setattr(sys, "argv", ["data", *arguments])
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)  # the test's own process goes on
    command.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said[-4:]] == [
        ["rows", "203", "42", "42.0"],
        ["videos", "29", "6"],
        *([n] for n in names),
    ]


KINDS = st.sampled_from(["mcq", "tvg", "oe", UNUSABLE])
ROWS = st.lists(st.tuples(KINDS, st.frozensets(st.integers(0, 30), max_size=3)), min_size=2, max_size=60)


@given(ROWS, st.integers(1, 30), st.integers(0, 5))
def test_no_video_is_ever_on_both_sides_and_something_is_left_to_train_on(drawn, num_rows, seed):
    rows = [Row(kind, frozenset(map(str, videos)) if kind != UNUSABLE else frozenset()) for kind, videos in drawn]
    try:
        found = choose(rows, num_rows, seed)
    except ValueError:
        return
    assert not found.videos(True) & found.videos(False)
    usable = sum(one.kind != UNUSABLE for one in rows)
    assert 0 < found.num_held_out < usable
    assert found.num_held_out < 2 * num_rows + len(found.quotas)
