"""Rows as they are published, from parquet or JSON lines, and what to do with those that cannot be used.

A row that cannot be used is counted by its reason, never skipped in silence; too many of them refuse to start.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.progress import Meter
from model_port.terminal import visible
from paravt_jax.data.hub import row_files

logger = logging.getLogger(__name__)
Read = TypeVar("Read")
Given = ParamSpec("Given")
OWN_IDS = ("id", "index")  # columns that name a row, where there are such
FILE_URI = "file://"
BATCH_ROWS = 256  # read from parquet at a time
HUB_SNAPSHOT = re.compile(r"(.*/datasets--[^/]+--[^/]+)/snapshots/")
# What one row may cost everything else: a text is tokenised in the event loop, where ten megabytes take 16 s, and all
# frames of a row are in memory at the same time, where a thousand of the recipe's size take 150 MB.
MAX_TEXT_CHARS = 100_000  # of a question, of an answer, of a message of a dialogue
MAX_ID_CHARS = 256  # it is repeated in logs, pages and names of files
MAX_MESSAGES = 4096  # of a dialogue
MAX_NAME_BYTES = 255  # of one part of a path, on every common file system
MAX_PATH_BYTES = 4000  # below Linux's PATH_MAX of 4096, with room for an ending
SHOWN_CHARS = 60  # of a value that is refused
MAX_FRAMES = 4096  # of all that is shown; a picture, or a video that does not say how many, counts as one


class BadRow(ValueError):
    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def reader(read: Callable[Given, Read]) -> Callable[Given, Read]:
    """Of rows. What is just shallow enough to be parsed may be too deep to be shown or written: that is a BadRow."""

    @wraps(read)
    def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Read:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise BadRow("wrong schema", "the row is nested too deep") from None

    return guarded


def read_rows(
    source: Path, columns: Sequence[str], read: Callable[[Any], Read], max_bad_frac: float | int
) -> tuple[list[Read], dict[str, int]]:
    """What `read` makes of every row that it does not refuse with a BadRow, and how many it refused for what reason.

    `source` is a .parquet or .jsonl file, or a directory, whose .parquet files are read in the order of their paths.
    """
    return kept_rows(rows_of(source, columns), read, max_bad_frac, str(source))


def kept_rows(
    rows: Iterable[tuple[str, Any]], read: Callable[[Any], Read], max_bad_frac: float | int, source: str
) -> tuple[list[Read], dict[str, int]]:
    """The same of rows that come with the place where they stand; `source` is what they are called together."""
    kept: list[Read] = []
    bad: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with Meter(f"reading {source}", unit="row") as meter:
        for place, row in rows:
            try:
                kept.append(read(row))
            except BadRow as problem:
                bad[problem.reason] += 1
                examples.setdefault(problem.reason, f"{place}: {problem}")
            meter.update()
    num_bad, num_rows = bad.total(), bad.total() + len(kept)
    if not num_rows:
        raise ValueError(f"{source} has no rows")
    reasons = "; ".join(f"{reason}: {bad[reason]}, such as {examples[reason]}" for reason in bad)
    if num_bad / num_rows > max_bad_frac:
        raise ValueError(
            f"{source}: {num_bad} of {num_rows} rows cannot be used, more than data.max_bad_frac={max_bad_frac} "
            f"allows ({reasons})"
        )
    if not kept:
        raise ValueError(f"{source}: not one of {num_rows} rows can be used ({reasons})")
    if bad:
        logger.warning("%s: %d of %d rows are left out (%s)", source, num_bad, num_rows, visible(reasons))
    return kept, dict(bad)


def left_out(source: str | Path, bad: dict[str, int]) -> list[str]:
    """A line for every reason, for the log of a run."""
    return [f"{source}: {count} rows left out: {reason}" for reason, count in bad.items()]


def root_of(source: Path, video_root: str) -> Path:
    """What relative paths of a row begin from: `video_root`, or where that is empty the place of the rows."""
    return Path(video_root or (source if source.is_dir() else source.parent)).absolute()


def rows_of(source: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Every row, a JSON line still as its bytes, and where it stands."""
    if source.is_dir():
        files = row_files(source)
        if not files:
            raise ValueError(f"{source} is a directory without *.parquet files")
        for file in files:
            yield from _parquet_rows(file, columns, file.relative_to(source).as_posix())
    elif not source.is_file():
        raise ValueError(f"{source} does not exist")
    elif source.suffix == ".parquet":
        yield from _parquet_rows(source, columns, source.name)
    elif source.suffix in (".jsonl", ".json"):
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{source.name} line {number}", line
    else:
        raise ValueError(f"{source} must be a .parquet or .jsonl file, or a directory of .parquet files")


