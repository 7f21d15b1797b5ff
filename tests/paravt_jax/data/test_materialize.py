"""Sentinel paths become file:// URIs, the rest of a row stays the same, and missing files are reported."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import ANSWER_TURN, media, messages, rl_row, text, write_parquet
from hypothesis import given, strategies as st

from paravt_jax.data import materialize as module
from paravt_jax.data.__main__ import main
from paravt_jax.data.materialize import local_path, materialize, rewritten
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.traces import load_traces

FILES = ("longvt_source/v_1/a.mp4", "museg/charades/b.mp4", "museg/et_instruct_164k/c d.mp4", "selfqa/frame.png")


def sft(*paths: str) -> list[dict]:
    """Returns messages as read from parquet, where every part has every key."""
    parts = [media("image" if path.endswith("png") else "video", path) for path in paths]
    parts += [text(f"Not a path: {FILES[0]}")]
    keys = dict.fromkeys(("type", "text", "video_url", "image_url"))
    return messages(("user", [keys | part for part in parts]), ("assistant", [keys | text(ANSWER_TURN)]))


def rl(*paths: str) -> dict:
    return rl_row(videos=[{"video": path} for path in paths])


@pytest.fixture
def directory(tmp_path):
    for name in FILES:
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(b"frames")
    (tmp_path / "in").mkdir()
    return tmp_path


def run(directory: Path, rows: list[dict] | None = None, name: str = "rows.parquet", **options):
    if rows is not None:
        write_parquet(directory / "in" / name, rows)
    return materialize(directory / "store", directory / "in", directory / "out", **options)


def read(directory: Path, name: str = "rows.parquet") -> list[dict]:
    return pq.read_table(directory / "out" / name).to_pylist()


def videos_of(row: dict) -> list[str]:
    return [video["video"] for video in row["videos"]]


def urls(messages: list[dict]) -> list[str]:
    parts = [part for message in messages for part in message["content"]]
    return [(part["video_url"] or part["image_url"])["url"] for part in parts if part["type"] != "text"]


def test_sentinels_are_rewritten_in_lists_in_json_and_in_videos(directory):
    expected = [f"file://{directory}/store/{name}" for name in FILES]
    run(directory, [{"messages": sft(*FILES)}], "list.parquet")
    run(directory, [{"messages": json.dumps(sft(*FILES))}], "json.parquet")
    report = run(directory, [rl(*FILES)], "rl.parquet")
    assert urls(read(directory, "list.parquet")[0]["messages"]) == expected
    assert urls(json.loads(read(directory, "json.parquet")[0]["messages"])) == expected
    assert videos_of(read(directory, "rl.parquet")[0]) == expected
    assert report.total.counts["rewritten_paths"] == 12 and not report.total.missing
    assert len(load_traces(directory / "out" / "list.parquet", video_root="", max_bad_frac=0.0).traces) == 1
    assert len(load_prompts(directory / "out" / "rl.parquet", video_root="", max_bad_frac=0.0).prompts) == 1


def test_a_sentinel_after_file_is_rewritten_too(directory):
    report = run(directory, [rl(f"file://{FILES[0]}", "file://museg/et_instruct_164k/c%20d.mp4")])
    store = f"file://{directory}/store"
    assert videos_of(read(directory)[0]) == [f"{store}/{FILES[0]}", f"{store}/museg/et_instruct_164k/c%20d.mp4"]
    assert not report.total.missing


def test_schema_other_columns_and_the_spelling_of_json_stay_the_same(directory):
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
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
    pq.write_table(table, directory / "in" / "rows.parquet")
    run(directory)
    source, output = (pq.read_table(directory / folder / "rows.parquet") for folder in ("in", "out"))
    assert output.schema.equals(source.schema, check_metadata=True) and output.schema.metadata == schema.metadata
    assert output.drop(["messages"]).equals(source.drop(["messages"]))
    changed = [text.replace('"selfqa/', f'"file://{directory}/store/selfqa/') for text in texts]
    assert output["messages"].to_pylist() == [changed[0].replace("1.50", "1.5"), *changed[1:]]


def test_rows_keep_their_order_over_many_batches(directory, monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    rows = [{"index": number, "messages": sft(f"selfqa/{number}.mp4")} for number in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "in" / "rows.parquet", row_group_size=5, compression="zstd")
    report, output = run(directory), read(directory)
    assert [row["index"] for row in output] == list(range(11))
    assert urls(output[7]["messages"]) == [f"file://{directory}/store/selfqa/7.mp4"]
    assert report.total.counts["rows"] == 11
    assert report.total.missing == {f"selfqa/{n}.mp4": "selfqa" for n in range(11)}
    assert pq.read_metadata(directory / "out" / "rows.parquet").row_group(0).column(0).compression == "ZSTD"


def test_missing_files_are_counted_once_in_the_bucket_of_their_longest_prefix(directory):
    gone = ["selfqa/x.mp4", "museg/charades/x.mp4", "museg/charades/y.mp4", "longvt_source/x/y.png", "museg/x.mp4"]
    gone += ["/nowhere/z.mp4", f"file://{directory}/store/selfqa/z.mp4", "museg_charades/x.mp4"]
    file = json.loads(run(directory, [rl(*gone), rl(FILES[0], gone[0])]).to_json())["files"]["rows.parquet"]
    assert file["missing"] == {"longvt_source": 1, "museg/charades": 2, "other": 3, "selfqa": 2}
    assert file["missing_files"] == sorted(gone) and file["rows_with_missing_files"] == 2
    assert [path for path in videos_of(read(directory)[0]) if path in gone] == gone[4:]  # not sentinels: unchanged
    assert file["rewritten_paths"] == 6 and file["other_paths"] == 4


@pytest.mark.parametrize("path", ["../x.mp4", "selfqa/../../x.mp4", "file://selfqa/../../../etc/passwd", "a\0.mp4"])
def test_a_path_out_of_the_root_is_bad_and_unchanged(directory, path):
    (directory / "x.mp4").write_bytes(b"secret")
    total = run(directory, [{"messages": json.dumps(sft(path))}]).total
    assert urls(json.loads(read(directory)[0]["messages"])) == [path]
    assert total.bad == {path} and not total.missing and not total.counts["rewritten_paths"]


def test_remote_pictures_are_neither_rewritten_nor_missing(directory):
    remote = ["https://host/selfqa/a.png", "data:image/png;base64,AAAA"]
    report = run(directory, [{"messages": sft(*remote)}])
    assert urls(read(directory)[0]["messages"]) == remote
    assert not report.total.missing and not report.total.bad


def test_a_second_run_writes_nothing_and_on_its_own_output_changes_nothing(directory):
    run(directory, [{"messages": sft(*FILES, "selfqa/gone.mp4")}, {"messages": sft(FILES[1])}])
    output = directory / "out" / "rows.parquet"
    content, status = output.read_bytes(), output.stat()
    assert run(directory).written == {"rows.parquet": False}
    assert output.read_bytes() == content and output.stat() == status
    again = materialize(directory / "store", directory / "out", directory / "again")
    assert (directory / "again" / "rows.parquet").read_bytes() == content
    assert again.total.counts["rewritten_paths"] == 0
    assert again.total.missing == {f"file://{directory}/store/selfqa/gone.mp4": "selfqa"}
    assert run(directory, [{"messages": sft(FILES[0])}]).written == {"rows.parquet": True}


def test_output_in_folders_below_the_input_is_not_read_as_input(directory):
    output = directory / "in" / "local"
    write_parquet(directory / "in" / "data" / "rl.parquet", [rl(FILES[0])])
    for _ in range(2):
        report = materialize(directory / "store", directory / "in", output)
        assert list(report.files) == ["data/rl.parquet"] and (output / "data" / "rl.parquet").is_file()


def test_an_interrupted_file_leaves_the_old_output(directory, monkeypatch):
    run(directory, [rl(FILES[0])])
    content = (directory / "out" / "rows.parquet").read_bytes()
    monkeypatch.setattr(module, "_check_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(directory, [rl(FILES[1])])
    assert [path.name for path in (directory / "out").iterdir() if "partial" in path.name] == []
    assert (directory / "out" / "rows.parquet").read_bytes() == content


def test_unreadable_messages_are_unchanged_and_counted(directory):
    nested = '[{"messages": ' * 900 + "[]" + "}]" * 900
    texts = ["{", "[" * 100_000, "3", None, json.dumps(messages(("user", ["\ud800", None, 3]))), "[" * 900 + "]" * 900]
    report = run(directory, [{"messages": content} for content in (*texts, nested)])
    assert [row["messages"] for row in read(directory)] == [*texts, nested]
    assert report.total.counts["unreadable_rows"] >= 2  # the last two depend on Python's recursion limit


def test_impossible_arguments_are_rejected_before_any_output(directory):
    store, source = directory / "store", directory / "in"
    with pytest.raises(ValueError, match=r"--parquet-dir .* has no \*.parquet files"):
        run(directory)
    (source / "x.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"x.parquet cannot be read as parquet"):
        run(directory)
    with pytest.raises(ValueError, match=r"--root .* is not a directory"):
        materialize(directory / "gone", source, directory / "out")
    with pytest.raises(ValueError, match="is also --parquet-dir"):
        materialize(store, source, source / ".." / "in")
    assert not (directory / "out").exists()


@given(
    st.text(st.sampled_from("./aselfqa:%\0fi"), max_size=24),
    st.sampled_from(["", "file://", "selfqa/", "file://selfqa/"]),
)
def test_no_path_leaves_the_root_and_a_second_rewrite_changes_nothing(name, prefix):
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
def test_messages_of_any_shape_are_unchanged_if_no_path_changes(value):
    assert rewritten(value, lambda path: path) == value


def test_the_command_warns_of_missing_files_and_fails_with_strict(directory, monkeypatch, capsys):
    write_parquet(directory / "in" / "rl.parquet", [rl("selfqa/gone.mp4")])
    options = ["--root", "store", "--parquet-dir", "in", "--output-dir", "out"]
    monkeypatch.chdir(directory)
    monkeypatch.setattr("paravt_jax.data.__main__.exit_on_sigterm", lambda: None)
    monkeypatch.setattr("sys.argv", ["data", "materialize", *options])
    main()
    printed = capsys.readouterr()
    assert "rl.parquet" in printed.out and "missing files by bucket: selfqa 1" in printed.out
    assert printed.err == "warning: 1 file is missing; out/report.json lists them\n"
    record = json.loads((directory / "out" / "report.json").read_text())
    assert record["files"]["rl.parquet"]["missing_files"] == ["selfqa/gone.mp4"] and record["total"]["rows"] == 1
    (directory / "out" / "rl.parquet").unlink()
    monkeypatch.setattr("sys.argv", ["data", "materialize", *options, "--strict"])
    with pytest.raises(ValueError, match="--strict: 1 file is missing"):
        main()
    assert (directory / "out" / "rl.parquet").is_file()
