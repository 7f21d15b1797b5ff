"""The released evaluation's protocol equals the requests that the release's own driver sent to an endpoint.

scripts/release_goldens.py recorded them, once with stand-in texts, which are in the golden, and once with the release's
texts, of which the golden has only hashes. The stand-in variant always runs; the other runs if PARAVT_RELEASE names a
copy of the release.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from on_use import torch
from PIL import Image

from paravt_jax.data.splits import SPLITS
from paravt_jax.evaluation.release.calls import (
    CALLS_IN,
    MalformedCall,
    crop_calls,
    sage_answer,
    sage_calls,
    window_of,
    zoom_calls,
)
from paravt_jax.evaluation.release.dialogue import MAX_TOKENS, ReleaseAgent, ReleaseDialogue
from paravt_jax.evaluation.release.frames import CROP_PX, OVERVIEW_PX, crop_numbers, fitted_size, overview_numbers
from paravt_jax.evaluation.release.pictures import ReleasePictures
from paravt_jax.evaluation.release.questions import question_of
from paravt_jax.evaluation.release.source import read_release, text_digest
from paravt_jax.evaluation.release.texts import ReleaseTexts
from paravt_jax.rewards.official import window_iou
from paravt_jax.rewards.release import predicted_letter, predicted_window
from rollout.endpoint.answers import Reply
from rollout.endpoint.words import JPEG_URL
from rollout.video.encode import write_video
from rollout.video.errors import VideoError
from rollout.video.reader import FrameReader

GOLDEN = json.loads((Path(__file__).parent / "release_golden.json").read_text())
FOLDERS = {  # properties of each split's videos in the golden
    "videomme": "videomme/data",
    "videomme_subtitles": "videomme/data",
    "longvideobench": "datasets/longvideobench/videos",
    "lvbench": "lvbench",
    "mlvu": "MLVU/video",
    "mmvu": "mmvu/videos/Law",
    "charades": "charades_sta/Charades_v1_480",
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    for name, (height, width, fps, num_frames) in GOLDEN["videos"].items():
        picture = (np.indices((height, width, 3)).sum(0) % 256).astype(np.uint8)
        write_video(root / name, (np.roll(picture, number, 1) for number in range(num_frames)), fps)
    (root / "wide.srt").write_text(GOLDEN["subtitles"]["videomme/subtitle/wide.srt"])
    return root


class Recorder:
    """An endpoint with scripted replies."""

    def __init__(self, replies):
        self.replies, self.requests = replies, []

    async def complete(self, messages, *, max_tokens, temperature, deadline_s, affinity=""):
        assert temperature == 0
        self.requests.append((messages, max_tokens))
        return Reply(self.replies[len(self.requests) - 1], "stop", 0, 0, "", 0.0)


def question_for(case, videos, texts):
    split, row = case["split"], GOLDEN["rows"][case["split"].removesuffix("_subtitles")][case["row"]]
    sample = SPLITS[split].checked(row)
    video = videos / Path(sample.prompt.videos[0]).name
    subtitles = video.with_suffix(".srt") if video.with_suffix(".srt").exists() else ""
    prompt = replace(sample.prompt, videos=(str(video),), subtitles=(str(subtitles),))
    return question_of(split, replace(sample, prompt=prompt), case["mode"], texts)


def parts_of(content):
    """Returns a message in the golden's format."""
    if isinstance(content, str):
        return [f"={text_digest(content)}"]
    parts = []
    for part in content:
        if part["type"] == "text":
            parts.append(f"text {text_digest(part['text'])}")
        elif part["type"] == "video_url":
            parts.append(f"video {Path(part['video_url']['url'].removeprefix('file://')).name}")
        else:
            image = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].removeprefix(JPEG_URL))))
            parts.append("{}x{}".format(*image.size))
    runs = [(part, len([*repeated])) for part, repeated in itertools.groupby(parts)]
    return [part if count == 1 else f"{count} x {part}" for part, count in runs]


def golden_parts(parts, number):
    """Returns the golden's parts with the hashes of the stand-in texts (0) or of the release's texts (1)."""
    chosen = []
    for part in parts:
        kind, pair = (part[:1], part[1:]) if part.startswith("=") else ("text ", part[5:])
        is_text = part.startswith(("=", "text "))
        chosen.append(kind + pair.split("|")[number if "|" in pair else 0] if is_text else part)
    return chosen


