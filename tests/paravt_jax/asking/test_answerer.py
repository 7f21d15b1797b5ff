"""Answers have their evidence, and listeners receive every event in order."""

import asyncio
import io
import json

import pytest
from agents import ANSWER, FakeFrames, call, script

from paravt_jax.asking.answerer import Answer, Answerer
from paravt_jax.asking.page import page_of
from paravt_jax.asking.terminal import BAR_COLUMNS, Live, bar, displayed_text, summary, why_no_answer
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.tools import Window

DEFAULT, TIGHT = EpisodeConfig(), 512
LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"


def answer_of(chat, turns, videos=("/data/a.mp4",), config=DEFAULT, **script_settings) -> tuple[Answer, str]:
    """The answer and the terminal output."""
    output = io.StringIO()
    agent = Agent(script(chat, turns, **script_settings), FakeFrames(), chat, config)
    return asyncio.run(Answerer(agent, 8).answer(videos, "What colour is it?", Live(output.write))), output.getvalue()


def test_the_evidence_is_the_windows_of_the_calls(chat):
    answer, _ = answer_of(chat, [LOOK, ANSWER])
    assert answer.text == "A"
    evidence = [(part.video, part.start_s, part.end_s, part.report) for part in answer.evidence]
    assert evidence == [("a.mp4", 16, 24, "A report."), ("a.mp4", 32, 40, "A report.")]
    assert answer.to_record()["outcomes"] == ["ok", "ok"]


def test_the_evidence_names_one_of_several_videos(chat):
    turn = LOOK.replace("video.mp4", "video_1.mp4")
    answer, output = answer_of(chat, [turn, ANSWER], ("/data/a.mp4", "/data/b.mp4"))
    assert {part.video for part in answer.evidence} == {"b.mp4"}
    assert "/data/b.mp4, 1:04.0 (as video_1.mp4)" in output


def test_the_evidence_names_videos_with_the_same_file_name_as_in_the_prompt(chat):
    turn = LOOK.replace("video.mp4", "video_1.mp4", 1).replace("video.mp4", "video_2.mp4")
    answer, _ = answer_of(chat, [turn, ANSWER], ("/data/b.mp4", "/data/1/a.mp4", "/data/2/a.mp4"))
    assert [part.video for part in answer.evidence] == ["video_1.mp4", "video_2.mp4"]


def test_failed_calls_are_not_evidence(chat):
    answer, output = answer_of(chat, [f"Hm.</think>{call(40, 32)}<|im_end|>", ANSWER])
    assert not answer.evidence and "report 1  (0.0 s) invalid: Error: start_time" in output
    assert "only the prompt" in "\n".join(summary(answer))


def test_without_tags_the_last_turn_is_the_answer_unless_it_was_cut_off(chat):
    assert answer_of(chat, ["Red or blue?</think>It is red.<|im_end|>"])[0].text == "It is red."
    cut_off, _ = answer_of(chat, ["Red or blue?</think>It is"])
    assert (cut_off.text, cut_off.finish) == ("", "length")


@pytest.mark.parametrize(
    ("turns", "config", "reason"),
    [
        (["Red or blue? " * 9], {"max_new_tokens": 24}, "the turn reached its limit of 24 tokens; raise rollout.max_n"),
        (["Red or blue? " * 9], {"max_context_tokens": TIGHT}, "the context of 512 tokens is full; pass a smaller --"),
        ([LOOK, ANSWER], {"max_context_tokens": TIGHT}, "the context of 512 tokens is full; pass a smaller --frames"),
        (["Hm.</think><answer></answer><|im_end|>"], {}, "the model's answer is empty"),
        ([ANSWER], {}, ""),
    ],
)
def test_a_missing_answer_names_the_limit_that_was_reached(turns, config, reason, chat):
    config = EpisodeConfig(**{"max_new_tokens": 256} | config)
    answer, _ = answer_of(chat, turns, config=config)
    shown = why_no_answer(answer, config)
    assert shown.startswith(reason) and bool(reason) != bool(answer.text)
    assert ("paravt.json" in shown) == ("paravt.json of the model's Hugging Face directory" in shown)
    assert "paravt.json" not in why_no_answer(answer, config, has_recipe=False)


def test_parallel_calls_take_the_maximum_of_their_times(chat):
    answer, _ = answer_of(chat, [LOOK, ANSWER], report_after_s=0.2)
    seconds = answer.seconds
    assert 0.2 <= seconds.calls[0] < seconds.calls_in_turn[0] and seconds.calls_in_turn[0] >= 0.4


def test_events_are_shown_in_order(chat):
    lines = [line.split("  ")[0] for line in answer_of(chat, [LOOK, ANSWER])[1].splitlines()]
    assert lines == ["video", "overview", "thinking", "call 1", "call 2", "report 1", "report 2", "thinking"]


def test_text_is_shown_once_without_tags_and_calls(chat):
    _, output = answer_of(chat, [LOOK, ANSWER])
    assert output.count("Where?") == 1 and output.count("It is red.") == 1
    assert "<" not in output and "crop_video" not in output


def test_model_text_cannot_send_control_characters_to_the_terminal(chat):
    turn = f"\x1b[2J\x9b1m‮{LOOK}"
    _, output = answer_of(chat, [turn, ANSWER], report="\x1b]0;owned\x07<|im_end|>")
    assert not any(character in output for character in "\x1b\x9b\x07‮")


def test_an_incomplete_tag_waits_for_the_next_token():
    assert displayed_text("It is red.</th") == "It is red."
    assert displayed_text("a < b and c") == "a < b and c"
    assert displayed_text("<think>\nIt is red.</think>\n<tool_call>{") == "It is red."


@pytest.mark.parametrize("answer", ["<answer>B", "<answer>B</answer>", "It is B", "The <answer>B"])
def test_the_answer_is_not_shown_as_thinking(answer):
    assert displayed_text(f"<think>I write <answer>.</think>{answer}") == "I write ."
    assert displayed_text(f"I look.</think>It is B<tool_call>{answer}") == "I look.It is B"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (Window(0, 40), "█" * 40),
        (Window(10, 20), "·" * 10 + "█" * 10 + "·" * 20),
        (Window(39.99, 40), "·" * 39 + "█"),
        (Window(0, 0.01), "█" + "·" * 39),
    ],
)
def test_a_bar_shows_even_the_shortest_window(window, expected):
    assert bar(window, 40.0) == expected and len(expected) == BAR_COLUMNS


@pytest.mark.parametrize("returns", ["report", "frames"])
def test_the_page_shows_the_turns_and_escapes_markup_of_the_model(chat, returns):
    turns, config = [LOOK, f"<img src=x onerror=alert(1)>{ANSWER}"], EpisodeConfig(crop_returns=returns)
    agent = Agent(script(chat, turns), FakeFrames(), chat, config)
    answerer = Answerer(agent, 8)
    page = page_of(asyncio.run(answerer.answer(["/data/a.mp4"], "What colour?")), answerer, "m").decode()
    assert "What colour?" in page and "onerror" in page and "<img" not in page
    page_data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert page_data["runs"][0]["answer"]["evidence"] == [["a.mp4", 16, 24], ["a.mp4", 32, 40]]
    assert len(page_data["pictures"]["data"]) == 22  # 8 of the overview, 16 of the windows, 2 of them equal
