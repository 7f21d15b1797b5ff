"""Published dialogues become traces; unusable rows are counted by reason."""

import json
from pathlib import Path

import pytest
from data_rows import (
    ANSWER_TURN,
    CALL_TURN,
    dialogue,
    media,
    messages,
    rl_row,
    sft_row,
    text,
    write_lines,
    write_parquet,
)

from paravt_jax.data.traces import Media, Message, load_traces


def load(path: Path, video_root: str = "", max_bad_frac: float = 0.0):
    return load_traces(str(path), video_root=video_root, max_bad_frac=max_bad_frac)


def load_row(directory: Path, content: object):
    return load(write_lines(directory / "sft.jsonl", [sft_row(content)])).traces[0]


def test_a_published_row_becomes_a_trace(video_dir):
    frames = [text("<3.0 seconds><image>"), media("image", f"file://{video_dir}/b.png")]
    question = [media("video", "a.mp4"), text("<video>\nWhich one?")]
    system = messages(("system", "You may crop."))
    trace = load_row(video_dir, system + dialogue(question, CALL_TURN, frames, ANSWER_TURN))
    assert trace.messages == (
        Message("system", ("You may crop.",)),
        Message("user", (Media("video", f"{video_dir}/a.mp4"), "Which one?")),
        Message("assistant", (CALL_TURN,)),
        Message("tool", ("<3.0 seconds>", Media("image", f"{video_dir}/b.png"))),
        Message("assistant", (ANSWER_TURN,)),
    )
    assert trace.videos == (f"{video_dir}/a.mp4",)
    assert trace.messages[3].text == "<3.0 seconds>"


def test_a_list_its_json_and_a_parquet_struct_give_the_same_traces(video_dir):
    image = media("image", "b.png", detail=None)
    question, response = [media("video", "a.mp4"), text("Which?")], [text("<1.0 seconds>"), image]
    content = dialogue(question, [text(CALL_TURN)], response, [text(ANSWER_TURN)])
    keys = dict.fromkeys(("type", "text", "video_url", "image_url"))  # parquet has every key in every part
    struct = [message | {"content": [keys | part for part in message["content"]]} for message in content]
    files = [
        write_lines(video_dir / "list.jsonl", [sft_row(content)]),
        write_lines(video_dir / "json.jsonl", [sft_row(json.dumps(content))]),
        write_parquet(video_dir / "json.parquet", [sft_row(json.dumps(content))]),
        write_parquet(video_dir / "struct.parquet", [sft_row(struct)]),
    ]
    first, *same = (load(path).traces for path in files)
    assert first[0].messages[2].media == (Media("image", f"{video_dir}/b.png"),)
    assert all(traces == first for traces in same)


def test_a_file_outside_of_the_root_makes_a_bad_row(video_dir):
    contents = [[media(kind, f"{video_dir}/b.png"), text("Q")] for kind in ("image", "video")]
    outside = [sft_row(dialogue(content, ANSWER_TURN)) for content in contents]
    (video_dir / "root").mkdir()
    (video_dir / "root" / "a.mp4").touch()
    path = write_lines(video_dir / "sft.jsonl", [sft_row(), *outside])
    loaded = load(path, video_root=str(video_dir / "root"), max_bad_frac=0.9)
    assert loaded.bad == {"file outside of data.video_root": 2} and len(loaded.traces) == 1


@pytest.mark.parametrize("url", ["a.mp4", {"url": "a.mp4"}])
def test_a_window_may_be_beside_the_url_of_a_video(video_dir, url):
    video = {"type": "video_url", "video_url": url, "start_time": 2, "end_time": 4.5}
    trace = load_row(video_dir, dialogue([video, text("Say.")], ANSWER_TURN))
    assert trace.messages[0].media == (Media("video", f"{video_dir}/a.mp4", (2.0, 4.5)),) and not trace.videos


@pytest.mark.parametrize(
    ("times", "window_s"),
    [({"start_time": 2, "end_time": 4.5}, (2.0, 4.5)), ({"start_time": None, "end_time": None}, None)],
)
def test_a_video_with_a_window_has_no_overview(video_dir, times, window_s):
    question = [media("video", "a.mp4", **times), media("image", "b.png", start_time=9), text("Say.")]
    trace, path = load_row(video_dir, dialogue(question, ANSWER_TURN)), f"{video_dir}/a.mp4"
    assert trace.messages[0].media == (Media("video", path, window_s), Media("image", f"{video_dir}/b.png"))
    assert trace.videos == (() if window_s else (path,))


def test_several_tools_may_answer_one_turn_and_the_user_may_continue(video_dir):
    pairs = [("user", "Q"), ("assistant", CALL_TURN), ("tool", "first"), ("tool", "second"), ("assistant", ANSWER_TURN)]
    pairs += [("user", "And then?"), ("assistant", ANSWER_TURN)]
    assert [message.role for message in load_row(video_dir, messages(*pairs)).messages] == [role for role, _ in pairs]


def test_the_id_depends_on_the_content_and_not_on_the_host(video_dir):
    moved = video_dir / "moved"
    moved.mkdir()
    (moved / "a.mp4").touch()
    other = sft_row(dialogue([media("video", "a.mp4"), text("Which, then?")], ANSWER_TURN))
    ids = [trace.id for trace in load(write_lines(video_dir / "sft.jsonl", [sft_row(), other, sft_row()])).traces]
    assert load(write_lines(moved / "sft.jsonl", [other])).traces[0].id == ids[1]
    # blake2b-64 of [["user", [["video", "a.mp4", null, null], "Which one?"]], ["assistant", [ANSWER_TURN]]]
    assert ids == ["92ef2ed4309d1bdf", ids[1], "92ef2ed4309d1bdf-2"] and len(set(ids)) == 3


