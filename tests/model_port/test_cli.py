"""Exit codes and error messages of commands."""

import errno
import os
import sys

import pytest

from model_port.cli import run_cli


def raiser(problem):
    def main():
        raise problem

    return main


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (ValueError("bad\n  key"), "bad key"),
        (RuntimeError("no token"), "no token"),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "a/b"), "a/b: No such file or directory"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a", None, "b"), "a: b: No space left on device"),
        (ExceptionGroup("of a task", [ExceptionGroup("of another", [ValueError("why")]), KeyError()]), "why"),
        (KeyError("key"), "KeyError 'key' (unexpected; --debug shows the stack trace)"),
    ],
)
def test_an_error_is_one_line_without_debug(monkeypatch, capsys, problem, message):
    for flags in ([], ["--debug"]):
        monkeypatch.setattr(sys, "argv", ["command", *flags])
        with pytest.raises(SystemExit) as ended:
            run_cli(raiser(problem))
        err = capsys.readouterr().err
        assert ended.value.code == 1 and err.splitlines()[-1] == f"error: {message}"
        assert ("Traceback" in err) == bool(flags) and (flags or err.count("\n") == 1)


@pytest.mark.parametrize(
    ("command", "code"), [(lambda: None, 0), (raiser(KeyboardInterrupt()), 130), (raiser(SystemExit(2)), 2)]
)
def test_exit_codes_of_success_and_interrupts(command, code, capsys):
    with pytest.raises(SystemExit) as ended:
        run_cli(command)
    assert ended.value.code == code and "Traceback" not in capsys.readouterr().err
