"""Loads the samples of a split from a local copy of the hub's repository, or downloads its rows.

Videos are not downloaded, because they are archives of up to 300 GB. Samples whose video is missing count as missing.
Loading fails only if all videos are missing.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from paravt_jax.data.hub import HubName, downloaded_files, hub_name, local_source
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.rows import BadRow, check_columns, file_finder, is_file, read_rows, row_files, rows_of, unique_id
from paravt_jax.data.splits.public import PublicSplit, Sample
from paravt_jax.run.output_file import sha256_of

SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/")
SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm")
MAX_JSON_BYTES = 2**30


@dataclass(frozen=True)
class SampleSet:
    """Samples to evaluate, and their origin."""

    samples: tuple[Sample, ...]  # in row order
    bad: dict[str, int] = field(default_factory=dict)  # reason -> number of dropped rows
    files: Mapping[str, str] = field(default_factory=dict)  # name -> sha256 of each file with rows
    revision: str | None = None  # revision of the hub's repository, if known
    split: PublicSplit | None = None  # None: your own rows


def load_samples(
    split: PublicSplit | None,
    source: str,
    *,
    video_root: str,
    max_bad_frac: float | int,
    allow_outside: bool = False,
    columns: Sequence[str] | None = None,
) -> SampleSet:
    """Loads a split from `source` (empty: the newest revision on the hub), or a file of prompts if `split` is None.

    `columns` are the columns of prompts that reward.plugin uses; None without a plugin.
    """
    if split is None:
        own = load_prompts(
            source, video_root=video_root, max_bad_frac=max_bad_frac, allow_outside=allow_outside, columns=columns
        )
        local = local_source(source)
        root = local if local.is_dir() else local.parent
        sums = {file.relative_to(root).as_posix(): sha256_of(file) for file in row_files(local)}
        return SampleSet(tuple(map(_own, own.prompts)), own.bad, sums)
    if columns:
        taken = ", ".join(columns)
        raise ValueError(f"reward.plugin takes {taken}, which samples of data.split={split.name} do not have")
    files = _row_files(split, source)
    root = Path(video_root or files[0].parents[split.rows.count("/")]).absolute()  # default: the copy's root
    rows = (row for file in files for row in _rows(split, file))
    find = _finder(split, root, allow_outside)
    loaded, bad = read_rows(
        rows, lambda row: _resolved(split, split.checked(row), find), max_bad_frac, source or split.repo
    )
    ids: dict[str, int] = {}
    samples = tuple(
        replace(sample, prompt=replace(sample.prompt, id=unique_id(sample.prompt.id, ids))) for sample in loaded
    )
    _check_videos(split, samples, root)
    revision = SNAPSHOT.search(str(files[0].absolute()))
    return SampleSet(samples, bad, {file.name: sha256_of(file) for file in files}, revision and revision[1], split)


def _own(prompt: Prompt) -> Sample:
    shown = " ".join((*prompt.videos, *prompt.images)) or prompt.id
    return Sample(prompt, shown, groups={"question_type": (prompt.question_type,)})


def _row_files(split: PublicSplit, source: str) -> list[Path]:
    local = Path(source)
    if source and local.is_dir():
        files = sorted(local.glob(split.rows))
        if not files:
            raise ValueError(
                f"{source} has no {split.rows}, the rows of data.split={split.name} in {split.repo}; "
                f"run `hf download --repo-type dataset {split.repo} --local-dir DIR` and set data.validation=DIR"
            )
        return files
    name = hub_name(source) if source else HubName(split.repo, "", None)
    if name is None or (source and local.exists()):
        raise ValueError(
            f"data.validation={source} is not a directory; with data.split={split.name} set it to a copy of "
            f"{split.repo}, to its name on the hub as OWNER/NAME[@REVISION], or leave it empty to download the rows"
        )
    return downloaded_files(name, split.rows)


def _rows(split: PublicSplit, file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".json":
        yield from rows_of(file, tuple(split.columns))
        return
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file} has more than {MAX_JSON_BYTES} bytes")
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{file} is not JSON: {problem}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{file} must be a list of rows: [{{…}}, {{…}}]")
    if rows and isinstance(rows[0], dict):  # any other first row is later counted as a bad row
        check_columns(file, split.columns, rows[0])
    yield from ((f"{file.name} row {number}", row) for number, row in enumerate(rows))


def _finder(split: PublicSplit, root: Path, allow_outside: bool) -> Callable[[str], str]:
    """Returns a function that resolves a path of the hub's layout; a missing file gets its expected path."""
    find = file_finder(root, str(root), allow_outside)

    @cache
    def resolve(name: str) -> str:
        path = PurePosixPath(name)
        if not path.name:
            raise BadRow("impossible path", "the path of a video is empty")
        # Users unpack archives in place or into one folder, and suffixes may differ.
        folders = dict.fromkeys([path.parent, *map(PurePosixPath, split.folders), PurePosixPath(".")])
        suffixes = SUFFIXES if path.suffix in SUFFIXES else (path.suffix,)
        for folder, suffix in itertools.product(folders, suffixes):
            try:
                return find(str(folder / path.with_suffix(suffix).name))
            except BadRow as problem:
                if problem.reason != "missing file":
                    raise
        return str(root / name)

    return resolve


def _resolved(split: PublicSplit, sample: Sample, find: Callable[[str], str]) -> Sample:
    videos = tuple(map(find, sample.prompt.videos))
    subtitles = tuple(find(path) if path and split.with_subtitles else "" for path in sample.prompt.subtitles)
    subtitles = tuple(path if path and is_file(Path(path)) else "" for path in subtitles)
    return replace(sample, prompt=replace(sample.prompt, videos=videos, subtitles=subtitles))


def _check_videos(split: PublicSplit, samples: tuple[Sample, ...], root: Path) -> None:
    if not any(is_file(Path(video)) for sample in samples for video in sample.prompt.videos):
        raise ValueError(
            f"{root} has no video of data.split={split.name}, for example {samples[0].prompt.videos[0]}; unpack the "
            f"archives of {split.repo} there, or set data.video_root to the directory of the unpacked videos"
        )