async def dialogue_of(case, videos, texts, frames):
    """Returns a dialogue's requests in the golden's format, and the score of its last reply."""
    recorder, dialogue = Recorder(GOLDEN["replies"][case["script"]]), ReleaseDialogue()
    agent = ReleaseAgent(recorder, ReleasePictures(frames, 60.0), texts, case["mode"], case["channel"])
    question = question_for(case, videos, texts)
    await agent.run(question, dialogue)
    limits = [[len(messages), limit] for messages, limit in recorder.requests]
    messages = [[message["role"], *parts_of(message["content"])] for message in recorder.requests[-1][0]]
    return {"limits": limits, "messages": messages, "score": pytest.approx(question.score(dialogue.final))}


def check_all(cases, videos, texts, number):
    async def check():
        async with FrameReader(lambda height, width: (height, width), num_workers=1) as frames:
            for case in cases:
                expected = {name: case[name] for name in ("limits", "score")}
                expected["messages"] = [[role, *golden_parts(parts, number)] for role, *parts in case["messages"]]
                assert await dialogue_of(case, videos, texts, frames) == expected, {**case, "messages": "…"}

    asyncio.run(check())


RELEASE = os.environ.get("PARAVT_RELEASE")
TEXTS = ["stand-in", *(["its own"] if RELEASE else [])]  # hashes of the release's texts need a copy of the release


@pytest.mark.slow
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("split", FOLDERS)
def test_all_requests_and_scores_equal_the_released_drivers(split, texts, videos):
    chosen = GOLDEN["texts"] if texts == "stand-in" else read_release(Path(str(RELEASE)))
    cases = [case for case in GOLDEN["dialogues"] if case["split"] == split]
    check_all(cases, videos, ReleaseTexts(chosen), TEXTS.index(texts))


def test_the_golden_has_every_split_mode_channel_and_script():
    names = ("split", "mode", "channel", "script")
    seen = {tuple(case[name] for name in names) for case in GOLDEN["dialogues"]}
    for split in FOLDERS:
        for channel in ("image_url", "video_url"):
            modes = ("agentic_general", "agentic_minimal")
            agentic = {(split, mode, channel, replies) for mode in modes for replies in GOLDEN["replies"]}
            assert agentic | {(split, mode, channel, "no_answer") for mode in ("direct", "reasoning")} <= seen


@pytest.mark.parametrize(
    ("size", "area", "fitted"),
    [
        ((240, 320), OVERVIEW_PX, (280, 392)),
        ((720, 1280), OVERVIEW_PX, (560, 1008)),
        ((240, 320), CROP_PX, (168, 252)),
        ((10, 20), CROP_PX, (28, 28)),
        ((362, 206), OVERVIEW_PX, (420, 252)),
    ],
)
def test_frames_are_multiples_of_28_pixels_within_their_area(size, area, fitted):
    assert fitted_size(*size, area) == fitted


def test_sizes_and_numbers_of_frames_are_qwen_vl_utils_own_where_it_is_installed():
    needed = "pip install qwen-vl-utils==0.0.14 torchvision"
    library = pytest.importorskip("qwen_vl_utils.vision_process", reason=needed)
    random = np.random.default_rng(0)
    for height, width in random.integers(28, 2200, (2000, 2)).tolist():
        for area in (OVERVIEW_PX, CROP_PX):
            theirs = library.smart_resize(height, width, 28, *area)
            if 0 not in theirs:
                assert fitted_size(height, width, area) == theirs
    for num_frames, fps in zip(random.integers(64, 20_000, 300).tolist(), random.uniform(1, 60, 300), strict=True):
        assert overview_numbers(num_frames) == theirs_of(library, {"nframes": 64}, num_frames, fps)
        window = {"video_start": (start_s := random.uniform(-1, num_frames / fps)), "video_end": start_s + 40}
        crop = {"fps": 1, "min_frames": 1, "max_frames": 16} | window
        with contextlib.suppress(ValueError):  # also when both readers are tried
            theirs = theirs_of(library, crop, num_frames, fps)
            assert crop_numbers(num_frames, fps, *window.values()) == theirs


def theirs_of(library, options, num_frames, fps):
    first, last, num_inside = library.calculate_video_frame_range(options, num_frames, fps)
    return torch.linspace(first, last, library.smart_nframes(options, num_inside, fps)).round().long().tolist()


@pytest.mark.parametrize("size", [(2, 402), (28, 5600)])
def test_a_frame_that_is_too_narrow_is_rejected(size):
    with pytest.raises(VideoError):
        fitted_size(*size, CROP_PX)


def test_an_overview_has_64_frames_and_a_shorter_video_has_none():
    assert overview_numbers(64) == list(range(64)) and overview_numbers(1000)[:3] == [0, 16, 32]
    with pytest.raises(VideoError):
        overview_numbers(63)


