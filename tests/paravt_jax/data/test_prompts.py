"""Published rows become prompts; what cannot be used is counted with its reason and never lost in silence."""

import contextlib
import json
import logging
import os
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.rows import unique_id


def row(answer="B", question_type="mcq", *, video="a.mp4", question="<video>\nWhich one?", **other) -> dict:
    return {
        "prompt": [{"role": "user", "content": question}],
        "videos": [{"video": video}],
        "extra_info": json.dumps({"answer": answer, "question_type": question_type}),
        **other,
    }


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows) + "\n")
    return path


def load(path: Path, video_root: str = "", max_bad_frac: float = 0.0, allow_outside: bool = False):
    return load_prompts(str(path), video_root=video_root, max_bad_frac=max_bad_frac, allow_outside=allow_outside)


@pytest.fixture
def here(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"frames")
    return tmp_path


def test_a_published_row_becomes_a_prompt(here):
    rows = [
        row("[2.5, 7]", "tvg", question="<video>\nWhen does it rain?", video="b.mp4"),
        row("a red door", "oe", question="What is opened?"),
    ]
    found = load(write_parquet(here / "rl.parquet", rows))
    assert found.bad == {}
    assert [(p.question, p.videos, p.answer, p.question_type) for p in found.prompts] == [
        ("<video>\nWhen does it rain?", (f"{here}/b.mp4",), "[2.5, 7]", "tvg"),
        ("What is opened?", (f"{here}/a.mp4",), "a red door", "oe"),
    ]


def test_parquet_and_json_lines_with_extra_info_as_text_or_object_give_the_same_prompts(here):
    rows = [row("A"), row("4", "oe"), row("3 to 5", "tvg", video="b.mp4"), row("A")]
    objects = [one | {"extra_info": json.loads(one["extra_info"]) | {"source": "x"}} for one in rows]
    sets = [load(write_parquet(here / "rl.parquet", rows)), load(write_lines(here / "rl.jsonl", rows))]
    assert sets[0] == sets[1] == load(write_parquet(here / "objects.parquet", objects))


def test_an_answer_that_is_an_interval_or_a_number_in_json_is_read_as_its_text(here):
    rows = [row([2.5, 7], "tvg"), row(4, "oe")]
    assert [prompt.answer for prompt in load(write_lines(here / "rl.jsonl", rows)).prompts] == ["[2.5, 7]", "4"]


def test_only_the_last_user_message_is_the_question(here):
    said = [("system", "You may crop."), ("user", "Hello"), ("assistant", "Yes?"), ("user", "<video>Which?")]
    rows = [row(prompt=[{"role": role, "content": text} for role, text in said])]
    assert load(write_parquet(here / "rl.parquet", rows)).prompts[0].question == "<video>Which?"


def test_a_video_is_found_however_its_path_is_written(here):
    odd = here / "a b%20c.mp4"  # the release writes such a path behind file:// as it stands
    odd.write_bytes(b"frames")
    names = [str(odd), f"file://{odd}", f"file://{quote(str(odd))}", odd.name, f"file://{odd.name}"]
    found = load(write_lines(here / "rl.jsonl", [row(video=name) for name in names]))
    assert {prompt.videos for prompt in found.prompts} == {(str(odd),)}


def test_relative_videos_begin_from_the_root_or_from_the_rows(here, monkeypatch):
    (here / "rows").mkdir()
    rows = write_lines(here / "rows" / "rl.jsonl", [row()])
    assert load(rows, video_root=str(here)).prompts[0].videos == (f"{here}/a.mp4",)
    (here / "rows" / "a.mp4").write_bytes(b"frames")
    monkeypatch.chdir(here)
    assert load(Path("rows/rl.jsonl")).prompts[0].videos == (f"{here}/rows/a.mp4",)


@pytest.fixture
def root(here):
    """A root of its own, itself a link, with a video and with a link that leads out of it."""
    (here / "real").mkdir()
    (here / "real" / "in.mp4").write_bytes(b"frames")
    (here / "real" / "link.mp4").symlink_to(here / "a.mp4")
    (here / "root").symlink_to(here / "real")
    return here / "root"


