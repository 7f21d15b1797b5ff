"""The samples of a split, from a copy of the hub's repository that is here, or from one whose rows are downloaded.

Videos are never downloaded: they are archives of up to 300 GB, to be unpacked where they lie. One that is not there
makes its samples missing; only where none is there at all, nothing is begun.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from paravt_jax.data.hub import HubName, downloaded_files, hub_name
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.rows import BadRow, file_finder, is_file, kept_rows, object_of, rows_of, unique_id
from paravt_jax.data.splits.public import PublicSplit, Sample

SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")
SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm")
MAX_JSON_BYTES = 2**30
JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|$)|[][{},]', re.DOTALL)  # a string, or what parts rows


@dataclass(frozen=True)
class SampleSet:
    """What there is to evaluate on, and where it came from."""

    samples: tuple[Sample, ...]  # in the order of the rows
    bad: dict[str, int] = field(default_factory=dict)  # reason -> rows that were left out for it
    files: Mapping[str, str] = field(default_factory=dict)  # name -> sha256 of the files with rows
    revision: str | None = None  # of the hub's repository, where that is known
    split: PublicSplit | None = None  # None: rows of one's own


def load_samples(
    split: PublicSplit | None, source: str, *, video_root: str, max_bad_frac: float | int, allow_outside: bool = False
) -> SampleSet:
    """Those of a split, from `source`, which is empty for the hub's newest; or those of a file of prompts."""
    if split is None:
        loaded = load_prompts(source, video_root=video_root, max_bad_frac=max_bad_frac, allow_outside=allow_outside)
        return SampleSet(tuple(map(_own, loaded.prompts)), loaded.bad)
    files = _row_files(split, source)
    root = Path(video_root or _copy_of(split, files[0])).absolute()
    rows = (placed for file in files for placed in _rows(split, file))
    find = _finder(split, root, allow_outside)
    read, bad = kept_rows(rows, lambda row: _found(split, split.checked(row), find), max_bad_frac, source or split.repo)
    taken: dict[str, int] = {}
    samples = tuple(
        replace(sample, prompt=replace(sample.prompt, id=unique_id(sample.prompt.id, taken))) for sample in read
    )
    _check_videos(split, samples, root)
    revision = SNAPSHOT.search(str(files[0].absolute()))
    return SampleSet(samples, bad, {file.name: _sha256(file) for file in files}, revision and revision[1], split)


def _own(prompt: Prompt) -> Sample:
    return Sample(prompt, " ".join(prompt.videos), groups={"question_type": (prompt.question_type,)})


def _row_files(split: PublicSplit, source: str) -> list[Path]:
    here = Path(source)
    if source and here.is_dir():
        files = sorted(here.glob(split.rows))
        if not files:
            raise ValueError(
                f"{source} has no {split.rows}, where {split.repo} has the rows of data.split={split.name}; "
                f"run `hf download --repo-type dataset {split.repo} --local-dir DIR` and set data.validation=DIR"
            )
        return files
    name = hub_name(source) if source else HubName(split.repo, "", None)
    if name is None or (source and here.exists()):
        raise ValueError(
            f"data.validation={source} is no directory; with data.split={split.name} give a copy of {split.repo}, its "
            f"name on the hub as OWNER/NAME[@REVISION], or nothing to have its rows downloaded"
        )
    return downloaded_files(name, split.rows)


def _copy_of(split: PublicSplit, file: Path) -> Path:
    """The directory that stands for the repository, of one of its files with rows."""
    return file.parents[split.rows.count("/")]


def _rows(split: PublicSplit, file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".json":
        yield from rows_of(file, tuple(split.columns))
        return
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} has more than {MAX_JSON_BYTES} bytes")
    rows = _parts_of_list(file)
    with suppress(BadRow, IndexError):  # a first row that cannot be read is a bad row among others
        first = object_of(rows[0], "the first row")
        missing = [name for name in split.columns if name not in first]
        if missing:
            raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(first)}")
    yield from ((f"{file.name} row {number}", row) for number, row in enumerate(rows))


def _parts_of_list(file: Path) -> list[str]:
    """The rows of a JSON list, each still as its text, so that one nested too deep to be parsed is one bad row."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as problem:
        raise ValueError(f"{file} is no JSON: {problem}") from None
    rows, depth, start = [], 0, 0
    for token in JSON_TOKEN.finditer(text):
        sign = token[0][0]
        if depth == 0 and (sign != "[" or rows or text[: token.start()].strip()):
            raise ValueError(f"{file} must be a list of rows: [{{…}}, {{…}}]")
        depth += (sign in "[{") - (sign in "]}")
        if (sign == "," and depth == 1) or (sign == "]" and depth == 0):
            rows.append(text[start : token.start()])
        if depth <= 1 and sign in "[,]":
            start = token.end()
    if depth or not rows or text[start:].strip():
        raise ValueError(f"{file} is no JSON: the list of its rows has no end")
    return rows if len(rows) > 1 or rows[0].strip() else []


def _finder(split: PublicSplit, root: Path, allow_outside: bool) -> Callable[[str], str]:
    """Where a file of the hub's layout is; where it should be, if it is nowhere."""
    find = file_finder(root, str(root), allow_outside)

    @cache
    def found(name: str) -> str:
        for place in _places(split, PurePosixPath(name)):
            try:
                return find(place)
            except BadRow as problem:
                if problem.reason != "missing file":
                    raise
        return str(root / name)

    return found


def _places(split: PublicSplit, path: PurePosixPath) -> Iterator[str]:
    """People unpack archives where they lie, or into one folder, and a few files have another ending."""
    if not path.name:
        raise BadRow("impossible path", "that of a video is empty")
    folders = dict.fromkeys([path.parent, *map(PurePosixPath, split.folders), PurePosixPath(".")])
    for folder in folders:
        for suffix in SUFFIXES if path.suffix in SUFFIXES else (path.suffix,):
            yield str(folder / path.with_suffix(suffix).name)


def _found(split: PublicSplit, sample: Sample, find: Callable[[str], str]) -> Sample:
    videos = tuple(map(find, sample.prompt.videos))
    subtitles = tuple(find(path) if path and split.with_subtitles else "" for path in sample.prompt.subtitles)
    subtitles = tuple(path if path and is_file(Path(path)) else "" for path in subtitles)
    return replace(sample, prompt=replace(sample.prompt, videos=videos, subtitles=subtitles))


def _check_videos(split: PublicSplit, samples: tuple[Sample, ...], root: Path) -> None:
    if not any(is_file(Path(video)) for sample in samples for video in sample.prompt.videos):
        raise ValueError(
            f"{root} has not one video of data.split={split.name}, such as {samples[0].prompt.videos[0]}; unpack the "
            f"archives of {split.repo} there, or set data.video_root to where they are unpacked"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
