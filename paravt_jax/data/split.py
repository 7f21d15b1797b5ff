"""Holds out rows for validation by video: no video is in both files, even if rows have several videos.

Rows that share a video form a cluster, directly or through other rows. Whole clusters are held out, in a random order
that depends on the seed and their videos, until every kind of row has about its share. Kinds are the question types of
RL rows, and traces with and without calls. Rows are copied unchanged. Unusable rows stay in the training file, where
the run counts them. Clusters with a missing file stay there too, unless all files are missing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from posixpath import realpath
from shlex import quote
from typing import IO, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.output_dir import check_local
from model_port.progress import Meter
from model_port.terminal import aligned
from paravt_jax.data import prompts, traces
from paravt_jax.data.hub import local_source, row_files
from paravt_jax.data.inspect import MISSING, kind_of
from paravt_jax.data.materialize import REMOTE
from paravt_jax.data.rows import BATCH_ROWS, FILE_URI, BadRow, file_finder, parquet_file, root_of, rows_of
from paravt_jax.run.log import whole_file
from rollout.seeds import derived_seed
from rollout.tools import find_calls

UNUSABLE = "cannot be used"
LEFT_OUT = (UNUSABLE, MISSING)  # kinds that are never held out


@dataclass(frozen=True)
class Row:
    kind: str
    videos: frozenset[str]  # normalized paths: the same file has the same path
    subtitles: frozenset[str] = frozenset()  # normalized paths; "" for a video without them


@dataclass(frozen=True)
class Split:
    rows: Sequence[Row]
    held_out: Sequence[bool]  # for every row
    quotas: dict[str, float]

    @property
    def num_held_out(self) -> int:
        return sum(self.held_out)

    def videos(self, held_out: bool) -> set[str]:
        pairs = zip(self.rows, self.held_out, strict=True)
        return {video for row, out in pairs if out == held_out for video in row.videos}

    def table(self) -> str:
        of_kind = Counter(row.kind for row in self.rows)
        held_out = Counter(row.kind for row, out in zip(self.rows, self.held_out, strict=True) if out)
        lines: list[tuple[str, ...]] = [("", "rows", "held out", "target")]
        lines += [
            (kind, f"{count:,}", f"{held_out[kind]:,}", f"{self.quotas.get(kind, 0):.1f}")
            for kind, count in sorted(of_kind.items())
        ]
        lines.append(("rows", f"{len(self.rows):,}", f"{self.num_held_out:,}", f"{sum(self.quotas.values()):.1f}"))
        num_videos = len(self.videos(True)), len(self.videos(False))
        lines.append(("videos", f"{sum(num_videos):,}", f"{num_videos[0]:,}", ""))
        return aligned(lines)


def choose(rows: Sequence[Row], num_rows: int, seed: int) -> Split:
    """Holds out about `num_rows` rows: a proportional share of every kind, and all or none of a video's rows."""
    clusters = _clusters(rows)
    usable = Counter(rows[number].kind for cluster in clusters for number in cluster)
    if not usable:
        raise ValueError(f"none of the {len(rows)} rows can be used; `paravt data inspect` gives the reasons")
    if len(clusters) == 1:
        raise ValueError(
            f"nothing can be held out, because rows that share a video stay together, and all usable rows "
            f"({usable.total()}) share videos, directly or through other rows; add rows with other videos"
        )
    if not 0 < num_rows < usable.total():
        raise ValueError(f"--num-rows {num_rows} must be at least 1 and fewer than the {usable.total()} usable rows")
    quotas = {kind: num_rows * count / usable.total() for kind, count in usable.items()}
    held_out = [False] * len(rows)
    num_held_out = Counter[str]()

    def error(counts: Counter[str]) -> float:
        return abs(counts.total() - num_rows) + sum(abs(counts[kind] - quota) for kind, quota in quotas.items())

    def take(cluster: Sequence[int], counts: Counter[str]) -> None:
        for number in cluster:
            held_out[number] = True
        num_held_out.update(counts)

    clusters.sort(key=lambda cluster: derived_seed("held out", seed, sorted(rows[cluster[0]].videos), cluster[0]))
    too_large: list[tuple[list[int], Counter[str]]] = []
    for cluster in clusters:  # first clusters within the quotas, then clusters that reduce the error
        counts = Counter(rows[number].kind for number in cluster)
        if all(num_held_out[kind] + count <= quotas[kind] for kind, count in counts.items()):
            take(cluster, counts)
        else:
            too_large.append((cluster, counts))
    for cluster, counts in too_large:
        enlarged = num_held_out + counts
        if error(enlarged) < error(num_held_out) and enlarged.total() < usable.total():
            take(cluster, counts)
    if not any(held_out):
        smallest = min(counts.total() for _, counts in too_large)
        raise ValueError(
            f"--num-rows {num_rows}: nothing can be held out, because rows that share a video stay together, and the "
            f"smallest such set has {smallest} of {usable.total()} rows; set --num-rows near that, or add other videos"
        )
    return Split(rows, held_out, quotas)


