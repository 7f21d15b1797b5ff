"""Published rows become prompts; unusable rows are counted by reason."""

import contextlib
import json
import logging
import math
import os
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from data_rows import messages, rl_row, sft_row, write_lines, write_parquet

from paravt_jax.data.prompts import check_row_messages, load_prompts, remarks_on
from paravt_jax.data.rows import unique_id


def load(path: Path, video_root: str = "", max_bad_frac: float = 0.0, **options):
    return load_prompts(str(path), video_root=video_root, max_bad_frac=max_bad_frac, **options)


def load_rows(directory: Path, *rows: object, **options):
    return load(write_lines(directory / "rl.jsonl", rows), **options)


def test_published_rows_become_prompts(video_dir):
    chat = messages(("system", "You may crop."), ("user", "Hello"), ("assistant", "Yes?"), ("user", "<video>Which?"))
    rows = [
        rl_row("[2.5, 7]", "tvg", question="<video>\nWhen does it rain?", video="b.mp4"),
        rl_row("a red door", "oe", question="What is opened?"),
        rl_row(prompt=chat),
    ]
    loaded = load(write_parquet(video_dir / "rl.parquet", rows))
    assert loaded.bad == {}
    assert [(p.question, p.videos, p.answer, p.question_type) for p in loaded.prompts] == [
        ("<video>\nWhen does it rain?", (f"{video_dir}/b.mp4",), "[2.5, 7]", "tvg"),
        ("What is opened?", (f"{video_dir}/a.mp4",), "a red door", "oe"),
        ("<video>Which?", (f"{video_dir}/a.mp4",), "B", "mcq"),
    ]


def test_parquet_and_json_lines_with_extra_info_as_text_or_object_give_the_same_prompts(video_dir):
    rows = [rl_row("A"), rl_row("4", "oe"), rl_row("3 to 5", "tvg", video="b.mp4"), rl_row("A")]
    objects = [row | {"extra_info": json.loads(row["extra_info"]) | {"source": "x"}} for row in rows]
    loaded = load(write_parquet(video_dir / "rl.parquet", rows))
    assert loaded == load_rows(video_dir, *rows) == load(write_parquet(video_dir / "objects.parquet", objects))


def test_an_answer_that_is_a_json_number_or_list_is_read_as_text(video_dir):
    loaded = load_rows(video_dir, rl_row([2.5, 7], "tvg"), rl_row(4, "oe"))
    assert [prompt.answer for prompt in loaded.prompts] == ["[2.5, 7]", "4"]


def test_every_spelling_of_a_path_leads_to_the_video(video_dir):
    odd = video_dir / "a b%20c.mp4"  # after file://, the release does not percent-encode
    odd.write_bytes(b"frames")
    names = [str(odd), f"file://{odd}", f"file://{quote(str(odd))}", odd.name, f"file://{odd.name}"]
    loaded = load_rows(video_dir, *(rl_row(video=name) for name in names))
    assert {prompt.videos for prompt in loaded.prompts} == {(str(odd),)}


def test_relative_videos_start_from_the_root_or_from_the_rows(video_dir, monkeypatch):
    (video_dir / "rows").mkdir()
    path = write_lines(video_dir / "rows" / "rl.jsonl", [rl_row()])
    assert load(path, video_root=str(video_dir)).prompts[0].videos == (f"{video_dir}/a.mp4",)
    (video_dir / "rows" / "a.mp4").write_bytes(b"frames")
    monkeypatch.chdir(video_dir)
    assert load(Path("rows/rl.jsonl")).prompts[0].videos == (f"{video_dir}/rows/a.mp4",)


@pytest.fixture
def root(video_dir):
    """A video root that is a symlink, with a video and a link to a video outside."""
    (video_dir / "real").mkdir()
    (video_dir / "real" / "in.mp4").write_bytes(b"frames")
    (video_dir / "real" / "link.mp4").symlink_to(video_dir / "a.mp4")
    (video_dir / "root").symlink_to(video_dir / "real")
    return video_dir / "root"


