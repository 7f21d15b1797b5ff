"""Dialogues to imitate, read from rows as they are published: what was shown, said and answered, turn by turn.

A row of a parquet or JSON-lines file has

    messages    [{role, content}], as a list or as its JSON; content is text, or parts of it:
                {"type": "text", "text": …}, {"type": "video_url", "video_url": {"url": path}}, and image_url likewise

A video may have more beside its url: "start_time" and "end_time", then the dialogue is a sub-agent's, about that part
of it; or "nframes", the number of frames in its overview, for traces that are true only of so many.
"""

import hashlib
import json
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
    encodable,
    file_finder,
    from_json,
    object_of,
    own_id,
    read_rows,
    reader,
    unique_id,
)

COLUMNS = ("messages",)
MEDIA = ("video", "image")
MAX_TIME_S = 1e9  # a JSON integer can be too large for a float
ROLES = ("system", "user", "assistant", "tool")

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Media:
    kind: Literal["video", "image"]
    path: str  # absolute
    window_s: tuple[float, float] | None = None  # the part of a video that is shown
    num_frames: int | None = None  # of a video's overview; None: as many as the run says


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
    """One dialogue: an optional system message, a user's, then turns of the assistant, whose answer comes last."""

    id: str  # the same in every run and on every host, and no other trace's
    messages: tuple[Message, ...]

    @property
    def videos(self) -> tuple[str, ...]:
        """Those of which an overview is shown, each once."""
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
    traces: tuple[Trace, ...]  # in the order of the rows
    bad: dict[str, int]  # reason -> rows that were left out for it


def load_traces(
    path: str | Path, *, video_root: str, max_bad_frac: float | int, allow_outside: bool = False
) -> TraceSet:
    """The traces of a .parquet or .jsonl file, or of all .parquet files below a directory, in the order of the paths.

    `path` may also be a data set on the hub, OWNER/NAME[/SUB/DIR][@REVISION], where nothing local has that name.
    Relative paths begin from `video_root`, or where that is empty from where the rows are. A file outside of
    a `video_root` is refused, unless `allow_outside`.
    """
    source = local_source(path)
    find = file_finder(source, video_root, allow_outside)
    traces, bad = read_rows(source, COLUMNS, lambda row: read_trace(row, find), max_bad_frac)
    ids: dict[str, int] = {}
    return TraceSet(tuple(replace(trace, id=unique_id(trace.id, ids)) for trace in traces), bad)


@reader
def read_trace(row: Any, find: Callable[[str], str]) -> Trace:
    """The trace of a row; `find` says where the file is that a path of the row names, or raises a BadRow."""
    row = object_of(row, "the row")
    messages = tuple(_message(message, find) for message in said_in(row))
    check_frames(sum(part.num_frames or 1 for message in messages for part in message.media))
    _check_turns(messages)
    return Trace(own_id(row) or _content_id(messages), messages)


def said_in(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row as it has them, whether they were already read or not."""
    said = row.get("messages")
    if isinstance(said, str | bytes):
        said = from_json(said, "messages")
    if not isinstance(said, list):
        raise BadRow("wrong schema", f"messages is {type(said).__name__}, expected a list of {{role, content}}")
    if len(said) > MAX_MESSAGES:
        raise BadRow("too many messages", f"the dialogue has {len(said)}, more than {MAX_MESSAGES}")
    return [object_of(message, "a message") for message in said]


def _message(message: dict[str, Any], find: Callable[[str], str]) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRow("wrong schema", f"the role {role!r} is none of {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise BadRow("wrong schema", "calls stand in tool_calls, expected <tool_call> in the text")
    if not isinstance(content, str | list):
        raise BadRow("wrong schema", f"the content of a message is {type(content).__name__}, expected text or parts")
    parts = tuple(_parts([{"type": "text", "text": content}] if isinstance(content, str) else content, find))
    read = Message(role, parts)
    check_text(read.text, f"a message of the {role}")
    num_videos = sum(part.kind == "video" for part in read.media)
    if read.text.count(PLACEHOLDER) > num_videos:
        raise BadRow(f"more {PLACEHOLDER} than videos", f"{read.text.count(PLACEHOLDER)} in a message, {num_videos}")
    if role in ("system", "assistant") and read.media:
        raise BadRow("wrong schema", f"a message of the {role} shows a {read.media[0].kind}")
    if role == "assistant" and not read.text.strip():
        raise BadRow("empty answer", "a turn of the assistant says nothing")
    return read


def _parts(parts: list[Any], find: Callable[[str], str]) -> Iterator[str | Media]:
    for part in parts:
        part = object_of(part, "a part of a message")
        named = str(part.get("type"))
        kind, value = named.removesuffix("_url"), part.get(named)
        if named == "text" and isinstance(value, str):
            yield encodable(value, "a part of a message")
        elif kind in MEDIA:
            where = object_of({"url": value} if isinstance(value, str) else value, f"a {kind}")
            if not isinstance(where.get("url"), str) or not where["url"]:
                raise BadRow("wrong schema", f"a {kind} has no url")
            if kind == "image":
                yield Media(kind, find(where["url"]))
            else:
                yield Media(kind, find(where["url"]), _window(where), _num_frames(where))
        else:
            raise BadRow("wrong schema", f"a part of type {part.get('type')!r} cannot be read")


def _window(where: dict[str, Any]) -> tuple[float, float] | None:
    times: list[Any] = [where.get("start_time"), where.get("end_time")]
    if times == [None, None]:
        return None
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in times) or not (
        0 <= times[0] < times[1] < MAX_TIME_S
    ):
        raise BadRow("bad window", f"start_time and end_time of a video are {str(times)[:100]}")
    return float(times[0]), float(times[1])


def _num_frames(where: dict[str, Any]) -> int | None:
    count: Any = where.get("nframes")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise BadRow("wrong schema", f"nframes of a video is {count!r}, expected a number of at least 1")
    return count


def _check_turns(messages: tuple[Message, ...]) -> None:
    """system? user assistant ((tool+ | user) assistant)*"""
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise BadRow("no answer", f"the messages are of {', '.join(roles) or 'nobody'}")
    if "system" in roles[1:]:
        raise BadRow("wrong order", "a message of the system comes later than the first")
    turns = roles[roles[0] == "system" :]
    if turns[0] != "user":
        raise BadRow("wrong order", f"the {turns[0]} speaks first, expected the user")
    if turns[-1] != "assistant":
        raise BadRow("no answer", f"the {turns[-1]} speaks last, expected the assistant")
    for before, role in pairwise(turns):
        allowed = {"user": ("assistant",), "tool": ("assistant", "tool"), "assistant": ("tool", "user")}[before]
        if role not in allowed:
            raise BadRow("wrong order", f"the {role} speaks after the {before}")


def _content_id(messages: tuple[Message, ...]) -> str:
    """Of files only the names count: where they lie differs between hosts."""
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
