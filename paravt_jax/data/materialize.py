"""Replaces the placeholder paths of published rows by paths in the directory that has the files.

`longvt_source/…`, `museg/charades/…`, `museg/et_instruct_164k/…` and `selfqa/…` become `file://ROOT/…`, in every image
and video URL of `messages`, and in `videos`. The rest of a row is unchanged, including the formatting of its JSON.
Absolute paths and other paths are unchanged, but their files are checked too. As in the release, the path after file://
is not percent-encoded.
"""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.layout import absolute_path
from model_port.output_dir import check_local
from model_port.progress import Meter
from model_port.terminal import aligned
from paravt_jax.data.hub import row_files
from paravt_jax.data.rows import BATCH_ROWS, FILE_URI, BadRow, existing_file, from_json, num_rows, parquet_file
from paravt_jax.run.output_file import OutputFile

SENTINELS = ("longvt_source", "museg/charades", "museg/et_instruct_164k", "selfqa")
OTHER = "other"
MEDIA_KEYS = ("video_url", "image_url", "video", "image")
LISTS = ("messages", "content")  # keys of lists that contain media
REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:")  # https://…, data:…
REPORT_FILE = "report.json"
LOOKING_THREADS = 8  # threads that check which files exist
COUNTS = ("rows", "rewritten_paths", "other_paths", "unreadable_rows", "rows_with_missing_files")  # in the report

Rewrite = Callable[[str], str]


class LocalPath(NamedTuple):
    """A path of a row, interpreted without the file system."""

    uri: str  # the path in the output
    bucket: str
    bad: bool = False  # escapes the root, or no file can have this name
    remote: bool = False


