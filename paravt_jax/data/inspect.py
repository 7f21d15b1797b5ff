"""What a file of rows holds, before a run is paid for: columns, kinds of questions or calls, bad rows, lengths.

Nothing is refused here: a row that a run would leave out is counted by its reason, and one whose only fault is a file
that is not there is counted as such and read all the same. Lengths are those of the text alone, in tokens: pictures and
videos are not counted (a run decides how many frames are shown and how large), and neither is the chat template.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from model_port.progress import Meter
from paravt_jax.data import prompts, traces
from paravt_jax.data.hub import local_source, row_files, tokenizer_file
from paravt_jax.data.rows import BadRow, file_finder, parquet_file, rows_of
from rollout.output_file import OutputFile
from rollout.toolbox import SHIPPED, signatures
from rollout.tools import find_calls

COUNTED = "text alone: pictures, videos and the chat template are not counted"
MISSING = "missing file"
TINY = "tiny"
MAX_BINS = 12
MAX_PLOTTED_BINS = 40
TAIL_FRAC = 0.99  # of the rows, what the bins are made for; the last one holds all that is longer
BAR_CHARS = 40
BATCH_ROWS = 256
SHOWN_EXAMPLES = 5

Kind = Literal["RL", "SFT"]


@dataclass(frozen=True)
class Bin:
    start: int
    end: int | None  # without it; None: no end
    count: int


@dataclass
class Findings:
    """What a look at a file of rows has counted."""

    path: str
    kind: Kind
    columns: dict[str, str]
    tokenizer: str
    num_rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> where, and what
    missing: set[str] = field(default_factory=set)  # as the rows spell them
    question_types: Counter[str] = field(default_factory=Counter)
    videos: Counter[int] = field(default_factory=Counter)  # of a row -> rows
    turns: Counter[int] = field(default_factory=Counter)  # of the assistant in a row -> rows
    calls_of_row: Counter[int] = field(default_factory=Counter)
    calls_of_turn: Counter[int] = field(default_factory=Counter)  # of a turn with calls -> turns
    num_faulty_calls: int = 0  # that cannot be carried out as they are written
    lengths: list[int] = field(default_factory=list)  # tokens of every row that was read

    @property
    def num_rows_with_calls(self) -> int:
        return sum(rows for calls, rows in self.calls_of_row.items() if calls)

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "columns": self.columns,
            "rows": self.num_rows,
            "bad_rows": {
                reason: {"rows": count, "example": self.examples[reason]} for reason, count in self.bad.most_common()
            },
            "missing_files": sorted(self.missing),
            "videos_per_row": _sorted(self.videos),
        }
        if self.kind == "RL":
            record["question_types"] = dict(self.question_types.most_common())
        else:
            record |= {
                "rows_with_calls": self.num_rows_with_calls,
                "turns_per_row": _sorted(self.turns),
                "calls_per_row": _sorted(self.calls_of_row),
                "calls_per_turn": _sorted(self.calls_of_turn),
                "faulty_calls": self.num_faulty_calls,
            }
        histogram = [[bin.start, bin.end, bin.count] for bin in bins(self.lengths, MAX_BINS)]
        return record | {
            "tokens": {
                "tokenizer": self.tokenizer,
                "counted": COUNTED,
                **summary(self.lengths),
                "histogram": histogram,
            }
        }


def inspect(path: str, *, video_root: str = "", tokenizer: str = TINY) -> Findings:
    source = local_source(path)
    encode = _encoder(tokenizer)
    columns = columns_of(source)
    kind, wanted = kind_of(source, columns)
    findings = Findings(str(path), kind, columns, tokenizer)
    texts = _texts(findings, rows_of(source, wanted), file_finder(source, video_root, allow_outside=False))
    with Meter("inspecting", _num_rows(source), "row") as meter:
        while batch := list(islice(texts, BATCH_ROWS)):
            findings.lengths += encode([text for text in batch if text is not None])
            meter.update(len(batch))
    if not findings.num_rows:
        raise ValueError(f"{source} has no rows")
    return findings


def _texts(
    findings: Findings, rows: Iterator[tuple[str, Any]], find_file: Callable[[str], str]
) -> Iterator[str | None]:
    """The text of every row, None where it cannot be read; what else it holds is counted."""
    read = _read_prompt if findings.kind == "RL" else _read_trace
    for place, row in rows:
        findings.num_rows += 1
        missing: list[str] = []

        def find(name: str, missing: list[str] = missing) -> str:
            try:
                return find_file(name)
            except BadRow as problem:
                if problem.reason != MISSING:
                    raise
                missing.append(name)
                return name

        text = None
        try:
            text = read(findings, row, find)
            if missing:
                raise BadRow(MISSING, missing[0])
        except BadRow as problem:
            findings.bad[problem.reason] += 1
            findings.examples.setdefault(problem.reason, f"{place}: {problem}")
        findings.missing.update(missing)
        yield text


def _read_prompt(findings: Findings, row: Any, find: Callable[[str], str]) -> str:
    prompt = prompts.read_prompt(row, find)
    findings.question_types[prompt.question_type] += 1
    findings.videos[len(prompt.videos)] += 1
    return prompt.question


def _read_trace(findings: Findings, row: Any, find: Callable[[str], str]) -> str:
    trace = traces.read_trace(row, find)
    turns = [message.text for message in trace.messages if message.role == "assistant"]
    calls = [find_calls(turn, signatures(SHIPPED.values())) for turn in turns]
    findings.videos[len(trace.videos)] += 1
    findings.turns[len(turns)] += 1
    findings.calls_of_row[sum(map(len, calls))] += 1
    findings.calls_of_turn.update(len(of_turn) for of_turn in calls if of_turn)
    findings.num_faulty_calls += sum(not call.well_formed for of_turn in calls for call in of_turn)
    return "\n".join(message.text for message in trace.messages)


def columns_of(source: Path) -> dict[str, str]:
    """Names and types of the columns; those of JSON lines as they come up, with how many lines have them."""
    if source.is_file() and source.suffix in (".jsonl", ".json"):
        return _line_columns(source)
    columns: dict[str, str] = {}
    for file in row_files(source):
        if not file.is_file() or file.suffix != ".parquet":
            break  # the reader of rows says what is wrong
        with parquet_file(file) as table:
            schema = table.schema_arrow
        for column in schema:
            text = str(column.type)
            known = columns.setdefault(column.name, text)
            if text not in known.split(" or "):
                columns[column.name] = f"{known} or {text}"
    return columns


def _line_columns(source: Path) -> dict[str, str]:
    kinds: dict[str, Counter[str]] = {}
    num_lines = 0
    for _, line in rows_of(source, ()):
        num_lines += 1
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name, value in row.items() if isinstance(row, dict) else ():
            kinds.setdefault(name, Counter())[_json_type(value)] += 1
    missing = {name: num_lines - counts.total() for name, counts in kinds.items()}
    return {
        name: " or ".join(sorted(counts)) + (f", absent in {missing[name]} rows" if missing[name] else "")
        for name, counts in kinds.items()
    }


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def kind_of(source: Path, columns: dict[str, str]) -> tuple[Kind, Sequence[str]]:
    known: list[tuple[Kind, Sequence[str]]] = [("SFT", traces.COLUMNS), ("RL", prompts.COLUMNS)]
    for kind, wanted in known:
        if all(name in columns for name in wanted):
            return kind, wanted
    next(rows_of(source, ()), None)  # raises what keeps the rows from being read, if something does
    raise ValueError(
        f"{source} holds neither RL rows ({', '.join(prompts.COLUMNS)}) nor SFT rows ({', '.join(traces.COLUMNS)}); "
        f"its columns are {', '.join(columns) or 'none'}"
    )


def _num_rows(source: Path) -> int | None:
    if source.suffix in (".jsonl", ".json"):
        return None
    return sum(pq.read_metadata(file).num_rows for file in row_files(source))


def _encoder(source: str) -> Callable[[list[str]], list[int]]:
    if source == TINY:
        from model_port.tiny import tiny_tokenizer  # with it comes jax, which nothing else here needs

        tokenizer = tiny_tokenizer()
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file(source)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(one.ids) for one in tokenizer.encode_batch(texts, add_special_tokens=False)]


# What is shown


def bins(lengths: Sequence[int], max_bins: int) -> list[Bin]:
    """Bins of a round width; where a few rows are far longer than the others, the last has no end."""
    if not lengths:
        return []
    reach = int(np.quantile(lengths, TAIL_FRAC, method="inverted_cdf"))
    width = _round_width((reach + 1) / max_bins)
    num_bins = reach // width + 1
    counts = Counter(min(length // width, num_bins) for length in lengths)
    columns = [Bin(n * width, (n + 1) * width, counts[n]) for n in range(num_bins)]
    while columns and not columns[0].count:
        del columns[0]
    if counts[num_bins]:
        columns.append(Bin(num_bins * width, None, counts[num_bins]))
    return columns


def _round_width(at_least: float) -> int:
    """1, 2 or 5 times a power of ten."""
    power = 10 ** max(0, math.floor(math.log10(max(at_least, 1))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least)


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


def bars(rows: Sequence[tuple[str, int]]) -> list[str]:
    """One line a row: its name, a bar, its count."""
    names = max((len(name) for name, _ in rows), default=0)
    most = max((count for _, count in rows), default=0)
    numbers = len(f"{most:,}")
    return [f"  {name:>{names}}  {count:>{numbers},}  {_bar(count, most)}".rstrip() for name, count in rows]


def _bar(count: int, most: int) -> str:
    eighths = round(8 * BAR_CHARS * count / most) if most else 0
    eighths = max(eighths, 1) if count else 0  # what is there can be seen
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def name_of(bin: Bin) -> str:
    return f"{bin.start:,} – {bin.end - 1:,}" if bin.end is not None else f"{bin.start:,} and more"


def text(findings: Findings) -> str:
    seen = findings
    lines = [f"{seen.path}: {seen.num_rows:,} {seen.kind} rows", "", "columns"]
    width = max(map(len, seen.columns))
    lines += [f"  {name:<{width}}  {kind}" for name, kind in seen.columns.items()]
    if seen.kind == "RL":
        lines += ["", "question types, rows", *bars(seen.question_types.most_common())]
    else:
        read = sum(seen.turns.values())
        lines += ["", f"rows with tool calls: {seen.num_rows_with_calls:,} of {read:,} that can be read"]
        if seen.num_faulty_calls:
            lines.append(f"calls that cannot be carried out as written: {seen.num_faulty_calls:,}")
        lines += ["", "turns of the assistant in a row, rows", *bars(_named(seen.turns))]
        if seen.calls_of_turn:
            lines += ["", "calls in a turn that has some, turns", *bars(_named(seen.calls_of_turn))]
    lines += ["", f"bad rows: {seen.bad.total():,}"]
    lines += [f"  {reason}: {count:,}, such as {seen.examples[reason]}" for reason, count in seen.bad.most_common()]
    lines.append(f"missing files: {len(seen.missing):,}")
    lines += [f"  {name}" for name in sorted(seen.missing)[:SHOWN_EXAMPLES]]
    if len(seen.missing) > SHOWN_EXAMPLES:
        lines.append(f"  … and {len(seen.missing) - SHOWN_EXAMPLES:,} more")
    lines += ["", f"tokens of a row ({seen.tokenizer} tokenizer; {COUNTED}), rows"]
    lines += bars([(name_of(bin), bin.count) for bin in bins(seen.lengths, MAX_BINS)])
    totals = summary(seen.lengths)
    if totals:
        lines.append("  " + ", ".join(f"{name} {value:,}" for name, value in totals.items()))
    return "\n".join(lines)


def _named(counts: Counter[int]) -> list[tuple[str, int]]:
    return [(str(number), counts[number]) for number in sorted(counts)]


def _sorted(counts: Counter[int]) -> dict[str, int]:
    return dict(_named(counts))


def plot(findings: Findings, path: Path) -> None:
    """Lengths, and beside them kinds of questions or turns and calls, as a PNG."""
    import matplotlib  # takes longer to import than a small file to read
    from matplotlib.figure import Figure

    from paravt_jax.run.plots import BLUE, GREEN, ORANGE, STYLE

    if findings.kind == "RL":
        sides = [("question types", "rows", findings.question_types.most_common(), GREEN)]
    else:
        sides = [
            ("turns of a row", "rows", _named(findings.turns), GREEN),
            ("calls of a turn", "turns", _named(findings.calls_of_turn), ORANGE),
        ]
    with matplotlib.rc_context(STYLE):
        widths = [2.4, *[1.0] * len(sides)]
        figure = Figure(figsize=(2.6 * sum(widths), 4))
        axes, *others = figure.subplots(1, len(widths), width_ratios=widths)
        bars = bins(findings.lengths, MAX_PLOTTED_BINS)
        width = bars[0].end - bars[0].start if bars and bars[0].end is not None else 1
        axes.bar([bin.start for bin in bars], [bin.count for bin in bars], width, align="edge", color=BLUE, ec="white")
        if bars and bars[-1].end is None:
            axes.annotate(
                f"{bars[-1].start:,} and more",
                (bars[-1].start + width / 2, bars[-1].count),
                (0, 4),
                textcoords="offset points",
                ha="right",
                va="bottom",
            )
        axes.set_title("tokens of a row, text alone")
        axes.set_xlabel(f"tokens ({Path(findings.tokenizer).name} tokenizer)")
        axes.set_ylabel("rows")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="x", visible=False)
        for side, (title, unit, counts, colour) in zip(others, sides, strict=True):
            side.bar([name for name, _ in counts], [count for _, count in counts], color=colour)
            side.set_title(title)
            side.set_ylabel(unit)
            side.yaxis.set_major_formatter("{x:,.0f}")
            side.grid(axis="x", visible=False)
        figure.suptitle(f"{Path(findings.path).name}: {findings.num_rows:,} {findings.kind} rows", x=0.01, ha="left")
        figure.savefig(path, format="png")


def run(args: Any) -> None:
    """The command."""
    inputs = [*row_files(local_source(args.path)), args.tokenizer]
    written = {
        flag: OutputFile(path, f"data inspect {flag}", inputs=inputs, force=args.force)
        for flag, path in (("--json", args.json), ("--png", args.png))
        if path
    }
    findings = inspect(args.path, video_root=args.video_root, tokenizer=args.tokenizer)
    print(text(findings))
    if "--json" in written:
        written["--json"].write(json.dumps(findings.to_record(), indent=2) + "\n")
    if "--png" in written:
        with written["--png"].partial() as partial:
            plot(findings, partial)
        print(f"\n{args.png}")
