"""Reads dialogues for SFT, turn by turn.

A row of a parquet or JSON-lines file has

    messages    [{role, content}], as a list or as JSON; content is text, or a list of parts:
                {"type": "text", "text": …}, {"type": "video_url", "video_url": {"url": path}}, or with image_url

A video may have "start_time" and "end_time", next to its url or in its part; the dialogue is then a sub-agent's about
that window. Or it may have "nframes", the number of overview frames that the trace needs, which must be equal for all
videos of a message.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paravt_jax.data.hub import local_source
from paravt_jax.data.prompts import PLACEHOLDER
from paravt_jax.data.rows import (
    MAX_MESSAGES,
    BadRow,
    check_frames,
    check_text,
    checked_encodable,
    file_finder,
    from_json,
    nesting_checked,
    object_of,
    own_id,
    read_rows,
    rows_of,
    unique_id,
)

COLUMNS = ("messages",)
MEDIA = ("video", "image")
MAX_TIME_S = 1e9  # JSON integers can be too large for a float
ROLES = ("system", "user", "assistant", "tool")

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Media:
    kind: Literal["video", "image"]
    path: str  # absolute
    window_s: tuple[float, float] | None = None  # window of a video; None: its overview
    num_frames: int | None = None  # frames of the overview; None: the run's frame budget


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[Media, ...]:
        return tuple(part for part in self.parts if isinstance(part, Media))


@dataclass(frozen=True)
class Trace:
    """One dialogue: an optional system message, a user message, and turns that end with the assistant's answer."""

    id: str  # unique, and the same in every run and on every host
    messages: tuple[Message, ...]

    @property
    def videos(self) -> tuple[str, ...]:
        """The distinct videos with an overview."""
        overviews = (part for part in self._media if part.kind == "video" and part.window_s is None)
        return tuple(dict.fromkeys(part.path for part in overviews))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.path for part in self._media))

    @property
    def _media(self) -> list[Media]:
        return [part for message in self.messages for part in message.media]


@dataclass(frozen=True)
class TraceSet:
    traces: tuple[Trace, ...]  # in row order
    bad: dict[str, int]  # reason -> number of dropped rows


def load_traces(
    path: str | Path,
    *,
    video_root: str,
    max_bad_frac: float | int,
    allow_outside: bool = False,
    with_lost: bool = False,
) -> TraceSet:
    """Loads traces; for the arguments see `load_prompts`."""
    source = local_source(path)
    find = file_finder(source, video_root, allow_outside, must_exist=not with_lost)
    traces, bad = read_rows(rows_of(source, COLUMNS), lambda row: read_trace(row, find), max_bad_frac, str(source))
    ids: dict[str, int] = {}
    return TraceSet(tuple(replace(trace, id=unique_id(trace.id, ids)) for trace in traces), bad)


@nesting_checked()
def read_trace(row: Any, find: Callable[[str], str]) -> Trace:
    """Reads one row. `find` resolves a path of the row, or raises BadRow."""
    row = object_of(row, "the row")
    messages = tuple(_message(message, find) for message in _messages(row))
    check_frames(sum(part.num_frames or 1 for message in messages for part in message.media))
    _check_turns(messages)
    return Trace(own_id(row) or _content_id(messages), tuple(map(_without_placeholders, messages)))


def _without_placeholders(message: Message) -> Message:
    """Removes `<video>` and `<image>`, because the message's parts already position videos and images."""
    placeholders = "|".join(f"<{kind}>\n?" for kind in {part.kind for part in message.media})
    parts = (re.sub(placeholders, "", part) if isinstance(part, str) else part for part in message.parts)
    return Message(message.role, tuple(parts))


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in row and "prompt" in row:
        raise BadRow("wrong schema", "a question with a prompt, which is for `paravt train`; SFT needs messages")
    messages = row.get("messages")
    if isinstance(messages, str | bytes):
        messages = from_json(messages, "messages")
    if not isinstance(messages, list):
        raise BadRow("wrong schema", f"messages is {type(messages).__name__}, expected a list of {{role, content}}")
    if len(messages) > MAX_MESSAGES:
        raise BadRow("too many messages", f"the dialogue has {len(messages)}, more than {MAX_MESSAGES}")
    return [object_of(message, "a message") for message in messages]