def test_a_video_outside_of_the_root_makes_a_bad_row_that_says_how_to_allow_it(here, root):
    ways_out = ["../a.mp4", "file://%2e%2e/a.mp4", "link.mp4", str(here / "a.mp4"), f"file://{here}/a.mp4"]
    ways_in = ["in.mp4", "../real/in.mp4", str(here / "real" / "in.mp4"), str(root / "in.mp4")]
    rows = write_lines(here / "rl.jsonl", [row(video=video) for video in [*ways_in, *ways_out]])
    found = load(rows, video_root=str(root), max_bad_frac=0.9)
    assert found.bad == {"file outside of data.video_root": len(ways_out)} and len(found.prompts) == len(ways_in)
    with pytest.raises(ValueError, match=r"a\.mp4, while data\.video_root=.*set data\.allow_outside=true"):
        load(rows, video_root=str(root))
    assert load(rows, video_root=str(root), allow_outside=True).bad == {}


def test_files_of_the_hubs_cache_are_links_to_its_blobs(here):
    repository = here / "datasets--ParaVT--ParaVT-Source"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_bytes(b"frames")
    (snapshot / "in.mp4").symlink_to("../../blobs/abc")
    (snapshot / "out.mp4").symlink_to(here / "a.mp4")
    rows = write_lines(here / "rl.jsonl", [row(video=video) for video in ("in.mp4", "out.mp4")])
    found = load(rows, video_root=str(snapshot), max_bad_frac=0.9)
    assert len(found.prompts) == 1 and found.bad == {"file outside of data.video_root": 1}


def test_subtitles_are_those_that_the_row_names_or_those_beside_the_video(here, root):
    (here / "a.srt").touch()
    (here / "real" / "in.srt").touch()
    (here / "real" / "own.srt").touch()
    named = row(video="in.mp4") | {"videos": [{"video": "in.mp4", "subtitles": "own.srt"}]}
    found = load(write_parquet(here / "rl.parquet", [row(video="in.mp4"), named]), video_root=str(root))
    assert [prompt.subtitles for prompt in found.prompts] == [(f"{root}/in.srt",), (f"{root}/own.srt",)]
    assert load(write_lines(here / "rl.jsonl", [row(video="b.mp4")])).prompts[0].subtitles == ("",)


def test_subtitles_outside_of_the_root_are_not_read(here, root):
    (here / "secret.srt").touch()
    (here / "real" / "in.srt").symlink_to(here / "secret.srt")
    named = [
        row(video="in.mp4") | {"videos": [{"video": "in.mp4", "subtitles": way}]} for way in ("../secret.srt", "in.srt")
    ]
    found = load(write_lines(here / "rl.jsonl", [row(video="in.mp4"), *named]), video_root=str(root), max_bad_frac=0.9)
    assert [prompt.subtitles for prompt in found.prompts] == [("",)]
    assert found.bad == {"file outside of data.video_root": 2}


def test_without_a_root_a_video_may_lie_anywhere(here, root):
    rows = [row(video=video) for video in ("../a.mp4", str(here / "a.mp4"), "link.mp4")]
    assert load(write_lines(root / "rl.jsonl", rows)).bad == {}


def test_a_directory_is_read_in_the_order_of_its_names(here):
    for number in (1, 0, 2):
        write_parquet(here / f"train-{number}.parquet", [row(index=number)])
    (here / "README.md").write_text("# rows")
    found = load(here)
    assert [prompt.id for prompt in found.prompts] == ["0", "1", "2"]
    assert found.prompts[0].videos == (f"{here}/a.mp4",)


