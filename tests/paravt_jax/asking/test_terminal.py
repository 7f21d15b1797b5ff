"""No text of a model, row, file or server reaches the terminal with control characters."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest
from agents import ANSWER, FakeFrames, call_of, script
from PIL import Image
from terminals import a_terminal

import model_port.cli
import model_port.terminal
import rollout.cli
import rollout.terminal
from model_port.progress import Meter
from paravt_jax import ask, serve
from paravt_jax.asking import asker
from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.terminal import clock
from paravt_jax.config import LogConfig
from paravt_jax.data.__main__ import main as data_main
from paravt_jax.run.log import RunLog
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.serve import StartLine

# Sets the title, clears the screen, sets the clipboard, overrides the direction, and overwrites the line.
HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;aGk=\x07\u202edlrow\u2066\x9b31m\rover"
CONTROL = set("\x1b\x07\x9b\r\u202e\u2066")


def test_a_cell_of_a_table_cannot_end_its_cell_or_row():
    table = model_port.terminal.markdown_table(["label", "score"], [["a | 99\n| b", "1"]])
    assert table.splitlines()[2:] == [r"| a \| 99 \| b | 1 |"]


def test_both_packages_escape_the_same_characters():
    every = "".join(map(chr, range(0x110000)))
    assert model_port.terminal.visible(every) == rollout.terminal.visible(every)
    screen = model_port.terminal.visible(HOSTILE + "\n\té日本🎬")
    assert CONTROL.isdisjoint(screen) and screen.endswith("over\n\té日本🎬") and "␛]0;title␇" in screen


@pytest.mark.parametrize("run_cli", [model_port.cli.run_cli, rollout.cli.run_cli])
@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize(
    "problem", [ValueError(HOSTILE), KeyError(HOSTILE), OSError(2, "No such file", f"a\n{HOSTILE}")]
)
def test_error_lines_have_no_control_characters(run_cli, debug, problem, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["any", *debug])

    def fail():
        raise problem

    with pytest.raises(SystemExit):
        run_cli(fail)
    output = capsys.readouterr().err
    assert CONTROL.isdisjoint(output) and "title" in output and "error: " in output


@pytest.mark.parametrize("run_cli", [model_port.cli.run_cli, rollout.cli.run_cli])
def test_output_is_escaped_on_a_terminal_and_raw_in_a_pipe(run_cli, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_cli(lambda: print(HOSTILE))
    assert capsys.readouterr().out == f"{HOSTILE}\n"
    with a_terminal(monkeypatch, "stdout") as read_screen:
        with pytest.raises(SystemExit):
            run_cli(lambda: print(HOSTILE))
        assert read_screen() == f"{model_port.terminal.visible(HOSTILE)}\n"


@pytest.fixture
def ask_of(chat, tmp_path, monkeypatch):
    """Runs `paravt ask` on a video with the given name and a scripted answer. Returns the exit status."""

    def run(answer, *flags, name="a", content=b"any", question="What?", first="", num_frames=8, **config) -> int:
        agent = Agent(script(chat, [first or answer, answer]), FakeFrames(), chat, EpisodeConfig(**config))

        @asynccontextmanager
        async def open_asker(*args, **settings):
            yield Answerer(agent, num_frames)

        monkeypatch.setattr(asker, "open_asker", open_asker)
        (video := tmp_path / f"{name}.mp4").write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["ask", str(video), question, *flags])
        with pytest.raises(SystemExit) as end:
            model_port.cli.run_cli(ask.main)
        return end.value.code

    return run


def test_answers_and_progress_of_ask_are_escaped_on_a_terminal(ask_of, monkeypatch):
    with a_terminal(monkeypatch, "stdout", "stderr") as read_screen:
        assert ask_of(f"{HOSTILE}</think><answer>{HOSTILE}</answer><|im_end|>", name=HOSTILE.replace("/", "")) == 0
        screen = read_screen()
    assert CONTROL.isdisjoint(screen) and screen.count("␛]0;title␇") >= 3


@pytest.mark.parametrize(("num_frames", "shown"), [(1, " 1 frame, "), (2, " 2 frames, ")])
def test_ask_shows_the_number_of_frames(ask_of, capsys, num_frames, shown):
    assert ask_of(ANSWER, num_frames=num_frames) == 0
    assert shown in capsys.readouterr().err


def test_an_unreadable_video_is_not_blamed_on_an_image(tmp_path, chat, monkeypatch, capsys):
    @asynccontextmanager
    async def open_asker(*args, **settings):
        yield Answerer(Agent(script(chat, []), FakeFrames(), chat, EpisodeConfig()), 8)

    monkeypatch.setattr(asker, "open_asker", open_asker)
    image, video = tmp_path / "a.png", tmp_path / "missing.mp4"
    Image.new("RGB", (64, 64)).save(image)
    video.write_bytes(b"any")
    monkeypatch.setattr(sys, "argv", ["ask", str(image), str(video), "What?"])
    with pytest.raises(SystemExit):
        model_port.cli.run_cli(ask.main)
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {video}: the video cannot be opened"


def test_a_question_may_be_longer_than_a_file_name(ask_of, capsys):
    assert ask_of("Long.</think><answer>B</answer><|im_end|>", question="Which one is it? " * 40) == 0
    assert capsys.readouterr().out == "B\n"


def test_ask_searches_subtitles_beside_the_video(ask_of, tmp_path, capsys):
    (tmp_path / "a.srt").write_text("1\n00:00:05,000 --> 00:00:07,000\nA heron.\n")
    search = f"I search.</think>{call_of('search_subtitles', video_path='video.mp4', query='heron')}<|im_end|>"
    assert ask_of(ANSWER, first=search, tools=["search_subtitles"]) == 0
    assert "5.0 to 7.0 seconds: A heron." in capsys.readouterr().err


TIMES = {0: "0:00.0", 5.04: "0:05.0", 59.96: "1:00.0", 61: "1:01.0", 65: "1:05.0"}
TIMES |= {3599.97: "1:00:00.0", 3661.5: "1:01:01.5"}


@pytest.mark.parametrize("seconds", TIMES)
def test_a_time_is_rounded_before_it_becomes_minutes(seconds):
    assert clock(seconds) == TIMES[seconds]


@pytest.mark.parametrize("command", [ask, serve])
@pytest.mark.parametrize("number", ["0", "4097", "many"])
def test_the_overview_has_a_possible_number_of_frames(command, number, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.make_parser().parse_args(["--frames", number, "a.mp4", "What?"])
    assert f"argument --frames: {number} is not a number from 1 to 4096" in capsys.readouterr().err


def test_the_usage_of_ask_has_the_videos_before_the_question():
    assert ask.make_parser().format_usage().endswith("ask [-h] [options] [VIDEO …] QUESTION\n")


def test_ask_fails_without_an_answer_unless_interactive(ask_of, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.html"
    assert ask_of("Red or", "--html", str(page)) == 1 and page.is_file()
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no answer: the context of 32,768")
    monkeypatch.setattr(sys, "stdin", io.StringIO("And now?\n\n"))
    assert ask_of("Red or", "--interactive") == 0
    shown = capsys.readouterr().err
    assert shown.count("no answer: the context of 32,768") == 2
    assert "\nquestion  And now?\nvideo " in shown and shown.endswith("\nquestion  \n")


WAITS = """
import asyncio, model_port.cli, paravt_jax.ask
model_port.cli.run_cli(lambda: asyncio.run(paravt_jax.ask._next_question()))
"""
COMPILES = """
import asyncio, contextlib, sys, time
import model_port.cli
from paravt_jax import ask
from paravt_jax.asking import asker

