"""Published rows name their files by sentinel paths; here they are joined to the directory where the files really lie.

`longvt_source/…`, `museg/charades/…`, `museg/et_instruct_164k/…` and `selfqa/…` become `file://ROOT/…`, in the url of
every picture and video of `messages`, and in `videos`. Whatever else a row says stays as it is, to the spelling of its
JSON. A path that is absolute already, or of another kind, is left alone and only looked for. As in the release, what
follows file:// is the path as it stands, not quoted.
"""

import json
import posixpath
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.output_dir import check_local
from model_port.progress import Meter
from paravt_jax.data.hub import row_files
from paravt_jax.data.rows import BATCH_ROWS, FILE_URI, BadRow, found_file, from_json, parquet_file
from rollout.output_file import OutputFile

SENTINELS = ("longvt_source", "museg/charades", "museg/et_instruct_164k", "selfqa")
OTHER = "other"
MEDIA_KEYS = ("video_url", "image_url", "video", "image")
REMOTE = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:")  # https://…, data:…
REPORT_FILE = "report.json"
SPELLINGS = tuple(product((False, True), (None, (",", ":"))))  # of JSON: only ASCII or not, with spaces or without

Rewrite = Callable[[str], str]


class LocalPath(NamedTuple):
    """What a path of a row means, by its spelling alone."""

    uri: str  # what it becomes
    bucket: str
    bad: bool = False  # escapes the root, or no file can have this name
    remote: bool = False


@dataclass
class FileReport:
    """What was found in one parquet file. Files that are missing are counted once each, however many rows show them."""

    num_rows: int = 0
    num_rewritten_paths: int = 0
    num_other_paths: int = 0  # absolute already, or of a kind that is left alone
    num_unreadable_rows: int = 0  # whose messages or videos are no JSON: left as they are
    num_rows_with_missing_files: int = 0
    missing: dict[str, set[str]] = field(default_factory=dict)  # bucket -> paths as the rows have them
    bad: set[str] = field(default_factory=set)

    @property
    def num_missing(self) -> int:
        return sum(map(len, self.missing.values()))

    def to_record(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "rewritten_paths": self.num_rewritten_paths,
            "other_paths": self.num_other_paths,
            "unreadable_rows": self.num_unreadable_rows,
            "rows_with_missing_files": self.num_rows_with_missing_files,
            "missing": {bucket: len(names) for bucket, names in sorted(self.missing.items())},
            "missing_files": sorted(name for names in self.missing.values() for name in names),
            "bad_paths": sorted(self.bad),
        }


@dataclass
class MaterializeReport:
    root: Path
    files: dict[str, FileReport]  # in the order of their names
    written: dict[str, bool]  # False: was up to date

    @property
    def total(self) -> FileReport:
        total = FileReport()
        for file in self.files.values():
            total.num_rows += file.num_rows
            total.num_rewritten_paths += file.num_rewritten_paths
            total.num_other_paths += file.num_other_paths
            total.num_unreadable_rows += file.num_unreadable_rows
            total.num_rows_with_missing_files += file.num_rows_with_missing_files
            total.bad |= file.bad
            for bucket, names in file.missing.items():
                total.missing.setdefault(bucket, set()).update(names)
        return total

    def to_json(self) -> str:
        """The same for the same rows and files, whatever was written: running again changes nothing."""
        total = self.total.to_record()
        del total["missing_files"], total["bad_paths"]  # they are listed file by file
        files = {name: file.to_record() for name, file in self.files.items()}
        return json.dumps({"root": str(self.root), "total": total, "files": files}, indent=2) + "\n"

    def table(self) -> str:
        rows: list[tuple[str, ...]] = [("file", "rows", "rewritten", "missing", "bad", "")]
        for name, file in [*self.files.items(), ("total", self.total)]:
            state = {None: "", True: "written", False: "up to date"}[self.written.get(name)]
            counts = (file.num_rows, file.num_rewritten_paths, file.num_missing, len(file.bad))
            rows.append((name, *map(str, counts), state))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:5]), row[5]]).rstrip()
            for row in rows
        ]
        missing = ", ".join(f"{bucket} {len(names)}" for bucket, names in sorted(self.total.missing.items()))
        return "\n".join([*lines, f"missing files by bucket: {missing or 'none'}"])


def place_of(name: str, root: str) -> LocalPath:
    """Where a path of a row leads. `root` is absolute and without `..`; nothing is looked up."""
    if REMOTE.match(name):
        return LocalPath(name, OTHER, remote=True)
    path = name.removeprefix(FILE_URI)
    if not path or "\0" in path:
        return LocalPath(name, OTHER, bad=True)
    if path.startswith("/"):
        inside = posixpath.normpath(path).removeprefix(f"{root}/")
        return LocalPath(name, _bucket(inside))
    # By its spelling, not by links: a root may hold links to other disks. As no `..` is left, none is followed later.
    plain = posixpath.normpath(path)
    if plain == ".." or plain.startswith("../"):
        return LocalPath(name, OTHER, bad=True)
    bucket = _bucket(plain)
    return LocalPath(name if bucket == OTHER else f"{FILE_URI}{root}/{plain}", bucket)