def test_a_video_outside_of_the_root_makes_a_bad_row_that_names_the_setting(video_dir, root):
    outside = ["../a.mp4", "file://%2e%2e/a.mp4", "link.mp4", f"{video_dir}/a.mp4", f"file://{video_dir}/a.mp4"]
    inside = ["in.mp4", "../real/in.mp4", f"{video_dir}/real/in.mp4", f"{root}/in.mp4"]
    rows = [rl_row(video=video) for video in [*inside, *outside]]
    loaded = load_rows(video_dir, *rows, video_root=str(root), max_bad_frac=0.9)
    assert loaded.bad == {"file outside of data.video_root": len(outside)} and len(loaded.prompts) == len(inside)
    with pytest.raises(ValueError, match=r"a\.mp4, while data\.video_root=.*set data\.allow_outside=true"):
        load_rows(video_dir, *rows, video_root=str(root))
    assert load_rows(video_dir, *rows, video_root=str(root), allow_outside=True).bad == {}
    assert load_rows(root, *(rl_row(video=video) for video in ("../a.mp4", f"{video_dir}/a.mp4", "link.mp4"))).bad == {}


def test_a_row_whose_messages_cannot_be_shown_is_named(video_dir):
    asked = messages(("user", "<video>Which?"))
    odd = messages(("user", "<video>Which?"), ("assistant", "A")), messages(("tool", "x" * 10**5), ("user", "Which?"))
    prompts = load_rows(video_dir, rl_row(prompt=asked), *(rl_row(prompt=each) for each in odd)).prompts
    check_row_messages(prompts[:1], "rl.jsonl")
    with pytest.raises(ValueError, match=r"rl\.jsonl: 2 of 3 rows, .* do not end with the user's message"):
        check_row_messages(prompts, "rl.jsonl")


def test_links_to_blobs_of_the_hubs_cache_are_inside_of_the_root(video_dir):
    repository = video_dir / "datasets--ParaVT--ParaVT-Source"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_bytes(b"frames")
    (snapshot / "in.mp4").symlink_to("../../blobs/abc")
    (snapshot / "out.mp4").symlink_to(video_dir / "a.mp4")
    rows = [rl_row(video=video) for video in ("in.mp4", "out.mp4")]
    loaded = load_rows(video_dir, *rows, video_root=str(snapshot), max_bad_frac=0.9)
    assert len(loaded.prompts) == 1 and loaded.bad == {"file outside of data.video_root": 1}


def with_subtitles(path: str) -> dict:
    return rl_row(videos=[{"video": "in.mp4", "subtitles": path}])


def test_subtitles_are_named_by_the_row_or_next_to_the_video(video_dir, root):
    for path in (video_dir / "a.srt", video_dir / "real" / "in.srt", video_dir / "real" / "own.srt"):
        path.touch()
    path = write_parquet(video_dir / "rl.parquet", [rl_row(video="in.mp4"), with_subtitles("own.srt")])
    subtitles = [prompt.subtitles for prompt in load(path, video_root=str(root)).prompts]
    assert subtitles == [(f"{root}/in.srt",), (f"{root}/own.srt",)]
    assert load_rows(video_dir, rl_row(video="b.mp4")).prompts[0].subtitles == ("",)


def test_subtitles_outside_of_the_root_are_not_read(video_dir, root):
    (video_dir / "secret.srt").touch()
    (video_dir / "real" / "in.srt").symlink_to(video_dir / "secret.srt")
    rows = [rl_row(video="in.mp4"), with_subtitles("../secret.srt"), with_subtitles("in.srt")]
    loaded = load_rows(video_dir, *rows, video_root=str(root), max_bad_frac=0.9)
    assert [prompt.subtitles for prompt in loaded.prompts] == [("",)]
    assert loaded.bad == {"file outside of data.video_root": 2}


def test_the_files_of_a_directory_are_read_in_the_order_of_their_names(video_dir):
    for number in (1, 0, 2):
        write_parquet(video_dir / f"train-{number}.parquet", [rl_row(index=number)])
    (video_dir / "README.md").write_text("# rows")
    loaded = load(video_dir)
    assert [prompt.id for prompt in loaded.prompts] == ["0", "1", "2"]
    assert loaded.prompts[0].videos == (f"{video_dir}/a.mp4",)


def test_the_id_depends_on_the_content_and_not_on_the_host(video_dir):
    moved = video_dir / "moved"
    moved.mkdir()
    (moved / "a.mp4").touch()
    rows = [rl_row("A"), rl_row("B"), rl_row("A", question="Which, then?")]
    ids = [prompt.id for prompt in load(write_parquet(video_dir / "rl.parquet", rows)).prompts]
    assert [prompt.id for prompt in load_rows(moved, *reversed(rows)).prompts] == ids[::-1]
    # blake2b-64 of ["<video>\nWhich one?", ["a.mp4"], "A", "mcq"]: another value would break every resume
    assert len(set(ids)) == 3 and ids[0] == "d06b8cb53017f690"