def _parquet_rows(file: Path, columns: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    with parquet_file(file) as table:
        names = table.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(names)}")
        number = 0
        wanted = [name for name in (*columns, *OWN_IDS) if name in names]
        for batch in table.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                yield f"{name} row {number}", row
                number += 1


@contextmanager
def parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file; whatever fails while it is read becomes a ValueError that names the file."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:  # UnicodeDecodeError: text that is not UTF-8
        raise ValueError(f"{path} cannot be read as parquet: {str(problem).splitlines()[0]}") from None


def from_json(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:  # a text may be nested as deep as it is long
        raise BadRow("wrong schema", f"{name} is no JSON: {problem}") from None


def encodable(text: str, name: str) -> str:
    """The text, if a tokenizer can read it: JSON can spell halves of characters that no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise BadRow("wrong schema", f"{name} is no Unicode text: {problem}") from None
    return text


def check_text(text: str, name: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise BadRow("text too long", f"{name} has {len(text)} characters, more than {MAX_TEXT_CHARS}")


def check_frames(num_frames: int) -> None:
    if num_frames > MAX_FRAMES:
        raise BadRow("too many frames", f"the row shows {num_frames} frames or more, more than {MAX_FRAMES}")


def object_of(value: Any, name: str) -> dict[str, Any]:
    """A JSON object, whether it was already read or not."""
    if isinstance(value, str | bytes):
        value = from_json(value, name)
    if not isinstance(value, dict):
        raise BadRow("wrong schema", f"{name} is {type(value).__name__}, expected an object")
    return value


def file_finder(source: Path, video_root: str, allow_outside: bool) -> Callable[[str], str]:
    """Where the file is that a path of a row names.

    Where there is a `video_root`, only files in it are found, links followed, unless others are allowed.
    """
    root = root_of(source, video_root)
    inside = _whole(root.resolve()) if video_root and not allow_outside else None

    @cache  # thousands of rows name the same few hundred videos
    def looked_for(name: str) -> str | BadRow:
        try:
            return found_file(name, root, inside)
        except BadRow as problem:
            return problem

    def find(name: str) -> str:
        found = looked_for(name)
        if isinstance(found, BadRow):
            raise BadRow(found.reason, str(found))
        return found

    return find


def _whole(root: Path) -> Path:
    """The directory itself; of a snapshot in the hub's cache the repository, whose blobs its files are links to."""
    cached = HUB_SNAPSHOT.match(f"{root}/")
    return Path(cached[1]) if cached else root


def found_file(name: str, root: Path, inside: Path | None = None) -> str:
    """What follows file:// is taken as it stands, which is how the release writes it, and else as a quoted URI.

    A file that does not really lie `inside` is refused.
    """
    path = possible_path(name).removeprefix(FILE_URI)
    for candidate in dict.fromkeys((root / path, root / (unquote(path) if path != name else path))):
        if not is_file(candidate):
            continue
        if inside is not None and not candidate.resolve().is_relative_to(inside):
            raise BadRow(
                "file outside of data.video_root",
                f"{candidate}, while data.video_root={root}; if it may be read, set data.allow_outside=true",
            )
        return str(candidate)
    raise BadRow("missing file", str(root / path))


def possible_path(name: str) -> str:
    """The path, if a file can have it."""
    parts = encodable(name, "a path").split("/")
    if (
        "\0" in name
        or len(name.encode()) > MAX_PATH_BYTES
        or max(len(part.encode()) for part in parts) > MAX_NAME_BYTES
    ):
        raise BadRow("impossible path", f"no file can be called {name[:SHOWN_CHARS]!r}…, of {len(name)} characters")
    return name


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have, or a directory that is not ours
        return False


def own_id(row: dict[str, Any]) -> str | None:
    """What the row calls itself, if it does."""
    given = next((str(row[name]) for name in OWN_IDS if isinstance(row.get(name), str | int) and row[name] != ""), None)
    if given is not None and len(given) > MAX_ID_CHARS:
        raise BadRow("id too long", f"it has {len(given)} characters, more than {MAX_ID_CHARS}")
    return given


def unique_id(name: str, taken: dict[str, int]) -> str:
    """The name, with a number where it is taken already; it is taken from then on.

    `taken` has the last number that was tried for each name: counting from 1 again would be quadratic in equal names.
    """
    unique, number = name, taken.get(name, 1)
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    taken[name] = number
    taken.setdefault(unique, 1)
    return unique
