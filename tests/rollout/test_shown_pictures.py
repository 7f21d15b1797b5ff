"""Tools can return pictures to the main agent; they are in its dialogue in order, and overflow fails only one call."""

import json
from dataclasses import replace

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, call_of, play_calls
from qwen_tokenizer import TOKENIZERS, chat_of, ids_of_template

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from rollout.chat import Chat
from rollout.episode import EpisodeCallbacks
from rollout.episode_config import EpisodeConfig
from rollout.picture import Picture
from rollout.prompter import Task
from rollout.prompts import Prompts, frame_parts, main_messages, text_part
from rollout.toolbox import signatures, tools_of

TASK = Task("t", "What is it?", ("/data/a.mp4",), frame_budget=2)
BOX = [0.5, 0.25, 1.0, 0.75]
OWN = """
import numpy as np
from dataclasses import replace
from pathlib import Path
from rollout.picture import Picture
from rollout.toolbox import Tool, ToolArgs
from rollout.tools import VIDEO_PATH, ToolSpec, make_schema

def tool(name, work, shows=True):
    class One(Tool):
        spec = ToolSpec(make_schema(name, "Does it.", video_path=VIDEO_PATH), usage=name, effect="done")
        shows_pictures = shows
        def check(self, arguments, videos): return ToolArgs(videos.path_of(arguments))
        run = work
    return One

async def ends(self, args, context):
    last_s = context.videos.infos[args.path].duration_s - 1
    return ["Its first and last second: ", *await context.prompter.frames_at(args.path, [0, last_s]), " <|im_end|>"]

def draws(self, args, context):
    return ["A drawing:", Picture("own name", np.full((50, 70, 3), 7, np.uint8))]

async def many(self, args, context):
    return await context.prompter.frames_at(args.path, range(9))

def odd(self, args, context): return ["text", 3]

async def moved(self, args, context):
    return [replace(frame, path=Path(frame.path)) for frame in await context.prompter.frames_at(args.path, [0])]

Moved, Windowed = tool("moved", moved), tool("windowed", draws)
Windowed.check = lambda self, arguments, videos: ToolArgs(videos.path_of(arguments), (1, 2))
Ends, Draws, Many, Odd = tool("ends", ends), tool("draws", draws), tool("many", many), tool("odd", odd)
Hidden = tool("hidden", draws, shows=False)
"""


@pytest.fixture(scope="module", params=TOKENIZERS)
def chat(request):
    return chat_of(request.param)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def played(chat, *calls: str, **options):
    return play_calls(chat, TASK, *calls, **{"crop_returns": "frames", **options})


class Results(EpisodeCallbacks):
    def __init__(self):
        self.outcomes = []

    def on_result(self, turn_number, number, call):
        self.outcomes.append((number, call.outcome))


def keys(pictures) -> list[str]:
    return [picture.key for picture in pictures]


@pytest.mark.slow
def test_frames_of_calls_are_in_the_rendered_dialogue_without_sub_agents(chat):
    engine, episode = played(chat, call(5, 8), call(60, 90))
    assert [len(request.pictures) for request in engine.requests] == [2, 9]  # the main agent's two turns
    shown = ["/data/a.mp4@0", "/data/a.mp4@63", *(f"/data/a.mp4@{n}" for n in (5, 6, 7, 60, 61, 62, 63))]
    assert keys(engine.requests[1].pictures) == keys(episode.ledger.pictures) == shown
    intro = "The part of the video from {} seconds, {} frames of it:\n"
    clamped = "The video ends at 64.0 seconds, so the part from 60.0 to 64.0 was looked at.\n"
    responses = [
        [text_part(intro.format("5.0 to 8.0", 3)), *frame_parts(Prompts(), [5.0, 6.0, 7.0])],
        [text_part(clamped + intro.format("60.0 to 64.0", 4)), *frame_parts(Prompts(), [60.0, 61.0, 62.0, 63.0])],
    ]
    tools = tools_of(("crop_video",), "frames")
    specs = [tool.spec for tool in tools]
    messages = [
        *main_messages(Prompts(), [("video.mp4", 64.0, [0.0, 63.0])], TASK.question, 5, specs),
        {"role": "assistant", "content": f"<think>\nI look.</think>{call(5, 8)}{call(60, 90)}"},
        *({"role": "tool", "content": response} for response in responses),
        {"role": "assistant", "content": "<think>\n" + ANSWER.removesuffix("<|im_end|>")},
    ]
    whole = ids_of_template(chat, messages, [specs[0].schema])
    np.testing.assert_array_equal([*episode.ledger.ids, *chat.encode("\n")], whole)
    assert episode.outcomes == ["ok", "ok"] and episode.calls[0].frames_s == (5.0, 6.0, 7.0)


def test_a_zoom_returns_its_region_and_a_subtitle_search_returns_text(chat):
    frames = FakeFrames()
    zoom = call_of("zoom_frame", video_path="video.mp4", time=12, box=BOX)
    _, episode = played(chat, zoom, call(3, 4), tools=["crop_video", "zoom_frame"], frames=frames)
    *_, detail, crop = episode.ledger.pictures
    assert detail.size_px == (64, 64) and crop.size_px == (32, 32)
    assert episode.calls[0].response == (
        "A part of the frame at 12.0 seconds of the video, from 50% to 100% of its width and from 25% to 75% of its "
        "height:\n<12.0 seconds>"
    )
    record = episode.calls[0].to_record()
    assert (record["path"], record["box"]) == ("/data/a.mp4", tuple(BOX))
    (shown,) = record["shown"]
    assert shown == {"key": detail.key, "time_s": 12.0, "path": "/data/a.mp4", "box": tuple(BOX)}


