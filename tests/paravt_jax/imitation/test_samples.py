"""The record of a trace has the form of an episode."""

import asyncio

from agents import FakeFrames, call

from model_port.processing import VisionContract
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.imitation.render import TraceRenderer
from paravt_jax.imitation.samples import sample_record
from paravt_jax.view.episodes import convert, row_of
from rollout.chat import Chat
from rollout.episode_config import EpisodeConfig


def test_a_sample_is_shown_like_an_episode(tiny_hf):
    renderer = TraceRenderer(FakeFrames(), Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf), EpisodeConfig())
    trace = Trace(
        "t",
        (
            Message("system", ("Be brief.",)),
            Message("user", (Media("video", "/a.mp4"), "What colour is it?")),
            Message("assistant", (f"I look.{call(16, 24)}{call(9, 3)}",)),
            Message("tool", ("A red one.", Media("video", "/a.mp4", (16.0, 18.0)))),
            Message("tool", ("Nothing.",)),
            Message("assistant", ("It is red.",)),
        ),
    )
    record = sample_record(asyncio.run(renderer.render(trace, 4)), 7)
    (video,), (looked, answered) = record["videos"], record["turns"]
    assert (record["step"], record["question"], record["frame_budget"]) == (7, "What colour is it?", 4)
    assert (video["path"], video["duration_s"], len(video["frames_s"])) == ("/a.mp4", 64.0, 4)
    windows = [(call["window_s"], len(call["frames_s"])) for call in looked["calls"]]
    assert windows == [([16.0, 24.0], 2), (None, 0)]
    assert (looked["told"], answered["told"]) == ("A red one.\nNothing.", "")
    episode = convert(record, "<think>\n", 1000)
    assert episode["turns"][1]["num_sampled"] == len(record["segments"][3]["ids"]) > 3
    assert row_of(episode, 0)["result"] == "" and row_of(episode, 0)["called"] == "ok"
