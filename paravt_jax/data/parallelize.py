"""Sequential tool traces become parallel ones, and the frames that a tool showed become text.

A row that cannot be changed in full (a summary is missing) stays entirely as it was, and so does one that no trace can
be read from; both are counted. All rows come out, in their order, with all their columns; only `messages` changes.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model_port.progress import Meter
from paravt_jax.data.hub import local_source, row_files
from paravt_jax.data.materialize import respelled
from paravt_jax.data.merging import heard, make_plan, merged, shows_frames, text_of, tool_turns, with_text
from paravt_jax.data.rows import BadRow, file_finder, from_json, object_of, rows_of
from paravt_jax.data.summaries import Answer, Column, NoSummary, Nothing, Summaries, Summarizer, SummarizerSettings
from paravt_jax.data.traces import COLUMNS, read_trace, said_in
from rollout.output_file import OutputFile
from rollout.tools import BadCall, find_calls, window_of

BATCH_ROWS = 256
MESSAGES = COLUMNS[0]


@dataclass
class ParallelizeReport:
    """What became of the rows, and why some stayed as they were."""

    num_traces: int = 0
    num_without_calls: int = 0
    num_merged: int = 0
    num_summarised: int = 0  # nothing to merge, but frames became text
    num_single: int = 0  # not merged, because there is only one tool turn
    num_unchanged: int = 0  # with calls, and as it was
    num_summaries: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # rows that hold no trace, by reason
    failed: Counter[str] = field(default_factory=Counter)  # rows left as they were for want of a summary
    stops: Counter[str] = field(default_factory=Counter)  # turns that were not merged into the one before
    calls_before: Counter[int] = field(default_factory=Counter)  # of a turn -> turns
    calls_after: Counter[int] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of every reason

    def to_record(self) -> dict[str, Any]:
        def reasons(counts: Counter[str]) -> dict[str, Any]:
            return {
                reason: {"count": count, "example": self.examples[reason]} for reason, count in counts.most_common()
            }

        return {
            "traces": self.num_traces,
            "without_calls": self.num_without_calls,
            "merged": self.num_merged,
            "summarised_only": self.num_summarised,
            "unchanged": self.num_unchanged,
            "only_one_tool_turn": self.num_single,
            "summaries": self.num_summaries,
            "bad_rows": reasons(self.bad),
            "rows_without_summary": reasons(self.failed),
            "turns_kept_sequential": reasons(self.stops),
            "calls_per_turn": {
                "before": {str(calls): self.calls_before[calls] for calls in sorted(self.calls_before)},
                "after": {str(calls): self.calls_after[calls] for calls in sorted(self.calls_after)},
            },
        }

    def text(self) -> str:
        lines = [
            f"{self.num_traces:,} traces: {self.num_merged:,} merged, {self.num_summarised:,} with frames made text "
            f"only, {self.num_unchanged:,} with calls left as they were, {self.num_without_calls:,} without calls",
            f"{self.num_single:,} have only one tool turn, so there is nothing to merge",
        ]
        for title, counts in (
            ("rows that hold no trace", self.bad),
            ("rows left as they were for want of a summary", self.failed),
            ("turns kept sequential", self.stops),
        ):
            if counts:
                lines += ["", f"{title}: {counts.total():,}"]
                lines += [
                    f"  {reason}: {count:,}, such as {self.examples[reason]}" for reason, count in counts.most_common()
                ]
        numbers = sorted({*self.calls_before, *self.calls_after})
        if numbers:
            width = max(
                6, *(len(f"{counts[n]:,}") for counts in (self.calls_before, self.calls_after) for n in numbers)
            )
            lines += ["", f"calls in a turn  {'before':>{width}}  {'after':>{width}}"]
            lines += [
                f"{number:>15}  {self.calls_before[number]:>{width},}  {self.calls_after[number]:>{width},}"
                for number in numbers
            ]
            before, after = mean(self.calls_before), mean(self.calls_after)
            lines.append(f"{'mean':>15}  {before:>{width}.2f}  {after:>{width}.2f}")
        return "\n".join(lines)


def mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(counts.total(), 1)


@dataclass(frozen=True)
class Parallelizer:
    """Rewrites rows one by one: sequential tool turns that do not need each other become one turn."""

    summaries: Summaries
    max_parallel: int
    report: ParallelizeReport = field(default_factory=ParallelizeReport)

    async def messages_of(self, place: str, row: Any) -> Any:
        """What `messages` of the row becomes, in the form that it has."""
        report = self.report
        try:
            row = object_of(row, "the row")
            read_trace(row, lambda name: name)  # a file need not be here: its text is all that counts
            before = said_in(row)
        except BadRow as problem:
            self._count(report.bad, problem.reason, f"{place}: {problem}")
            return row.get(MESSAGES) if isinstance(row, dict) else None
        report.num_traces += 1
        calls = calls_per_turn(before)
        report.calls_before += calls
        after = before
        if not calls:
            report.num_without_calls += 1
        else:
            try:
                after = await self._changed(place, row, before)
            except NoSummary as problem:
                self._count(report.failed, problem.reason, f"{place}: {problem}")
            if after == before:
                report.num_unchanged += 1
        report.calls_after += calls_per_turn(after)
        value = row[MESSAGES]
        if after == before:
            return value
        text = value.decode() if isinstance(value, bytes) else value
        return respelled(text, from_json(text, MESSAGES), after) if isinstance(text, str) else after

    async def _changed(self, place: str, row: dict[str, Any], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers = frame_answers(before)
        changed = await asyncio.gather(
            *(self.summaries.text(row, answer) for answer in answers.values()), return_exceptions=True
        )
        problems = [problem for problem in changed if isinstance(problem, BaseException)]
        for problem in sorted(problems, key=lambda problem: isinstance(problem, NoSummary)):
            raise problem
        texts = {number: str(text) for number, text in zip(answers, changed, strict=True)}
        report = self.report
        report.num_summaries += len(texts)
        shown = [with_text(m, texts[number]) if number in texts else m for number, m in enumerate(before)]
        # What the frames were said to show counts as what the model knew, and so does what stood beside them.
        known = {
            number: "\n".join(filter(None, (heard(text_of(m)) if number in texts else text_of(m), texts.get(number))))
            for number, m in enumerate(before)
            if m["role"] == "tool"
        }
        plan = make_plan(before, known, self.max_parallel)
        for stop in plan.stops:
            self._count(report.stops, stop.reason, f"{place}: {stop.detail}")
        if plan.merges:
            report.num_merged += 1
        else:
            report.num_summarised += bool(texts)
            report.num_single += len(tool_turns(before)) == 1
        return merged(shown, plan.groups)

    def _count(self, counts: Counter[str], reason: str, example: str) -> None:
        counts[reason] += 1
        self.report.examples.setdefault(reason, example)


def calls_per_turn(messages: Sequence[dict[str, Any]]) -> Counter[int]:
    turns = [len(find_calls(text_of(message))) for message in messages if message["role"] == "assistant"]
    return Counter(number for number in turns if number)


def frame_answers(messages: Sequence[dict[str, Any]]) -> dict[int, Answer]:
    """The tool messages that show frames, by their numbers, with what each was asked for."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == "tool"]
    with_frames = [number for number in numbers if shows_frames(messages[number])]
    shown = frozenset(name for message in messages if message["role"] == "user" for name in _video_names(message))
    asked: dict[int, tuple[tuple[float, float] | None, frozenset[str]]] = {}
    for turn in tool_turns(messages):
        calls = find_calls(text_of(messages[turn[0]]))
        for call, number in zip(calls, turn[1:], strict=False):
            try:
                window = window_of(call.arguments, float("inf"))
            except BadCall:
                continue
            video = call.arguments.get("video_path")
            name = frozenset([Path(video).name]) if isinstance(video, str) else frozenset()
            asked[number] = ((window.start_s, window.end_s), shown | name)
    return {
        number: Answer(
            place=numbers.index(number),
            frame_place=frame_place,
            num_answers=len(numbers),
            num_frame_answers=len(with_frames),
            window_s=asked[number][0] if number in asked else None,
            content=messages[number]["content"],
            videos=asked[number][1] if number in asked else shown,
        )
        for frame_place, number in enumerate(with_frames)
    }