def test_the_id_follows_from_the_content_and_not_from_the_host(here):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.mp4").write_bytes(b"frames")
    rows = [row("A"), row("B"), row("A", question="Which, then?")]
    ids = [prompt.id for prompt in load(write_parquet(here / "rl.parquet", rows)).prompts]
    moved = [dict(r, videos=[{"video": f"file://{elsewhere}/a.mp4"}]) for r in reversed(rows)]
    assert [prompt.id for prompt in load(write_lines(here / "rl.jsonl", moved)).prompts] == ids[::-1]
    # blake2b-64 of ["<video>\nWhich one?", ["a.mp4"], "A", "mcq"]: another value would break every resume
    assert len(set(ids)) == 3 and ids[0] == "d06b8cb53017f690"


def test_a_rows_own_id_is_kept_and_made_unique(here):
    rows = [row(id="x"), row(id="x-2"), row(id="x"), row(id=""), row(), row(index=0), row(id=0)]
    ids = [prompt.id for prompt in load(write_lines(here / "rl.jsonl", rows)).prompts]
    assert ids[:3] == ["x", "x-2", "x-3"] and ids[5:] == ["0", "0-2"]
    assert ids[4] == f"{ids[3]}-2" and len(set(ids)) == 7


BAD_ROWS = {
    "missing file": [row(video=name) for name in ("c.mp4", "/nowhere/a.mp4", ".")],
    "impossible path": [row(video=name) for name in ("x" * 5000, "a/" * 3000, "a.mp4\0")],
    "no video": [row(videos=[]), row(videos=None)],
    "more <video> than videos": [row(question="<video><video> Which?")],
    "empty answer": [row(" "), row(None), row(extra_info={"question_type": "mcq"})],
    "id too long": [row(id="x" * 257), row(index="x" * 10**6)],
    "text too long": [row(question="Which? " * 15_000), row("red " * 30_000, "oe")],
    "too many frames": [row(videos=[{"video": "a.mp4"}] * 4097)],
    "empty question": [row(question="<video>\n")],
    "unknown question type": [row("A", "mc"), row("A", None), row("A", ["mcq"]), row(extra_info={"answer": "A"})],
    "unreadable ground truth": [row("a man"), row("A and B"), row("[7, 2]", "tvg"), row("soon", "tvg")],
    "wrong schema": [
        "{",
        "[1, 2]",
        "\x00\x01",
        row({"text": "A"}),
        row(extra_info="answer: A"),
        row(extra_info=None),
        row(prompt="Which one?"),
        row(prompt=[]),
        row(prompt=[{"role": "system", "content": "Which?"}]),
        row(prompt=[{"role": "user", "content": [{"type": "text", "text": "Which?"}]}]),
        row(videos=["a.mp4"]),
        row(videos=[{"path": "a.mp4"}]),
        row(video="half\ud800.mp4"),
    ],
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_counted_by_its_reason_and_dropped(here, reason):
    rows = [row("A"), *BAD_ROWS[reason], row("C")]
    found = load(write_lines(here / "rl.jsonl", rows), max_bad_frac=0.99)
    assert found.bad == {reason: len(BAD_ROWS[reason])}
    assert [prompt.answer for prompt in found.prompts] == ["A", "C"]


def test_too_many_bad_rows_are_an_error_with_counts_and_examples(here):
    rows = [row(), row(video="gone.mp4"), row("A", "quiz"), row(video="lost.mp4"), *[row()] * 3]
    path = write_lines(here / "rl.jsonl", rows)  # 3 of 7
    with pytest.raises(ValueError, match="cannot be used") as raised:
        load(path, max_bad_frac=0.42)
    message = str(raised.value)
    assert f"{path}: 3 of 7 rows" in message and "data.max_bad_frac=0.42" in message
    assert f"missing file: 2, for example rl.jsonl line 2: {here}/gone.mp4" in message
    assert "unknown question type: 1, for example rl.jsonl line 3: 'quiz', expected mcq, tvg, oe" in message
    with pytest.raises(ValueError, match="none of 2 rows can be used"):
        load(write_lines(here / "rl.jsonl", [row(""), row("")]), max_bad_frac=1.0)


def test_as_many_bad_rows_as_allowed_are_logged_and_dropped(here, caplog):
    rows = [row()] * 71 + [row(video="gone.mp4")] * 29  # 0.29 * 100 is below 29 in floating point
    with caplog.at_level(logging.WARNING):
        assert load(write_lines(here / "rl.jsonl", rows), max_bad_frac=0.29).bad == {"missing file": 29}
    assert "29 of 100 rows are dropped" in caplog.text and f"rl.jsonl line 72: {here}/gone.mp4" in caplog.text


def test_a_file_that_holds_no_prompts_is_refused_in_one_sentence(here):
    (here / "text.parquet").write_text("no parquet at all")
    whole = write_parquet(here / "whole.parquet", [row(question="Which? " * 9)] * 20).read_bytes()
    (here / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (here / "none.jsonl").write_text("\n\n")
    (here / "empty").mkdir()
    (here / "rows.csv").write_text("prompt,videos\n")
    pq.write_table(pa.table({"messages": ["[]"]}), here / "sft.parquet")
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), here / "none.parquet")
    table, no_text = pa.Table.from_pylist([row()]), pc.cast(pa.array([b"\xff"]), pa.string(), safe=False)
    pq.write_table(table.set_column(2, "extra_info", no_text), here / "bytes.parquet")
    expected = {
        "gone.parquet": "does not exist",
        "text.parquet": "cannot be read as parquet: ",
        "cut.parquet": "cannot be read as parquet: ",
        "bytes.parquet": "cannot be read as parquet: 'utf-8' codec can't decode byte 0xff",
        "none.jsonl": "has no rows",
        "none.parquet": "has no rows",
        "empty": r"is a directory without \*\.parquet files",
        "rows.csv": r"must be a \.parquet or \.jsonl file",
        "sft.parquet": "has no column prompt, videos, extra_info; it has messages",
    }
    for name, problem in expected.items():
        with pytest.raises(ValueError, match=problem) as raised:
            load(here / name, max_bad_frac=1.0)
        assert str(here / name) in str(raised.value) and "\n" not in str(raised.value)


