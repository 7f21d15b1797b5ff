"""Reads published rows from parquet or JSON lines.

Unusable rows are counted by reason. Too many of them stop the run.
"""

import json
import logging
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.progress import Meter
from model_port.terminal import visible
from paravt_jax.config import MAX_FRAMES
from paravt_jax.data.hub import row_files

logger = logging.getLogger(__name__)
Read = TypeVar("Read")
MISSING_FILE = "missing file"  # reason of a bad row
ID_COLUMNS = ("id", "index")  # optional columns that name a row
LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{.*)?", re.DOTALL)  # the first line of a list of rows; may have a BOM
FILE_URI = "file://"
BATCH_ROWS = 256  # rows read from parquet at a time
HUB_SNAPSHOT = re.compile(r"(.*/datasets--[^/]+--[^/]+)/snapshots/")
# Limits of one row. Text is tokenized in the event loop, where 10 MB take 16 s. All frames of a row are in memory at
# the same time, where 1,000 frames of the recipe's size take 150 MB.
MAX_TEXT_CHARS = 100_000  # a question, an answer, or a message of a dialogue
MAX_ID_CHARS = 256  # ids appear in logs, pages and file names
MAX_MESSAGES = 4096  # messages of a dialogue
MAX_NAME_BYTES = 255  # one component of a path, on every common file system
MAX_PATH_BYTES = 4000  # below Linux's PATH_MAX of 4096, with room for a suffix
MAX_SHOWN_CHARS = 60  # characters of a rejected value in errors
MAX_DETAIL_CHARS = 1000  # an error about a row; a value of the row may have megabytes


class BadRow(ValueError):
    """Raised for an unusable row. Rows are counted by `reason`."""

    def __init__(self, reason: str, detail: str):
        longest = MAX_DETAIL_CHARS // 2  # the start names the value, the end says what is expected
        super().__init__(detail if len(detail) <= 2 * longest else f"{detail[:longest]} … {detail[-longest:]}")
        self.reason = reason


@contextmanager
def nesting_checked() -> Iterator[None]:
    """Turns too deep nesting into a BadRow. Decorates functions that read a row."""
    try:
        yield
    except RecursionError:
        raise BadRow("wrong schema", "the row is nested too deep") from None


def read_rows(
    rows: Iterable[tuple[str, Any]], read: Callable[[Any], Read], max_bad_frac: float | int, source: str
) -> tuple[list[Read], dict[str, int]]:
    """Applies `read` to (location, row) pairs. Returns the results, and the counts of bad rows by reason."""
    results: list[Read] = []
    bad: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with Meter(f"reading {source}", unit="row") as meter:
        for location, row in rows:
            try:
                results.append(read(row))
            except BadRow as problem:
                bad[problem.reason] += 1
                examples.setdefault(problem.reason, f"{location}: {problem}")
            meter.update()
    num_bad, num_rows = bad.total(), bad.total() + len(results)
    if not num_rows:
        raise ValueError(f"{source} has no rows")
    reasons = "; ".join(f"{reason}: {bad[reason]}, for example {examples[reason]}" for reason in bad)
    if num_bad / num_rows > max_bad_frac:
        raise ValueError(
            f"{source}: {num_bad} of {num_rows} rows cannot be used, more than data.max_bad_frac={max_bad_frac} "
            f"allows ({reasons})"
        )
    if not results:
        raise ValueError(f"{source}: none of {num_rows} rows can be used ({reasons})")
    if bad:
        logger.warning("%s: %d of %d rows are dropped (%s)", source, num_bad, num_rows, visible(reasons))
    return results, dict(bad)


def root_of(source: Path, video_root: str) -> Path:
    """The directory of relative paths in rows: `video_root`, or if it is empty, the rows' directory."""
    return Path(video_root or (source if source.is_dir() else source.parent)).absolute()