def _message(message: dict[str, Any], find: Callable[[str], str]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRow("wrong schema", f"the role is {role!r}, expected {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise BadRow("wrong schema", "calls are in tool_calls, expected <tool_call> in the text")
    if not isinstance(content, str | list):
        raise BadRow("wrong schema", f"the content of a message is {type(content).__name__}, expected text or parts")
    parts = tuple(_parts([{"type": "text", "text": content}] if isinstance(content, str) else content, find))
    parsed = Message(role, parts)
    check_text(parsed.text, f"a message of the {role}")
    num_placeholders, num_videos = parsed.text.count(PLACEHOLDER), sum(part.kind == "video" for part in parsed.media)
    if num_placeholders > num_videos:
        raise BadRow(
            f"more {PLACEHOLDER} than videos",
            f"{num_placeholders} in a message with {num_videos} videos; every video is a part of its message, "
            f'{{"type": "video_url", "video_url": {{"url": path}}}}',
        )
    if len({part.num_frames for part in parsed.media if part.kind == "video" and part.window_s is None}) > 1:
        raise BadRow("wrong schema", "the videos of a message have different nframes, or only some have it")
    if role in ("system", "assistant") and parsed.media:
        raise BadRow("wrong schema", f"a message of the {role} has a {parsed.media[0].kind}")
    if role == "assistant" and not parsed.text.strip():
        raise BadRow("empty answer", "a turn of the assistant is empty")
    return parsed


def _parts(parts: list[Any], find: Callable[[str], str]) -> Iterator[str | Media]:
    for part in parts:
        part = object_of(part, "a part of a message")
        part_type = str(part.get("type"))
        kind, value = part_type.removesuffix("_url"), part.get(part_type)
        if part_type == "text" and isinstance(value, str):
            yield checked_encodable(value, "a part of a message")
        elif kind in MEDIA:
            reference = part | object_of({"url": value} if isinstance(value, str) else value or {}, part_type)
            if not isinstance(reference.get("url"), str) or not reference["url"]:
                raise BadRow("wrong schema", f"a part of type {part_type} has no path")
            if kind == "image":
                yield Media(kind, find(reference["url"]))
            else:
                yield Media(kind, find(reference["url"]), _window(reference), _num_frames(reference))
        else:
            raise BadRow("wrong schema", f"a message has a part of unknown type {part.get('type')!r}")


def _window(reference: dict[str, Any]) -> tuple[float, float] | None:
    times: list[Any] = [reference.get("start_time"), reference.get("end_time")]
    if times == [None, None]:
        return None
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in times) or not (
        0 <= times[0] < times[1] < MAX_TIME_S
    ):
        raise BadRow("bad window", f"start_time and end_time of a video are {times}")
    return float(times[0]), float(times[1])


def _num_frames(reference: dict[str, Any]) -> int | None:
    count: Any = reference.get("nframes")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise BadRow("wrong schema", f"nframes of a video is {count!r}, expected an integer of at least 1")
    return count


def _check_turns(messages: tuple[Message, ...]) -> None:
    """Checks the order of roles: system? user assistant ((tool+ | user) assistant)*"""
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise BadRow("no answer", f"there is no assistant message (roles: {', '.join(roles) or 'none'})")
    if "system" in roles[1:]:
        raise BadRow("wrong order", "a system message is not the first")
    turns = roles[roles[0] == "system" :]
    if turns[0] != "user":
        raise BadRow("wrong order", f"the first turn is the {turns[0]}'s, expected the user's")
    if turns[-1] != "assistant":
        raise BadRow("no answer", f"the last turn is the {turns[-1]}'s, expected the assistant's")
    for previous, role in pairwise(turns):
        allowed = {"user": ("assistant",), "tool": ("assistant", "tool"), "assistant": ("tool", "user")}[previous]
        if role not in allowed:
            raise BadRow("wrong order", f"a {role} message follows a {previous} message")


def _content_id(messages: tuple[Message, ...]) -> str:
    """A hash of the content, with only file names of media, because directories differ between hosts."""
    content = [
        [
            message.role,
            [
                part if isinstance(part, str) else [part.kind, Path(part.path).name, part.window_s, part.num_frames]
                for part in message.parts
            ],
        ]
        for message in messages
    ]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
