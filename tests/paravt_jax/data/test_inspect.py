"""`inspect` counts the contents of rows, and every row that training would drop is reported."""

import json
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model_port.tiny import tiny_tokenizer
from paravt_jax.data.__main__ import main
from paravt_jax.data.inspect import bars, bins, inspect, plot, text
from paravt_jax.data.materialize import materialize
from paravt_jax.data.prompts import load_prompts

CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}</tool_call>'
ANSWER = "<think>\nIt is red.\n</think>\n<answer>B</answer>"


def rl(question_type="mcq", answer="B", video="a.mp4") -> dict:
    return {
        "prompt": [{"role": "user", "content": "<video>\nWhich one?"}],
        "videos": [{"video": video}],
        "extra_info": json.dumps({"answer": answer, "question_type": question_type}),
    }


def sft(*num_calls: int, question="Which one?") -> dict:
    messages = [("user", question)]
    for number in num_calls:
        messages += [("assistant", f"<think>\nLook.\n</think>\n{CALL * number}"), *[("tool", "It is red.")] * number]
    return {"messages": [{"role": role, "content": words} for role, words in [*messages, ("assistant", ANSWER)]]}


def write_lines(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_rl_rows_are_counted_by_question_type_and_bad_ones_by_reason(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"frames")
    rows = [rl(), rl(), rl("tvg", "[1, 2]"), rl("oe", "red"), rl(video="gone.mp4"), rl("quiz"), rl(answer="a man")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rl.parquet")
    findings = inspect(str(tmp_path / "rl.parquet"))
    assert (findings.kind, findings.num_rows, len(findings.lengths)) == ("RL", 7, 5)
    assert findings.counts["question_types"] == {"mcq": 3, "tvg": 1, "oe": 1}  # one mcq row lacks only its file
    assert findings.bad == {"missing file": 1, "unknown question type": 1, "unreadable ground truth": 1}
    assert findings.missing == {"gone.mp4"}
    assert findings.columns["extra_info"] == "string" and findings.columns["videos"].startswith("list<")


def test_a_directory_has_the_same_files_for_inspect_materialize_and_training(tmp_path):
    (tmp_path / "in" / "a.mp4").parent.mkdir()
    (tmp_path / "in" / "a.mp4").write_bytes(b"frames")
    for number, name in enumerate(("rl.parquet", "more/rl.parquet", "more/deep/rl.parquet", ".cache/rl.parquet"), 1):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([rl()] * number + [rl("quiz")]), tmp_path / "in" / name)
    findings = inspect(str(tmp_path / "in"))
    assert (findings.num_rows, findings.counts["question_types"]) == (2 + 3 + 4, {"mcq": 1 + 2 + 3})
    assert findings.examples["unknown question type"].startswith("more/deep/rl.parquet row 3: ")
    assert len(load_prompts(tmp_path / "in", video_root="", max_bad_frac=0.5).prompts) == 1 + 2 + 3
    report = materialize(tmp_path, tmp_path / "in", tmp_path / "out")
    assert list(report.files) == ["more/deep/rl.parquet", "more/rl.parquet", "rl.parquet"]


def test_sft_rows_are_counted_by_turns_and_calls(tmp_path):
    path = write_lines(tmp_path / "sft.jsonl", [sft(), sft(1), sft(1, 3), sft(3), "{\n", sft(question="")])
    findings = inspect(str(path))
    assert (findings.kind, findings.num_rows, findings.num_rows_with_calls) == ("SFT", 6, 3)
    assert findings.counts["turns_per_row"] == {1: 2, 2: 2, 3: 1}
    assert findings.counts["calls_per_row"] == {0: 2, 1: 1, 4: 1, 3: 1}
    assert findings.counts["calls_per_turn"] == {1: 2, 3: 2}
    assert findings.num_faulty_calls == 0 and findings.bad == {"wrong schema": 1}
    assert findings.columns == {"messages": "list, absent in 1 rows"}


def test_lengths_count_text_with_the_tokenizer_of_your_choice(tmp_path):
    parts = [{"type": "image_url", "image_url": {"url": "gone.png"}}, {"type": "text", "text": "What is red?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": ANSWER}]
    path = str(write_lines(tmp_path / "sft.jsonl", [{"messages": json.dumps(messages)}]))
    findings = inspect(path)
    tokenizer = tiny_tokenizer()
    assert findings.lengths == [len(tokenizer.encode(f"What is red?\n{ANSWER}", add_special_tokens=False).ids)]
    assert "pictures, videos and the chat template are not counted" in text(findings)
    tokenizer.add_tokens(["What is red?"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert inspect(path, tokenizer=str(tmp_path / "model")).lengths[0] < findings.lengths[0]
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        inspect(path, tokenizer=str(tmp_path))


def test_columns_of_json_lines_list_types_and_absences(tmp_path):
    rows = [{**sft(), "id": 1}, {**sft(), "id": "x"}, sft()]
    assert inspect(str(write_lines(tmp_path / "sft.jsonl", rows))).columns == {
        "messages": "list",
        "id": "number or text, absent in 1 rows",
    }


@pytest.mark.parametrize("kind", ["RL", "SFT"])
def test_terminal_json_and_png_agree(tmp_path, kind):
    rows = [rl(video="gone.mp4"), rl("oe", "red", "lost.mp4")] if kind == "RL" else [sft(1), sft(2, 1)]
    findings = inspect(str(write_lines(tmp_path / "rows.jsonl", rows)))
    record = json.loads(json.dumps(findings.to_record()))
    assert record["kind"] == kind and record["rows"] == 2
    assert sum(count for _, _, count in record["tokens"]["histogram"]) == len(findings.lengths) == 2
    assert f"2 {kind} rows" in text(findings) and f"max {max(findings.lengths)}" in text(findings)
    plot(findings, tmp_path / "rows.png")
    with Image.open(tmp_path / "rows.png") as image:
        assert image.width > image.height > 300 and len(image.getcolors(1 << 24)) > 10


@given(st.lists(st.integers(0, 10**7), min_size=1), st.integers(1, 40))
def test_every_length_is_in_exactly_one_bin(lengths, max_bins):
    histogram = bins(lengths, max_bins)
    assert sum(bin.count for bin in histogram) == len(lengths) and len(histogram) <= max_bins + 1
    for bin in histogram:
        assert bin.count == sum(bin.start <= length and (bin.end is None or length < bin.end) for length in lengths)
    assert all(before.end == after.start for before, after in pairwise(histogram))


def test_a_few_long_rows_do_not_flatten_the_histogram():
    histogram = bins([100] * 500 + [200] * 498 + [90_000] * 2, 12)
    ends = [(bin.start, bin.end, bin.count) for bin in (histogram[0], histogram[-1])]
    assert ends == [(100, 120, 500), (220, None, 2)]


def test_bars_are_proportional_and_a_nonzero_count_is_visible():
    lines = bars([("a", 1000), ("bb", 500), ("c", 1), ("d", 0)])
    assert lines[0] == f"   a  1,000  {'█' * 40}" and lines[1] == f"  bb    500  {'█' * 20}"
    assert lines[2] == "   c      1  ▏" and lines[3] == "   d      0"


def test_a_video_outside_of_the_root_is_a_bad_row(tmp_path):
    (tmp_path / "root").mkdir()
    for folder in (tmp_path, tmp_path / "root"):
        (folder / "a.mp4").write_bytes(b"frames")
    path = write_lines(tmp_path / "rl.jsonl", [rl(), rl(video="../a.mp4")])
    assert inspect(str(path), video_root=str(tmp_path / "root")).bad == {"file outside of data.video_root": 1}


def test_a_file_that_is_not_data_is_rejected_in_one_sentence(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "none.jsonl", [])
    write_lines(tmp_path / "other.jsonl", [{"text": 1}])
    for name, problem in {
        "other.parquet": "has neither RL rows .* nor SFT rows .* its columns are text",
        "other.jsonl": "its columns are text",
        "none.jsonl": "its columns are none",
        "cut.parquet": "cannot be read as parquet",
        "empty": r"without \*\.parquet files",
        "gone.parquet": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=problem) as raised:
            inspect(str(tmp_path / name))
        assert "\n" not in str(raised.value)


def test_the_command_prints_writes_and_draws(tmp_path, monkeypatch, capsys):
    path = write_lines(tmp_path / "sft.jsonl", [sft(2), sft()])
    options = [str(path), "--json", str(tmp_path / "i.json"), "--png", str(tmp_path / "i.png")]
    monkeypatch.setattr("sys.argv", ["data", "inspect", *options])
    monkeypatch.setattr("paravt_jax.data.__main__.exit_on_sigterm", lambda: None)
    main()
    output = capsys.readouterr()
    assert "sft.jsonl: 2 SFT rows" in output.out and "rows with tool calls: 1 of 2" in output.out and output.err == ""
    assert json.loads((tmp_path / "i.json").read_text())["calls_per_turn"] == {"2": 1}
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")