@dataclass
class FileReport:
    """Counts for one parquet file, or for all. A missing file counts once, even if many rows name it."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    missing: dict[str, str] = field(default_factory=dict)  # path as written in the rows -> bucket
    bad: set[str] = field(default_factory=set)

    @property
    def missing_by_bucket(self) -> dict[str, int]:
        return dict(sorted(Counter(self.missing.values()).items()))

    def to_record(self) -> dict[str, Any]:
        return {**self.counts, "missing": self.missing_by_bucket}


@dataclass
class MaterializeReport:
    root: Path
    files: dict[str, FileReport] = field(default_factory=dict)  # file name -> report, in order
    written: dict[str, bool] = field(default_factory=dict)  # False: the output was up to date

    @property
    def total(self) -> FileReport:
        total = FileReport()
        for file in self.files.values():
            total.counts.update(file.counts)
            total.missing |= file.missing
            total.bad |= file.bad
        return total

    def to_json(self) -> str:
        """The report as JSON. It depends only on rows and files, so a second run produces the same report."""
        files = {
            name: file.to_record() | {"missing_files": sorted(file.missing), "bad_paths": sorted(file.bad)}
            for name, file in self.files.items()
        }
        record = {"root": str(self.root), "total": self.total.to_record(), "files": files}
        return json.dumps(record, indent=2) + "\n"

    def table(self) -> str:
        lines: list[tuple[str, ...]] = [("file", "rows", "rewritten", "missing", "bad", "")]
        for name, file in [*self.files.items(), ("total", self.total)]:
            state = {None: "", True: "written", False: "up to date"}[self.written.get(name)]
            counts = (file.counts["rows"], file.counts["rewritten_paths"], len(file.missing), len(file.bad))
            lines.append((name, *map(str, counts), state))
        missing = ", ".join(f"{bucket} {count}" for bucket, count in self.total.missing_by_bucket.items())
        return f"{aligned(lines)}\nmissing files by bucket: {missing or 'none'}"


def local_path(name: str, root: str) -> LocalPath:
    """Resolves a path of a row lexically. `root` is absolute and has no `..`."""
    if REMOTE.match(name):
        return LocalPath(name, OTHER, remote=True)
    path = name.removeprefix(FILE_URI)
    if not path or "\0" in path:
        return LocalPath(name, OTHER, bad=True)
    if path.startswith("/"):
        return LocalPath(name, _bucket(posixpath.normpath(path).removeprefix(f"{root}/")))
    # Links are not resolved, because a root may link to other disks. Without `..`, a path cannot escape through them.
    plain = posixpath.normpath(path)
    if plain == ".." or plain.startswith("../"):
        return LocalPath(name, OTHER, bad=True)
    bucket = _bucket(plain)
    return LocalPath(name if bucket == OTHER else f"{FILE_URI}{root}/{plain}", bucket)


def _bucket(path: str) -> str:
    return max((prefix for prefix in SENTINELS if path.startswith(f"{prefix}/")), key=len, default=OTHER)


def rewritten(value: Any, rewrite: Rewrite, *, names_are_paths: bool = False) -> Any:
    """Rewrites every image and video URL of `messages` or `videos`, given as a list or as JSON.

    Text in a list is a path if `names_are_paths`, else the JSON of a message or of a part of a message.
    """
    if isinstance(value, str):
        return _rewritten_json(value, lambda parsed: rewritten(parsed, rewrite, names_are_paths=names_are_paths))
    if isinstance(value, list) and names_are_paths:
        return [rewrite(item) if isinstance(item, str) else _rewritten_fields(item, rewrite) for item in value]
    if isinstance(value, list):
        return [_rewritten_item(item, rewrite) for item in value]
    return _rewritten_fields(value, rewrite)


def _rewritten_item(item: Any, rewrite: Rewrite) -> Any:
    try:
        return rewritten(item, rewrite)
    except BadRow:  # text that is not JSON contains no path
        return item


def _rewritten_fields(value: Any, rewrite: Rewrite) -> Any:
    if not isinstance(value, dict):
        return value
    changed = dict(value)
    for key, item in value.items():
        if key in LISTS and isinstance(item, list):
            changed[key] = rewritten(item, rewrite)
        elif key in MEDIA_KEYS and isinstance(item, str) and item:
            changed[key] = rewrite(item)
        elif key in MEDIA_KEYS and isinstance(item, dict) and isinstance(item.get("url"), str) and item["url"]:
            changed[key] = {**item, "url": rewrite(item["url"])}
    return changed


def _rewritten_json(text: str, rewritten: Callable[[Any], Any]) -> str:
    """Rewrites JSON text and keeps its spacing and escapes; returns the same text if nothing changes."""
    value = from_json(text, "a column")
    result = rewritten(value)
    if result == value:
        return text
    separators = None if '": ' in text else (",", ":")
    spelled = json.dumps(result, ensure_ascii=text.isascii(), separators=separators)
    is_encodable = spelled.encode(errors="ignore").decode() == spelled  # false for lone surrogates outside ASCII
    return spelled if is_encodable else json.dumps(result, separators=separators)


def materialize(
    root: str | Path, parquet_dir: str | Path, output_dir: str | Path, *, force: bool = False
) -> MaterializeReport:
    """Writes every parquet file of `parquet_dir`, with paths joined to `root`, to `output_dir` under the same name.

    Files are written atomically, and an unchanged file is not touched. `force` also replaces files that this command
    did not write from the same source.
    """
    for path in (root, parquet_dir, output_dir):
        check_local(path)
    root, parquet_dir, output_dir = map(absolute_path, (root, parquet_dir, output_dir))
    for name, path in (("--root", root), ("--parquet-dir", parquet_dir)):
        if not path.is_dir():
            raise ValueError(f"{name} {path} is not a directory")
    if output_dir.resolve() == parquet_dir.resolve():
        raise ValueError(f"--output-dir {output_dir} is also --parquet-dir; choose another directory")
    sources = [path for path in row_files(parquet_dir) if output_dir not in path.parents]
    if not sources:
        raise ValueError(f"--parquet-dir {parquet_dir} has no *.parquet files")
    outputs = {
        source: OutputFile(
            output_dir / source.relative_to(parquet_dir),
            f"data materialize of {source}",
            inputs=[*sources, root],
            force=force,
        )
        for source in sources
    }
    report, total = MaterializeReport(root), sum(map(num_rows, sources))
    with ThreadPoolExecutor(LOOKING_THREADS) as pool, Meter("materializing", total, "row") as meter:
        for source, output in outputs.items():
            name = source.relative_to(parquet_dir).as_posix()
            report.files[name] = _materialize_file(source, output, root, pool, meter)
            report.written[name] = output.changed
    return report


def _materialize_file(
    source: Path, output: OutputFile, root: Path, pool: ThreadPoolExecutor, meter: Meter
) -> FileReport:
    report = FileReport()
    with output.partial() as partial, parquet_file(source) as table:
        codec = table.metadata.row_group(0).column(0).compression if table.metadata.num_row_groups else "SNAPPY"
        codec = "NONE" if codec == "UNCOMPRESSED" else codec
        with pq.ParquetWriter(partial, table.schema_arrow, compression=codec) as writer:
            for batch in table.iter_batches(BATCH_ROWS, use_threads=False):
                writer.write_batch(_rewritten_batch(batch, root, report, pool))
                meter.update(batch.num_rows)
    return report


def _rewritten_batch(batch: pa.RecordBatch, root: Path, report: FileReport, pool: ThreadPoolExecutor) -> pa.RecordBatch:
    paths_of_rows: list[set[str]] = [set() for _ in range(batch.num_rows)]
    unreadable: set[int] = set()
    for name in ("messages", "videos"):
        column = batch.schema.get_field_index(name)
        if column < 0:
            continue
        values = batch.column(column).to_pylist()
        rewritten_values = list(values)
        for number, value in enumerate(values):
            paths: list[str] = []

            def rewrite(path: str, paths: list[str] = paths) -> str:
                paths.append(path)
                return local_path(path, str(root)).uri

            try:
                rewritten_values[number] = rewritten(value, rewrite, names_are_paths=name == "videos")
            except (BadRow, RecursionError):
                unreadable.add(number)
                continue
            num_rewritten = sum(local_path(path, str(root)).uri != path for path in paths)
            report.counts.update(rewritten_paths=num_rewritten, other_paths=len(paths) - num_rewritten)
            paths_of_rows[number].update(paths)
        if rewritten_values != values:
            field = batch.schema.field(column)
            batch = batch.set_column(column, field, pa.array(rewritten_values, field.type))
    report.counts.update(rows=batch.num_rows, unreadable_rows=len(unreadable))
    _check_files(paths_of_rows, root, report, pool)
    return batch


def _check_files(paths_of_rows: list[set[str]], root: Path, report: FileReport, pool: ThreadPoolExecutor) -> None:
    resolved = {path: local_path(path, str(root)) for paths in paths_of_rows for path in paths}
    report.bad.update(path for path, where in resolved.items() if where.bad)
    local = [path for path, where in resolved.items() if not (where.bad or where.remote)]
    exists = pool.map(lambda path: _exists(path, root), local)
    missing = {path: resolved[path].bucket for path, is_file in zip(local, exists, strict=True) if not is_file}
    report.missing |= missing
    report.counts["rows_with_missing_files"] += sum(not paths.isdisjoint(missing) for paths in paths_of_rows)


def _exists(path: str, root: Path) -> bool:
    with suppress(BadRow):
        existing_file(path, root)
        return True
    return False


def run(args: Any) -> str | None:
    """Runs the command: prints the table and returns the warning, if there is one."""
    path = Path(args.report) if args.report else Path(args.output_dir) / REPORT_FILE
    inputs = [*row_files(Path(args.parquet_dir)), args.root]
    output = OutputFile(path, "data materialize --report", inputs=inputs, force=args.force)
    report = materialize(args.root, args.parquet_dir, args.output_dir, force=args.force)
    output.write(report.to_json())
    print(report.table())
    total = report.total
    problems = (
        (len(total.missing), "file is missing", "files are missing"),
        (len(total.bad), "path leaves the root or is invalid", "paths leave the root or are invalid"),
        (total.counts["unreadable_rows"], "row is unreadable", "rows are unreadable"),
    )
    listed = ", ".join(f"{count} {one if count == 1 else several}" for count, one, several in problems if count)
    return f"{listed}; {path} lists them" if listed else None