def rows_of(source: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the location and content of every row; a JSON line is yielded as bytes.

    `source` is a .parquet or .jsonl file, or a directory with .parquet files, read in path order. Every parquet file
    must have the `columns`. Of all other columns, only `optional` columns are read.
    """
    if source.is_dir():
        files = row_files(source)
        if not files:
            raise ValueError(
                f"{source} is a directory without *.parquet files; JSON lines are one file, which the path names"
            )
        for file in files:
            yield from _parquet_rows(file, columns, optional, file.relative_to(source).as_posix())
    elif not source.is_file():
        raise ValueError(f"{source} {'is not a regular file' if source.exists() else 'does not exist'}")
    elif source.suffix == ".parquet":
        yield from _parquet_rows(source, columns, optional, source.name)
    elif source.suffix in (".jsonl", ".json"):
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and LIST.fullmatch(line):
                    command = f"jq -c '.[]' {shlex.quote(str(source))} > rows.jsonl"
                    raise ValueError(f"{source} is one JSON list; write JSON lines: {command}")
                if line.strip():
                    yield f"{source.name} line {number}", line
    else:
        raise ValueError(f"{source} must be a .parquet or .jsonl file, or a directory of .parquet files")


def _parquet_rows(file: Path, columns: Sequence[str], optional: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    with parquet_file(file) as table:
        names = table.schema_arrow.names
        check_columns(file, columns, names)
        number = 0
        to_read = [name for name in dict.fromkeys((*columns, *ID_COLUMNS, *optional)) if name in names]
        for batch in table.iter_batches(BATCH_ROWS, columns=to_read, use_threads=False):
            for row in batch.to_pylist():
                yield f"{name} row {number}", row
                number += 1


def check_columns(file: Path, expected: Iterable[str], names: Collection[str]) -> None:
    missing = [name for name in expected if name not in names]
    if missing:
        raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")


@contextmanager
def parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file. Errors while reading it become a ValueError that names the file."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:  # UnicodeDecodeError: invalid UTF-8
        raise ValueError(f"{path} cannot be read as parquet: {str(problem).splitlines()[0]}") from None


def num_rows(file: Path) -> int:
    with parquet_file(file) as table:
        return table.metadata.num_rows


def from_json(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise BadRow("wrong schema", f"{name} is not JSON: {problem}") from None


def object_of(value: Any, name: str) -> dict[str, Any]:
    """Checks that a value is a JSON object; parses it if it is text."""
    if isinstance(value, str | bytes):
        value = from_json(value, name)
    if not isinstance(value, dict):
        raise BadRow("wrong schema", f"{name} is {type(value).__name__}, expected an object")
    return value


def checked_encodable(text: str, name: str) -> str:
    """Returns the text. Raises BadRow if it has lone surrogates, which JSON allows but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise BadRow("wrong schema", f"{name} is not valid Unicode: {problem}") from None
    return text


def check_text(text: str, name: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise BadRow("text too long", f"{name} has {len(text)} characters, more than {MAX_TEXT_CHARS}")


def check_frames(num_frames: int) -> None:
    """Checks the frames of a row; an image counts as one, and so does a video without a frame count."""
    if num_frames > MAX_FRAMES:
        raise BadRow("too many frames", f"the row shows at least {num_frames} frames, more than {MAX_FRAMES}")


def file_finder(source: Path, video_root: str, allow_outside: bool, must_exist: bool = True) -> Callable[[str], str]:
    """Returns a function that resolves a path in a row to an absolute path.

    It raises BadRow if the file is missing, unless `must_exist` is false. With a `video_root`, it also raises for
    files outside of it (after resolving links), unless `allow_outside`.
    """
    root, inside = root_of(source, video_root), None
    if video_root and not allow_outside:
        inside = root.resolve()
        if cached := HUB_SNAPSHOT.match(f"{inside}/"):
            inside = Path(cached[1])  # the repository's folder in the hub's cache, which has the linked blobs

    @cache  # thousands of rows name the same few hundred videos
    def lookup(name: str) -> str | BadRow:
        try:
            return existing_file(name, root, inside)
        except BadRow as problem:
            is_lost = problem.reason == MISSING_FILE and not must_exist
            return str(root / name.removeprefix(FILE_URI)) if is_lost else problem

    def find(name: str) -> str:
        result = lookup(name)
        if isinstance(result, BadRow):
            raise BadRow(result.reason, str(result))
        return result

    return find


def existing_file(name: str, root: Path, inside: Path | None = None) -> str:
    """The absolute path of a file. Tries a name after file:// unchanged, as the release writes it, then decoded.

    With `inside`, a file outside of that directory raises BadRow.
    """
    longest = max(len(part.encode()) for part in checked_encodable(name, "a path").split("/"))
    if "\0" in name or len(name.encode()) > MAX_PATH_BYTES or longest > MAX_NAME_BYTES:
        raise BadRow("impossible path", f"invalid file name {name[:MAX_SHOWN_CHARS]!r}…, of {len(name)} characters")
    path = name.removeprefix(FILE_URI)
    for candidate in dict.fromkeys((root / path, root / (unquote(path) if path != name else path))):
        if not is_file(candidate):
            continue
        if inside is not None and not candidate.resolve().is_relative_to(inside):
            raise BadRow(
                "file outside of data.video_root",
                f"{candidate}, while data.video_root={root}; to read it, set data.allow_outside=true",
            )
        return str(candidate)
    raise BadRow(MISSING_FILE, f"{path} is not a local file; download it" if "://" in path else str(root / path))


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # an invalid name, or a directory without permission
        return False


def own_id(row: dict[str, Any]) -> str | None:
    ids = (str(row[name]) for name in ID_COLUMNS if isinstance(row.get(name), str | int) and row[name] != "")
    row_id = next(ids, None)
    if row_id is not None and len(row_id) > MAX_ID_CHARS:
        raise BadRow("id too long", f"it has {len(row_id)} characters, more than {MAX_ID_CHARS}")
    return row_id and checked_encodable(row_id, "an id")


def unique_id(name: str, used: dict[str, int]) -> str:
    """Returns the name, with a number if it is already used, and records it in `used`.

    `used` has the last number of each name, because counting from 1 every time would take quadratic time.
    """
    unique, number = name, used.get(name, 1)
    while unique in used:
        number += 1
        unique = f"{name}-{number}"
    used[name] = number
    used.setdefault(unique, 1)
    return unique
