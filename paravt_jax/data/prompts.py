"""Prompts for RL, read from rows as they are published: a question about videos, and what its answer is scored against.

A row of a parquet or JSON-lines file has

    prompt      [{role, content}], with a `<video>` in the text where a video belongs
    videos      [{"video": path}]: absolute, relative, or a file:// URI
    extra_info  {answer, question_type}, as an object or as its JSON

The question is the text of the last user message, with its `<video>`s, which the agent takes out. Other messages are
not read: the agent has a system prompt of its own. A row that cannot be used is counted by its reason, never skipped
in silence.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from paravt_jax.rewards import check_ground_truth

logger = logging.getLogger(__name__)
COLUMNS = ("prompt", "videos", "extra_info")
OWN_IDS = ("id", "index")  # columns that name a row, where there are such
QUESTION_TYPES = ("mcq", "tvg", "oe")
PLACEHOLDER = "<video>"
FILE_URI = "file://"


@dataclass(frozen=True)
class Prompt:
    id: str  # the same in every run and on every host, and no other prompt's
    question: str
    videos: tuple[str, ...]  # absolute paths
    answer: str
    question_type: str  # mcq, tvg or oe


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]  # in the order of the rows
    bad: dict[str, int]  # reason -> rows that were left out for it


class _BadRow(ValueError):
    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def load_prompts(path: str | Path, *, video_root: str, max_bad_frac: float | int) -> PromptSet:
    """The prompts of a .parquet or .jsonl file, or of all .parquet files of a directory, in the order of their names.

    Relative video paths begin from `video_root`, or where that is empty from where the rows are.
    """
    source = Path(path)
    root = Path(video_root or (source if source.is_dir() else source.parent)).absolute()
    prompts: list[Prompt] = []
    ids: set[str] = set()
    bad: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for place, row in _rows(source):
        try:
            prompt = _prompt(row, root)
        except _BadRow as problem:
            bad[problem.reason] += 1
            examples.setdefault(problem.reason, f"{place}: {problem}")
            continue
        prompts.append(replace(prompt, id=_unique(prompt.id, ids)))
        ids.add(prompts[-1].id)
    num_bad, num_rows = bad.total(), bad.total() + len(prompts)
    if not num_rows:
        raise ValueError(f"{source} has no rows")
    reasons = "; ".join(f"{reason}: {bad[reason]}, such as {examples[reason]}" for reason in bad)
    if num_bad / num_rows > max_bad_frac:
        raise ValueError(
            f"{source}: {num_bad} of {num_rows} rows cannot be used, more than data.max_bad_frac={max_bad_frac} "
            f"allows ({reasons})"
        )
    if not prompts:
        raise ValueError(f"{source}: not one of {num_rows} rows can be used ({reasons})")
    if bad:
        logger.warning("%s: %d of %d rows are left out (%s)", source, num_bad, num_rows, reasons)
    return PromptSet(tuple(prompts), dict(bad))


def _rows(source: Path) -> Iterator[tuple[str, Any]]:
    """Every row, a JSON line still as its bytes, and where it stands."""
    if source.is_dir():
        files = sorted(source.glob("*.parquet"))
        if not files:
            raise ValueError(f"{source} is a directory without *.parquet files")
        for file in files:
            yield from _parquet_rows(file)
    elif not source.is_file():
        raise ValueError(f"{source} does not exist")
    elif source.suffix == ".parquet":
        yield from _parquet_rows(source)
    elif source.suffix in (".jsonl", ".json"):
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{source.name} line {number}", line
    else:
        raise ValueError(f"{source} must be a .parquet or .jsonl file, or a directory of .parquet files")


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            missing = [name for name in COLUMNS if name not in names]
            if missing:
                raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")
            number = 0
            columns = [name for name in (*COLUMNS, *OWN_IDS) if name in names]
            for batch in table.iter_batches(batch_size=1024, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield f"{file.name} row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(f"{file} cannot be read as parquet: {str(problem).splitlines()[0]}") from None


def _prompt(row: Any, root: Path) -> Prompt:
    row = _object(row, "the row")
    question, names = _question(row.get("prompt")), _video_names(row.get("videos"))
    if question.count(PLACEHOLDER) > len(names):
        raise _BadRow(
            f"more {PLACEHOLDER} than videos", f"{question.count(PLACEHOLDER)} in prompt, {len(names)} in videos"
        )
    extra_info = _object(row.get("extra_info"), "extra_info")
    question_type = extra_info.get("question_type")
    if question_type not in QUESTION_TYPES:
        raise _BadRow("unknown question type", f"{question_type!r}, expected {', '.join(QUESTION_TYPES)}")
    answer = _answer(extra_info.get("answer"))
    try:
        check_ground_truth(answer, question_type)
    except ValueError as problem:
        raise _BadRow("unreadable ground truth", str(problem)) from None
    videos = tuple(_found(name, root) for name in names)
    own_ids = [row[name] for name in OWN_IDS if isinstance(row.get(name), str | int) and row[name] != ""]
    content_id = _content_id(question, names, answer, question_type)
    return Prompt(str(own_ids[0]) if own_ids else content_id, question, videos, answer, question_type)


def _object(value: Any, name: str) -> dict[str, Any]:
    """A JSON object, whether it was already read or not."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except ValueError as problem:
            raise _BadRow("wrong schema", f"{name} is no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise _BadRow("wrong schema", f"{name} is {type(value).__name__}, expected an object")
    return value


def _question(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _BadRow("wrong schema", "prompt is no list of messages {role, content}")
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said or not isinstance(said[-1], str):
        raise _BadRow("wrong schema", "prompt has no user message whose content is text")
    if not said[-1].replace(PLACEHOLDER, "").strip():
        raise _BadRow("empty question", repr(said[-1]))
    return said[-1]


def _video_names(videos: Any) -> list[str]:
    if videos is None or videos == []:
        raise _BadRow("no video", "videos is empty")
    if not isinstance(videos, list) or not all(isinstance(video, dict) for video in videos):
        raise _BadRow("wrong schema", 'videos is no list of {"video": path}')
    names = [video.get("video") for video in videos]
    if not all(isinstance(name, str) and name for name in names):
        raise _BadRow("wrong schema", f"videos has a path that is no text: {names}")
    return names


def _answer(value: Any) -> str:
    if isinstance(value, int | float | list):  # 4, or [2.5, 7]
        value = json.dumps(value)
    if value is not None and not isinstance(value, str):
        raise _BadRow("wrong schema", f"answer is {type(value).__name__}, expected text")
    if not value or not value.strip():
        raise _BadRow("empty answer", repr(value))
    return value.strip()


def _found(name: str, root: Path) -> str:
    """What follows file:// is taken as it stands, which is how the release writes it, and else as a quoted URI."""
    path = name.removeprefix(FILE_URI)
    for found in dict.fromkeys((root / path, root / (unquote(path) if path != name else path))):
        with suppress(OSError):  # a name that no file can have, or a directory that is not ours
            if found.is_file():
                return str(found)
    raise _BadRow("missing file", str(root / path))


def _content_id(question: str, videos: list[str], answer: str, question_type: str) -> str:
    """Of the videos only the file names count: where they lie differs between hosts."""
    names = [Path(video).name for video in videos]
    content = json.dumps([question, names, answer, question_type])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _unique(name: str, taken: set[str]) -> str:
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique
