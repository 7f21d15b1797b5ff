"""Nothing that a model, a row, a file or a server says steers the terminal of whoever reads it."""

import json
import os
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
from agents import FakeFrames, script

import model_port.cli
import model_port.terminal
import rollout.cli
import rollout.terminal
from model_port.progress import Meter
from paravt_jax import ask
from paravt_jax.asking import asker
from paravt_jax.asking.answerer import Answerer
from paravt_jax.config import LogConfig
from paravt_jax.data.__main__ import main as data_main
from paravt_jax.run.log import RunLog
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.serve import StartLine

# A title, the screen cleared, the clipboard set, an override of direction, and what would stand over the line itself.
HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;aGk=\x07\u202edlrow\u2066\x9b31m\rover"
STEERING = set("\x1b\x07\x9b\r\u202e\u2066")


@contextmanager
def a_terminal(monkeypatch, *names):
    """Has `names` of sys on a terminal; gives a function that reads what came to it."""
    ours, theirs = os.openpty()
    monkeypatch.setenv("NO_COLOR", "1")  # which a command would set, and leave
    with os.fdopen(theirs, "w") as shown:
        for name in names:
            monkeypatch.setattr(sys, name, shown)

        def came():
            shown.flush()
            os.set_blocking(ours, False)
            return os.read(ours, 2**20).decode().replace("\r\n", "\n")  # as a terminal breaks lines

        yield came
    os.close(ours)


def test_both_packages_make_the_same_characters_visible():
    every = "".join(map(chr, range(0x110000)))
    assert model_port.terminal.visible(every) == rollout.terminal.visible(every)
    shown = model_port.terminal.visible(HOSTILE + "\n\té日本🎬")
    assert STEERING.isdisjoint(shown) and shown.endswith("over\n\té日本🎬") and "␛]0;title␇" in shown


@pytest.mark.parametrize("run_cli", [model_port.cli.run_cli, rollout.cli.run_cli])
@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize(
    "problem", [ValueError(HOSTILE), KeyError(HOSTILE), OSError(2, "No such file", f"a\n{HOSTILE}")]
)
def test_no_error_line_steers_a_terminal(run_cli, debug, problem, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["any", *debug])

    def fail():
        raise problem

    with pytest.raises(SystemExit):
        run_cli(fail)
    said = capsys.readouterr().err
    assert STEERING.isdisjoint(said) and "title" in said and "error: " in said


@pytest.mark.parametrize("run_cli", [model_port.cli.run_cli, rollout.cli.run_cli])
def test_what_a_command_prints_is_made_visible_on_a_terminal_and_raw_in_a_pipe(run_cli, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_cli(lambda: print(HOSTILE))
    assert capsys.readouterr().out == f"{HOSTILE}\n"
    with a_terminal(monkeypatch, "stdout") as came:
        with pytest.raises(SystemExit):
            run_cli(lambda: print(HOSTILE))
        assert came() == f"{model_port.terminal.visible(HOSTILE)}\n"


def test_an_answer_of_ask_and_all_that_is_told_of_it_steer_no_terminal(chat, tmp_path, monkeypatch):
    answer = f"{HOSTILE}</think><answer>{HOSTILE}</answer><|im_end|>"
    agent = Agent(script(chat, [answer]), FakeFrames(), chat, EpisodeConfig())

    @asynccontextmanager
    async def open_asker(*args, **settings):
        yield Answerer(agent, 8)

    monkeypatch.setattr(asker, "open_asker", open_asker)
    (video := tmp_path / f"a{HOSTILE.replace('/', '')}.mp4").write_bytes(b"any")
    monkeypatch.setattr(sys, "argv", ["ask", str(video), "What?"])
    with a_terminal(monkeypatch, "stdout", "stderr") as came:
        with pytest.raises(SystemExit, match="0"):
            model_port.cli.run_cli(ask.main)
        shown = came()
    assert STEERING.isdisjoint(shown) and shown.count("␛]0;title␇") >= 3


def test_rows_that_are_inspected_steer_no_terminal(tmp_path, monkeypatch):
    extra = {"answer": "A", "question_type": HOSTILE}
    row = {"id": HOSTILE, "prompt": [{"role": "user", "content": HOSTILE}], "videos": [{"video": HOSTILE}]}
    lines = [row | {"extra_info": extra}, row | {"extra_info": extra | {"question_type": "mcq"}}, {HOSTILE: 1}]
    (rows := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["data", "inspect", str(rows)])
    with a_terminal(monkeypatch, "stdout", "stderr") as came:
        with pytest.raises(SystemExit, match="0"):
            model_port.cli.run_cli(data_main)
        shown = came()
    assert STEERING.isdisjoint(shown) and "␛]0;title␇" in shown and "missing files: 1" in shown


def test_lines_of_progress_steer_no_terminal(tmp_path, capsys):
    with Meter(f"reading {HOSTILE}") as meter:
        meter.say(HOSTILE)
        model_port.terminal.say(meter.line())
    log = RunLog(tmp_path, LogConfig(), num_steps=3, first_step=0, settings={})
    log.say(HOSTILE)
    log.phase(HOSTILE)
    model_port.terminal.say(log.where())
    log.close()
    StartLine().show(HOSTILE)
    said = capsys.readouterr().err
    assert STEERING.isdisjoint(said) and said.count("title") == 5
