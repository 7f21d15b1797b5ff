"""Published dialogues become traces; what cannot be used is counted with its reason and never lost in silence."""

import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data.rows import BadRow
from paravt_jax.data.traces import Media, Message, load_traces, read_trace

CALL = '<think>\nI look closer.\n</think>\n<tool_call>{"name": "crop_video", "arguments": {}}</tool_call>'
ANSWER = "<think>\nIt is red.\n</think>\n<answer>B</answer>"


def text(said: str) -> dict:
    return {"type": "text", "text": said}


def media(kind: str, url: object, **window: object) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **window}}


def dialogue(*said: object) -> list[dict]:
    """Roles in turn: user, assistant, then tool and assistant as often as there is something to say."""
    roles = ["user", "assistant", *["tool", "assistant"] * len(said)]
    return [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]


def row(messages: object = None, **other: object) -> dict:
    shown = [media("video", "a.mp4"), text("Which one?")]
    return {"messages": dialogue(shown, ANSWER) if messages is None else messages, **other}


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows) + "\n")
    return path


def load(path: Path, video_root: str = "", max_bad_frac: float = 0.0):
    return load_traces(str(path), video_root=video_root, max_bad_frac=max_bad_frac)


@pytest.fixture
def here(tmp_path):
    for name in ("a.mp4", "b.png"):
        (tmp_path / name).write_bytes(b"frames")
    return tmp_path


def test_a_published_row_becomes_a_trace(here):
    frames = [text("<3.0 seconds>"), media("image", f"file://{here}/b.png")]
    messages = [
        {"role": "system", "content": "You may crop."},
        *dialogue([media("video", "a.mp4"), text("Which one?")], CALL, frames, ANSWER),
    ]
    trace = load(write_lines(here / "sft.jsonl", [row(messages)])).traces[0]
    assert trace.messages == (
        Message("system", ("You may crop.",)),
        Message("user", (Media("video", f"{here}/a.mp4"), "Which one?")),
        Message("assistant", (CALL,)),
        Message("tool", ("<3.0 seconds>", Media("image", f"{here}/b.png"))),
        Message("assistant", (ANSWER,)),
    )
    assert trace.videos == (f"{here}/a.mp4",)
    assert trace.messages[3].text == "<3.0 seconds>"


def parts_of_struct(content: object) -> list[dict]:
    """As parquet has them: every part has every key, and None for those that are not its own."""
    parts = [text(content)] if isinstance(content, str) else content
    keys = ("type", "text", "video_url", "image_url")
    return [{key: part.get(key) for key in keys} for part in parts]


def test_a_list_its_json_and_a_parquet_struct_hold_the_same_traces(here):
    image = media("image", "b.png", detail=None)
    messages = dialogue([media("video", "a.mp4"), text("Which?")], CALL, [text("<1.0 seconds>"), image], ANSWER)
    as_struct = [dict(message, content=parts_of_struct(message["content"])) for message in messages]
    files = {
        "list.jsonl": write_lines(here / "list.jsonl", [row(messages)]),
        "json.jsonl": write_lines(here / "json.jsonl", [row(json.dumps(messages))]),
    }
    for name, value in (("json.parquet", json.dumps(messages)), ("struct.parquet", as_struct)):
        files[name] = here / name
        pq.write_table(pa.Table.from_pylist([row(value)]), here / name)
    found = {name: load(path).traces for name, path in files.items()}
    assert found["list.jsonl"][0].messages[2].media == (Media("image", f"{here}/b.png"),)
    assert all(traces == found["list.jsonl"] for traces in found.values())


def test_a_picture_or_video_outside_of_the_root_makes_a_bad_row(here):
    (here / "root").mkdir()
    rows = [row(), *(row(dialogue([media(kind, f"{here}/b.png"), text("Q")], ANSWER)) for kind in ("image", "video"))]
    write_lines(here / "root" / "a.mp4", [])
    found = load(write_lines(here / "sft.jsonl", rows), video_root=str(here / "root"), max_bad_frac=0.9)
    assert found.bad == {"file outside of data.video_root": 2} and len(found.traces) == 1


def test_a_window_makes_a_video_a_part_of_it_and_no_overview(here):
    shown = [media("video", "a.mp4", start_time=2, end_time=4.5), media("image", "b.png", start_time=9), text("Say.")]
    trace = load(write_lines(here / "sft.jsonl", [row(dialogue(shown, ANSWER))])).traces[0]
    assert trace.messages[0].media == (Media("video", f"{here}/a.mp4", (2.0, 4.5)), Media("image", f"{here}/b.png"))
    assert trace.videos == ()


def test_a_window_of_nones_as_parquet_has_it_is_none(here):
    shown = [media("video", "a.mp4", start_time=None, end_time=None), text("Say.")]
    assert load(write_lines(here / "sft.jsonl", [row(dialogue(shown, ANSWER))])).traces[0].videos == (f"{here}/a.mp4",)


def test_several_tools_may_answer_one_turn_and_the_user_may_go_on(here):
    said = [("user", "Q"), ("assistant", CALL), ("tool", "one"), ("tool", "two"), ("assistant", ANSWER)]
    said += [("user", "And then?"), ("assistant", ANSWER)]
    messages = [{"role": role, "content": content} for role, content in said]
    trace = load(write_lines(here / "sft.jsonl", [row(messages)])).traces[0]
    assert [message.role for message in trace.messages] == [role for role, _ in said]


def test_the_id_follows_from_the_content_and_not_from_the_host(here):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.mp4").write_bytes(b"frames")
    rows = [row(), row(dialogue([media("video", "a.mp4"), text("Which, then?")], ANSWER)), row()]
    ids = [trace.id for trace in load(write_lines(here / "sft.jsonl", rows)).traces]
    moved = [dialogue([media("video", f"file://{elsewhere}/a.mp4"), text(q)], ANSWER) for q in ("Which, then?",)]
    assert load(write_lines(here / "moved.jsonl", [row(messages) for messages in moved])).traces[0].id == ids[1]
    # blake2b-64 of [["user", [["video", "a.mp4", null, null], "Which one?"]], ["assistant", [ANSWER]]]
    assert ids == ["92ef2ed4309d1bdf", ids[1], "92ef2ed4309d1bdf-2"] and len(set(ids)) == 3


def test_the_id_tells_one_answer_from_two(here):
    def answered(*answers: str) -> dict:
        said = [("user", "Q"), ("assistant", CALL), *(("tool", [text(a)]) for a in answers), ("assistant", ANSWER)]
        return row([{"role": role, "content": content} for role, content in said])

    joined = answered("one")
    joined["messages"][2]["content"] = [text("one"), text("two")]
    ids = [trace.id for trace in load(write_lines(here / "sft.jsonl", [answered("one", "two"), joined])).traces]
    assert ids[1] != f"{ids[0]}-2" and len(set(ids)) == 2


def shows(*parts: dict) -> dict:
    return row(dialogue([*parts, text("Which?")], ANSWER))


def turns(*roles: str) -> dict:
    return row([{"role": role, "content": "said"} for role in roles])