def test_a_rows_id_is_used_and_made_unique(video_dir):
    columns = [{"id": "x"}, {"id": "x-2"}, {"id": "x"}, {"id": ""}, {}, {"index": 0}, {"id": 0}]
    ids = [prompt.id for prompt in load_rows(video_dir, *(rl_row(**each) for each in columns)).prompts]
    assert ids[:3] == ["x", "x-2", "x-3"] and ids[5:] == ["0", "0-2"]
    assert ids[4] == f"{ids[3]}-2" and len(set(ids)) == 7


def deep_rows() -> list[str]:
    """Returns values nested too deeply for Python to process."""
    columns = [{"prompt": "DEEP"}, {"videos": "DEEP"}, {"extra_info": "DEEP"}]
    columns += [{"extra_info": {"answer": "DEEP", "question_type": "mcq"}}]
    rows = [(json.dumps(rl_row(**each)), depth) for each in columns for depth in (500, 980, 100_000)]
    rows += [(json.dumps(rl_row(id="DEEP")), 100_000)]
    return [row.replace('"DEEP"', "[" * depth + "]" * depth) for row, depth in rows]


OPTIONS = "A. a red lid\nB. a blue lid\nD. none of them"
BAD_ROWS = {
    "missing file": [rl_row(video=name) for name in ("c.mp4", "/nowhere/a.mp4", ".", "/")],
    "impossible path": [rl_row(video=name) for name in ("x" * 5000, "a/" * 3000, "a.mp4\0")],
    "no video": [rl_row(videos=[]), rl_row(videos=None)],
    "more <video> than videos": [rl_row(question="<video><video> Which?")],
    "empty answer": [rl_row(" "), rl_row(None), rl_row(extra_info={"question_type": "mcq"}), rl_row(math.nan, "oe")],
    "id too long": [rl_row(id="x" * 257), rl_row(index="x" * 10**6)],
    "text too long": [rl_row(question="Which? " * 15_000), rl_row("red " * 30_000, "oe")],
    "too many frames": [rl_row(videos=[{"video": "a.mp4"}] * 4097)],
    "empty question": [rl_row(question="<video>\n")],
    "unknown question type": [
        *(rl_row("A", question_type) for question_type in ("mc", None, ["mcq"])),
        rl_row(extra_info={"answer": "A"}),
    ],
    "unreadable ground truth": [rl_row("a man"), rl_row("A and B"), rl_row("[7, 2]", "tvg"), rl_row("soon", "tvg")],
    "answer outside of the options": [rl_row(a, question=f"<video>Which?\n{OPTIONS}") for a in ("E", "(C)", "C. it")],
    "wrong schema": [
        *("{", "[1, 2]", "\x00\x01", rl_row({"text": "A"}), rl_row(extra_info="answer: A"), rl_row(extra_info=None)),
        *(rl_row(prompt="Which one?"), rl_row(prompt=[]), rl_row(prompt=messages(("system", "Which?")))),
        rl_row(prompt=messages(("user", [{"type": "text", "text": "Which?"}]))),
        *(rl_row(videos=["a.mp4"]), rl_row(videos=[{"path": "a.mp4"}]), rl_row(video="half\ud800.mp4")),
        *(rl_row(videos=[{"video": "a.mp4", "subtitles": 5}]), rl_row(id="half\ud800"), rl_row(index="half\ud800")),
    ],
}


@pytest.mark.parametrize(
    "options", ["", "A. a lid\nB. two, or C. three", "(A) 1 (B) 2\n(C) 3", "A. 1  B. 2\nC. 3", OPTIONS]
)
def test_an_answer_is_accepted_wherever_its_option_is(video_dir, options):
    letter = "D" if options == OPTIONS else "C"
    assert load_rows(video_dir, rl_row(letter, question=f"<video>Which?\n{options}")).bad == {}


