"""`data inspect` counts the contents of rows, and reports every row that training would drop."""

import json

import pytest
from data_rows import ANSWER_TURN, CALL, dialogue, media, rl_row, sft_row, text, write_lines, write_parquet

from model_port.tiny import tiny_tokenizer
from paravt_jax.data import inspect as module
from paravt_jax.data.__main__ import main
from paravt_jax.data.inspect import inspect
from paravt_jax.data.materialize import materialize
from paravt_jax.data.prompts import load_prompts


def calling(*num_calls: int, question="Which one?") -> dict:
    """Returns a dialogue with the given number of calls in each turn before the answer."""
    contents = [question]
    for number in num_calls:
        contents += [f"<think>\nLook.\n</think>\n{CALL * number}", "It is red."]
    return sft_row(dialogue(*contents, ANSWER_TURN))


def test_rl_rows_are_counted_by_question_type_and_bad_rows_by_reason(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"frames")
    rows = [rl_row(), rl_row(), rl_row("[1, 2]", "tvg"), rl_row("red", "oe"), rl_row(video="gone.mp4")]
    rows += [rl_row(question_type="quiz"), rl_row("a man")]
    findings = inspect(str(write_parquet(tmp_path / "rl.parquet", rows)))
    assert (findings.kind, findings.num_rows, len(findings.lengths)) == ("RL", 7, 5)
    assert findings.counts["question_types"] == {"mcq": 3, "tvg": 1, "oe": 1}  # one mcq row lacks only its file
    assert findings.bad == {"missing file": 1, "unknown question type": 1, "unreadable ground truth": 1}
    assert findings.missing == {"gone.mp4"}
    assert findings.examples["missing file"] == f"rl.parquet row 4: {tmp_path}/gone.mp4"
    assert findings.columns["extra_info"] == "string" and findings.columns["videos"].startswith("list<")


