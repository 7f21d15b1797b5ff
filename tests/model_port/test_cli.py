"""Exit codes and error messages of commands."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model_port.cli import run_cli

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("command", "imported"),
    [(f"-m {name}", "numpy") for name in ("paravt_jax.train", "paravt_jax eval", "model_port.export", "rollout.serve")]
    + [(str(Path(sys.executable).with_name("paravt")), "difflib")],
)
def test_ctrl_c_during_the_imports_of_a_command_ends_it_without_a_stack_trace(command, imported, tmp_path):
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not reached')"
    (tmp_path / f"{imported}.py").write_text(interrupt)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_command_of_the_users_keeps_its_own_ctrl_c(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import model_port, paravt_jax")
    (tmp_path / "mine" / "command.py").write_text("import signal; print(signal.getsignal(signal.SIGINT).__name__)")
    words = [sys.executable, "-m", "mine.command"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True)
    assert done.stdout == "default_int_handler\n", done.stderr


WRITE = """
import os, sys
from {package}.cli import run_cli

def main():
    with open(sys.argv[1], "w") as file:
        print("printed")
        os.system("echo by a child >&2")
        file.write("content")

run_cli(main)
"""


@pytest.mark.parametrize("package", ["model_port", "rollout"])
def test_a_command_starts_with_closed_streams_and_its_output_gets_into_no_file(package, tmp_path):
    words = [sys.executable, "-c", WRITE.format(package=package), str(tmp_path / "file")]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], cwd=ROOT)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"\\u2026 \\udcff"), ("utf-8", "… \\udcff".encode())])
@pytest.mark.parametrize("package", ["model_port", "rollout"])
def test_text_that_stdout_cannot_encode_is_printed_as_escapes(package, encoding, printed):
    code = f"from {package}.cli import run_cli; run_cli(lambda: print('\\u2026 \\udcff'))"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout.strip() == printed


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.skipif(subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0, reason="no namespaces")
def test_sigterm_ends_the_first_process_of_a_container():
    code = "import time; from model_port.cli import run_cli; run_cli(lambda: (print(flush=True), time.sleep(60)))"
    words = [*CONTAINER, sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None and container.stdout.readline() == "\n"
        (first,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert container.wait(30) == 128 + signal.SIGTERM