def test_a_file_of_traces_names_the_sft_command(video_dir):
    with pytest.raises(ValueError, match=r"rl\.jsonl line 1: a trace with messages, .* `paravt sft`; RL needs prompt"):
        load_rows(video_dir, sft_row())


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_counted_by_its_reason_and_dropped(video_dir, reason):
    rows = [rl_row("A"), *BAD_ROWS[reason], rl_row("C")]
    loaded = load_rows(video_dir, *rows, max_bad_frac=0.99)
    assert loaded.bad == {reason: len(BAD_ROWS[reason])}
    assert [prompt.answer for prompt in loaded.prompts] == ["A", "C"]
    with_lost = load_rows(video_dir, *rows, max_bad_frac=0.99, with_lost=True)
    assert len(with_lost.prompts) == (len(rows) if reason == "missing file" else 2)


def test_with_a_plugin_a_row_may_have_its_own_question_type_and_has_the_columns_that_the_plugin_takes(video_dir):
    rows = [
        rl_row(extra_info={"question_type": "caption", "answer": math.nan, "keywords": ["pan"]}),
        rl_row("A", keywords=["lid"]),
        *(rl_row("A", name, keywords=[]) for name in ("Caption", "a" * 33, "k4", None)),
        rl_row("A"),
        rl_row(None, keywords=[]),  # a question type with R_acc needs an answer
    ]
    path = write_lines(video_dir / "rl.jsonl", rows)
    loaded = load_prompts(path, video_root="", max_bad_frac=0.9, columns=["keywords"])
    caption, choice = ("caption", "", (("keywords", ["pan"]),)), ("mcq", "A", (("keywords", ["lid"]),))
    assert [(p.question_type, p.answer, p.columns) for p in loaded.prompts] == [caption, choice]
    assert loaded.bad == {"unknown question type": 4, "missing column": 1, "empty answer": 1}
    assert remarks_on("rl.jsonl", loaded.prompts) == ["rl.jsonl: only reward.plugin scores caption (1 row)"]
    parquet = write_parquet(video_dir / "rl.parquet", [rl_row("A", keywords=["lid"], more=1)])
    (prompt,) = load_prompts(parquet, video_root="", max_bad_frac=0.0, columns=["keywords"]).prompts
    assert prompt.columns == (("keywords", ["lid"]),)


def test_a_row_may_have_images_or_text_alone_instead_of_videos(video_dir):
    for name in ("a.png", "b.png"):
        (video_dir / name).touch()
    rows = [
        rl_row(question="<image>Which?", videos=[], images=["a.png", {"image": "b.png"}]),
        rl_row(question="Which?", videos=None),
        rl_row(question="Which?", images=["a.png"]),
        *(rl_row(question="Which?", videos=[], images=odd) for odd in ("a.png", [{}], [3], {"image": "a.png"}, 3)),
        rl_row(question="<image><image>Which?", videos=[], images=["a.png"]),
        rl_row(question="Which?", videos=[], images=["c.png"]),
    ]
    loaded = load_rows(video_dir, *rows, max_bad_frac=0.9)
    files = (f"{video_dir}/a.png", f"{video_dir}/b.png")
    assert [(p.videos, p.images, p.files) for p in loaded.prompts] == [((), files, files), ((), (), ())]
    assert loaded.bad == {"videos and images": 1, "wrong schema": 5, "more <image> than images": 1, "missing file": 1}
    (line,) = remarks_on("rl.jsonl", loaded.prompts)
    assert line == "rl.jsonl: 1 row with images and 1 with text alone: asked without tools"
    parquet = write_parquet(video_dir / "rl.parquet", [rl_row(question="Which?", videos=[], images=["a.png"])])
    assert load(parquet).prompts[0].images == (f"{video_dir}/a.png",)


def test_a_deeply_nested_row_is_a_bad_row(video_dir):
    loaded = load_rows(video_dir, rl_row("A"), *deep_rows(), max_bad_frac=0.99)
    assert [prompt.answer for prompt in loaded.prompts] == ["A"] and sum(loaded.bad.values()) == 13


