"""Runs commands in processes forked from a server that has imported everything, which saves the import time.

They use the tests' compiler flags for fast compilation, and share the tests' compiled programs.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from model_port.cli import run_cli
from paravt_jax.run import training

ENVIRONMENT = {"COLUMNS": "200"}
training.make_plots = lambda run_dir: []  # takes five seconds; the smoke run and its own tests cover plots

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(
    [
        *("paravt_jax.train", "paravt_jax.rl.setup", "paravt_jax.sft", "paravt_jax.imitation.run"),
        *("paravt_jax.bench.__main__", "model_port.convert", "model_port.export"),
    ]
)


def start(
    module: str, arguments: list[str], output: str, errors: str | None = None, cwd: str = ".", **environment: str
) -> ForkServerProcess:
    """Starts a command. Its stdout goes to the file `output`, its stderr to `errors` or also to `output`."""
    files = output, errors or output
    Path(output).touch()
    process = forks.Process(target=_run, args=(module, arguments, *files, cwd, ENVIRONMENT | environment))
    process.start()
    return process


def run(module: str, *arguments: object, deadline_s: float = 240, **environment: str) -> CompletedProcess[str]:
    """Runs a command to its end."""
    with TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        process = start(module, [*map(str, arguments)], str(output), str(errors), **environment)
        process.join(deadline_s)
        code = process.exitcode
        process.kill()
        assert code is not None, f"{module} did not exit: {errors.read_text()}"
        return CompletedProcess([module, *map(str, arguments)], code, output.read_text(), errors.read_text())


def wait_until(
    condition: Callable[[], object], process: ForkServerProcess, output: Path, deadline_s: float = 200
) -> None:
    """Waits until the process makes a condition true; a failure shows the end of its `output`."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert process.is_alive() and time.monotonic() < give_up_s, output.read_text()[-3000:]
        time.sleep(0.05)


def _run(module: str, arguments: list[str], output: str, errors: str, cwd: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(cwd)
    gc.freeze()  # garbage collection skips everything imported so far
    for name, numbers in ((output, (0, 1)), (errors, (2,))):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for number in numbers:
            os.dup2(file, number)
    command(module, arguments, environment)


def command(module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    run_cli(importlib.import_module(module).main)