BAD_ROWS = {
    "missing file": [
        shows(media("video", "c.mp4")),
        shows(media("image", "/nowhere/b.png")),
    ],
    "impossible path": [shows(media("video", "x" * 5000)), shows(media("video", "a\0.mp4"))],
    "bad window": [
        shows(media("video", "a.mp4", start_time=4, end_time=4)),
        shows(media("video", "a.mp4", start_time=-1, end_time=4)),
        shows(media("video", "a.mp4", start_time=1)),
        shows(media("video", "a.mp4", start_time="1", end_time=4)),
        shows(media("video", "a.mp4", start_time=False, end_time=True)),
        shows(media("video", "a.mp4", start_time=0, end_time=float("inf"))),
        shows(media("video", "a.mp4", start_time=float("nan"), end_time=4)),
        shows(media("video", "a.mp4", start_time=0, end_time=10**400)),
    ],
    "id too long": [row(id="x" * 257)],
    "text too long": [
        row(dialogue("Which? " * 15_000, ANSWER)),
        row(dialogue([text("Which? " * 9_000)] * 2, ANSWER)),
        row(dialogue("Which?", CALL, "a report " * 12_000, ANSWER)),
    ],
    "too many messages": [turns(*["user", "assistant"] * 2049)],
    "too many frames": [
        shows(media("video", "a.mp4", nframes=10**12)),
        shows(*[media("video", "a.mp4", nframes=4096)] * 2),
        shows(*[media("image", "b.png")] * 4097),
    ],
    "more <video> than videos": [
        row(dialogue("<video> Which?", ANSWER)),
        shows(media("video", "a.mp4"), text("<video><video>")),
        row(dialogue("Which?", f"<video>{ANSWER}")),
    ],
    "empty answer": [row(dialogue("Which?", " \n")), row(dialogue("Which?", []))],
    "no answer": [turns("user"), turns("user", "assistant", "tool"), turns("system", "user"), row([])],
    "wrong order": [
        turns("assistant"),
        turns("user", "user", "assistant"),
        turns("user", "tool", "assistant"),
        turns("user", "assistant", "assistant"),
        turns("user", "assistant", "system", "assistant"),
        turns("tool", "assistant"),
    ],
    "wrong schema": [
        "{",
        "[" * 100_000,
        "[1, 2]",
        row("no JSON"),
        row("[" * 100_000),
        row('{"role": "user"}'),
        row(messages=3),
        {"prompt": []},
        row(["user"]),
        row([{"role": "user"}]),
        row([{"role": ["user"], "content": "said"}]),
        row([{"role": "narrator", "content": "said"}]),
        row([{"role": "user", "content": {"type": "text"}}]),
        row(dialogue([None], ANSWER)),
        row(dialogue([{"type": "audio", "audio": "a.wav"}], ANSWER)),
        row(dialogue([{"type": ["text"], "text": "x"}], ANSWER)),
        row(dialogue([{"type": {}, "text": "x"}], ANSWER)),
        row(dialogue([{"type": "text_url", "text_url": "x"}], ANSWER)),
        row(dialogue([{"type": "text", "text": 3}], ANSWER)),
        row(dialogue("half a character: \ud800", ANSWER)),
        shows({"type": "video_url", "video_url": None}),
        shows(media("video", "")),
        shows(media("video", 3)),
        row(dialogue("Which?", [media("image", "b.png")])),
        row([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]),
    ],
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_counted_by_its_reason_and_dropped(here, reason):
    rows = [row(id="first"), *BAD_ROWS[reason], row(id="last")]
    found = load(write_lines(here / "sft.jsonl", rows), max_bad_frac=0.99)
    assert found.bad == {reason: len(BAD_ROWS[reason])}
    assert [trace.id for trace in found.traces] == ["first", "last"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "text", "video_url"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "video_url", "url"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_no_json_is_worse_than_a_bad_row(value):
    for given_row in (
        value,
        {"messages": value},
        row([{"role": "user", "content": value}, *dialogue("Q", ANSWER)[1:]]),
    ):
        with suppress(BadRow):
            assert read_trace(given_row, lambda name: name).messages


@pytest.mark.parametrize("depth", [500, 980, 100_000])
def test_a_row_that_is_nested_too_deep_is_a_bad_row(here, depth):
    deep = json.dumps(shows(media("video", "a.mp4", nframes="HERE"))).replace('"HERE"', "[" * depth + "]" * depth)
    role = json.dumps(turns("HERE")).replace('"HERE"', "[" * depth + "]" * depth)
    found = load(write_lines(here / "sft.jsonl", [row(), deep, role]), max_bad_frac=0.7)
    assert len(found.traces) == 1 and found.bad == {"wrong schema": 2}
