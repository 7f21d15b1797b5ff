"""A command's file replaces what that command wrote and nothing else, and never what the command reads."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest

from paravt_jax.run.output_file import OutputFile


def write(path, text="new", by="a command", **options):
    output = OutputFile(path, by, **options)
    output.write(text)
    return output


def test_a_command_replaces_its_own_unchanged_file(tmp_path):
    path = tmp_path / "made" / "out.json"
    assert write(path, "one").changed and write(path, "two").changed and not write(path, "two").changed
    path.write_text("by hand")
    with pytest.raises(ValueError, match=r"out\.json exists and was changed since it was written; .* with --force"):
        OutputFile(path, "a command")
    write(path, force=True)
    with pytest.raises(ValueError, match=r"out\.json exists and was written by a command;"):
        OutputFile(path, "another command")


def test_a_command_replaces_its_own_file_in_a_copied_directory(tmp_path):
    write(tmp_path / "run" / "report.html", "one")
    os.utime(tmp_path / "run" / "report.html", (1, 1))
    shutil.copytree(tmp_path / "run", copy := tmp_path / "copy", copy_function=shutil.copyfile)
    write(copy / "report.html", "two", inputs=[copy])
    assert (copy / "report.html").read_text() == "two"


def test_non_finite_numbers_are_null_in_json(tmp_path):
    OutputFile(tmp_path / "out.json", "a command").write_json({"kl": [float("nan"), 0.5], "bound": float("inf")})
    written = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert written == {"kl": [None, 0.5], "bound": None}


@pytest.mark.parametrize("kind", ["itself", "hard", "symbolic", "spelled"])
def test_an_input_is_never_replaced_under_any_name(kind, tmp_path):
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_text("hours of work")
    if kind == "hard":
        path.hardlink_to(source)
    elif kind == "symbolic":
        path.symlink_to(source)
    else:
        path = source if kind == "itself" else tmp_path / "x" / ".." / "in"
        (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="is an input of this command"):
        OutputFile(path, "a command", inputs=[tmp_path / "gone", "", "OWNER/NAME", source], force=True)
    assert source.read_text() == "hours of work"


def test_in_a_directory_that_a_command_reads_force_replaces_only_pages_and_pictures(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    for _ in range(2):
        write(tmp_path / "own.json", inputs=[tmp_path])
    for name in ("report.html", "chart.png"):
        (tmp_path / name).write_text("by hand")
        with pytest.raises(ValueError, match="with --force"):
            write(tmp_path / name, inputs=[tmp_path])
        write(tmp_path / name, inputs=[tmp_path], force=True)
    with pytest.raises(ValueError, match="is inside a directory that this command reads"):
        OutputFile(tmp_path / "metrics.jsonl", "a command", inputs=[tmp_path], force=True)


@pytest.mark.parametrize("number", range(4))
def test_a_command_killed_while_it_replaced_its_file_may_replace_it_again(number, tmp_path, monkeypatch):
    path = tmp_path / "out"
    write(path, "old")
    with monkeypatch.context() as patch:
        calls = itertools.count()

        def killed(*arguments, then):
            if next(calls) == number:
                raise KeyboardInterrupt
            return then(*arguments)

        for name in ("fsync", "replace"):
            patch.setattr(os, name, functools.partial(killed, then=getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            write(path, "new")
    assert path.read_text() == ("old" if number < 3 else "new")
    write(path, "newer")
    assert path.read_text() == "newer"


def test_a_file_is_written_atomically(tmp_path):
    path = tmp_path / "out"
    write(path, "old")

    def fail():
        with OutputFile(path, "a command").partial() as partial:
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old" and not [entry for entry in tmp_path.iterdir() if "partial" in entry.name]


def test_a_file_created_by_others_during_the_work_is_kept(tmp_path):
    output = OutputFile(tmp_path / "out", "a command")

    def work():
        with output.partial() as partial:
            partial.write_text("new")
            output.path.write_text("of somebody else")

    with pytest.raises(ValueError, match="exists and was not written"):
        work()
    assert output.path.read_text() == "of somebody else"


def test_the_target_of_a_link_is_checked_and_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link", "one")
    write(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "two"
    (tmp_path / "target").write_text("by hand")
    with pytest.raises(ValueError, match="changed since"):
        OutputFile(tmp_path / "link", "a command")


def test_an_own_file_in_an_unwritable_directory_is_rejected_at_once(tmp_path, monkeypatch):
    write(tmp_path / "page.html", "one")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"page\.html cannot be written: \S+ is not a writable directory$"):
        OutputFile(tmp_path / "page.html", "a command")


def test_an_unwritable_path_is_rejected_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path, problem in [
        (tmp_path / "file" / "deep" / "out", "file is not a writable directory"),
        (tmp_path, "is a directory"),
        (tmp_path / ("x" * 201), "longer than 200 bytes"),
    ]:
        with pytest.raises(ValueError, match=problem):
            OutputFile(path, "a command", force=True)


def test_an_empty_file_is_replaced(tmp_path):
    (tmp_path / "made by mktemp").touch()
    write(tmp_path / "made by mktemp")


def test_concurrent_writes_do_not_mix(tmp_path):
    with OutputFile(tmp_path / "out", "a command").partial() as partial:
        partial.write_text("first")
        with pytest.raises(ValueError, match="another process is writing"):
            write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "first"


def test_standard_output_and_pipes_are_written_through(tmp_path):
    code = "from paravt_jax.run.output_file import OutputFile; OutputFile('/dev/stdout', 'x').write('said')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"said"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through" and [entry.name for entry in tmp_path.iterdir()] == ["pipe"]
    os.close(reader)
