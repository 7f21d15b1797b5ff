"""Chooses the episodes for the page: one pass indexes the files, then the chosen lines are read one by one.

The files may be larger than memory, so the index only has each line's offset and ids. The choice depends only on ids:
two runs on the same data show the same episodes.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from model_port.progress import counted
from paravt_jax.run.log import EPISODES_DIR

EPISODES_PER_STEP = 4  # with fewer, a step is hard to judge; long runs show only some steps instead
SAMPLES = "samples_"  # file name prefix of an evaluation's cells
SHARDS = "shards/*"
NAME = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*"|\d+)')  # quotes inside a JSON string are escaped
VISIT = re.compile(rb'"visit": ?(\d+)')
SAMPLE_KEY = re.compile(rb'"key": ?"(\w+)"')
QUESTION, MISSING = b'"question": ', b'"missing": true'
# Raised while a wrong record is converted; OSError by a picture that Pillow cannot read
DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)

Record = dict[str, Any]
Converted = TypeVar("Converted")


class Line(NamedTuple):
    """Index entry for a line in a file."""

    path: Path
    number: int  # counted from 1
    offset: int
    id: str
    visit: bytes
    key: bytes
    has_question: bool
    missing: bool

    def read(self) -> Record:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                record = json.loads(file.readline())
                if not isinstance(record, dict):
                    raise ValueError("no record")
                return record
        except FileNotFoundError:
            raise ValueError(f"{self.path} was moved while it was read; if the run has resumed, try again") from None
        except (ValueError, RecursionError):
            raise self.wrong("not a JSON object") from None

    def wrong(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path}: line {self.number} is {what}; if the run is running, try again, else restore the file, or "
            f"remove the line"
        )


@dataclass(frozen=True)
class Chosen:
    """The lines of a run that the page shows. `parts` are steps or cells."""

    lines: list[Line] = field(default_factory=list)
    num_parts_shown: int = 0
    num_parts: int = 0
    questions: dict[tuple[Path, bytes], Line] = field(default_factory=dict)  # (file, visit) -> a line with its question
    max_per_sample: int | None = None  # episodes of an evaluation's sample, if not all

    def convert(self, to_page: Callable[[Record], Converted]) -> Iterator[Converted]:
        """Converts every episode. Raises ValueError with the file and the line of a record that cannot be converted."""
        for line in counted(self.lines, "reading episodes", "episode"):
            sibling = None if line.has_question else self.questions.get((line.path, line.visit))
            record = {"question": sibling.read().get("question", "") if sibling else "", **line.read()}
            try:
                yield from [to_page(episode) for episode in self._episodes(line, record)]
            except DAMAGED as problem:
                reason = f"key {problem} is missing" if isinstance(problem, KeyError) else problem
                raise line.wrong(f"not a record of an episode ({reason})") from None

    def _episodes(self, line: Line, record: Record) -> Iterator[Record]:
        """Yields a record, or the episodes of an evaluation's sample with the sample's fields."""
        if "episodes" not in record:
            yield record
            return
        shared = {name: value for name, value in record.items() if name not in ("episodes", "key", "id")}
        shared["cell"] = line.path.stem.removeprefix(SAMPLES)
        for number, episode in enumerate(record["episodes"][: self.max_per_sample]):
            yield {**shared, **episode, "id": f"{record['id']}/{number}"}


def steps_of(run_dir: Path) -> dict[int, Path]:
    """Episode files by step."""
    paths = [path for path in (run_dir / EPISODES_DIR).glob("*.jsonl") if path.stem.isdecimal()]
    return dict(sorted((int(path.stem), path) for path in paths))


def cells_of(run_dir: Path) -> dict[str, list[Path]]:
    """Sample files by cell of an evaluation: shard files first, then the run's own."""
    paths = [*sorted(run_dir.glob(f"{SHARDS}/{SAMPLES}*.jsonl")), *sorted(run_dir.glob(f"{SAMPLES}*.jsonl"))]
    cells: dict[str, list[Path]] = {}
    for path in paths:
        cells.setdefault(path.stem.removeprefix(SAMPLES), []).append(path)
    return dict(sorted(cells.items()))


def chosen_of_steps(paths: Sequence[Path], max_episodes: int) -> Chosen:
    """Chooses episodes evenly over the steps, including the first and the last."""
    num_shown = min(len(paths), max(1, max_episodes // EPISODES_PER_STEP)) if max_episodes else 0
    lines: list[Line] = []
    questions: dict[tuple[Path, bytes], Line] = {}
    chosen_paths = [paths[number] for number in evenly(len(paths), num_shown)]
    for number, path in counted(list(enumerate(chosen_paths)), "finding episodes", "step"):
        lines_of_step = list(lines_of(path))
        quota = max_episodes // num_shown + (number < max_episodes % num_shown)
        lines += _pick(lines_of_step, quota, path.stem)
        questions |= {(path, line.visit): line for line in lines_of_step if line.has_question and line.visit}
    return Chosen(lines, num_shown, len(paths), questions)


def chosen_of_cells(cells: dict[str, list[Path]], max_episodes: int, episodes_per_sample: int = 1) -> Chosen:
    """Chooses equally many samples per cell, and the same samples where cells share them.

    If not even one sample fits, chooses some of its episodes.
    """
    lines: list[Line] = []
    max_samples = max(1, max_episodes // episodes_per_sample) if max_episodes else 0
    num_shown = min(len(cells), max_samples)
    chosen_paths = [list(cells.values())[number] for number in evenly(len(cells), num_shown)]
    for number, paths in counted(list(enumerate(chosen_paths)), "finding samples", "cell"):
        quota = max_samples // num_shown + (number < max_samples % num_shown)
        lines += _pick(samples_of(paths), quota, "")
    max_per_sample = max_episodes if max_episodes < episodes_per_sample else None
    return Chosen(lines, num_shown, len(cells), max_per_sample=max_per_sample)


def samples_of(paths: Iterable[Path]) -> list[Line]:
    """The newest line of each sample. A missing sample never replaces a finished one."""
    newest: dict[bytes, Line] = {}
    for line in (line for path in paths for line in lines_of(path)):
        if not line.missing or line.key not in newest or newest[line.key].missing:
            newest[line.key] = line
    return list(newest.values())


def lines_of(path: Path) -> Iterator[Line]:
    """Indexes the lines of a file. Skips an incomplete last line, left by a kill or still being written."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") or _is_whole(line):
                yield _line(path, number, offset, line)
            offset += len(line)


def evenly(length: int, count: int) -> list[int]:
    """`count` evenly spaced indices below `length`, including the first and the last; only the last if `count` is 1."""
    if count < 2:
        return [length - 1] * count
    return [(length - 1) * number // (count - 1) for number in range(count)]


def _line(path: Path, number: int, offset: int, line: bytes) -> Line:
    name, visit, key = (pattern.search(line) for pattern in (NAME, VISIT, SAMPLE_KEY))
    return Line(
        path,
        number,
        offset,
        name[1].strip(b'"').decode(errors="replace") if name else str(number),
        visit[1] if visit else b"",
        key[1] if key else b"%d" % number,
        QUESTION in line,
        MISSING in line,
    )


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _pick(lines: Sequence[Line], quota: int, salt: str) -> list[Line]:
    """Picks `quota` lines in file order. `salt` varies the choice, so that steps show different rollout numbers."""

    def rank(line: Line) -> bytes:
        return hashlib.blake2b(f"{salt} {line.id}".encode(), digest_size=8).digest()

    picked = set(islice(sorted(lines, key=rank), quota))
    return [line for line in lines if line in picked]