def test_json_lines_without_videos_are_questions_as_in_training(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Which?"}], "extra_info": {"answer": "red", "question_type": "oe"}}
    findings = inspect(str(write_lines(tmp_path / "rl.jsonl", [row, row | {"extra_info": {}}])))
    assert (findings.kind, findings.counts["videos_per_row"], findings.bad.total()) == ("RL", {0: 1}, 1)


@pytest.mark.parametrize(
    ("num_traces", "kind", "example"),
    [
        (1, "RL", "line 1: a trace with messages, which is for"),
        (3, "SFT", "line 4: a question with a prompt, which is"),
    ],
)
def test_a_mixture_has_the_kind_of_most_rows_and_names_the_others(num_traces, kind, example, tmp_path):
    findings = inspect(str(write_lines(tmp_path / "a.jsonl", [calling()] * num_traces + [rl_row("red", "oe")] * 2)))
    assert findings.kind == kind and example in findings.examples["wrong schema"]
    assert findings.bad["wrong schema"] == min(num_traces, 2)


def test_a_directory_has_the_same_files_for_inspect_materialize_and_training(tmp_path):
    source = tmp_path / "in"
    for number, name in enumerate(("rl.parquet", "more/rl.parquet", "more/deep/rl.parquet", ".cache/rl.parquet"), 1):
        write_parquet(source / name, [rl_row()] * number + [rl_row(question_type="quiz")])
    (source / "a.mp4").write_bytes(b"frames")
    findings = inspect(str(source))
    assert (findings.num_rows, findings.counts["question_types"]) == (2 + 3 + 4, {"mcq": 1 + 2 + 3})
    assert findings.examples["unknown question type"].startswith("more/deep/rl.parquet row 3: ")
    assert len(load_prompts(source, video_root="", max_bad_frac=0.5).prompts) == 1 + 2 + 3
    report = materialize(tmp_path, source, tmp_path / "out")
    assert list(report.files) == ["more/deep/rl.parquet", "more/rl.parquet", "rl.parquet"]


def test_sft_rows_are_counted_by_turns_and_calls(tmp_path):
    rows = [calling() | {"id": 1}, calling(1), calling(1, 3), calling(3) | {"id": "x"}, calling(question="")]
    rows += ["{", "[1]"]
    findings = inspect(str(write_lines(tmp_path / "sft.jsonl", rows)))
    assert (findings.kind, findings.num_rows, findings.num_rows_with_calls) == ("SFT", 7, 3)
    assert findings.counts["turns_per_row"] == {1: 2, 2: 2, 3: 1}
    assert findings.counts["calls_per_row"] == {0: 2, 1: 1, 4: 1, 3: 1}
    assert findings.counts["calls_per_turn"] == {1: 2, 3: 2}
    assert findings.num_faulty_calls == 0 and findings.bad == {"wrong schema": 2}
    assert findings.columns == {"messages": "in 5 of 7 rows", "id": "in 2 of 7 rows"}


def test_lengths_count_the_text_with_the_chosen_tokenizer(tmp_path):
    row = sft_row(json.dumps(dialogue([media("image", "gone.png"), text("What is red?")], ANSWER_TURN)))
    path = str(write_lines(tmp_path / "sft.jsonl", [row]))
    findings, tokenizer = inspect(path), tiny_tokenizer()
    assert findings.lengths == [len(tokenizer.encode(f"What is red?\n{ANSWER_TURN}", add_special_tokens=False).ids)]
    assert "pictures, videos and the chat template are not counted" in module.text(findings)
    tokenizer.add_tokens(["What is red?"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    assert inspect(path, tokenizer=str(tmp_path / "model")).lengths[0] < findings.lengths[0]
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        inspect(path, tokenizer=str(tmp_path))


def test_a_video_outside_of_the_root_is_a_bad_row(tmp_path):
    (tmp_path / "root").mkdir()
    for folder in (tmp_path, tmp_path / "root"):
        (folder / "a.mp4").write_bytes(b"frames")
    path = write_lines(tmp_path / "rl.jsonl", [rl_row(), rl_row(video="../a.mp4")])
    assert inspect(str(path), video_root=str(tmp_path / "root")).bad == {"file outside of data.video_root": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other.parquet", "has neither RL rows .* nor SFT rows .* its columns are text"),
        ("other.jsonl", "its columns are text"),
        ("none.jsonl", "none.jsonl has no rows"),
        ("text.jsonl", "text.jsonl line 2 is not JSON: Expecting value"),
        ("list.jsonl", "list.jsonl line 1 is list, expected an object"),
        ("cut.parquet", "cannot be read as parquet"),
        ("empty", r"without \*\.parquet files; JSON lines are one file, which the path names$"),
        ("gone.parquet", "does not exist"),
    ],
)
def test_a_file_without_rows_is_rejected_in_one_line(name, message, tmp_path):
    write_parquet(tmp_path / "other.parquet", [{"text": "a"}])
    (tmp_path / "cut.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "none.jsonl", [])
    (tmp_path / "text.jsonl").write_text("\nno JSON\n")
    write_lines(tmp_path / "list.jsonl", [[1]])
    write_lines(tmp_path / "other.jsonl", [{"text": 1}])
    with pytest.raises(ValueError, match=message) as raised:
        inspect(str(tmp_path / name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["RL", "SFT"])
def test_the_command_prints_and_writes_the_same_counts(kind, tmp_path, monkeypatch, capsys):
    rows = [rl_row(video="gone.mp4"), rl_row("red", "oe")] if kind == "RL" else [calling(2), calling()]
    path, output = write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "counts.json"
    monkeypatch.setattr("sys.argv", ["data", "inspect", str(path), "--json", str(output)])
    monkeypatch.setattr("paravt_jax.data.__main__.exit_on_sigterm", lambda: None)
    main()
    printed, record = capsys.readouterr(), json.loads(output.read_text())
    assert f"rows.jsonl: 2 {kind} rows" in printed.out and printed.err == ""
    assert (record["kind"], record["rows"]) == (kind, 2)
    assert f"max {record['tokens']['max']}" in printed.out
    assert f"videos in the overview (rows)\n  {0 if kind == 'SFT' else 1}: 2\n" in printed.out
    if kind == "SFT":
        assert "rows with tool calls: 1 of 2" in printed.out and record["calls_per_turn"] == {"2": 1}
