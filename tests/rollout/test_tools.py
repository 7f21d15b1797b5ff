"""Calls are parsed from any model output, and an invalid call has a reason and never raises."""

import math

import pytest

from rollout.tools import MAX_CALLS, BadCall, Window, find_calls, moment_of, parse_seconds, video_of, window_of

JSON = '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 20, "end_time": 30.5}}'
ARGUMENTS = {"video_path": "video.mp4", "start_time": 20, "end_time": 30.5}


def call(body: str, kind: str = "call") -> str:
    return f"<tool_{kind}>{body}</tool_{kind}>"


@pytest.mark.parametrize(
    "text",
    [
        call(JSON),
        call(f"\n{JSON}\n"),
        call('crop_video("video.mp4", 20, 30.5)', "code"),
        call("crop_video(start_time=20, end_time=30.5, video_path='video.mp4')", "code"),
        call("\nprint(crop_video('video.mp4', 20, end_time=30.5))\n", "code"),
    ],
)
def test_all_accepted_formats_give_the_same_call(text):
    (found,) = find_calls(f"<think>\nlook</think>{text} and more")
    assert (found.name, dict(found.arguments), found.well_formed) == ("crop_video", ARGUMENTS, True)
    assert f"<think>\nlook</think>{text}"[slice(*found.span)] == text


def test_a_call_inside_thinking_is_ignored():
    assert find_calls(f"<think>{call(JSON)}</think><answer>B</answer>") == []
    assert len(find_calls(f"<think>{call(JSON)}")) == 1
    assert len(find_calls(f"<think>a</think>{call(JSON)}</think>")) == 1  # after the first closing tag


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((call(json), "not valid JSON") for json in ("{'name': 'crop_video'}", "[" * 3000)),
        *((call(json), "has no name") for json in ("[1]", '{"name": 3, "arguments": {}}')),
        (call('{"name": "crop_video", "arguments": "x"}'), "no arguments object"),
        (call(" " * 5000), "longer than"),
        *((f"<tool_call>{JSON}{end}", "not closed with </tool_call>") for end in ("", "</tool_code>")),
        (call("", "code"), "empty"),
        (call("crop_video(", "code"), "cannot be read"),
        (call("crop_video(**{'start_time': 1})", "code"), "cannot be read"),
        (call("crop_video('a', 1, 2, 3)", "code"), "cannot be read"),
        *((call(code, "code"), "only calls") for code in ("1 + 1", "__import__('os').system('ls')")),
        (call("x = crop_video('a', 1, 2)", "code"), "only calls"),
        (call("crop_video(open('x'), 1, 2)", "code"), "plain numbers"),
        (call(f"crop_video(0x{'f' * 3900}, 1, 2)", "code"), "plain numbers"),
        (call("crop_video('a', video_path='b')", "code"), "given twice"),
    ],
)
def test_an_unparsable_call_has_a_reason(text, complaint):
    (found,) = find_calls(text)
    assert found.problem is not None and complaint in str(found.problem)
    assert found.problem.outcome == "invalid"


@pytest.mark.parametrize("text", [call(JSON.replace("crop", "cut")), call("exec('1')", "code")])
def test_an_unknown_tool_has_its_own_outcome(text):
    (found,) = find_calls(text)
    assert found.problem is not None and found.problem.outcome == "unknown_tool"


def test_an_unclosed_call_does_not_swallow_the_next_one():
    first, second = find_calls(f"<tool_call>{{{call(JSON)}")
    assert (first.well_formed, second.well_formed) == (False, True)


def test_several_statements_are_several_calls():
    found = find_calls(call("crop_video('a', 1, 2)\ncrop_video('b', 3, 4)", "code"))
    assert [c.arguments["video_path"] for c in found] == ["a", "b"]
    assert len(find_calls(call("\n".join((MAX_CALLS + 1) * ["crop_video('a', 1, 2)"]), "code"))) == MAX_CALLS


def test_an_end_beyond_the_video_is_clamped_with_a_note():
    assert window_of({"start_time": "00:50", "end_time": "1:30"}, 64.0) == Window(50.0, 64.0, clamped=True)
    assert window_of({"start_time": 50, "end_time": 64}, 64.0) == Window(50.0, 64.0, clamped=False)


def test_a_rounded_duration_counts_as_the_end():
    assert [moment_of({"time": time_s}, 12.26) for time_s in (0, 12.3)] == [0, 12.3]  # the prompt shows 12.3 seconds
    with pytest.raises(BadCall, match=r"time 12\.4 lies beyond the end of the video, which lasts 12\.3 seconds"):
        moment_of({"time": 12.4}, 12.26)


@pytest.mark.parametrize(
    ("start", "end", "complaint"),
    [
        *((start, 5, "not before") for start in (5, 9)),
        (64, 70, "beyond the end of the video, which lasts 64.0"),
        (-1, 5, "negative"),
        *((start, 5, "start_time is not a time") for start in (math.nan, True, "soon", None, 10**400)),
        (0, math.inf, "end_time is not a time"),
    ],
)
def test_an_invalid_window_has_a_reason(start, end, complaint):
    with pytest.raises(BadCall, match=complaint):
        window_of({"start_time": start, "end_time": end}, 64.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12", 12.0),
        ("12.5", 12.5),
        (" 1:05 ", 65.0),
        ("01:02:03.5", 3723.5),
        ("90:00", 5400.0),
        *((text, None) for text in ("1:60", "1:60:00", "1:2:3:4", "", "1e3", "12 s")),
    ],
)
def test_times_as_text(text, seconds):
    assert parse_seconds(text) == seconds


def test_a_video_name_is_looked_up_and_never_opened_as_a_path():
    names = {"video_0.mp4": "/data/a.mp4", "video_1.mp4": "/data/b.mp4", "/data/b.mp4": "/data/b.mp4"}
    assert video_of({"video_path": "video_1.mp4"}, names) == "/data/b.mp4"
    assert video_of({}, {"video.mp4": "/data/a.mp4", "a.mp4": "/data/a.mp4"}) == "/data/a.mp4"
    for wrong in ("/etc/passwd", "../a.mp4", 3, None, ["video_0.mp4"]):
        with pytest.raises(BadCall, match="not one of the videos"):
            video_of({"video_path": wrong}, names)
