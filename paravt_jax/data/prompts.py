"""Reads prompts for RL: a question about videos and its ground truth.

A row of a parquet or JSON-lines file has

    prompt      [{role, content}], with a `<video>` in the text where a video belongs
    videos      [{"video": path}]: absolute, relative, or a file:// URI; optionally "subtitles": the path of an SRT
                file, by default the video's path with the suffix .srt; empty for a question about images or text
    images      [{"image": path}] or [path], optional, in a row without videos; `<image>` in the text is optional too
    extra_info  {answer, question_type}, as an object or as its JSON

reward.plugin may use further columns of the rows, or further keys of extra_info. With it, a question type may be your
own; such a row needs no answer.

The question is the text of the last user message, including its `<video>` placeholders, which the agent removes. Other
messages are ignored, because the agent has its own system prompt; rollout.prompts.row_messages uses them.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.progress import in_units
from paravt_jax.data.hub import local_source
from paravt_jax.data.rows import (
    MAX_TEXT_CHARS,
    BadRow,
    check_frames,
    check_text,
    checked_encodable,
    file_finder,
    nesting_checked,
    object_of,
    own_id,
    read_rows,
    rows_of,
    unique_id,
)
from paravt_jax.rewards.answers import may_list, option_letter
from paravt_jax.rewards.terms import QUESTION_TYPES, check_ground_truth
from rollout.prompts import IMAGE_PLACEHOLDER, PLACEHOLDER
from rollout.toolbox.subtitles import subtitles_beside

COLUMNS, OPTIONAL_COLUMNS = ("prompt", "videos", "extra_info"), ("images",)
ROLES = ("system", "user", "assistant")
OWN_TYPE = re.compile(r"(?!k\d+$)[a-z][a-z0-9_]{,31}")  # a part of metric names, where k16 is a frame budget


@dataclass(frozen=True)
class Prompt:
    id: str  # unique, and the same in every run and on every host
    question: str
    videos: tuple[str, ...]  # absolute paths
    answer: str
    question_type: str  # mcq, tvg, oe, or your own
    subtitles: tuple[str, ...] = ()  # an absolute path for each video, or ""
    messages: tuple[tuple[str, str], ...] = ()  # roles and texts of the row; empty if a message is not text
    columns: tuple[tuple[str, Any], ...] = ()  # names and values of the columns that reward.plugin uses
    images: tuple[str, ...] = ()  # absolute paths

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.videos, *self.images, *filter(None, self.subtitles))


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]  # in row order
    bad: dict[str, int]  # reason -> number of dropped rows


def load_prompts(
    path: str | Path,
    *,
    video_root: str,
    max_bad_frac: float | int,
    allow_outside: bool = False,
    columns: Sequence[str] | None = None,
    with_lost: bool = False,
) -> PromptSet:
    """Loads a .parquet or .jsonl file, or all .parquet files of a directory in path order.

    `path` may also be a data set on the hub, OWNER/NAME[/SUB/DIR][@REVISION], if no local path has that name. Relative
    video paths start from `video_root`, or if it is empty, from the rows' directory. Files outside of a `video_root`
    are rejected unless `allow_outside`. `columns` are the columns that reward.plugin uses; None without a plugin.
    `with_lost` keeps rows whose files are missing.
    """
    source = local_source(path)
    find = file_finder(source, video_root, allow_outside)
    find_named = file_finder(source, video_root, allow_outside, must_exist=not with_lost)
    rows = rows_of(source, COLUMNS, (*OPTIONAL_COLUMNS, *(columns or ())))
    prompts, bad = read_rows(rows, lambda row: read_prompt(row, find_named, columns), max_bad_frac, str(source))
    ids: dict[str, int] = {}
    return PromptSet(
        tuple(replace(prompt, id=unique_id(prompt.id, ids), subtitles=_subtitles(prompt, find)) for prompt in prompts),
        bad,
    )


@nesting_checked()
def read_prompt(row: Any, find: Callable[[str], str], columns: Sequence[str] | None = None) -> Prompt:
    """Reads one row. `find` resolves a path of the row, or raises BadRow. For `columns` see `load_prompts`."""
    row = object_of(row, "the row")
    if "prompt" not in row and "messages" in row:
        raise BadRow("wrong schema", "a trace with messages, which is for `paravt sft`; RL needs prompt")
    question = _question(row.get("prompt"))
    names, images = _video_names(row.get("videos"), question), _image_names(row.get("images"))
    if names and images:
        raise BadRow("videos and images", "a row can have only one of the two")
    _check_placeholders(question, PLACEHOLDER, names, "videos")
    if images:
        _check_placeholders(question, IMAGE_PLACEHOLDER, images, "images")
    extra_info = object_of(row.get("extra_info"), "extra_info")
    question_type = _question_type(extra_info.get("question_type"), own=columns is not None)
    answer = _answer(extra_info.get("answer"), question_type)
    if question_type == "mcq" and not may_list(question, option_letter(answer) or ""):
        raise BadRow("answer outside of the options", f"the answer is {answer!r}, which the question does not list")
    videos = tuple(map(find, names))
    subtitles = tuple(_named_subtitles(video, find) for video in row.get("videos") or ())
    content_id = _content_id(question, [*names, *images], answer, question_type)
    prompt = Prompt(own_id(row) or content_id, question, videos, answer, question_type, subtitles)
    fields = extra_info | row
    if absent := [name for name in columns or () if name not in fields]:
        raise BadRow("missing column", f"reward.plugin takes {absent[0]}, which is neither a column nor in extra_info")
    own = tuple((name, fields[name]) for name in columns or ())
    return replace(prompt, messages=_messages(row["prompt"]), columns=own, images=tuple(map(find, images)))


def _check_placeholders(question: str, placeholder: str, names: list[str], column: str) -> None:
    if (count := question.count(placeholder)) > len(names):
        raise BadRow(f"more {placeholder} than {column}", f"{count} in prompt, {len(names)} in {column}")


def remarks_on(source: str | Path, prompts: Sequence[Prompt]) -> list[str]:
    """Log lines about rows without videos, and about question types that only reward.plugin scores."""
    num_images = sum(bool(prompt.images) for prompt in prompts)
    num_alone = sum(not prompt.files for prompt in prompts)
    with_images = in_units([num_images], "row")
    without = f"{source}: {with_images} with images and {num_alone:,} with text alone: asked without tools"
    counts = Counter(prompt.question_type for prompt in prompts if prompt.question_type not in QUESTION_TYPES)
    listed = ", ".join(f"{name} ({in_units([count], 'row')})" for name, count in sorted(counts.items()))
    only_plugin = f"{source}: only reward.plugin scores {listed}"
    return [without] * bool(num_images + num_alone) + [only_plugin] * bool(counts)


def check_row_messages(prompts: Sequence[Prompt], source: str) -> None:
    """Raises ValueError if a row has no usable messages."""
    if without := [prompt.id for prompt in prompts if not prompt.messages]:
        raise ValueError(
            f"{source}: {len(without)} of {len(prompts)} rows, for example {without[0]}, do not end with the "
            f"user's message, or have one that is not text: rollout.prompts.row_messages=true cannot show them"
        )


def _messages(messages: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The roles and texts of a row's messages; empty if one is unusable, or if the last is not the user's."""
    texts: tuple[Any, ...] = tuple((message.get("role"), message.get("content")) for message in messages)
    shows = texts[-1][0] == "user" and all(role in ROLES and _is_shown(text) for role, text in texts)
    return texts if shows else ()


