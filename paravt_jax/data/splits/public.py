"""What a public split is, and how its rows become samples: a question, what it is scored against, what it belongs to.

A split is one small file beside this one: which file of the hub has its rows, which columns they have, how a row
becomes a sample, where videos lie, how many there are. A file that has other columns than that is refused in one
sentence, and a row that has something else in them is a bad row, as everywhere.

A question is asked in the same words whatever the split: the stem, its options as lines `A. …`, and the form in which
to answer. DIFFERS from lmms-eval and from the release, each of which has words of its own for every one.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args, get_origin

from paravt_jax.data.prompts import PLACEHOLDER, Prompt
from paravt_jax.data.rows import SHOWN_CHARS, BadRow, check_text, encodable, object_of, reader
from paravt_jax.rewards.terms import check_ground_truth

LETTERS = "ABCDEFGHIJ"
LETTERED = re.compile(r"^\s*\(?([A-J])[.):]\s*(\S.*?)\s*$")
ASK_LETTER = "Answer with the letter of the option."
ASK_WORDS = "Answer in a few words."
ASK_WINDOW = "Answer with [start, end] in seconds."

Groups = Mapping[str, tuple[str, ...]]  # what is reported apart -> the labels of a sample, mostly one
Official = Callable[[str, str, Sequence[str]], float]  # of a reply, the answer and the options: a score in [0, 1]


@dataclass(frozen=True)
class Sample:
    """A prompt of an evaluation. In those of a split, paths are as in the hub's layout until they are found."""

    prompt: Prompt
    video: str  # equal for samples on the same video
    options: tuple[str, ...] = ()
    groups: Groups = field(default_factory=dict)


@dataclass(frozen=True)
class PublicSplit:
    """One of the published evaluations; docs/evaluation.md says how to add one."""

    name: str  # data.split
    title: str  # in tables
    repo: str  # on the hub
    rows: str  # the files with rows there, a pattern
    columns: Mapping[str, Any]  # of those that are read, each with what Python makes of its values: str, list[str] …
    sample: Callable[[Mapping[str, Any]], Sample]
    num_samples: int  # published
    official: Official  # the rule of the benchmark's own harness
    folders: tuple[str, ...] = ()  # where videos may lie beside the place that `sample` says, once they are unpacked
    with_subtitles: bool = False  # the lines that are on screen with the frames are shown
    mean_over: str = ""  # the headline is the mean over these groups; empty: over samples
    thresholds: tuple[float, ...] = ()  # of a score, whose share above each is reported: R@1 of temporal grounding

    @reader
    def checked(self, row: Any) -> Sample:
        """The sample of a row whose columns hold what they should; one of a JSON file comes as its text."""
        row = object_of(row, "a row")
        for name, kind in self.columns.items():
            if not holds(row.get(name), kind):
                found = repr(row[name])[:SHOWN_CHARS] if name in row else "not there"
                raise BadRow("wrong schema", f"{name} is {found}, expected {kind if get_args(kind) else kind.__name__}")
            for text in _texts(row[name]):
                check_text(encodable(text, name), name)
        return self.sample(row)


def holds(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind: str, int, float, or a list or a dict of such."""
    inside = get_args(kind)
    whole: Any = get_origin(kind) or (Real if kind is float else kind)  # half a float is a number of numpy's own
    if not isinstance(value, whole) or isinstance(value, bool):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not inside or all(holds(part, inside[-1]) for part in parts)


def _texts(value: Any) -> Iterator[str]:
    """All that stand in the value of a column, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)


def choice(
    name: str, question: str, options: Sequence[str], answer: str, video: str, groups: Groups, subtitles: str = ""
) -> Sample:
    """A question with options, which have no letters yet; its answer is the letter of one of them."""
    letters = LETTERS[: len(options)]
    if not 2 <= len(options) <= len(LETTERS):
        raise BadRow("wrong options", f"{name} has {len(options)} options, expected 2 to {len(LETTERS)}")
    if len(answer) != 1 or answer not in letters:
        raise BadRow("answer outside of the options", f"the answer of {name} is {answer!r}, its options are {letters}")
    listed = [f"{letter}. {' '.join(option.split())}" for letter, option in zip(letters, options, strict=True)]
    asked = "\n".join([_stem(question, name), *listed, ASK_LETTER])
    return Sample(_prompt(name, asked, video, answer, "mcq", subtitles), video, tuple(options), groups)


def open_question(name: str, question: str, answer: str, video: str, groups: Groups) -> Sample:
    asked = f"{_stem(question, name)}\n{ASK_WORDS}"
    return Sample(_prompt(name, asked, video, answer.strip(), "oe"), video, groups=groups)


def grounding(name: str, caption: str, window_s: Sequence[float], video: str) -> Sample:
    """When something happens."""
    if len(window_s) != 2 or not 0 <= window_s[0] < window_s[1] < math.inf:
        raise BadRow("wrong window", f"that of {name} is {list(window_s)}, expected [start, end] in seconds")
    asked = f"When in the video does this happen: {_stem(caption, name)}\n{ASK_WINDOW}"
    return Sample(_prompt(name, asked, video, f"[{window_s[0]:.1f}, {window_s[1]:.1f}]", "tvg"), video)


def options_in(text: str) -> tuple[str, list[str]]:
    """A question whose options stand in its own last lines, `(A) …`, taken apart."""
    lines = text.rstrip().split("\n")
    first = max((at for at, line in enumerate(lines) if (match := LETTERED.match(line)) and match[1] == "A"), default=0)
    return "\n".join(lines[:first]), unlettered(lines[first:])


def unlettered(options: Sequence[str]) -> list[str]:
    """Options that carry their letters, without these, which must come in order."""
    matches = [LETTERED.match(option) for option in options]
    letters = "".join(match[1] if match else "?" for match in matches)
    if letters != LETTERS[: len(letters)]:
        raise BadRow("wrong options", f"they are lettered {letters}: {' | '.join(options)[:200]}")
    return [match[2] for match in matches if match]


def _stem(text: str, name: str) -> str:
    stem = encodable(text.replace(PLACEHOLDER, ""), "a question").strip()
    if not stem:
        raise BadRow("empty question", f"that of {name}")
    check_text(stem, "a question")
    return stem


def _prompt(name: str, asked: str, video: str, answer: str, kind: str, subtitles: str = "") -> Prompt:
    try:
        check_ground_truth(answer, kind)
    except ValueError as problem:
        raise BadRow("unreadable ground truth", f"{name}: {problem}") from None
    return Prompt(name, asked, (video,), answer, kind, (subtitles,))