def _video_names(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        where = part.get("video_url") or part.get("video") if isinstance(part, dict) else None
        url = where.get("url") if isinstance(where, dict) else where
        if isinstance(url, str):
            yield Path(url).name


# Files


def parallelize(
    src: str,
    dst: str | Path,
    summaries: str = "",
    *,
    engine: Callable[[str], SummarizerSettings] | None = None,
    video_root: str = "",
    max_parallel: int = 5,
    force: bool = False,
) -> ParallelizeReport:
    """`summaries` is column:NAME, engine:URL, for which `engine` gives the settings, or nothing."""
    source, dst = local_source(src), Path(dst)
    if max_parallel < 1:
        raise ValueError(f"--max-parallel {max_parallel} must be at least 1")
    if dst.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--dst {dst} must end with .parquet or .jsonl")
    if source.resolve() in (dst.resolve(), *dst.resolve().parents):
        raise ValueError(f"--dst {dst} would change --src {src}; choose another place")
    output = OutputFile(dst, f"data parallelize of {source.absolute()}", inputs=row_files(source), force=force)
    kind, _, name = summaries.partition(":")
    if summaries and (kind not in ("column", "engine") or not name):
        raise ValueError(f"--summaries {summaries} must be column:NAME or engine:URL")
    schema = None if source.suffix in (".jsonl", ".json") else schema_of(source, COLUMNS)
    for column in (MESSAGES, *([name] if kind == "column" else [])):
        if schema is not None and column not in schema.names:
            raise ValueError(f"{source} has no column {column}; it has {', '.join(schema.names)}")
    settings = engine(name) if kind == "engine" and engine is not None else None
    report = ParallelizeReport()
    known = dst.with_suffix(".summaries.jsonl")  # hours of an engine's work must not hang on the last row
    dst.parent.mkdir(parents=True, exist_ok=True)

    async def write(partial: Path) -> None:
        async with AsyncExitStack() as stack:
            texts: Summaries = Column(name) if kind == "column" else Nothing()
            if settings is not None:
                find = file_finder(source, video_root, allow_outside=False)
                texts = await stack.enter_async_context(Summarizer(settings, find, known))
            total = None if schema is None else sum(pq.read_metadata(file).num_rows for file in row_files(source))
            meter = stack.enter_context(Meter("parallelizing", total, "row"))
            await _convert(source, schema, partial, dst.suffix, Parallelizer(texts, max_parallel, report), meter)

    with output.partial() as partial:
        asyncio.run(write(partial))
    return report


async def _convert(
    source: Path, schema: pa.Schema | None, partial: Path, suffix: str, parallelizer: Parallelizer, meter: Meter
) -> None:
    async def changed(places: Sequence[str], rows: Sequence[Any]) -> list[Any]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(place, row)) for place, row in zip(places, rows, strict=True)]
        except BaseExceptionGroup as problems:
            raise problems.exceptions[0] from None  # the others were cancelled for it, or failed alike
        return [task.result() for task in tasks]

    async def one(place: str, row: Any) -> Any:
        try:
            return await parallelizer.messages_of(place, row)
        finally:
            meter.update()

    writer = _LineWriter(partial) if suffix == ".jsonl" else _ParquetWriter(partial, schema)
    try:
        if schema is None:
            for places, lines in _line_batches(source):
                writer.rows(lines, await changed(places, lines))
        else:
            for places, batch in parquet_batches(source, schema):
                writer.batch(batch, await changed(places, batch.to_pylist()))
    finally:
        writer.close()