def _is_shown(text: Any) -> bool:
    """Whether the value is text of bounded length without lone surrogates."""
    return isinstance(text, str) and len(text) <= MAX_TEXT_CHARS and text.encode(errors="replace").decode() == text


def _question(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("wrong schema", "prompt is not a list of messages {role, content}")
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    if not texts or not isinstance(texts[-1], str):
        raise BadRow("wrong schema", "prompt has no user message whose content is text")
    check_text(texts[-1], "the question")
    if not texts[-1].replace(PLACEHOLDER, "").strip():
        raise BadRow("empty question", repr(texts[-1]))
    return checked_encodable(texts[-1], "prompt")


def _video_names(videos: Any, question: str) -> list[str]:
    if videos is None or videos == []:
        if PLACEHOLDER in question:
            raise BadRow("no video", "videos is empty")
        return []
    check_frames(len(videos) if isinstance(videos, list) else 0)
    if not isinstance(videos, list) or not all(isinstance(video, dict) for video in videos):
        raise BadRow("wrong schema", 'videos is not a list of {"video": path}')
    names = [video.get("video") for video in videos]
    if not all(isinstance(name, str) and name for name in names):
        raise BadRow("wrong schema", f"a path in videos is not text: {names}")
    return names


def _image_names(images: Any) -> list[str]:
    if images is None:
        return []
    listed: list[Any] = images if isinstance(images, list) else [images]
    check_frames(len(listed))
    names: list[Any] = [image.get("image") if isinstance(image, dict) else image for image in listed]
    if listed is not images or not all(isinstance(name, str) and name for name in names):
        raise BadRow("wrong schema", 'images is not a list of paths, or of {"image": path}')
    return names


def _named_subtitles(video: dict[str, Any], find: Callable[[str], str]) -> str:
    name = video.get("subtitles")
    if not isinstance(name, str | None):
        raise BadRow("wrong schema", f"subtitles of a video is {type(name).__name__}, expected a path")
    return find(name) if name else ""


def _subtitles(prompt: Prompt, find: Callable[[str], str]) -> tuple[str, ...]:
    """Subtitle files: from the row, else the file next to the video, if it exists and is allowed."""
    pairs = zip(prompt.videos, prompt.subtitles, strict=True)
    return tuple(named or _next_to(video, find) for video, named in pairs)


def _next_to(video: str, find: Callable[[str], str]) -> str:
    try:
        return find(str(subtitles_beside(video)))
    except ValueError:  # a BadRow, or a lost path without a name
        return ""


def _question_type(value: Any, own: bool) -> str:
    if value in QUESTION_TYPES or (own and isinstance(value, str) and OWN_TYPE.fullmatch(value)):
        return value
    named = "a name of your own (lower-case letters, digits and _, not k16)"
    others = named if own else "with reward.plugin one of your own"
    raise BadRow("unknown question type", f"{value!r}, expected {', '.join(QUESTION_TYPES)}, or {others}")


def _answer(value: Any, question_type: str) -> str:
    """Reads the ground truth, which only your own question types may omit. pandas writes NaN for a missing value."""
    if isinstance(value, float) and math.isnan(value):
        value = None
    if value is None and question_type not in QUESTION_TYPES:
        return ""
    answer = _answer_text(value)
    if question_type in QUESTION_TYPES:
        try:
            check_ground_truth(answer, question_type)
        except ValueError as problem:
            raise BadRow("unreadable ground truth", str(problem)) from None
    return answer


def _answer_text(value: Any) -> str:
    if isinstance(value, int | float | list):  # for example 4 or [2.5, 7]
        value = json.dumps(value)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong schema", f"answer is {type(value).__name__}, expected text")
    if not value or not value.strip():
        raise BadRow("empty answer", repr(value))
    check_text(value, "the answer")
    return value.strip()


def _content_id(question: str, videos: list[str], answer: str, question_type: str) -> str:
    """A hash of the content, with only file names of videos, because directories differ between hosts."""
    content = json.dumps([question, [Path(video).name for video in videos], answer, question_type])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
