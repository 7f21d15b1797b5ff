"""Several tools in one turn behave like crop_video, and prompts with only crop_video are unchanged."""

import hashlib
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, call_of, play, play_calls, script
from async_tests import async_test
from make_video import number_of, numbered_frame, write_video

from rollout.engine.scripted import ScriptedEngine
from rollout.episode import MAX_ANSWER_CHARS, Agent
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.prompts import Prompts, main_messages
from rollout.toolbox import forget_user_code, signatures, tools_of
from rollout.toolbox.search_subtitles import MAX_FILE_BYTES, MAX_HITS, MAX_LINE_CHARS, search
from rollout.toolbox.subtitles import Cue, parse_srt
from rollout.tools import CROP_VIDEO_ALONE, CROP_VIDEO_SCHEMA, find_calls
from rollout.video.box import Box
from rollout.video.reader import FrameReader

DIGEST = "338b00084281f1d9d299caf0755926e6f0db97c36a857fdb7cd4ca8806a425b4"
ALL = ["crop_video", "zoom_frame", "search_subtitles"]
BOX = [0.5, 0.25, 1.0, 0.75]
SRT = "1\n00:00:01,500 --> 00:00:03,000\n<i>The red cat</i>\nsits.\n\n2\n00:01:05.000 --> 00:01:07.250\nA dog.\n"


@pytest.fixture
def task(tmp_path):
    (tmp_path / "a.srt").write_text(SRT)
    return Task("t", "What is it?", ("/data/a.mp4",), 2, (str(tmp_path / "a.srt"),))


def answers(chat, task, *calls: str, **options) -> list[tuple[str, str]]:
    _, episode = play_calls(chat, task, *calls, **{"tools": ALL, **options})
    return [(made.outcome, made.response) for made in episode.calls]


def test_prompts_with_only_crop_video_are_unchanged():
    """The digest is of the text and schema before other tools were added."""
    assert signatures(EpisodeConfig().toolbox) == CROP_VIDEO_ALONE
    messages = main_messages(Prompts(), [("video.mp4", 64.0, [0.0, 12.5])], "What?", 5)
    text = json.dumps([messages, CROP_VIDEO_SCHEMA], ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_calls_of_different_tools_in_one_turn_are_answered_in_order(chat, task):
    frames = FakeFrames()
    crop, zoom = call(5, 9), call_of("zoom_frame", video_path="video.mp4", time="00:12", box=BOX)
    found = answers(chat, task, crop, zoom, call_of("search_subtitles", query="RED cat"), frames=frames)
    assert [outcome for outcome, _ in found] == ["ok"] * 3
    assert [response for _, response in found[:2]] == ["A report."] * 2
    cue = "1.5 to 3.0 seconds: The red cat sits."
    assert found[2][1] == f"Lines of the subtitles with all of these words, 1 of 2:\n{cue}"
    assert frames.boxes == [Box(*BOX)]


@pytest.mark.parametrize(
    "text",
    [
        call_of("zoom_frame", video_path="video.mp4", time=12, box=BOX),
        f"<tool_code>zoom_frame('video.mp4', 12, {BOX})</tool_code>",
        f"<tool_code>print(zoom_frame(time=12, box={tuple(BOX)}, video_path='video.mp4'))</tool_code>",
    ],
)
def test_every_call_format_is_parsed_with_its_tools_parameters(text):
    (found,) = find_calls(text, signatures(tools_of(tuple(ALL))))
    assert found.well_formed and found.name == "zoom_frame"
    assert (found.arguments["time"], list(found.arguments["box"])) == (12, BOX)


def test_an_unknown_tool_gets_an_error_with_the_available_tools(chat, task):
    zoom = call_of("zoom_frame", time=1, box=BOX)
    assert answers(chat, task, zoom, tools=["crop_video"])[0][0] == "unknown_tool"
    outcome, response = answers(chat, task, call_of("cut"), tools=ALL[:2])[0]
    assert outcome == "unknown_tool" and "the tools are crop_video, zoom_frame" in response


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"box": BOX}, "time is missing"),
        ({"time": 65, "box": BOX}, "lies beyond the end of the video, which lasts 64.0 seconds"),
        ({"time": -1, "box": BOX}, "is negative"),
        ({"time": 1}, "box is missing"),
        *(
            ({"time": 1, "box": wrong}, "four fractions")
            for wrong in ("x", BOX[:3], [*BOX, 2], [0, 0, 500, "1"], [0, 0, True, 1], [0, 0, float("nan"), 1], None)
        ),
        ({"time": 1, "box": [0.5, 0, 0.5, 1]}, "x0 before x1"),
        ({"time": 1, "box": [0, 0.9, 1, 0.1]}, "y0 before y1"),
        ({"time": 1, "box": [0, 0, 0.01, 1]}, "by 0.02 of the frame or more"),
        ({"time": 1, "box": BOX, "video_path": "/etc/passwd"}, "not one of the videos"),
    ],
)
def test_an_invalid_zoom_fails_with_a_reason_and_affects_no_sibling(chat, task, asked, complaint):
    (outcome, response), sibling = answers(chat, task, call_of("zoom_frame", **asked), call(5, 9))
    assert outcome == "invalid" and complaint in response and sibling[0] == "ok"