def test_user_tools_return_texts_frames_and_pictures(chat, own):
    calls = [call_of(name, video_path="video.mp4") for name in ("ends", "draws")]
    _, episode = played(chat, *calls, tools=[own("Ends"), own("Draws")])
    ends, draws = episode.calls
    assert ends.response == "Its first and last second: <0.0 seconds><63.0 seconds> <|im_end|>"
    ids = episode.ledger.segments[-3].ids
    assert chat.turn_end_id not in ids[:-8]  # a tool's text cannot end a turn
    assert keys(episode.ledger.pictures)[2:4] == ["/data/a.mp4@0", "/data/a.mp4@63"]
    drawn = episode.ledger.pictures[4]
    assert drawn.size_px == (32, 32) and drawn.key != "own name"  # a size that the processor does not change
    (stored,) = draws.to_record()["shown"]
    assert stored["key"] == drawn.key and "png" in stored
    json.dumps(episode.to_record())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Odd", "odd returned int, expected text, or a list of texts and pictures"),
        ("Hidden", "hidden returned pictures; set its shows_pictures = True"),
        ("Many", "many returned 9 pictures, more than rollout.subagent_max_frames=4"),
        ("Moved", "moved returned a frame whose path is PosixPath, expected str"),
        ("Windowed", "ToolArgs.window is tuple, expected rollout.tools.Window | None"),
    ],
)
def test_an_invalid_tool_result_fails_only_its_call(chat, own, name, problem):
    bad = call_of(name.lower(), video_path="video.mp4")
    _, episode = played(chat, bad, call(5, 7), tools=["crop_video", own(name)], subagent_max_frames=4)
    assert episode.outcomes == ["error", "ok"] and problem in episode.calls[0].problem
    assert keys(episode.ledger.pictures)[2:] == ["/data/a.mp4@5", "/data/a.mp4@6"]
    json.dumps(episode.to_record())


def test_pictures_that_exceed_the_context_fail_only_their_call(chat):
    calls = [call(5, 7), call(10, 26), call(30, 31)]
    unbounded, _ = played(chat, *calls)
    last = unbounded.requests[-1]
    needed = len(last.ids) + sum(picture.num_tokens(32) - 1 for picture in last.pictures)
    room = dict(max_new_tokens=400, max_context_tokens=needed + 400 - 5)
    results = Results()
    engine, episode = played(chat, *calls, callbacks=results, **room)
    assert episode.outcomes == ["ok", "error", "ok"] and episode.finish == "done"
    assert results.outcomes == [(0, "ok"), (1, "error"), (2, "ok")]  # each is reported once
    assert "Error: the pictures of this call need 16 tokens of the context, which has " in episode.calls[1].response
    assert keys(engine.requests[-1].pictures)[2:] == [f"/data/a.mp4@{n}" for n in (5, 6, 30)]
    assert episode.calls[1].frames_s == () and episode.calls[1].to_record()["shown"] == []


def test_the_last_turn_message_follows_the_pictures(chat):
    _, episode = played(chat, call(5, 6), max_turns=1)
    assert episode.calls[0].response.endswith("<5.0 seconds>\nThis was the last call. Answer now.")
    text = chat.decode(episode.ledger.segments[-3].ids)
    assert "<|vision_end|>\nThis was the last call. Answer now.\n</tool_response>" in text


class Plain(Chat):
    """A tokenizer whose template ignores pictures in tool messages."""

    def __init__(self, tokenizer):
        rendered = "tool_response>\\n' + render(message.content)"
        text = CHAT_TEMPLATE.replace(rendered, "tool_response>\\n' + message.content")
        assert text != CHAT_TEMPLATE
        super().__init__(tokenizer, text)


def test_a_template_without_tool_pictures_uses_user_placeholders(chat):
    pictures = [Picture.of(np.full((32, 32, 3), n, np.uint8)) for n in (1, 2)]
    ids, responses = chat.encode("x<|im_end|>"), [["Here: ", *pictures], "plain"]
    expected = chat.decode(chat.after_turn(ids, responses))
    assert chat.decode(Plain(chat.tokenizer).after_turn(ids, responses)) == expected
    assert expected.count("<|vision_start|><|image_pad|><|vision_end|>") == 2


def test_a_template_keeps_its_format_of_text_responses(chat):
    own = Chat(chat.tokenizer, CHAT_TEMPLATE.replace("tool_response>", "tool_result>"))
    assert "<tool_result>\nred\n</tool_result>" in chat.decode(own.after_turn(chat.encode("x"), ["red"]))


def test_report_prompts_are_unchanged_and_frame_tools_have_the_same_arguments():
    reports = EpisodeConfig(tools=["crop_video", "zoom_frame"])
    frames = replace(reports, crop_returns="frames")
    assert signatures(reports.toolbox) == signatures(frames.toolbox)
    assert reports.shown_pictures == 0 and frames.shown_pictures == 3 * 5 * 16
    schemas = [json.dumps([tool.spec.schema for tool in config.toolbox]) for config in (reports, frames)]
    assert schemas[0].count("reports") == 2 and "report" not in schemas[1]
