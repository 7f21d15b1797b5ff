"""A question's answer says what it rests on, and whoever listens hears of everything as it happens."""

import asyncio
import io
import json

import pytest
from agents import ANSWER, FakeFrames, call, script

from model_port.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.asking.answerer import Answerer, Reply
from paravt_jax.asking.page import page_of
from paravt_jax.asking.terminal import BAR_COLUMNS, Live, bar, clock, spoken, summary
from rollout.chat import Chat
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.tools import Window

LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"


@pytest.fixture(scope="module")
def chat():
    return Chat(tiny_tokenizer(), CHAT_TEMPLATE)


def asked(chat, turns, videos=("/data/a.mp4",), **script_settings) -> tuple[Reply, str]:
    """The answer, and what was shown."""
    shown = io.StringIO()
    agent = Agent(script(chat, turns, **script_settings), FakeFrames(), chat, EpisodeConfig())
    return asyncio.run(Answerer(agent, 8).answer(videos, "What colour is it?", Live(shown.write))), shown.getvalue()


def test_an_answer_rests_on_the_parts_that_were_looked_at(chat):
    answer, _ = asked(chat, [LOOK, ANSWER])
    assert answer.text == "A"
    assert [(one.video, one.start_s, one.end_s, one.report) for one in answer.evidence] == [
        ("a.mp4", 16, 24, "A report."),
        ("a.mp4", 32, 40, "A report."),
    ]
    assert answer.to_record()["outcomes"] == ["ok", "ok"]


def test_of_several_videos_the_one_that_was_looked_at_is_named(chat):
    turn = LOOK.replace("video.mp4", "video_1.mp4")
    answer, shown = asked(chat, [turn, ANSWER], ("/data/a.mp4", "/data/b.mp4"))
    assert {one.video for one in answer.evidence} == {"b.mp4"}
    assert "/data/b.mp4, 1:04.0 (as video_1.mp4)" in shown


def test_calls_that_were_not_carried_out_are_no_evidence(chat):
    answer, shown = asked(chat, [f"Hm.</think>{call(40, 32)}<|im_end|>", ANSWER])
    assert not answer.evidence and "report 1  (0.0 s) invalid: Error: start_time" in shown
    assert "the overview alone" in "\n".join(summary(answer))


def test_without_tags_the_last_words_are_the_answer_and_without_an_end_there_is_none(chat):
    assert asked(chat, ["Red or blue?</think>It is red.<|im_end|>"])[0].text == "It is red."
    cut_off, _ = asked(chat, ["Red or blue?</think>It is"])
    assert (cut_off.text, cut_off.finish) == ("", "length")
    assert "longer than its tokens" in next(summary(cut_off))


def test_calls_side_by_side_take_as_long_as_the_longest_of_them(chat):
    answer, _ = asked(chat, [LOOK, ANSWER], report_after_s=0.2)
    assert 0.2 <= answer.seconds.calls[0] < 0.4 <= answer.seconds.calls_in_turn[0]


def test_everything_is_shown_in_the_order_in_which_it_happens(chat):
    lines = [line.split("  ")[0] for line in asked(chat, [LOOK, ANSWER])[1].splitlines()]
    assert lines == ["video", "overview", "thinking", "call 1", "call 2", "report 1", "report 2", "thinking"]


def test_words_are_shown_once_without_tags_and_calls(chat):
    _, shown = asked(chat, [LOOK, ANSWER])
    assert shown.count("Where?") == 1 and shown.count("It is red.") == 1
    assert "<" not in shown and "crop_video" not in shown


def test_what_a_model_says_cannot_steer_the_terminal(chat):
    turn = f"\x1b[2J\x9b1m‮{LOOK}"
    _, shown = asked(chat, [turn, ANSWER], report="\x1b]0;owned\x07<|im_end|>")
    assert not any(character in shown for character in "\x1b\x9b\x07‮")


def test_an_end_that_may_become_a_tag_waits_for_the_next_token():
    assert spoken("It is red.</th") == "It is red."
    assert spoken("a < b and c") == "a < b and c"
    assert spoken("<think>\nIt is red.</think>\n<tool_call>{") == "It is red."


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (Window(0, 40), "█" * 40),
        (Window(10, 20), "·" * 10 + "█" * 10 + "·" * 20),
        (Window(39.99, 40), "·" * 39 + "█"),
        (Window(0, 0.01), "█" + "·" * 39),
    ],
)
def test_a_bar_shows_where_a_window_is_however_short(window, expected):
    assert bar(window, 40.0) == expected and len(expected) == BAR_COLUMNS


def test_times_read_as_on_a_clock():
    assert [clock(seconds) for seconds in (5.04, 65, 3661.5)] == ["0:05.0", "1:05.0", "1:01:01.5"]


def test_the_page_of_a_question_has_its_turns_and_no_markup_of_the_model(chat):
    agent = Agent(script(chat, [LOOK, f"<img src=x onerror=alert(1)>{ANSWER}"]), FakeFrames(), chat, EpisodeConfig())
    answerer = Answerer(agent, 8)
    page = page_of(asyncio.run(answerer.answer(["/data/a.mp4"], "What colour?")), answerer, "m").decode()
    assert "What colour?" in page and "onerror" in page and "<img" not in page
    told = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert told["runs"][0]["answer"]["evidence"] == [["a.mp4", 16, 24], ["a.mp4", 32, 40]]
    assert len(told["pictures"]["data"]) == 22  # of the overview 8, of the windows 16, 2 of them the same