def test_equal_ids_are_told_apart_in_a_number_of_looks_that_grows_with_the_rows():
    class Counting(dict):
        num_looks = 0

        def __contains__(self, name):
            self.num_looks += 1
            return super().__contains__(name)

    taken = Counting()
    names = [unique_id("a", taken) for _ in range(500)] + [unique_id("a-3", taken), unique_id("b", taken)]
    assert names[:3] == ["a", "a-2", "a-3"] and names[-2:] == ["a-3-2", "b"] and len(set(names)) == 502
    assert taken.num_looks < 3 * 502


@pytest.mark.parametrize("name_of_row", ["a.mp4", "gone.mp4"])
def test_a_file_is_looked_for_once_however_many_rows_name_it(here, monkeypatch, name_of_row):
    lines = write_lines(here / "rl.jsonl", [row(question=f"Which of {n}?", video=name_of_row) for n in range(50)])
    looked: Counter[str] = Counter()
    stat = os.stat

    def counted(path, **how):
        looked[str(path)] += 1
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", counted)
    with contextlib.suppress(ValueError):  # where no row has its video
        load(lines, max_bad_frac=1.0)
    assert {name: count for name, count in looked.items() if "rl" not in name and count > 2} == {}
    assert sum(looked.values()) < 20


@pytest.mark.parametrize("key", ["prompt", "videos", "extra_info", "id"])
@pytest.mark.parametrize("depth", [500, 980, 100_000])
def test_a_row_that_is_nested_too_deep_is_a_bad_row(here, key, depth):
    deep = json.dumps(row("A", **{key: "HERE"})).replace('"HERE"', "[" * depth + "]" * depth)
    answers = json.dumps(row(extra_info={"answer": "HERE", "question_type": "mcq"}))
    answers = answers.replace('"HERE"', "[" * depth + "]" * depth)
    found = load(write_lines(here / "rl.jsonl", [row("A"), deep, answers]), max_bad_frac=0.7)
    assert len(found.prompts) + sum(found.bad.values()) == 3 and found.prompts[0].answer == "A"
    assert sum(found.bad.values()) >= (1 if key == "id" and depth < 1000 else 2)