class Compiling:
    async def answer(self, *args, **settings):
        await asyncio.to_thread(lambda: print("compiling", file=sys.stderr, flush=True) or time.sleep(60))

@contextlib.asynccontextmanager
async def open_asker(*args, **settings):
    yield Compiling()

asker.open_asker = open_asker
args = ask.make_parser().parse_args(["Why?"])
model_port.cli.run_cli(lambda: asyncio.run(ask.run(args, [], "Why?")))
"""


@pytest.mark.parametrize(("code", "shown"), [(WAITS, "q"), (COMPILES, "compiling\n")], ids=["waiting", "compiling"])
def test_ctrl_c_ends_ask_while_it_waits_for_a_question_or_a_compilation(code, shown):
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            assert process.stderr.read(len(shown)) == shown
            time.sleep(0.2)  # it reads a line
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130 and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_video_that_ask_cannot_read_is_named(ask_of, tmp_path, capsys):
    assert ask_of("Red", name="missing") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'missing.mp4'}: the video cannot be opened\n"


def test_an_image_that_ask_cannot_read_is_named_once(ask_of, tmp_path, capsys):
    Image.new("RGB", (40, 24)).save(buffer := io.BytesIO(), "PNG")
    assert ask_of("Red", content=buffer.getvalue()[:60]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.mp4'} cannot be read: image file is truncated\n"


def test_inspected_rows_are_escaped_on_a_terminal(tmp_path, monkeypatch):
    extra = {"answer": "A", "question_type": HOSTILE}
    row = {"id": HOSTILE, "prompt": [{"role": "user", "content": HOSTILE}], "videos": [{"video": HOSTILE}]}
    lines = [row | {"extra_info": extra}, row | {"extra_info": extra | {"question_type": "mcq"}}, {HOSTILE: 1}]
    (rows := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["data", "inspect", str(rows)])
    with a_terminal(monkeypatch, "stdout", "stderr") as read_screen:
        with pytest.raises(SystemExit, match="0"):
            model_port.cli.run_cli(data_main)
        screen = read_screen()
    assert CONTROL.isdisjoint(screen) and "␛]0;title␇" in screen and "missing files: 1" in screen


def test_progress_lines_have_no_control_characters(tmp_path, capsys):
    with Meter(f"reading {HOSTILE}") as meter:
        model_port.terminal.say(HOSTILE)
        model_port.terminal.say(meter.line())
    log = RunLog(tmp_path, LogConfig(), num_steps=3, first_step=0, settings={})
    log.say(HOSTILE)
    log.phase(HOSTILE)
    model_port.terminal.say(log.where())
    log.close()
    StartLine().show(HOSTILE)
    output = capsys.readouterr().err
    assert CONTROL.isdisjoint(output) and output.count("title") == 5