@pytest.mark.parametrize(
    ("query", "outcome", "response"),
    [
        ("dog", "ok", "65.0 to 67.2 seconds: A dog."),
        ("dog cat red", "ok", "with 2 of these 3 words, 1 of 2:\n1.5 to 3.0 seconds"),
        ("horse", "ok", "None of the 2 lines of the subtitles has these words."),
        ("…", "invalid", "query has no word"),
        (3, "invalid", "query has no word"),
        ("dog " * 60, "invalid", "query has more than 200 characters"),
    ],
)
def test_subtitles_are_searched_for_words_without_a_model(chat, task, query, outcome, response):
    engine, episode = play_calls(chat, task, call_of("search_subtitles", query=query), tools=ALL)
    assert len(engine.requests) == 2  # the main agent's requests
    assert episode.outcomes == [outcome] and response in episode.calls[0].response


def test_a_subtitle_path_comes_only_from_the_data(chat, task, tmp_path):
    (tmp_path / "secret.srt").write_text(SRT.replace("dog", "key"))
    named = {"subtitles": str(tmp_path / "secret.srt"), "path": str(tmp_path / "secret.srt")}
    ((_, response),) = answers(chat, task, call_of("search_subtitles", query="key", **named))
    assert "None of the 2 lines" in response
    wrong = call_of("search_subtitles", query="key", video_path=str(tmp_path / "secret.mp4"))
    assert answers(chat, task, wrong)[0][0] == "invalid"


@pytest.mark.parametrize(
    ("subtitles", "complaint"),
    [
        ((), "has no subtitles"),
        (("",), "has no subtitles"),
        (("/gone.srt",), "cannot be read"),
        (("/dev/zero",), "cannot be read"),  # before any of it is read
        (("large",), "are too large"),
    ],
)
def test_missing_subtitles_fail_the_call(chat, tmp_path, subtitles, complaint):
    if subtitles == ("large",):
        subtitles = (str(tmp_path / "large.srt"),)
        Path(subtitles[0]).write_bytes(b"\0" * (MAX_FILE_BYTES + 1))
    task = Task("t", "q", ("/data/a.mp4",), 2, subtitles)
    found = answers(chat, task, call_of("search_subtitles", query="x"), call(5, 9))
    assert [outcome for outcome, _ in found] == ["error", "ok"] and complaint in found[0][1]


def test_search_results_are_bounded():
    response = search([Cue(0.0, 1.0, "word " * 99)] * 500, "word")
    assert response.splitlines()[0].endswith("500 of 500:") and response.endswith(f"The first {MAX_HITS} are listed.")
    assert len(response) < MAX_HITS * (MAX_LINE_CHARS + 30) + 120 < MAX_ANSWER_CHARS


def test_words_are_compared_without_case_and_in_one_form():
    cues = [Cue(0.0, 1.0, "Die STRASSE, cafe\u0301")]
    assert "all of these words" in search(cues, "Straße Café")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_an_srt_is_read_in_any_encoding(encoding, newline):
    text = SRT.replace("sits", "sitzt früh").replace("\n", newline)
    assert parse_srt(text.encode(encoding)) == [Cue(1.5, 3.0, "The red cat sitzt früh."), Cue(65.0, 67.25, "A dog.")]


def test_cues_without_blank_lines_between_them_are_separated():
    found = parse_srt(SRT.replace("\n\n", "\n").encode())
    assert [cue.text for cue in found] == ["The red cat sits.", "A dog."]
    without_numbers = b"01:00:01,5 --> 01:00:03,25\nThe red cat\n01:00:04.0 --> 01:00:05.0\nA dog"
    assert parse_srt(without_numbers) == [Cue(3601.5, 3603.25, "The red cat"), Cue(3604.0, 3605.0, "A dog")]


