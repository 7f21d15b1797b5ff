"""Runs that are interrupted: in a notebook, beside its event loop, and while a model loads."""

import asyncio
import queue
import signal
import subprocess
import sys
import threading
import traceback

import pytest

import paravt_jax
from paravt_jax.run.process import Stopping, run_here, stop_on_signals


async def until_stopped(num_steps_more: int) -> str:
    """Interrupts the main thread and stops like a run; `num_steps_more` further interrupts end it at once."""
    stopping = Stopping()
    undo = stop_on_signals(stopping)
    try:
        await interrupt()
        await stopping.wait()
        for _ in range(num_steps_more):
            await interrupt()
            await asyncio.sleep(20)
        return f"saved after signal {int(stopping.signal)}"
    finally:
        undo()


async def interrupt() -> None:
    """Interrupts the main thread as soon as it waits for the run."""
    while "result" not in main_thread():
        await asyncio.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def main_thread() -> list[str]:
    """Returns the names of the functions on the main thread's stack."""
    return [frame.name for frame in traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])]


def in_a_cell(work):
    """Runs `work` like a notebook's kernel: in its event loop, with Python's own interrupt handler."""

    async def cell():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_here(work)

    return asyncio.run(cell())


def test_an_interrupt_of_a_notebook_ends_a_run_like_a_signal(capsys):
    assert in_a_cell(until_stopped(0)) == "saved after signal 2"
    assert "stopping: saving a checkpoint; interrupt again to stop without it" in capsys.readouterr().err


def test_an_interrupt_just_before_a_notebook_waits_is_handled():
    async def work():
        stopping = Stopping()
        undo = stop_on_signals(stopping)
        while "result" not in main_thread():
            await asyncio.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # as if just before the main thread began to wait
        try:
            await asyncio.wait_for(stopping.wait(), 20)
        finally:
            undo()

    in_a_cell(work())


@pytest.mark.parametrize("kind", [ValueError, TimeoutError])  # waiting has a timeout too
def test_an_error_of_a_run_in_a_notebook_is_raised(kind):
    async def work():
        raise kind("no server")

    with pytest.raises(kind, match="no server"):
        in_a_cell(work())


def test_a_second_interrupt_of_a_notebook_ends_a_run_at_once():
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(until_stopped(1))
    assert in_a_cell(asyncio.sleep(0, "next")) == "next"


def test_without_a_loop_the_work_runs_in_this_thread():
    async def thread():
        return threading.current_thread()

    assert run_here(thread()) is threading.main_thread()


def test_only_the_commands_that_train_are_imported_by_name():
    assert paravt_jax.train.main and paravt_jax.sft.main and not hasattr(paravt_jax, "trian")


LOADS = """
import asyncio, time
from paravt_jax.run.process import Stopping, ended_by_interrupt, stop_on_signals

async def load():
    {handler}
    print("loading", flush=True)
    await asyncio.to_thread(time.sleep, 60)

asyncio.run(load())
"""


@pytest.mark.parametrize("handler", ["stop_on_signals(Stopping())", "(interrupt := ended_by_interrupt()).__enter__()"])
def test_ctrl_c_ends_a_command_while_its_model_loads(handler):
    command = [sys.executable, "-c", LOADS.format(handler=handler)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


AT_A_PROMPT = """
import asyncio, signal, sys
from paravt_jax.run import process

{prompt}
process.GRACE_S = 0.2

async def step():
    stopping = process.Stopping()
    stopping.saves = {saves}
    undo = process.stop_on_signals(stopping)
    signal.raise_signal(signal.SIGINT)
    await asyncio.wait_for(stopping.wait(), 20)
    await asyncio.sleep(0.5)
    print("saving", flush=True)
    signal.raise_signal(signal.SIGINT)
    try:
        await asyncio.sleep(20)
    finally:
        undo()

async def load():
    with process.ended_by_interrupt():
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(20)

for work in (step, load):
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("saves", "prompt", "flags"),
    [(True, "sys.ps1 = 'In : '", []), (False, "sys.ps1 = 'In : '", []), (True, "", ["-i"])],
)
def test_interrupts_at_a_prompt_never_end_the_process(saves, prompt, flags):
    command = [sys.executable, *flags, "-c", AT_A_PROMPT.format(saves=saves, prompt=prompt)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "saving\ninterrupted\ninterrupted\n"), done.stderr


def test_sigterm_after_an_interrupt_at_a_prompt_has_a_deadline(monkeypatch):
    exits = queue.Queue[str]()
    monkeypatch.setattr("paravt_jax.run.process.GRACE_S", 0.01)
    monkeypatch.setattr("paravt_jax.run.process._exit", exits.put)
    stopping = Stopping()
    stopping.interrupt()
    stopping.stop(signal.SIGINT)  # as all hosts do when they agree to stop
    with pytest.raises(queue.Empty):
        exits.get(timeout=0.1)
    stopping.stop(signal.SIGTERM)
    assert exits.get(timeout=20) == "no checkpoint within 0.01 s"