class _LineWriter:
    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")

    def batch(self, batch: pa.RecordBatch, messages: Sequence[Any]) -> None:
        for row, changed in zip(batch.to_pylist(), messages, strict=True):
            self._file.write(json.dumps({**row, MESSAGES: changed}, default=str) + "\n")

    def rows(self, lines: Sequence[bytes], messages: Sequence[Any]) -> None:
        """A line whose messages did not change stays as it is, also one that holds no row."""
        for line, changed in zip(lines, messages, strict=True):
            row = _row_of(line)
            if row is None or row.get(MESSAGES) == changed:
                self._file.write(line.decode(errors="replace").strip() + "\n")
            else:
                self._file.write(json.dumps({**row, MESSAGES: changed}) + "\n")

    def close(self) -> None:
        self._file.close()


class _ParquetWriter:
    """With the schema of the source. Rows from JSON lines have none: their messages are written as JSON."""

    def __init__(self, path: Path, schema: pa.Schema | None):
        self._path, self._schema = path, schema
        self._writer = None if schema is None else pq.ParquetWriter(path, schema)
        self._rows: list[dict[str, Any]] = []

    def batch(self, batch: pa.RecordBatch, messages: Sequence[Any]) -> None:
        assert self._writer is not None
        place = batch.schema.get_field_index(MESSAGES)
        kind = batch.schema.field(place)
        self._writer.write_batch(batch.set_column(place, kind, pa.array(messages, kind.type)))

    def rows(self, lines: Sequence[bytes], messages: Sequence[Any]) -> None:
        for line, changed in zip(lines, messages, strict=True):
            row = _row_of(line)
            if row is not None:  # a column cannot hold what is no row; it is counted as bad
                text = changed if isinstance(changed, str) else json.dumps(changed)
                self._rows.append({**row, MESSAGES: text})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            return
        try:
            pq.write_table(pa.Table.from_pylist(self._rows), self._path)
        except pa.ArrowException as problem:
            raise ValueError(
                f"the rows do not fit columns ({str(problem).splitlines()[0]}); give --dst the suffix .jsonl"
            ) from None


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def schema_of(source: Path, columns: Sequence[str]) -> pa.Schema:
    """That of all files, which must have these columns."""
    next(rows_of(source, columns), None)  # raises what keeps the rows from being read
    schemas = {file: pq.read_schema(file) for file in row_files(source)}
    first, *others = schemas
    for file in others:
        if not schemas[file].equals(schemas[first]):
            raise ValueError(
                f"{file.name} and {first.name} in {source} have different columns; give one file at a time"
            )
    return schemas[first]