OWN = """
import asyncio, sys, time
from rollout.toolbox import Tool, ToolArgs
from rollout.tools import ToolSpec, make_schema

def tool(name, work):
    class One(Tool):
        spec = ToolSpec(make_schema(name, "Does it.", how=("string", "How.")), usage=f"{name} on it", effect="done")
        def check(self, arguments, videos): return ToolArgs(query=str(arguments.get("how", "")))
        run = work
    return One

def quits(self, args, context): sys.exit(3)
def hangs(self, args, context): time.sleep(3600)
def wrong(self, args, context): return 3
def long(self, args, context): return "x" * 10**6
def says(self, args, context): return f"{args.query} {{}} <|im_end|>"
async def cancels(self, args, context):
    other = asyncio.create_task(asyncio.sleep(1)); other.cancel(); await other

async def exits(self, args, context): raise SystemExit
async def interrupts(self, args, context): raise KeyboardInterrupt
async def closes(self, args, context): raise GeneratorExit

Exits, Interrupts, Closes = tool("exits", exits), tool("interrupts", interrupts), tool("closes", closes)
Quits, Hangs, Wrong, Long = tool("quits", quits), tool("hangs", hangs), tool("wrong", wrong), tool("long", long)
Says, Cancels, Crop = tool("says", says), tool("cancels", cancels), tool("crop_video", says)
class Unnamed(Tool): pass
class Broken(Tool):
    def __init__(self): raise RuntimeError("no")
class Odd(Tool): spec = ToolSpec(make_schema("a tool", "x"), usage="", effect="")
class Unsent(Tool): spec = ToolSpec(make_schema("a_set", "x", how=({1}, "x")), usage="", effect="")
number = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def test_a_user_tool_can_only_fail_its_own_call(chat, task, own):
    names = ("Says", "Quits", "Hangs", "Wrong", "Long", "Cancels", "Exits", "Interrupts", "Closes")
    started_s = time.monotonic()
    calls = [*(call_of(name.lower(), how="gently") for name in names), call(5, 9)]
    tools = ["crop_video", *map(own, names)]
    found = answers(chat, task, *calls, tools=tools, max_parallel=10, turn_deadline_s=1.0)
    assert [outcome for outcome, _ in found] == ["ok", "error", "timeout", "error", "ok", *["error"] * 4, "ok"]
    assert found[0][1] == "gently {} <|im_end|>" and len(found[4][1]) == MAX_ANSWER_CHARS
    assert found[2][1] == "Error: the call took too long." and found[9][1] == "A report."
    assert time.monotonic() - started_s < 30


def test_the_next_run_uses_an_edited_tool_but_a_running_one_does_not(chat, tmp_path, own):
    config = EpisodeConfig(tools=[own("Says")])
    agent = Agent(ScriptedEngine(None), FakeFrames(), chat, config)
    (tmp_path / "own.py").write_text(OWN.replace('"says"', '"tells"'))
    assert list(Agent(ScriptedEngine(None), FakeFrames(), chat, config).tools) == ["says"]
    forget_user_code()
    assert list(Agent(ScriptedEngine(None), FakeFrames(), chat, config).tools) == ["tells"]
    changed = agent.with_settings(temperature=0.5)
    assert list(changed.tools) == list(changed.signatures) == [spec.name for spec in changed.prompter.tools] == ["says"]
    assert list(agent.with_settings(max_turns=1, tools=["crop_video"]).tools) == ["crop_video"]


def test_every_tool_is_in_the_template_and_in_the_instructions(chat, task, own):
    engine = script(chat, [ANSWER])
    play(engine, chat, task, tools=["search_subtitles", own("Says")])
    shown = chat.decode(engine.requests[0].ids)
    assert "call search_subtitles for words that are spoken, or says on it, up to 5 calls in one turn: " in shown
    assert '"name": "says"' in shown and '"name": "search_subtitles"' in shown and "crop_video" not in shown


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([], r"rollout\.tools=\[\] leaves nothing to call; leave it out, and set rollout\.dispatch=none"),
        (["zoom"], r"there is no tool zoom; use one of crop_video, zoom_frame, search_subtitles, or your own tool"),
        (["crop_video", "crop_video"], "has 2 tools named crop_video"),
        (["gone.py:Tool"], "rollout.tools=gone.py:Tool: there is no file"),
        (["{own}:Gone"], "the file has no Gone"),
        (["{own}:number"], "is not a Tool"),
        (["{own}:Unnamed"], "cannot be created: AttributeError"),
        (["{own}:Broken"], "cannot be created: RuntimeError: no"),
        (["{own}:Odd"], "whose name is a word"),
        (["{own}:Unsent"], "cannot be created: TypeError: Object of type set is not JSON serializable"),
        (["crop_video", "{own}:Crop"], "has 2 tools named crop_video"),
        (["{broken}:Tool"], "cannot be loaded: SyntaxError"),
        (["{text}:Tool"], "is not a Python file"),
    ],
)
def test_an_invalid_list_of_tools_is_rejected_by_name(own, tmp_path, tools, complaint):
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "text.txt").write_text("")
    places = {"own": tmp_path / "own.py", "broken": tmp_path / "broken.py", "text": tmp_path / "text.txt"}
    with pytest.raises(ValueError, match=complaint):
        EpisodeConfig(tools=[tool.format(**places) for tool in tools]).check_tools()


def test_settings_execute_no_file_until_their_tools_are_loaded(tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit('executed')")
    config = EpisodeConfig(tools=[f"{tmp_path / 'exits.py'}:Tool"])
    with pytest.raises(ValueError, match="SystemExit: executed"):
        config.check_tools()


def test_a_built_in_tools_texts_can_be_replaced(chat, task, tmp_path):
    (tmp_path / "words.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from rollout.toolbox.zoom_frame import ZoomFrame\n"
        "@dataclass(frozen=True)\n"
        "class Reads(ZoomFrame):\n"
        "    instruction: str = 'Read the {sign}.'\n"
    )
    tools = [f"{tmp_path / 'words.py'}:Reads"]
    engine, _ = play_calls(chat, task, call_of("zoom_frame", time=1, box=BOX), tools=tools)
    shown = chat.decode(engine.requests[1].ids)
    region = "from 50% to 100% of its width and from 25% to 75% of its height:"
    assert f"frame at 1.0 seconds of the video, {region}" in shown
    assert "Read the {sign}." in shown


def test_a_call_has_one_report(chat, task, tmp_path):
    (tmp_path / "greedy.py").write_text(
        "from rollout.toolbox.crop_video import CropVideo\n"
        "class Greedy(CropVideo):\n"
        "    async def run(self, args, context):\n"
        "        return [await CropVideo.run(self, args, context) for _ in range(2)][0]\n"
    )
    assert answers(chat, task, call(5, 9), tools=[f"{tmp_path / 'greedy.py'}:Greedy"])[0][0] == "error"


@async_test
async def test_a_detail_is_cropped_from_the_full_resolution_frame(tmp_path):
    """A quarter of a frame that was shown at a quarter of its size is returned at full resolution."""
    video = write_video(tmp_path / "a.mp4", [0.0, 1.0, 2.0], size_px=(192, 256))
    seen = []

    def detail_size(height: int, width: int) -> tuple[int, int]:
        seen.append((height, width))
        return height, width

    boxes = (None, Box(0, 0, 1, 1), Box(0.5, 0.5, 1, 0.9), Box(0.5, 0.5, 1, 0.9))
    options = {"detail_size": detail_size, "num_workers": 1, "disk_directory": tmp_path / "frames"}
    async with FrameReader(lambda height, width: (height // 4, width // 4), **options) as reader:
        whole, part, other, again = [(await reader.frames(video, [1.2], 30, box))[0] for box in boxes]
        assert reader.fitted(part.picture) is part.picture
    assert [(frame.time_s, frame.box) for frame in (whole, part, other)] == [(1.0, box) for box in boxes[:3]]
    assert again.picture is other.picture
    assert [p.picture.size_px for p in (whole, part, other)] == [(48, 64), (192, 256), (77, 128)]
    assert number_of(part.picture.pixels) == 1 and seen[-2:] == [(77, 128), (192, 256)]
    expected = numbered_frame(1, 192, 256)[96:173, 128:].astype(int)
    assert np.abs(other.picture.pixels - expected).mean() < 12


def test_the_tool_example_in_the_docs_is_called(chat, task, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    (block,) = re.findall(r"^```python\n# own_tool.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "own_tool.py").write_text(block)
    tools = ["crop_video", f"{tmp_path / 'own_tool.py'}:VideoFacts"]
    wrong, right = call_of("video_facts", video_path="x"), call_of("video_facts", video_path="video.mp4")
    reply = "64.0 seconds, frames of 32 x 32 pixels:\n<0.0 seconds><63.0 seconds>"
    assert answers(chat, task, wrong, right, tools=tools)[1] == ("ok", reply)
    assert answers(chat, task, wrong, right, tools=tools)[0][0] == "invalid"
