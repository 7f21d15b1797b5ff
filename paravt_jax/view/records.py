"""Which of a run's episodes a page shows, and where they lie: found in one light pass, then read one by one.

The files of a run may be larger than memory, so the pass keeps of every line only where it begins and what it is
called. Names decide which lines are chosen, and nothing else does: of two runs on the same data, the same episodes.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from model_port.progress import counted
from paravt_jax.run.log import EPISODES_DIR

EPISODES_A_STEP = 4  # fewer say little about a step: with many steps, rather some of them than one episode of each
SAMPLES = "samples_"  # what the files of an evaluation's cells begin with
SHARDS = "shards/*"
NAME = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*"|\d+)')  # no quote within a string is without a backslash
VISIT = re.compile(rb'"visit": ?(\d+)')
SAMPLE_KEY = re.compile(rb'"key": ?"(\w+)"')
ASKED, MISSING = b'"question": ', b'"missing": true'

Record = dict[str, Any]


class Line(NamedTuple):
    """One line of a file, and what a glance tells of it."""

    path: Path
    number: int  # the first is 1
    offset: int
    id: str
    visit: bytes
    key: bytes
    asked: bool  # it has the question
    missing: bool

    def read(self) -> Record:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            try:
                return json.loads(file.readline())
            except ValueError:
                raise ValueError(
                    f"{self.path}: line {self.number} is no JSON; restore the file, or remove the line"
                ) from None


@dataclass(frozen=True)
class Chosen:
    """What a page shows of a run. `parts` are steps or cells."""

    lines: list[Line] = field(default_factory=list)
    num_parts_shown: int = 0
    num_parts: int = 0
    questions: dict[tuple[Path, bytes], Line] = field(default_factory=dict)  # of a visit, a line that has it

    def records(self) -> Iterator[Record]:
        """One that never began has the question of its siblings; one of an evaluation, what its sample's line says."""
        for line in counted(self.lines, "reading episodes", "episode"):
            record = line.read()
            if "episodes" in record:
                yield from _of_sample(record, line.path.stem.removeprefix(SAMPLES))
            else:
                sibling = None if line.asked else self.questions.get((line.path, line.visit))
                yield {"question": sibling.read()["question"] if sibling else "", **record}


def steps_of(run_dir: Path) -> dict[int, Path]:
    """The steps of which there are episodes."""
    paths = [path for path in (run_dir / EPISODES_DIR).glob("*.jsonl") if path.stem.isdecimal()]
    return dict(sorted((int(path.stem), path) for path in paths))


def cells_of(run_dir: Path) -> dict[str, list[Path]]:
    """The cells of an evaluation that have samples: the files of its shards, then its own."""
    paths = [*sorted(run_dir.glob(f"{SHARDS}/{SAMPLES}*.jsonl")), *sorted(run_dir.glob(f"{SAMPLES}*.jsonl"))]
    cells: dict[str, list[Path]] = {}
    for path in paths:
        cells.setdefault(path.stem.removeprefix(SAMPLES), []).append(path)
    return dict(sorted(cells.items()))


def chosen_of_steps(paths: Sequence[Path], max_episodes: int) -> Chosen:
    """Evenly over the steps, the first and the last included."""
    num_shown = min(len(paths), max(1, max_episodes // EPISODES_A_STEP)) if max_episodes else 0
    lines: list[Line] = []
    questions: dict[tuple[Path, bytes], Line] = {}
    shown = [paths[number] for number in evenly(len(paths), num_shown)]
    for place, path in counted(list(enumerate(shown)), "finding episodes", "step"):
        found = list(lines_of(path))
        quota = max_episodes // num_shown + (place < max_episodes % num_shown)
        lines += _picked(found, quota, path.stem)
        questions |= {(path, line.visit): line for line in found if line.asked and line.visit}
    return Chosen(lines, num_shown, len(paths), questions)


def chosen_of_cells(cells: dict[str, list[Path]], max_episodes: int) -> Chosen:
    """As many of every cell, and of every cell the same samples as far as it has them."""
    lines: list[Line] = []
    num_shown = min(len(cells), max_episodes)
    for place, name in counted(list(enumerate(list(cells)[:num_shown])), "finding samples", "cell"):
        quota = max_episodes // num_shown + (place < max_episodes % num_shown)
        lines += _picked(samples_of(cells[name]), quota, "")
    return Chosen(lines, num_shown, len(cells))


def samples_of(paths: Iterable[Path]) -> list[Line]:
    """The newest line of each sample; one that is done is not undone by a later one that is missing."""
    newest: dict[bytes, Line] = {}
    for line in (line for path in paths for line in lines_of(path)):
        if not line.missing or line.key not in newest or newest[line.key].missing:
            newest[line.key] = line
    return list(newest.values())


def lines_of(path: Path) -> Iterator[Line]:
    """A last line that a kill cut short, or that is being written, is left out."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") or _is_whole(line):
                yield _line(path, number, offset, line)
            offset += len(line)


def evenly(length: int, count: int) -> list[int]:
    """`count` of `length` places, the first and the last included; of one, the last."""
    if count < 2:
        return [length - 1] * count
    return [(length - 1) * number // (count - 1) for number in range(count)]


def _line(path: Path, number: int, offset: int, line: bytes) -> Line:
    name, visit, key = (pattern.search(line) for pattern in (NAME, VISIT, SAMPLE_KEY))
    return Line(
        path,
        number,
        offset,
        str(json.loads(name[1])) if name else str(number),
        visit[1] if visit else b"",
        key[1] if key else b"%d" % number,
        ASKED in line,
        MISSING in line,
    )


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _picked(lines: Sequence[Line], quota: int, salt: str) -> list[Line]:
    """In their order. `salt` makes it others in another step, or it would always be the same members of a group."""

    def rank(line: Line) -> bytes:
        return hashlib.blake2b(f"{salt} {line.id}".encode(), digest_size=8).digest()

    picked = set(islice(sorted(lines, key=rank), quota))
    return [line for line in lines if line in picked]


def _of_sample(line: Record, cell: str) -> Iterator[Record]:
    shared = {name: value for name, value in line.items() if name not in ("episodes", "key", "id")}
    for number, episode in enumerate(line["episodes"]):
        yield {**shared, **episode, "id": f"{line['id']}/{number}", "cell": cell}