def _bucket(path: str) -> str:
    return max((prefix for prefix in SENTINELS if path.startswith(f"{prefix}/")), key=len, default=OTHER)


def rewritten_messages(value: Any, rewrite: Rewrite) -> Any:
    """`messages` of a row, a list or the JSON of one, with every url of a picture or video rewritten."""
    if isinstance(value, str):
        return _rewritten_json(value, lambda read: rewritten_messages(read, rewrite))
    if isinstance(value, list):
        return [_rewritten_message(message, rewrite) for message in value]
    if _has(value, "messages") and isinstance(value["messages"], list):
        return {**value, "messages": rewritten_messages(value["messages"], rewrite)}
    return value


def rewritten_videos(value: Any, rewrite: Rewrite) -> Any:
    """`videos` of a row: [{"video": path}], its JSON, or paths alone."""
    if isinstance(value, str):
        return _rewritten_json(value, lambda read: rewritten_videos(read, rewrite))
    if isinstance(value, list):
        return [rewrite(item) if isinstance(item, str) else _rewritten_media(item, rewrite) for item in value]
    return value


COLUMNS = {"messages": rewritten_messages, "videos": rewritten_videos}


def _rewritten_message(message: Any, rewrite: Rewrite) -> Any:
    if isinstance(message, str):
        return _rewritten_inner(message, lambda read: _rewritten_message(read, rewrite))
    if not _has(message, "content") or not isinstance(message["content"], list):
        return message
    return {**message, "content": [_rewritten_part(part, rewrite) for part in message["content"]]}


def _rewritten_part(part: Any, rewrite: Rewrite) -> Any:
    if isinstance(part, str):
        return _rewritten_inner(part, lambda read: _rewritten_part(read, rewrite))
    return _rewritten_media(part, rewrite)


def _rewritten_media(part: Any, rewrite: Rewrite) -> Any:
    if not isinstance(part, dict):
        return part
    changed = dict(part)
    for key in MEDIA_KEYS:
        value = part.get(key)
        if isinstance(value, str) and value:
            changed[key] = rewrite(value)
        elif _has(value, "url") and isinstance(value["url"], str) and value["url"]:
            changed[key] = {**value, "url": rewrite(value["url"])}
    return changed