def _clusters(rows: Sequence[Row]) -> list[list[int]]:
    """Groups row numbers that share a video, directly or through other rows. Only groups of usable rows."""
    leader = list(range(len(rows)))

    def lead(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    first_with: dict[str, int] = {}
    for number, row in enumerate(rows):
        for video in row.videos:
            leader[lead(number)] = lead(first_with.setdefault(video, number))
    clusters = defaultdict[int, list[int]](list)
    for number in range(len(rows)):
        clusters[lead(number)].append(number)
    return [cluster for cluster in clusters.values() if not any(rows[number].kind in LEFT_OUT for number in cluster)]


def read(source: Path) -> tuple[list[Row], bool, str]:
    """Reads kind and videos of every row, whether any video path is relative, and a remark if all files are missing."""
    kind, columns, _ = kind_of(source)
    row_of: Callable[[Any, Callable[[str], str]], Row] = _question if kind == "RL" else _trace
    root, find_file = root_of(source, ""), file_finder(source, "", allow_outside=True)
    rows: list[Row] = []
    paths: dict[str, str] = {}  # name -> path
    missing: set[str] = set()  # paths

    def normalized(name: str) -> str:
        """Normalizes a path, so that all spellings of a file and links to it are equal; it need not exist."""
        paths[name] = name if REMOTE.match(name) else realpath(root / unquote(name.removeprefix(FILE_URI)))
        try:
            find_file(name)
        except BadRow as problem:
            if problem.reason != MISSING:
                raise
            missing.add(paths[name])
        return paths[name]

    with Meter(f"reading {source}", unit="row") as meter:
        for _, row in rows_of(source, columns, prompts.OPTIONAL_COLUMNS):
            try:
                rows.append(row_of(row, normalized))
            except BadRow:
                rows.append(Row(UNUSABLE, frozenset()))
            meter.update()
    relative = any(not REMOTE.match(name) and not name.removeprefix(FILE_URI).startswith("/") for name in paths)
    if paths and missing.issuperset(paths.values()):  # not downloaded yet, or in another root
        return rows, relative, f"not checked: none of the {len(paths):,} files that the rows name is here"
    return [replace(row, kind=MISSING) if (row.videos | row.subtitles) & missing else row for row in rows], relative, ""


def _question(row: Any, find: Callable[[str], str]) -> Row:
    prompt = prompts.read_prompt(row, find, columns=())  # accepts your own question types
    return Row(prompt.question_type, frozenset(prompt.videos + prompt.images), frozenset(prompt.subtitles))


def _trace(row: Any, find: Callable[[str], str]) -> Row:
    messages = traces.read_trace(row, find).messages
    calls = any(find_calls(message.text) for message in messages if message.role == "assistant")
    videos = frozenset(media.path for message in messages for media in message.media)
    return Row("with calls" if calls else "without calls", videos)


def split(src: str, train: str | Path, validation: str | Path, num_rows: int, seed: int) -> str:
    """Writes both files atomically, `train` last, and returns a summary. Neither file may exist."""
    for path in (train, validation):
        check_local(path)
    source, outputs = local_source(src), (Path(train), Path(validation))
    if not source.exists():
        raise ValueError(f"{source} does not exist")
    suffix = ".jsonl" if source.suffix in (".jsonl", ".json") else ".parquet"
    for name, path in zip(("--train", "--validation"), outputs, strict=True):
        if path.suffix != suffix:
            raise ValueError(f"{name} {path} must end with {suffix}, because rows are copied unchanged")
        if path.exists():
            raise ValueError(f"{name} {path} already exists; remove it, or choose another path")
        if source.is_dir() and path.resolve().is_relative_to(source.resolve()):
            raise ValueError(
                f"{name} {path} is inside of --src {src}, which would then have its rows twice; choose a path outside"
            )
    if outputs[0].absolute() == outputs[1].absolute():
        raise ValueError(f"--train and --validation are both {train}; name two files")
    rows, relative, unchecked = read(source)
    chosen = choose(rows, num_rows, seed)
    _write(source, outputs, chosen.held_out)
    root = root_of(source, "")
    summary = [chosen.table(), *(str(path) for path in outputs)]
    if unchecked:
        summary.append(unchecked)
    if num_missing := sum(row.kind == MISSING for row in rows):
        summary.append(
            f"rows with a missing file ({num_missing:,}) and those that share a video with them are not held out; "
            f"`paravt data inspect {quote(src)} --json FILE` lists the files"
        )
    if relative and any(path.absolute().parent != root for path in outputs):
        summary.append(f"video paths are relative to {root}; set data.video_root={quote(str(root))} in a run")
    return "\n".join(summary)


def _write(source: Path, outputs: tuple[Path, Path], held_out: Sequence[bool]) -> None:
    """Writes both files in row order. Held-out rows go to the second file, which is complete before the first."""
    write = _write_lines if outputs[0].suffix == ".jsonl" else _write_tables
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        write(source, [stack.enter_context(whole_file(path)) for path in outputs], iter(held_out))


def _write_lines(source: Path, outputs: Sequence[IO[bytes]], held_out: Iterator[bool]) -> None:
    for _, line in rows_of(source, ()):
        outputs[next(held_out)].write(line.rstrip(b"\n") + b"\n")


def _write_tables(source: Path, outputs: Sequence[IO[bytes]], held_out: Iterator[bool]) -> None:
    files = row_files(source)
    schema = pq.read_schema(files[0])
    for file in files[1:]:
        if not pq.read_schema(file).equals(schema):
            raise ValueError(
                f"{file.name} and {files[0].name} in {source} have different columns; split one file at a time"
            )
    with ExitStack() as stack:
        writers = [stack.enter_context(pq.ParquetWriter(output, schema)) for output in outputs]
        for file in files:
            with parquet_file(file) as table:
                for batch in table.iter_batches(BATCH_ROWS, use_threads=False):
                    mask = list(islice(held_out, batch.num_rows))
                    for writer, is_validation in zip(writers, (False, True), strict=True):
                        writer.write_batch(batch.filter(pa.array([out == is_validation for out in mask])))
