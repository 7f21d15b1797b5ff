"""Prompts for RL, read from rows as they are published: a question about videos, and what its answer is scored against.

A row of a parquet or JSON-lines file has

    prompt      [{role, content}], with a `<video>` in the text where a video belongs
    videos      [{"video": path}]: absolute, relative, or a file:// URI; "subtitles" beside it, the path of its SRT
                file, where that is not the video's with .srt in place of its ending
    extra_info  {answer, question_type}, as an object or as its JSON

The question is the text of the last user message, with its `<video>`s, which the agent takes out. Other messages are
not read: the agent has a system prompt of its own.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paravt_jax.data.hub import local_source
from paravt_jax.data.rows import (
    BadRow,
    check_frames,
    check_text,
    encodable,
    file_finder,
    object_of,
    own_id,
    read_rows,
    reader,
    unique_id,
)
from paravt_jax.rewards.terms import check_ground_truth

COLUMNS = ("prompt", "videos", "extra_info")
QUESTION_TYPES = ("mcq", "tvg", "oe")
PLACEHOLDER = "<video>"


@dataclass(frozen=True)
class Prompt:
    id: str  # the same in every run and on every host, and no other prompt's
    question: str
    videos: tuple[str, ...]  # absolute paths
    answer: str
    question_type: str  # mcq, tvg or oe
    subtitles: tuple[str, ...] = ()  # absolute paths, of each video; empty where it has none

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.videos, *filter(None, self.subtitles))


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]  # in the order of the rows
    bad: dict[str, int]  # reason -> rows that were left out for it


def load_prompts(
    path: str | Path, *, video_root: str, max_bad_frac: float | int, allow_outside: bool = False
) -> PromptSet:
    """The prompts of a .parquet or .jsonl file, or of all .parquet files below a directory, in the order of the paths.

    `path` may also be a data set on the hub, OWNER/NAME[/SUB/DIR][@REVISION], where nothing local has that name.
    Relative video paths begin from `video_root`, or where that is empty from where the rows are. A file outside of
    a `video_root` is refused, unless `allow_outside`.
    """
    source = local_source(path)
    find = file_finder(source, video_root, allow_outside)
    loaded, bad = read_rows(source, COLUMNS, lambda row: read_prompt(row, find), max_bad_frac)
    ids: dict[str, int] = {}
    prompts = tuple(
        replace(prompt, id=unique_id(prompt.id, ids), subtitles=_all_subtitles(prompt, find)) for prompt in loaded
    )
    return PromptSet(prompts, bad)


@reader
def read_prompt(row: Any, find: Callable[[str], str]) -> Prompt:
    """The prompt of a row; `find` says where the file is that a path of the row names, or raises a BadRow."""
    row = object_of(row, "the row")
    question, names = _question(row.get("prompt")), _video_names(row.get("videos"))
    if question.count(PLACEHOLDER) > len(names):
        raise BadRow(
            f"more {PLACEHOLDER} than videos", f"{question.count(PLACEHOLDER)} in prompt, {len(names)} in videos"
        )
    extra_info = object_of(row.get("extra_info"), "extra_info")
    question_type = extra_info.get("question_type")
    if question_type not in QUESTION_TYPES:
        raise BadRow("unknown question type", f"{question_type!r}, expected {', '.join(QUESTION_TYPES)}")
    answer = _answer(extra_info.get("answer"))
    try:
        check_ground_truth(answer, question_type)
    except ValueError as problem:
        raise BadRow("unreadable ground truth", str(problem)) from None
    videos = tuple(map(find, names))
    subtitles = tuple(_named_subtitles(video, find) for video in row["videos"])
    content_id = _content_id(question, names, answer, question_type)
    return Prompt(own_id(row) or content_id, question, videos, answer, question_type, subtitles)


def _question(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("wrong schema", "prompt is no list of messages {role, content}")
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said or not isinstance(said[-1], str):
        raise BadRow("wrong schema", "prompt has no user message whose content is text")
    check_text(said[-1], "the question")
    if not said[-1].replace(PLACEHOLDER, "").strip():
        raise BadRow("empty question", repr(said[-1]))
    return encodable(said[-1], "prompt")


def _video_names(videos: Any) -> list[str]:
    if videos is None or videos == []:
        raise BadRow("no video", "videos is empty")
    check_frames(len(videos) if isinstance(videos, list) else 0)
    if not isinstance(videos, list) or not all(isinstance(video, dict) for video in videos):
        raise BadRow("wrong schema", 'videos is no list of {"video": path}')
    names = [video.get("video") for video in videos]
    if not all(isinstance(name, str) and name for name in names):
        raise BadRow("wrong schema", f"videos has a path that is no text: {names}")
    return names


def _named_subtitles(video: dict[str, Any], find: Callable[[str], str]) -> str:
    named = video.get("subtitles")
    if not isinstance(named, str | None):
        raise BadRow("wrong schema", f"subtitles of a video is {type(named).__name__}, expected a path")
    return find(named) if named else ""


def _all_subtitles(prompt: Prompt, find: Callable[[str], str]) -> tuple[str, ...]:
    """Those that the row names, and for other videos those beside them, if they may be read."""
    pairs = zip(prompt.videos, prompt.subtitles, strict=True)
    return tuple(named or _beside(video, find) for video, named in pairs)


def _beside(video: str, find: Callable[[str], str]) -> str:
    try:
        return find(str(Path(video).with_suffix(".srt")))
    except BadRow:
        return ""


def _answer(value: Any) -> str:
    if isinstance(value, int | float | list):  # 4, or [2.5, 7]
        value = json.dumps(value)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong schema", f"answer is {type(value).__name__}, expected text")
    if not value or not value.strip():
        raise BadRow("empty answer", repr(value))
    check_text(value, "the answer")
    return value.strip()


def _content_id(question: str, videos: list[str], answer: str, question_type: str) -> str:
    """Of the videos only the file names count: where they lie differs between hosts."""
    names = [Path(video).name for video in videos]
    content = json.dumps([question, names, answer, question_type])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