def shows(*parts: dict) -> dict:
    return sft_row(dialogue([*parts, text("Which?")], ANSWER_TURN))


def window(start_time: object = None, end_time: object = None) -> dict:
    return shows(media("video", "a.mp4", start_time=start_time, end_time=end_time))


def asks(question: object) -> dict:
    return sft_row(dialogue(question, ANSWER_TURN))


def turns(*roles: object) -> dict:
    return sft_row([{"role": role, "content": "words"} for role in roles])


BAD_ROWS = {
    "missing file": [shows(media("video", "c.mp4")), shows(media("image", "/nowhere/b.png"))],
    "impossible path": [shows(media("video", "x" * 5000)), shows(media("video", "a\0.mp4"))],
    "bad window": [
        *(window(4, 4), window(-1, 4), window(1), window("1", 4), window(False, True), window(0, float("inf"))),
        *(window(float("nan"), 4), window(0, 10**400)),
    ],
    "id too long": [sft_row(id="x" * 257)],
    "text too long": [
        *(asks("Which? " * 15_000), asks([text("Which? " * 9_000)] * 2)),
        sft_row(dialogue("Which?", CALL_TURN, "a report " * 12_000, ANSWER_TURN)),
    ],
    "too many messages": [turns(*["user", "assistant"] * 2049)],
    "too many frames": [
        shows(media("video", "a.mp4", nframes=10**12)),
        shows(*[media("video", "a.mp4", nframes=4096)] * 2),
        shows(*[media("image", "b.png")] * 4097),
    ],
    "more <video> than videos": [
        *(asks("<video> Which?"), shows(media("video", "a.mp4"), text("<video><video>"))),
        sft_row(dialogue("Which?", f"<video>{ANSWER_TURN}")),
    ],
    "empty answer": [sft_row(dialogue("Which?", " \n")), sft_row(dialogue("Which?", []))],
    "no answer": [turns("user"), turns("user", "assistant", "tool"), turns("system", "user"), sft_row([])],
    "wrong order": [
        *(turns("assistant"), turns("user", "user", "assistant"), turns("user", "tool", "assistant")),
        *(turns("user", "assistant", "assistant"), turns("user", "assistant", "system", "assistant")),
        turns("tool", "assistant"),
    ],
    "wrong schema": [
        *("{", "[" * 100_000, "[1, 2]", sft_row("no JSON"), sft_row("[" * 100_000), sft_row('{"role": "user"}')),
        *(sft_row(3), {"prompt": []}, sft_row(["user"]), sft_row([{"role": "user"}])),
        *(turns(["user"]), turns("narrator"), sft_row(messages(("user", {"type": "text"})))),
        *(asks([None]), asks([{"type": "audio", "audio": "a.wav"}]), asks([{"type": ["text"], "text": "x"}])),
        *(asks([{"type": {}, "text": "x"}]), asks([{"type": "text_url", "text_url": "x"}]), asks([text(3)])),
        *(asks("half a character: \ud800"), asks([{"type": "video_url", "video_url": None}])),
        *(shows(media("video", "")), shows(media("video", 3))),
        *(shows(media("video", "a.mp4", nframes=4), media("video", "a.mp4", **more)) for more in ({"nframes": 8}, {})),
        sft_row(dialogue("Which?", [media("image", "b.png")])),
        sft_row([*messages(("user", "Q")), {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]),
        *(
            json.dumps(each).replace('"DEEP"', "[" * depth + "]" * depth)
            for each in (turns("DEEP"), shows(media("video", "a.mp4", nframes="DEEP")))
            for depth in (500, 980, 100_000)
        ),
    ],
}


def test_a_file_of_questions_names_the_train_command(video_dir):
    with pytest.raises(ValueError, match=r"sft\.jsonl line 1: a question with a prompt, .* `paravt train`; SFT needs"):
        load(write_lines(video_dir / "sft.jsonl", [rl_row("A")]))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_that_is_one_list_is_an_error_that_names_the_format(encoding, video_dir):
    (video_dir / "my sft.json").write_text(json.dumps([sft_row()], indent=1), encoding)
    with pytest.raises(ValueError, match=r"sft\.json is one JSON list; .*: jq -c '\.\[\]' '\S*my sft\.json' > rows"):
        load(video_dir / "my sft.json")


def test_a_part_without_a_path_is_named(video_dir):
    """Some published rows have their images in another column."""
    with pytest.raises(ValueError, match=r"sft\.jsonl line 1: a part of type image has no path"):
        load(write_lines(video_dir / "sft.jsonl", [shows({"type": "image"})]))


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_row_is_counted_by_its_reason_and_dropped(video_dir, reason):
    rows = [sft_row(id="first"), *BAD_ROWS[reason], sft_row(id="last")]
    loaded = load(write_lines(video_dir / "sft.jsonl", rows), max_bad_frac=0.99)
    assert loaded.bad == {reason: len(BAD_ROWS[reason])}
    assert [trace.id for trace in loaded.traces] == ["first", "last"]