def _has(value: Any, key: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and key in value


def _rewritten_json(text: str, rewritten: Callable[[Any], Any]) -> str:
    """Untouched where nothing changes, or else with the same spaces and the same characters beyond ASCII."""
    before = from_json(text, "a column")
    return respelled(text, before, rewritten(before))


def _rewritten_inner(text: str, rewritten: Callable[[Any], Any]) -> str:
    """Of a text within `messages`, which may be JSON again; where it is not, it holds no path."""
    try:
        return _rewritten_json(text, rewritten)
    except BadRow:
        return text


def respelled(text: str, before: Any, after: Any) -> str:
    """`after` as JSON, in the spelling of `text`, the JSON of `before`."""
    if after == before:
        return text
    for only_ascii, separators in SPELLINGS:
        if json.dumps(before, ensure_ascii=only_ascii, separators=separators) == text:
            return json.dumps(after, ensure_ascii=only_ascii, separators=separators)
    separators = None if '": ' in text else SPELLINGS[-1][1]  # as far as can be told
    spelled = json.dumps(after, ensure_ascii=text.isascii(), separators=separators)
    return spelled if _is_encodable(spelled) else json.dumps(after, separators=separators)


def _is_encodable(text: str) -> bool:
    """JSON can spell halves of characters as ASCII that stand for nothing without it."""
    return text.encode(errors="ignore").decode() == text


def materialize(
    root: str | Path, parquet_dir: str | Path, output_dir: str | Path, num_workers: int = 8, *, force: bool = False
) -> MaterializeReport:
    """Writes every parquet file of `parquet_dir`, its paths joined to `root`, under its name in `output_dir`.

    Files appear whole, and one whose content would not change is not touched. `num_workers` threads look for files.
    `force` also replaces files that were not made of the same source before.
    """
    for path in (root, parquet_dir, output_dir):
        check_local(path)
    root, parquet_dir, output_dir = (_absolute(path) for path in (root, parquet_dir, output_dir))
    for name, path in (("--root", root), ("--parquet-dir", parquet_dir)):
        if not path.is_dir():
            raise ValueError(f"{name} {path} is not a directory")
    if num_workers < 1:
        raise ValueError(f"--num-workers {num_workers} must be at least 1")
    if output_dir.resolve() == parquet_dir.resolve():
        raise ValueError(
            f"--output-dir {output_dir} is --parquet-dir itself, whose files are kept; choose another place"
        )
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
    num_rows = sum(map(_num_rows, sources))
    report = MaterializeReport(root, {}, {})
    with (
        ThreadPoolExecutor(num_workers) as pool,
        Meter("materializing", num_rows, "row") as meter,
    ):
        for source, output in outputs.items():
            name = source.relative_to(parquet_dir).as_posix()
            report.files[name] = _materialize_file(source, output, root, pool, meter)
            report.written[name] = output.changed
    return report


def _absolute(path: str | Path) -> Path:
    """Links are kept, as they may mean to be, except where a `..` depends on them."""
    path = Path(path)
    return path.resolve() if ".." in path.parts else path.absolute()


def _num_rows(source: Path) -> int:
    with parquet_file(source) as table:
        return table.metadata.num_rows


def _materialize_file(
    source: Path, output: OutputFile, root: Path, pool: ThreadPoolExecutor, meter: Meter
) -> FileReport:
    report = FileReport()
    with output.partial() as partial, parquet_file(source) as table:
        codec = table.metadata.row_group(0).column(0).compression if table.metadata.num_row_groups else "SNAPPY"
        codec = "NONE" if codec == "UNCOMPRESSED" else codec
        with pq.ParquetWriter(partial, table.schema_arrow, compression=codec) as writer:
            for batch in table.iter_batches(BATCH_ROWS, use_threads=False):
                writer.write_batch(_materialized(batch, root, report, pool))
                meter.update(batch.num_rows)
    return report


def _materialized(batch: pa.RecordBatch, root: Path, report: FileReport, pool: ThreadPoolExecutor) -> pa.RecordBatch:
    shown: list[set[str]] = [set() for _ in range(batch.num_rows)]  # paths of every row
    unreadable: set[int] = set()
    for name, rewritten in COLUMNS.items():
        place = batch.schema.get_field_index(name)
        if place < 0:
            continue
        before = batch.column(place).to_pylist()
        after = list(before)
        for number, value in enumerate(before):
            paths: list[str] = []

            def rewrite(path: str, paths: list[str] = paths) -> str:
                paths.append(path)
                return place_of(path, str(root)).uri

            try:
                after[number] = rewritten(value, rewrite)
            except BadRow:
                unreadable.add(number)
                continue
            num_rewritten = sum(place_of(path, str(root)).uri != path for path in paths)
            report.num_rewritten_paths += num_rewritten
            report.num_other_paths += len(paths) - num_rewritten
            shown[number].update(paths)
        if after != before:
            batch = batch.set_column(place, batch.schema.field(place), pa.array(after, batch.schema.field(place).type))
    report.num_rows += batch.num_rows
    report.num_unreadable_rows += len(unreadable)
    _look_for(shown, root, report, pool)
    return batch


def _look_for(shown: list[set[str]], root: Path, report: FileReport, pool: ThreadPoolExecutor) -> None:
    places = {path: place_of(path, str(root)) for paths in shown for path in paths}
    local = [path for path, place in places.items() if not (place.bad or place.remote)]
    exists = dict(zip(local, pool.map(lambda path: _exists(path, root), local), strict=True))
    for path, place in places.items():
        if place.bad:
            report.bad.add(path)
        elif not exists.get(path, True):
            report.missing.setdefault(place.bucket, set()).add(path)
    report.num_rows_with_missing_files += sum(not all(exists.get(path, True) for path in paths) for paths in shown)


def _exists(path: str, root: Path) -> bool:
    with suppress(BadRow):
        found_file(path, root)
        return True
    return False


def run(args: Any) -> str | None:
    """The command: prints the table, and returns what is to be warned of."""
    path = Path(args.report) if args.report else Path(args.output_dir) / REPORT_FILE
    inputs = [*row_files(Path(args.parquet_dir)), args.root]
    written = OutputFile(path, "data materialize --report", inputs=inputs, force=args.force)
    report = materialize(args.root, args.parquet_dir, args.output_dir, args.num_workers, force=args.force)
    written.write(report.to_json())
    print(report.table())
    total = report.total
    problems = [f"{total.num_missing} files are missing"] if total.num_missing else []
    problems += [f"{len(total.bad)} paths lead out of the root or are no paths"] if total.bad else []
    problems += [f"{total.num_unreadable_rows} rows cannot be read"] if total.num_unreadable_rows else []
    return f"{', '.join(problems)}; {path} lists them" if problems else None