@pytest.mark.parametrize(
    ("window", "numbers"),
    [
        ((0, 1), [0, 25]),
        ((2, 7), [50, 92, 133, 175]),
        ((0, 16), list(np.linspace(0, 399, 16).round())),
        ((15, 99), [375, 399]),
        ((float("nan"), 1), [0, 25]),
        ((0.51, 0.55), [12, 13]),  # a single frame, and the one before it
    ],
)
def test_a_crop_has_an_even_number_of_frames_at_one_per_second(window, numbers):
    assert crop_numbers(400, 25.0, *window) == numbers


@pytest.mark.parametrize("window", [(2, 1), (16, 20), (1, 1), (1.01, 1.03), (float("nan"), float("nan"))])
def test_a_window_without_two_frames_cannot_be_read(window):
    with pytest.raises(VideoError):
        crop_numbers(400, 25.0, *window)


def test_a_video_without_a_duration_has_no_crop():
    with pytest.raises(VideoError):
        crop_numbers(1, 0.0, 0, 10)


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("<answer> (C) maybe </answer> A", "C"),
        ("<answer>yes</answer> The answer is: D", "D"),
        ("A man stands. Answer: BC", "B"),
        ("A man stands.", "A"),
        ("no idea", "n"),
        ("", ""),
        (" J ", "J"),
    ],
)
def test_the_predicted_letter(reply, letter):
    assert predicted_letter(reply) == letter


@pytest.mark.parametrize(
    ("reply", "window"),
    [
        ("<time>00:19.7 - 00:25.6</time>", (19.7, 25.6)),
        ("from 2 - 1, or 3.5–4", (2.0, 1.0)),
        ("<time>none</time> 70:00 - 71:00", (0.0, 71.0)),
        ("58:00 - 59:30", (3480.0, 3570.0)),
        ("5 - 9, so <time>6 - 7</time>", (6.0, 7.0)),
        ("start 4, end 6, not 2 - 1", (4.0, 6.0)),  # a reversed range is skipped
        ("start time: 4, ending 2", (4.0, 2.0)),
        ("at 5 and 9.", (5.0, 9.0)),
        ("at 5", None),
        ("  ", None),
    ],
)
def test_the_predicted_window(reply, window):
    assert predicted_window(reply) == window


@pytest.mark.parametrize("begin", ["", "start", "<tool_call>", "<tool_code>", "<video_zoom>"])
@pytest.mark.parametrize("repeated", ["000", "\n", "<tool_call>"])
def test_a_repetitive_reply_is_parsed_in_linear_time(begin, repeated):
    """The release's regular expressions take minutes for it, during which all other samples wait."""
    reply, began_s = f"{begin}{repeated * MAX_TOKENS}", time.process_time()
    for read in (predicted_window, predicted_letter, crop_calls, zoom_calls, sage_calls):
        read(reply)
    window_iou(reply, "[1.0, 2.0]", ())
    assert time.process_time() - began_s < 1


def test_videozoomers_calls_are_json_or_pairs():
    reply = '<video_zoom>{"start": 1}</video_zoom><video_zoom>start=2.0, end="4"</video_zoom><video_zoom>x</video_zoom>'
    assert [window_of(call) for call in zoom_calls(reply)] == [(1, 11), (2, 4)]


def test_sages_calls_with_a_window_are_crops_and_its_final_answer_is_scored():
    extract = {"name": "extract", "arguments": {"start_time": "01:00"}}
    calls = [{"name": "web-search", "arguments": {"query": "x"}}, extract]
    reply = f"<json>{json.dumps({'recommended_tools': {'tool_calls': calls}, 'final_answer': None})}</json>"
    assert [window_of(call) for call in sage_calls(reply)] == [(60, 70)] and sage_answer(reply) == reply
    assert sage_answer('<json>{"final_answer": "B"}</json>') == "B" and sage_calls("no JSON") == []


def test_longvts_calls_are_crop_calls():
    call = '<tool_call>{"name": "crop_video", "arguments": {"start_time": "1:02:03", "end_time": null}}</tool_call>'
    assert [window_of(call) for call in crop_calls(call)] == [(3723, 0)]


names = st.sampled_from(["arguments", "recommended_tools", "tool_calls", "final_answer", "start", "end_time"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
)


@given(st.sampled_from(["tool_call", "tool_code", "video_zoom", "json"]), values)
@example("json", {"recommended_tools": {"tool_calls": 5}})
def test_any_reply_has_calls_with_a_window_or_malformed_ones(tag, value):
    reply = f"<{tag}>{json.dumps(value)}</{tag}>"
    for call in (call for calls_in in CALLS_IN.values() for call in calls_in(reply)):
        with contextlib.suppress(MalformedCall):
            assert all(isinstance(time_s, float) for time_s in window_of(call))
    assert isinstance(sage_answer(reply), str)
