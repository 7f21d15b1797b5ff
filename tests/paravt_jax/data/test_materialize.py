"""Sentinel paths become file:// URIs, nothing else of a row changes, and what is missing is said."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data import materialize as module
from paravt_jax.data.__main__ import main
from paravt_jax.data.materialize import local_path, materialize, rewritten_messages
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.traces import load_traces

ANSWER = "<think>\nIt is red.\n</think>\n<answer>B</answer>"
FILES = ("longvt_source/v_1/a.mp4", "museg/charades/b.mp4", "museg/et_instruct_164k/c d.mp4", "selfqa/frame.png")


def sft(*paths: str) -> list[dict]:
    parts = [
        {"type": kind, "text": None, "video_url": None, "image_url": None, kind: {"url": path}}
        for path in paths
        for kind in ["image_url" if path.endswith("png") else "video_url"]
    ]
    question = {"type": "text", "text": f"Not a path: {FILES[0]}", "video_url": None, "image_url": None}
    answer = {"type": "text", "text": ANSWER, "video_url": None, "image_url": None}
    return [{"role": "user", "content": [*parts, question]}, {"role": "assistant", "content": [answer]}]


def rl(*paths: str) -> dict:
    return {
        "prompt": [{"role": "user", "content": "<video>\nWhich?"}],
        "videos": [{"video": path} for path in paths],
        "extra_info": json.dumps({"answer": "B", "question_type": "mcq"}),
    }


@pytest.fixture
def here(tmp_path):
    for name in FILES:
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(b"frames")
    (tmp_path / "in").mkdir()
    return tmp_path


def run(here: Path, rows: list[dict] | pa.Table | None = None, name: str = "rows.parquet", **options):
    if rows is not None:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        pq.write_table(table, here / "in" / name)
    return materialize(here / "store", here / "in", here / "out", **options)


def read(here: Path, name: str = "rows.parquet") -> list[dict]:
    return pq.read_table(here / "out" / name).to_pylist()


def urls(messages: list[dict]) -> list[str]:
    parts = [part for message in messages for part in message["content"]]
    return [(part["video_url"] or part["image_url"])["url"] for part in parts if part["type"] != "text"]


def test_sentinels_are_joined_in_lists_in_json_and_in_videos(here):
    expected = [f"file://{here}/store/{name}" for name in FILES]
    run(here, [{"messages": sft(*FILES)}], "list.parquet")
    run(here, [{"messages": json.dumps(sft(*FILES))}], "json.parquet")
    report = run(here, [rl(*FILES)], "rl.parquet")
    assert urls(read(here, "list.parquet")[0]["messages"]) == expected
    assert urls(json.loads(read(here, "json.parquet")[0]["messages"])) == expected
    assert [video["video"] for video in read(here, "rl.parquet")[0]["videos"]] == expected
    assert report.total.num_rewritten_paths == 12 and not report.total.missing
    assert len(load_traces(here / "out" / "list.parquet", video_root="", max_bad_frac=0.0).traces) == 1
    assert len(load_prompts(here / "out" / "rl.parquet", video_root="", max_bad_frac=0.0).prompts) == 1


def test_a_sentinel_behind_file_is_joined_too(here):
    run(here, [rl(f"file://{FILES[0]}", "file://museg/et_instruct_164k/c%20d.mp4")])
    paths = [video["video"] for video in read(here)[0]["videos"]]
    assert paths == [f"file://{here}/store/{FILES[0]}", f"file://{here}/store/museg/et_instruct_164k/c%20d.mp4"]
    assert not materialize(here / "store", here / "in", here / "out").total.missing


def test_all_else_stays_as_it_is(here):
    schema = pa.schema(
        [
            pa.field("id", pa.int32(), metadata={"k": "v"}),
            ("messages", pa.large_string()),
            ("scores", pa.list_(pa.float32())),
            ("when", pa.timestamp("ns")),
        ],
        metadata={"huggingface": '{"info": 1}'},
    )
    texts = [
        '[{"role":"user","content":[{"type":"video_url","video_url":{"url":"selfqa/x.mp4","fps":1.50}},{"a":"é"}]}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "selfqa/x.png"}}, "caf\\u00e9"]}]',
        '[ {"role" : "user",  "content":"no path"} ]',
    ]
    columns = [[3, 1, None], texts, [[1.5], [], None], [1, 2, 3]]
    run(here, pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema))
    found = pq.read_table(here / "out" / "rows.parquet")
    assert found.schema.equals(pq.read_schema(here / "in" / "rows.parquet"), check_metadata=True)
    assert found.schema.metadata == schema.metadata
    assert found.drop(["messages"]).equals(pq.read_table(here / "in" / "rows.parquet").drop(["messages"]))
    changed = [text.replace('"selfqa/', f'"file://{here}/store/selfqa/') for text in texts]
    assert found["messages"].to_pylist() == [changed[0].replace("1.50", "1.5"), *changed[1:]]


def test_rows_keep_their_order_over_many_batches(here, monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    rows = [{"index": number, "messages": sft(f"selfqa/{number}.mp4")} for number in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), here / "in" / "rows.parquet", row_group_size=5, compression="zstd")
    report = run(here)
    found = read(here)
    assert [row["index"] for row in found] == list(range(11))
    assert urls(found[7]["messages"]) == [f"file://{here}/store/selfqa/7.mp4"]
    assert report.total.num_rows == 11 and report.total.missing == {"selfqa": {f"selfqa/{n}.mp4" for n in range(11)}}
    assert pq.read_metadata(here / "out" / "rows.parquet").row_group(0).column(0).compression == "ZSTD"


def test_missing_files_are_counted_once_in_the_bucket_of_their_longest_prefix(here):
    gone = ["selfqa/x.mp4", "museg/charades/x.mp4", "museg/charades/y.mp4", "longvt_source/x/y.png", "museg/x.mp4"]
    gone += ["/nowhere/z.mp4", f"file://{here}/store/selfqa/z.mp4", "museg_charades/x.mp4"]
    report = run(here, [rl(*gone), rl(FILES[0], gone[0])])
    file = report.to_json() and json.loads(report.to_json())["files"]["rows.parquet"]
    assert file["missing"] == {"longvt_source": 1, "museg/charades": 2, "other": 3, "selfqa": 2}
    assert file["missing_files"] == sorted(gone) and file["rows_with_missing_files"] == 2
    kept = [video["video"] for video in read(here)[0]["videos"]]
    assert [path for path in kept if path in gone] == gone[4:]  # no sentinels: left alone
    assert file["rewritten_paths"] == 6 and file["other_paths"] == 4


@pytest.mark.parametrize("path", ["../x.mp4", "selfqa/../../x.mp4", "file://selfqa/../../../etc/passwd", "a\0.mp4"])
def test_a_path_out_of_the_root_is_bad_and_stays(here, path):
    (here / "x.mp4").write_bytes(b"secret")
    report = run(here, [{"messages": json.dumps(sft(path))}])
    assert urls(json.loads(read(here)[0]["messages"])) == [path]
    assert report.total.bad == {path} and not report.total.missing and not report.total.num_rewritten_paths


def test_remote_pictures_are_neither_joined_nor_missed(here):
    remote = ["https://host/selfqa/a.png", "data:image/png;base64,AAAA"]
    report = run(here, [{"messages": sft(*remote)}])
    assert urls(read(here)[0]["messages"]) == remote
    assert not report.total.missing and not report.total.bad


def test_running_again_writes_nothing_and_on_its_own_output_changes_nothing(here):
    run(here, [{"messages": sft(*FILES, "selfqa/gone.mp4")}, {"messages": sft(FILES[1])}])
    out = here / "out" / "rows.parquet"
    before, status = out.read_bytes(), out.stat()
    assert run(here).written == {"rows.parquet": False}
    assert out.read_bytes() == before and out.stat().st_mtime_ns == status.st_mtime_ns
    assert out.stat().st_ino == status.st_ino
    again = materialize(here / "store", here / "out", here / "again")
    assert (here / "again" / "rows.parquet").read_bytes() == before
    assert again.total.num_rewritten_paths == 0 and again.total.missing == {
        "selfqa": {f"file://{here}/store/selfqa/gone.mp4"}
    }
    assert run(here, [{"messages": sft(FILES[0])}]).written == {"rows.parquet": True}


def test_output_in_folders_below_the_input_is_not_read_as_input(here):
    (here / "in" / "data").mkdir()
    run(here, [rl(FILES[0])], "data/rl.parquet")
    for _ in range(2):
        report = materialize(here / "store", here / "in", here / "in" / "local")
        assert list(report.files) == ["data/rl.parquet"] and (here / "in" / "local" / "data" / "rl.parquet").is_file()


def test_an_interrupted_file_leaves_what_was_there(here, monkeypatch):
    run(here, [rl(FILES[0])])
    before = (here / "out" / "rows.parquet").read_bytes()
    monkeypatch.setattr(module, "_check_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(here, [rl(FILES[1])])
    assert [path.name for path in (here / "out").iterdir() if "partial" in path.name] == []
    assert (here / "out" / "rows.parquet").read_bytes() == before


def test_unreadable_messages_stay_and_are_counted(here):
    texts = ["{", "[" * 100_000, "3", None, json.dumps([{"role": "user", "content": ["\ud800", None, 3]}])]
    report = run(here, pa.table({"messages": texts}))
    assert [row["messages"] for row in read(here)] == texts
    assert report.total.num_unreadable_rows == 2


def test_what_cannot_be_done_is_refused_in_one_sentence(here):
    with pytest.raises(ValueError, match=r"--parquet-dir .* has no \*.parquet files"):
        run(here)
    (here / "in" / "x.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"x.parquet cannot be read as parquet"):
        run(here)
    with pytest.raises(ValueError, match=r"--root .* is not a directory"):
        materialize(here / "gone", here / "in", here / "out")
    with pytest.raises(ValueError, match="is also --parquet-dir"):
        materialize(here / "store", here / "in", here / "in" / ".." / "in")
    with pytest.raises(ValueError, match="--num-workers 0"):
        run(here, num_workers=0)
    assert not (here / "out").exists()


@given(
    st.text(st.sampled_from("./aselfqa:%\0fi"), max_size=24),
    st.sampled_from(["", "file://", "selfqa/", "file://selfqa/"]),
)
def test_no_path_leaves_the_root_and_joining_twice_is_joining_once(name, prefix):
    path = local_path(prefix + name, "/r")
    assert local_path(path.uri, "/r").uri == path.uri
    if path.uri != prefix + name:
        assert path.uri.startswith("file:///r/selfqa/") and ".." not in path.uri.split("/")


JSON = st.recursive(
    st.none() | st.text() | st.integers() | st.sampled_from(["", "{", '{"content": 3}']),
    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["content", "messages", "video_url", "url", "type"]), x),
    max_leaves=8,
)


@pytest.mark.slow
@given(JSON.filter(lambda value: not isinstance(value, str)))
def test_messages_of_any_shape_come_back_as_they_were(value):
    assert rewritten_messages(value, lambda path: path) == value


def test_the_command_warns_and_with_strict_fails(here, monkeypatch, capsys):
    pq.write_table(pa.Table.from_pylist([rl("selfqa/gone.mp4")]), here / "in" / "rl.parquet")
    options = ["--root", "store", "--parquet-dir", "in", "--output-dir", "out"]
    monkeypatch.chdir(here)
    monkeypatch.setattr("paravt_jax.data.__main__.exit_on_sigterm", lambda: None)
    monkeypatch.setattr("sys.argv", ["data", "materialize", *options])
    main()
    shown = capsys.readouterr()
    assert "rl.parquet" in shown.out and "missing files by bucket: selfqa 1" in shown.out
    assert shown.err == "warning: 1 files are missing; out/report.json lists them\n"
    record = json.loads((here / "out" / "report.json").read_text())
    assert record["files"]["rl.parquet"]["missing_files"] == ["selfqa/gone.mp4"] and record["total"]["rows"] == 1
    (here / "out" / "rl.parquet").unlink()
    monkeypatch.setattr("sys.argv", ["data", "materialize", *options, "--strict"])
    with pytest.raises(ValueError, match="--strict: 1 files are missing"):
        main()
    assert (here / "out" / "rl.parquet").is_file()