def parquet_batches(source: Path, schema: pa.Schema) -> Iterator[tuple[list[str], pa.RecordBatch]]:
    """Where each row stands, and the rows."""
    for file in row_files(source):
        number = 0
        with pq.ParquetFile(file) as table:
            try:
                for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                    yield [f"{file.name} row {number + n}" for n in range(batch.num_rows)], batch
                    number += batch.num_rows
            except (pa.ArrowException, OSError) as problem:
                raise ValueError(f"{file} cannot be read as parquet: {str(problem).splitlines()[0]}") from None


def _line_batches(source: Path) -> Iterator[tuple[list[str], list[bytes]]]:
    places: list[str] = []
    lines: list[bytes] = []
    for place, line in rows_of(source, COLUMNS):
        places.append(place)
        lines.append(line)
        if len(lines) == BATCH_ROWS:
            yield places, lines
            places, lines = [], []
    if lines:
        yield places, lines


def run(args: Any) -> None:
    """The command."""
    kind = (args.summaries or "").partition(":")[0]
    if kind != "engine" and (args.model or args.api_key_env):
        raise ValueError("--model and --api-key-env do nothing without --summaries engine:URL")
    path = Path(args.report) if args.report else Path(args.dst).with_suffix(".report.json")
    inputs = [*row_files(local_source(args.src)), args.dst]
    written = OutputFile(path, "data parallelize --report", inputs=inputs, force=args.force)
    report = parallelize(
        args.src,
        args.dst,
        args.summaries or "",
        engine=lambda url: SummarizerSettings(
            url,
            args.model or "",
            args.api_key_env or "",
            attempt_deadline_s=args.deadline_s,
            max_attempts=args.max_attempts,
            max_concurrent=args.max_concurrent,
            max_reply_tokens=args.max_new_tokens,
        ),
        video_root=args.video_root,
        max_parallel=args.max_parallel,
        force=args.force,
    )
    written.write(json.dumps(report.to_record(), indent=2) + "\n")
    print(report.text())
    print(f"\n{args.dst}, report in {path}")
