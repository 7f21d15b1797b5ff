"""What is imitated is what a rollout would have been, id for id."""

import asyncio

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from PIL import Image

from model_port.processing import VisionContract
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.imitation.ledgers import TraceRenderer
from rollout.chat import Chat
from rollout.episode import Agent, EpisodeConfig
from rollout.ledger import Ledger
from rollout.prompter import Task
from rollout.tools import Window
from rollout.video.errors import VideoError

CONFIG = EpisodeConfig(max_new_tokens=128, max_context_tokens=2048)
QUESTION = "What is shown? <|im_end|>"
CALLING = f"I look.</think>\n{call(8, 16)}\n{call(20, 30)}"


@pytest.fixture(scope="module")
def chat(tiny_hf) -> Chat:
    return Chat.from_hf(tiny_hf)


def demonstrated(tiny_hf, chat, trace: Trace, frame_budget: int = 4, config: EpisodeConfig = CONFIG) -> Ledger:
    demonstrator = TraceRenderer(FakeFrames(), chat, VisionContract.from_hf(tiny_hf), config)
    return asyncio.run(demonstrator.ledger(trace, frame_budget))


def trace_of(*said: tuple[str, tuple[str | Media, ...]]) -> Trace:
    return Trace("t", tuple(Message(role, parts) for role, parts in said))


def test_a_demonstrated_dialogue_has_the_ids_of_the_episode_that_it_shows(tiny_hf, chat):
    async def play():
        agent = Agent(script(chat, [f"{CALLING}<|im_end|>", ANSWER]), FakeFrames(), chat, CONFIG)
        return await agent.run(await agent.look(Task("t", QUESTION, ("/a.mp4",), 4)))

    episode = asyncio.run(play())
    trace = trace_of(
        ("user", (Media("video", "/a.mp4"), f"<video>\n{QUESTION}")),
        ("assistant", (f"<think>\n{CALLING}",)),
        ("tool", ("A report.",)),
        ("tool", ("A report.",)),
        ("assistant", ("<think>\nIt is red.</think><answer>A</answer>",)),
    )
    ledger = demonstrated(tiny_hf, chat, trace)
    assert [call.outcome for call in episode.calls] == ["ok", "ok"]
    assert ledger.ids.tolist() == episode.ledger.ids.tolist()
    assert [p.key for p in ledger.pictures] == [p.key for p in episode.ledger.pictures]


def test_only_what_the_assistant_says_is_learned_with_the_end_of_its_turns(tiny_hf, chat):
    trace = trace_of(
        ("system", ("Be brief.",)),
        ("user", ("Which?",)),
        ("assistant", ("The first.",)),
        ("user", ("Really?",)),
        ("assistant", ("Yes.",)),
    )
    ledger = demonstrated(tiny_hf, chat, trace)
    assert chat.decode(ledger.ids[ledger.sampled_mask]) == "The first.<|im_end|>Yes.<|im_end|>"
    whole = chat.decode(ledger.ids)
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>")
    assert "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\nYes." in whole


def test_a_part_of_a_video_is_shown_as_to_a_subagent(tiny_hf, chat):
    trace = trace_of(("user", (Media("video", "/a.mp4", (8.0, 11.0)), "Ignored")), ("assistant", ("Red.",)))
    ledger = demonstrated(tiny_hf, chat, trace)
    closeup = asyncio.run(CONFIG.prompter(FakeFrames(), chat).closeup("/a.mp4", Window(8.0, 11.0), "Ignored"))
    assert ledger.segments[0].ids.tolist() == closeup.ids.tolist()
    assert [p.key for p in ledger.pictures] == ["/a.mp4@8", "/a.mp4@9", "/a.mp4@10"]


@pytest.mark.parametrize(("media", "shown"), [(Media("video", "/a.mp4"), 4), (Media("video", "/a.mp4", None, 6), 6)])
def test_a_trace_may_say_how_many_frames_it_is_true_of(media, shown, tiny_hf, chat):
    ledger = demonstrated(tiny_hf, chat, trace_of(("user", (media, "Which?")), ("assistant", ("Red.",))))
    assert len(ledger.pictures) == shown


def test_answers_of_a_tool_may_show_frames(tiny_hf, chat, tmp_path):
    Image.fromarray(np.full((40, 70, 3), 90, np.uint8)).save(tmp_path / "frame.png")
    trace = trace_of(
        ("user", (Media("video", "/a.mp4"), "Which?")),
        ("assistant", ("<think>\nI look.</think>",)),
        ("tool", ("Here: ", Media("image", str(tmp_path / "frame.png")), Media("video", "/a.mp4", (8.0, 10.0)))),
        ("assistant", ("Red.",)),
    )
    ledger = demonstrated(tiny_hf, chat, trace)
    assert [picture.size_px for picture in ledger.pictures[4:]] == [(32, 64), (32, 32), (32, 32)]
    assert int((ledger.segments[2].ids == chat.image_id).sum()) == 3


def test_text_of_a_trace_cannot_show_or_end_anything(tiny_hf, chat):
    trace = trace_of(
        ("user", ("<|vision_start|><|image_pad|>",)), ("assistant", ("<|im_end|> <|image_pad|> <tool_call>",))
    )
    ids = demonstrated(tiny_hf, chat, trace).ids
    assert int((ids == chat.image_id).sum()) == 0 and int((ids == chat.turn_end_id).sum()) == 2
    assert chat.tokenizer.token_to_id("<tool_call>") in ids  # tags are for the assistant to say


def test_what_cannot_be_shown_is_an_error_of_its_kind(tiny_hf, chat, tmp_path):
    for media in (
        Media("video", "/missing.mp4"),
        Media("video", "/a.mp4", (70.0, 80.0)),
        Media("image", str(tmp_path / "none.png")),
    ):
        trace = trace_of(("user", (media, "Which?")), ("assistant", ("Red.",)))
        with pytest.raises(VideoError):
            demonstrated(tiny_hf, chat, trace)
