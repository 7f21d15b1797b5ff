"""RUN/log.txt has what a run printed to stderr, across its starts."""

import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from terminals import a_terminal
from tqdm import tqdm

from model_port.terminal import say
from paravt_jax.run.stderr_log import log_file, tee_stderr


@pytest.mark.parametrize("problem", [None, RuntimeError("the disk is full"), SystemExit(1)])
def test_messages_and_errors_of_every_start_are_in_the_file(problem, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["paravt", "train", "run_dir=a b"])
    for start in (1, 2):
        with pytest.raises(type(problem)) if problem else nullcontext(), tee_stderr(tmp_path / "log.txt"):
            say(f"start {start}")
            kept = sys.stderr  # for example by a handler of logging
            kept.write("a library warns\n")
            if problem:
                raise problem
        kept.write("after the run\n")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("  paravt train 'run_dir=a b'\nstart ") == 2 and text.index("start 1") < text.index("start 2")
    assert text.count("a library warns\n") == 2 and "after the run" not in text
    num_errors = 2 * isinstance(problem, RuntimeError)
    assert text.count("RuntimeError: the disk is full") == text.count("Traceback") == num_errors
    printed = capsys.readouterr().err
    assert printed.count("a library warns\n") == printed.count("after the run\n") == 2 and "Traceback" not in printed


def test_a_bar_goes_only_to_the_terminal_and_messages_are_complete(tmp_path, monkeypatch):
    with a_terminal(monkeypatch, "stderr", rows_and_columns=(30, 100)) as read_screen:
        with tee_stderr(tmp_path / "log.txt"):
            assert sys.stderr.isatty()
            bar = tqdm(total=3, file=sys.stderr)
            for step in range(3):
                bar.update()
                bar.refresh()
                tqdm.write(f"message {step}", file=sys.stderr)
            bar.close()
        screen = read_screen()
    assert "3/3" in screen
    assert (tmp_path / "log.txt").read_text().splitlines()[1:] == ["message 0", "message 1", "message 2", ""]


def test_a_full_disk_loses_lines_of_the_file_and_not_the_run(capsys):
    with tee_stderr(Path("/dev/full")):
        say("step 1")
    assert capsys.readouterr().err == "step 1\n"


def test_a_run_outlives_the_reader_of_its_stderr(tmp_path, monkeypatch):
    """After Ctrl-C, which also ends the `tee` of `train 2>&1 | tee FILE`, the run saves a checkpoint."""
    reader, writer = os.pipe()
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as stderr:  # closing the file writes again
        monkeypatch.setattr(sys, "stderr", stderr)
        os.close(reader)
        with tee_stderr(tmp_path / "log.txt"):
            say("stopping: saving a checkpoint")
            sys.stderr.flush()
            say("stopped")
    assert (tmp_path / "log.txt").read_text().endswith("stopping: saving a checkpoint\nstopped\n")


def test_hosts_have_files_of_their_own():
    assert [log_file(host) for host in (0, 1, 12)] == ["log.txt", "log.1.txt", "log.12.txt"]
