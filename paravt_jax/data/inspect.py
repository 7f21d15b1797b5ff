"""Counts the contents of a data file before you train on it: columns, question types or tool calls, bad rows, lengths.

No row is rejected. Rows that training would drop are counted by reason. A row whose only fault is a missing file counts
as such, and its other contents are counted too. Lengths are text tokens, without pictures, videos and the chat
template, because frame counts and sizes depend on the run's settings.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from model_port.progress import Meter, in_units
from paravt_jax.data import prompts, traces
from paravt_jax.data.hub import local_source, row_files, tokenizer_file
from paravt_jax.data.rows import BATCH_ROWS, BadRow, file_finder, num_rows, object_of, parquet_file, rows_of
from paravt_jax.run.output_file import OutputFile
from rollout.toolbox import BUILT_IN, signatures
from rollout.tools import find_calls

COUNTED = "text only: pictures, videos and the chat template are not counted"
MISSING = "missing file"
TINY = "tiny"
MAX_LISTED_FILES = 5

Kind = Literal["RL", "SFT"]
QUESTION_TYPES, VIDEOS, TURNS, CALLS = "question_types", "videos_per_row", "turns_per_row", "calls_per_turn"
TITLES = {
    QUESTION_TYPES: "question types (rows)",
    VIDEOS: "videos in the overview (rows)",
    TURNS: "assistant turns per row (rows)",
    CALLS: "calls per tool turn (turns)",
}


@dataclass
class Findings:
    """Statistics for a data file or directory."""

    path: str
    kind: Kind
    columns: dict[str, str]
    tokenizer: str
    num_rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first such row
    missing: set[str] = field(default_factory=set)  # file names as written in the rows
    counts: dict[str, Counter[Any]] = field(default_factory=dict)  # name in the JSON -> value -> rows (or turns)
    num_faulty_calls: int = 0  # calls that could not be executed as written
    lengths: list[int] = field(default_factory=list)  # tokens of every readable row

    @property
    def num_rows_with_calls(self) -> int:
        return sum(rows for calls, rows in self.counts["calls_per_row"].items() if calls)

    def to_record(self) -> dict[str, Any]:
        calls = {}
        if self.kind == "SFT":
            calls = {"rows_with_calls": self.num_rows_with_calls, "faulty_calls": self.num_faulty_calls}
        return {
            "path": self.path,
            "kind": self.kind,
            "columns": self.columns,
            "rows": self.num_rows,
            "bad_rows": {
                reason: {"rows": count, "example": self.examples[reason]} for reason, count in self.bad.most_common()
            },
            "missing_files": sorted(self.missing),
            **{name: dict(ordered(counts)) for name, counts in self.counts.items()},
            **calls,
            "tokens": {"tokenizer": self.tokenizer, "counted": COUNTED, **summary(self.lengths)},
        }


def inspect(path: str, *, video_root: str = "", tokenizer: str = TINY) -> Findings:
    source = local_source(path)
    count_tokens = _token_counter(tokenizer)
    kind, required, columns = kind_of(source)
    names = (QUESTION_TYPES, VIDEOS) if kind == "RL" else (VIDEOS, TURNS, "calls_per_row", CALLS)
    findings = Findings(str(path), kind, columns, tokenizer, counts={name: Counter() for name in names})
    texts = _texts(
        findings,
        rows_of(source, required, prompts.OPTIONAL_COLUMNS),
        file_finder(source, video_root, allow_outside=False),
    )
    total = None if source.suffix in (".jsonl", ".json") else sum(map(num_rows, row_files(source)))
    with Meter("inspecting", total, "row") as meter:
        while batch := list(islice(texts, BATCH_ROWS)):
            findings.lengths += count_tokens([text for text in batch if text is not None])
            meter.update(len(batch))
    if not findings.num_rows:
        raise ValueError(f"{source} has no rows")
    return findings


def _texts(
    findings: Findings, rows: Iterator[tuple[str, Any]], find_file: Callable[[str], str]
) -> Iterator[str | None]:
    """Yields the text of every row, None for an unreadable one, and updates all counts except lengths."""
    read = _read_prompt if findings.kind == "RL" else _read_trace
    for location, row in rows:
        findings.num_rows += 1
        missing: list[BadRow] = []

        def find(name: str, missing: list[BadRow] = missing) -> str:
            try:
                return find_file(name)
            except BadRow as problem:
                if problem.reason != MISSING:
                    raise
                missing.append(problem)
                findings.missing.add(name)
                return name

        text = None
        try:
            text = read(findings, row, find)
            if missing:
                raise missing[0]  # with the path, because --video-root may be wrong
        except BadRow as problem:
            findings.bad[problem.reason] += 1
            findings.examples.setdefault(problem.reason, f"{location}: {problem}")
        yield text


def _read_prompt(findings: Findings, row: Any, find: Callable[[str], str]) -> str:
    prompt = prompts.read_prompt(row, find)
    findings.counts[QUESTION_TYPES][prompt.question_type] += 1
    findings.counts[VIDEOS][len(prompt.videos)] += 1
    return prompt.question


def _read_trace(findings: Findings, row: Any, find: Callable[[str], str]) -> str:
    trace = traces.read_trace(row, find)
    turns = [message.text for message in trace.messages if message.role == "assistant"]
    calls = [find_calls(turn, signatures(BUILT_IN["report"].values())) for turn in turns]
    counts = findings.counts
    counts[VIDEOS][len(trace.videos)] += 1
    counts[TURNS][len(turns)] += 1
    counts["calls_per_row"][sum(map(len, calls))] += 1
    counts[CALLS].update(len(of_turn) for of_turn in calls if of_turn)
    findings.num_faulty_calls += sum(not call.well_formed for of_turn in calls for call in of_turn)
    return "\n".join(message.text for message in trace.messages)


def _columns_of(source: Path) -> tuple[dict[str, str], Counter[str]]:
    """Column names with their types; for JSON lines, with the number of lines that have the key, also as a Counter."""
    counts = Counter[str]()
    if source.is_file() and source.suffix in (".jsonl", ".json"):
        num_lines = 0
        for _, line in rows_of(source, ()):
            num_lines += 1
            with suppress(ValueError, RecursionError):  # bad rows are counted later
                row = json.loads(line)
                counts.update(row.keys() if isinstance(row, dict) else ())
        return {name: f"in {count:,} of {num_lines:,} rows" for name, count in counts.items()}, counts
    types: dict[str, dict[str, None]] = {}
    for file in row_files(source):
        if not file.is_file() or file.suffix != ".parquet":
            break  # rows_of raises the error
        with parquet_file(file) as table:
            for column in table.schema_arrow:
                types.setdefault(column.name, {})[str(column.type)] = None
    return {name: " or ".join(of_column) for name, of_column in types.items()}, counts


def kind_of(source: Path) -> tuple[Kind, Sequence[str], dict[str, str]]:
    """The kind of most rows, the columns that it needs, and all columns. Rows of the other kind are bad rows."""
    columns, num_with = _columns_of(source)
    kinds: list[tuple[Kind, Sequence[str]]] = [("SFT", traces.COLUMNS), ("RL", prompts.COLUMNS)]
    for kind, required in sorted(kinds, key=lambda kind: -num_with[kind[1][0]]):
        if required[0] in columns:  # JSON lines may omit the others
            return kind, required, columns
    first = next(rows_of(source, ()), None)  # an unreadable source raises its own error here
    if first is None:
        raise ValueError(f"{source} has no rows")
    if not columns:  # no line is an object
        object_of(first[1], first[0])
    raise ValueError(
        f"{source} has neither RL rows ({', '.join(prompts.COLUMNS)}) nor SFT rows ({', '.join(traces.COLUMNS)}); "
        f"its columns are {', '.join(columns) or 'none'}"
    )


def _token_counter(source: str) -> Callable[[list[str]], list[int]]:
    if source == TINY:
        from model_port.tiny import tiny_tokenizer  # imported late, because it imports jax

        tokenizer = tiny_tokenizer()
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file(source)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def summary(lengths: Sequence[int]) -> dict[str, float | int]:
    if not lengths:
        return {}
    median, p95 = np.quantile(lengths, [0.5, 0.95], method="inverted_cdf")
    return {
        "total": sum(lengths),
        "mean": round(sum(lengths) / len(lengths), 1),
        "median": int(median),
        "p95": int(p95),
        "max": max(lengths),
    }


def ordered(counts: Counter[Any]) -> list[tuple[str, int]]:
    """Sorts numbers in ascending order, and names by descending count."""
    if all(isinstance(value, int) for value in counts):
        return [(str(value), counts[value]) for value in sorted(counts)]
    return counts.most_common()


def text(findings: Findings) -> str:
    lines = [f"{findings.path}: {in_units([findings.num_rows], f'{findings.kind} row')}", "", "columns"]
    lines += [f"  {name}: {kind}" for name, kind in findings.columns.items()]
    if findings.kind == "SFT":
        num_readable = findings.counts[TURNS].total()
        lines += ["", f"rows with tool calls: {findings.num_rows_with_calls:,} of {num_readable:,} readable rows"]
        lines += [f"faulty calls: {findings.num_faulty_calls:,}"] if findings.num_faulty_calls else []
    for name, title in TITLES.items():
        if findings.counts.get(name):
            lines += ["", title, *(f"  {value}: {count:,}" for value, count in ordered(findings.counts[name]))]
    lines += ["", f"bad rows: {findings.bad.total():,}"]
    lines += [f"  {reason}: {n:,}, for example {findings.examples[reason]}" for reason, n in findings.bad.most_common()]
    lines.append(f"missing files: {len(findings.missing):,}")
    lines += [f"  {name}" for name in sorted(findings.missing)[:MAX_LISTED_FILES]]
    if len(findings.missing) > MAX_LISTED_FILES:
        lines.append(f"  … and {len(findings.missing) - MAX_LISTED_FILES:,} more")
    lines += ["", f"tokens per row ({findings.tokenizer} tokenizer; {COUNTED})"]
    if totals := summary(findings.lengths):
        lines.append("  " + ", ".join(f"{name} {value:,}" for name, value in totals.items()))
    return "\n".join(lines)


def run(args: Any) -> None:
    inputs = [*row_files(local_source(args.path)), args.tokenizer]
    output = OutputFile(args.json, "data inspect --json", inputs=inputs, force=args.force) if args.json else None
    findings = inspect(args.path, video_root=args.video_root, tokenizer=args.tokenizer)
    print(text(findings))
    if output:
        output.write_json(findings.to_record())
