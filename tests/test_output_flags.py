"""No output flag of any command can replace an input or another program's file."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from paravt_jax.__main__ import COMMANDS
from paravt_jax.bench.__main__ import BENCHES

ROW = {"question": "q", "answer": "A", "videos": ["a.mp4"]}
MATERIALIZE = ["data", "materialize", "--root", "root", "--parquet-dir", "in"]
SPLIT = ["data", "split", "--src", "in.jsonl"]
# (command, flag) -> arguments that write FILE, and an input that FILE must not replace.
FILES = {
    ("ask", "--html"): (["ask", "a.mp4", "why?", "--model", "gone", "--html", "FILE"], "a.mp4"),
    ("bench", "--json"): (["bench", "mesh", "--config", "c.yaml", "--json", "FILE"], "c.yaml"),
    ("check", "--html"): (["check", "--model", "2b", "--data", "in.jsonl", "--html", "FILE"], "in.jsonl"),
    ("check", "--json"): (["check", "--model", "2b", "--data", "in.jsonl", "--json", "FILE"], "in.jsonl"),
    ("gate", "--json"): (["gate", "--model", "in.jsonl", "--url", "x", "--json", "FILE"], "in.jsonl"),
    ("data inspect", "--json"): (["data", "inspect", "in.jsonl", "--json", "FILE"], "in.jsonl"),
    ("data materialize", "--report"): ([*MATERIALIZE, "--output-dir", "o", "--report", "FILE"], "in/x.parquet"),
    ("data split", "--train"): ([*SPLIT, "--train", "FILE", "--validation", "v.jsonl"], "in.jsonl"),
    ("data split", "--validation"): ([*SPLIT, "--train", "t.jsonl", "--validation", "FILE"], "in.jsonl"),
    ("eval table", "--png"): (["eval", "table", "run", "--png", "FILE"], "run/eval.json"),
    ("plots", "--png"): (["plots", "run", "other", "--png", "FILE"], "run/eval.json"),
    ("prompts import-release", "--dst"): (
        ["prompts", "import-release", "in", "--dst", "FILE"],
        "in/paravt/eval/utils.py",
    ),
    ("view", "--out"): (["view", "run", "--out", "FILE"], "run/eval.json"),
}
WITHOUT_FORCE = {"data split"}  # commands whose output files must not exist
DIRECTORIES = {  # output directories, which output_directory protects
    "configs --to": ["configs", "smoke_cpu", "--to", "FILE"],
    "convert --dst": ["convert", "--src", "in", "--dst", "FILE"],
    "data materialize --output-dir": [*MATERIALIZE, "--output-dir", "FILE"],
    "export --dst": ["export", "--src", "in", "--dst", "FILE"],
    "tiny --dst": ["tiny", "--dst", "FILE"],
}
READ_FROM = {  # settings, flags and arguments that name an input or a run directory
    "convert --src": ["convert", "--src", "FILE", "--dst", "o"],
    "data inspect": ["data", "inspect", "FILE"],
    "data materialize --parquet-dir": [*MATERIALIZE[:-1], "FILE", "--output-dir", "o"],
    "data split --src": ["data", "split", "--src", "FILE", "--train", "t.jsonl", "--validation", "v.jsonl"],
    "eval run_dir": ["eval", "--config", "c.yaml", "data.validation=in.jsonl", "run_dir=FILE"],
    "train data.train": ["train", "--config", "c.yaml", "data.train=FILE"],
    "train data.video_root": ["train", "--config", "c.yaml", "data.video_root=FILE"],
    "train engine.weights_dir": ["train", "--config", "c.yaml", "engine.weights_dir=FILE"],
    "train model.path": ["train", "--config", "c.yaml", "model.path=FILE"],
    "train run_dir": ["train", "--config", "c.yaml", "run_dir=FILE"],
}
READ = {  # flags that name an input, no path at all, or a log that is appended to
    *("--api-key", "--calibrate", "--config", "--data", "--device", "--dtype", "--engine", "--evaluation", "--hf"),
    *("--host", "--log-file", "--mesh", "--message", "--model", "--parquet-dir", "--push-to-hub", "--python"),
    *("--qwen-vl-utils", "--replay", "--recipe", "--revision", "--root", "--server", "--shard", "--src", "--text"),
    *("--tokenizer", "--endpoint", "--endpoint-key-env", "--topology", "--url", "--video", "--video-root"),
}


class Parsed(Exception):
    pass


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        name, *rest = arguments
        module = importlib.import_module(COMMANDS[name][0])
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{module.__name__}.__main__")
        monkeypatch.setattr(sys, "argv", [name, *rest])
        module.main()

    return run


def text_flags(start, monkeypatch, name: str, *rest: str) -> set[str]:
    """Returns (command, flag) for the text flags of a command and its subcommands."""
    found = set()

    def flags(parser: argparse.ArgumentParser, of: str) -> None:
        for action in parser._actions:
            is_text = action.nargs != 0 and action.type in (None, str, Path) and not action.choices
            if isinstance(action, argparse._SubParsersAction):
                for sub, inner in action.choices.items():
                    flags(inner, of if of == "bench" else f"{of} {sub}")
            elif action.option_strings and is_text:
                found.add((of, action.option_strings[-1]))

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        flags(parser, name if rest != ("table",) else f"{name} table")
        raise Parsed

    with monkeypatch.context() as patch:
        for method in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, method, parse)
        with pytest.raises(Parsed):
            start(name, *rest)
    return found


def test_every_output_flag_is_in_the_table(start, monkeypatch):
    started = [(name,) for name in COMMANDS if name != "bench"] + [("bench", name) for name in BENCHES]
    found = set().union(*(text_flags(start, monkeypatch, *one) for one in [*started, ("eval", "table")]))
    assert FILES.keys() <= found
    unknown = {f"{command} {flag}" for command, flag in found - FILES.keys() if flag not in READ} - DIRECTORIES.keys()
    assert not unknown, "if these flags name an output file, use OutputFile and add them to FILES; else to READ"


@pytest.fixture
def inputs(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for directory in ("in", "root", "run"):
        (tmp_path / directory).mkdir()
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    pq.write_table(pa.table({"messages": ["[]"]}), tmp_path / "in" / "x.parquet")
    (tmp_path / "run" / "eval.json").write_text('{"cells": []}')
    (tmp_path / "in" / "paravt" / "eval").mkdir(parents=True)
    (tmp_path / "in" / "paravt" / "eval" / "utils.py").write_text("# of the release\n")
    (tmp_path / "a.mp4").write_bytes(b"film")
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    (tmp_path / "driver.py").write_text("X = 1\n")
    return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def kept(inputs) -> None:
    assert {path: path.read_bytes() for path in inputs} == inputs


@pytest.mark.parametrize(("command", "flag"), FILES)
def test_a_file_of_another_program_is_rejected_before_the_work(command, flag, start, inputs, tmp_path):
    arguments, _ = FILES[command, flag]
    other = tmp_path / "other.jsonl"
    other.write_text("years of work")
    with pytest.raises(ValueError, match=r"other\.jsonl (exists and was not written by this command|already exists)"):
        start(*(other.name if one == "FILE" else one for one in arguments))
    assert other.read_text() == "years of work"
    kept(inputs)


@pytest.mark.parametrize(("command", "flag"), FILES)
def test_an_input_is_never_replaced_even_with_force(command, flag, start, inputs, tmp_path):
    arguments, source = FILES[command, flag]
    (tmp_path / "link.jsonl").hardlink_to(tmp_path / source)
    force = [] if command in WITHOUT_FORCE else ["--force"]
    for name in (source, *(["link.jsonl"] if not source.startswith("run/") else [])):
        with pytest.raises(ValueError, match=r"is an input|reads|would change|already exists|must end with"):
            start(*(name if one == "FILE" else one for one in arguments), *force)
    kept(inputs)


ARGUMENTS = {" ".join(key): one for key, (one, _) in FILES.items()} | DIRECTORIES | READ_FROM
BUCKET_SUPPORT = {  # arguments that may name a bucket: models, rows and runs
    *("convert --dst", "convert --src", "data inspect", "data split --src", "export --dst", "tiny --dst"),
    *("train data.train", "train model.path", "train run_dir"),
}


@pytest.mark.parametrize(
    ("scheme", "name"),
    [(scheme, name) for scheme in ("gs", "s3") for name in ARGUMENTS if scheme == "s3" or name not in BUCKET_SUPPORT],
)
def test_a_url_is_never_used_as_a_folder(scheme, name, start, inputs, tmp_path):
    arguments = ARGUMENTS[name]
    before = set(tmp_path.rglob("*"))
    with pytest.raises((ValueError, OSError), match=rf"{scheme}:/"):
        start(*(one.replace("FILE", f"{scheme}://bucket/x.jsonl") for one in arguments))
    assert not [path for path in set(tmp_path.rglob("*")) - before if "bucket" in str(path) or ":" in str(path)]


def test_materialize_replaces_only_its_own_output_of_the_same_source(start, inputs, tmp_path):
    made = [*MATERIALIZE, "--output-dir", "o"]
    start(*made)
    start(*made)
    (tmp_path / "in").rename(tmp_path / "older")
    (tmp_path / "in2").mkdir()
    (tmp_path / "older" / "x.parquet").rename(tmp_path / "in2" / "x.parquet")
    other = ["in2" if one == "in" else one for one in made]
    message = r"o/x\.parquet exists and was written by data materialize of .*/in/x\.parquet"
    with pytest.raises(ValueError, match=message):
        start(*other)
    start(*other, "--force")