def test_too_many_bad_rows_are_an_error_with_counts_and_examples(video_dir):
    rows = [rl_row(), rl_row(video="gone.mp4"), rl_row("A", "quiz"), rl_row(video="lost.mp4"), *[rl_row()] * 3]
    with pytest.raises(ValueError, match="cannot be used") as raised:  # 3 of 7
        load_rows(video_dir, *rows, max_bad_frac=0.42)
    message = str(raised.value)
    assert f"{video_dir}/rl.jsonl: 3 of 7 rows" in message and "data.max_bad_frac=0.42" in message
    assert f"missing file: 2, for example rl.jsonl line 2: {video_dir}/gone.mp4" in message
    assert "unknown question type: 1, for example rl.jsonl line 3: 'quiz', expected mcq, tvg, oe" in message
    with pytest.raises(ValueError, match=r"none of 2 rows can be used .*x … x.* is not an interval") as raised:
        load_rows(video_dir, rl_row("x" * 10**5, "tvg"), rl_row(""), max_bad_frac=1.0)
    assert len(str(raised.value)) < 2000
    with pytest.raises(ValueError, match=r"missing file: 1, for example .*: https://a\.b/c\.mp4 is not a local file"):
        load_rows(video_dir, rl_row(video="https://a.b/c.mp4"))


def test_as_many_bad_rows_as_allowed_are_logged_and_dropped(video_dir, caplog):
    rows = [rl_row()] * 71 + [rl_row(video="gone.mp4")] * 29  # 0.29 * 100 is below 29 in floating point
    with caplog.at_level(logging.WARNING):
        assert load_rows(video_dir, *rows, max_bad_frac=0.29).bad == {"missing file": 29}
    assert "29 of 100 rows are dropped" in caplog.text and f"rl.jsonl line 72: {video_dir}/gone.mp4" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.parquet", "does not exist"),
        ("text.parquet", "cannot be read as parquet: "),
        ("cut.parquet", "cannot be read as parquet: "),
        ("bytes.parquet", "cannot be read as parquet: 'utf-8' codec can't decode byte 0xff"),
        ("none.jsonl", "has no rows"),
        ("none.parquet", "has no rows"),
        ("empty", r"is a directory without \*\.parquet files"),
        ("rows.csv", r"must be a \.parquet or \.jsonl file"),
        ("sft.parquet", "has no column prompt, videos, extra_info; it has messages"),
    ],
)
def test_a_file_without_prompts_is_rejected_in_one_line(name, message, video_dir):
    for file, content in (("text.parquet", "no parquet at all"), ("none.jsonl", "\n\n"), ("rows.csv", "prompt\n")):
        (video_dir / file).write_text(content)
    content = write_parquet(video_dir / "whole.parquet", [rl_row(question="Which? " * 9)] * 20).read_bytes()
    (video_dir / "cut.parquet").write_bytes(content[: len(content) // 2])
    (video_dir / "empty").mkdir()
    write_parquet(video_dir / "sft.parquet", [{"messages": "[]"}])
    table, no_text = pa.Table.from_pylist([rl_row()]), pc.cast(pa.array([b"\xff"]), pa.string(), safe=False)
    pq.write_table(table.slice(0, 0), video_dir / "none.parquet")
    pq.write_table(table.set_column(2, "extra_info", no_text), video_dir / "bytes.parquet")
    with pytest.raises(ValueError, match=message) as raised:
        load(video_dir / name, max_bad_frac=1.0)
    assert str(video_dir / name) in str(raised.value) and "\n" not in str(raised.value)


def test_the_lookups_for_unique_ids_grow_linearly_with_the_rows():
    class Counting(dict):
        num_lookups = 0

        def __contains__(self, name):
            self.num_lookups += 1
            return super().__contains__(name)

    used = Counting()
    names = [unique_id("a", used) for _ in range(500)] + [unique_id("a-3", used), unique_id("b", used)]
    assert names[:3] == ["a", "a-2", "a-3"] and names[-2:] == ["a-3-2", "b"] and len(set(names)) == 502
    assert used.num_lookups < 3 * 502


@pytest.mark.parametrize("video", ["a.mp4", "gone.mp4"])
def test_a_file_is_looked_up_once_for_all_rows(video_dir, monkeypatch, video):
    path = write_lines(video_dir / "rl.jsonl", [rl_row(question=f"Which of {n}?", video=video) for n in range(50)])
    lookups: Counter[str] = Counter()
    stat = os.stat

    def counted(path, **options):
        lookups[str(path)] += 1
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    with contextlib.suppress(ValueError):  # no row's video exists
        load(path, max_bad_frac=1.0)
    assert {name: count for name, count in lookups.items() if "rl" not in name and count > 2} == {}
    assert sum(lookups.values()) < 20
