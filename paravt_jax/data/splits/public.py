"""Defines public splits and turns their rows into samples: a question, its answer, and groups for breakdowns.

A split (shipped.py has ours) names the hub's files, their columns, a function from a row to a sample, the video folders
and the number of samples. A file with other columns is an error; a row with other contents is a bad row.

All splits have the same question format: the stem, its options as lines `A. …`, and the form of the answer. DIFFERS
from lmms-eval and the release, which format every split differently.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, get_args, get_origin

from paravt_jax.data.prompts import PLACEHOLDER, Prompt
from paravt_jax.data.rows import MAX_SHOWN_CHARS, BadRow, check_text, checked_encodable, nesting_checked, object_of
from paravt_jax.rewards.terms import check_ground_truth
from rollout.user_code import call_user_code

LETTERS = "ABCDEFGHIJ"
LETTERED = re.compile(r"^\s*\(?([A-J])[.):]\s*(\S.*?)\s*$")
ROUNDING = 1e-6  # by which a score may leave the range
ASK_LETTER = "Answer with the letter of the option."
ASK_WORDS = "Answer in a few words."
ASK_WINDOW = "Answer with [start, end] in seconds."

Groups = Mapping[str, tuple[str, ...]]  # name of a breakdown -> labels of a sample, usually one
Official = Callable[[str, str, Sequence[str]], float]  # (reply, answer, options) -> score in [0, 1]


@dataclass(frozen=True)
class Sample:
    """A sample of an evaluation. `PublicSplit.sample` returns paths in the hub's layout; loading resolves them."""

    prompt: Prompt
    video: str  # equal for samples on the same video
    options: tuple[str, ...] = ()
    groups: Groups = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the row on the hub


@dataclass(frozen=True)
class PublicSplit:
    """A published evaluation; docs/extend.md has an example."""

    name: str  # for data.split
    title: str  # for tables
    repo: str  # repository on the hub
    rows: str  # glob pattern of its files with rows
    columns: Mapping[str, Any]  # the columns to read and their Python types: str, list[str] …
    sample: Callable[[Mapping[str, Any]], Sample]
    num_samples: int  # published number
    official: Official  # the scoring rule of the benchmark's own harness
    folders: tuple[str, ...] = ()  # other folders that may have the unpacked videos
    with_subtitles: bool = False  # the prompt has the lines on screen in the sampled frames
    mean_over: str = ""  # breakdown whose groups weigh the same in the mean; empty: mean over samples
    thresholds: tuple[float, ...] = ()  # report the fraction of scores at or above each: R@1 of temporal grounding

    @nesting_checked()
    def checked(self, row: Any) -> Sample:
        """Checks the column types of a row, which may be JSON text, and returns its sample."""
        row = object_of(row, "a row")
        for name, kind in self.columns.items():
            if not holds(row.get(name), kind):
                value = repr(row[name])[:MAX_SHOWN_CHARS] if name in row else "missing"
                raise BadRow("wrong schema", f"{name} is {value}, expected {kind if get_args(kind) else kind.__name__}")
            for text in _texts(row[name]):
                check_text(checked_encodable(text, name), name)
        return replace(self.sample(row), row=row)

    def official_score(self, reply: str, sample: Sample) -> float:
        """The score of a reply by the benchmark's rule. Raises ValueError if the rule, which may be yours, fails."""
        rule, name = f"the rule `official` of data.split, {self.name},", sample.prompt.id
        try:
            score = call_user_code(lambda: float(self.official(reply, sample.prompt.answer, sample.options)))
        except Exception as problem:
            raise ValueError(f"{rule} failed on sample {name}: {type(problem).__name__}: {problem}") from problem
        if not -ROUNDING <= score <= 1 + ROUNDING:
            raise ValueError(f"{rule} returned {score:g} for sample {name}, expected a score from 0 to 1")
        return score


def holds(value: Any, kind: Any) -> bool:
    """Whether a value has a type: str, int, float, or a list or dict of these."""
    inside = get_args(kind)
    outer: Any = get_origin(kind) or (Real if kind is float else kind)  # numpy's half-precision numbers are Real
    if not isinstance(value, outer) or isinstance(value, bool):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not inside or all(holds(part, inside[-1]) for part in parts)


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a column's value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(part)


def choice(
    name: str, question: str, options: Sequence[str], answer: str, video: str, groups: Groups, subtitles: str = ""
) -> Sample:
    """Makes a multiple-choice sample. `options` have no letters; empty options are unused, for example A, B and D.

    `answer` is an option's letter. Raises BadRow if a row does not have such a question.
    """
    lettered = [(letter, text) for letter, text in zip(LETTERS, options, strict=False) if text.strip()]
    letters = "".join(letter for letter, _ in lettered)
    if len(lettered) < 2 or len(options) > len(LETTERS):
        raise BadRow("wrong options", f"{name} has the options {letters or 'none'}, expected 2 to {len(LETTERS)}")
    if len(answer) != 1 or answer not in letters:
        raise BadRow("answer outside of the options", f"the answer to {name} is {answer!r}, its options are {letters}")
    listed = [f"{letter}. {' '.join(text.split())}" for letter, text in lettered]
    prompt = "\n".join([_stem(question, name), *listed, ASK_LETTER])
    return Sample(_prompt(name, prompt, video, answer, "mcq", subtitles), video, tuple(options), groups)


def up_to_last_used(options: Sequence[str]) -> list[str]:
    """Drops the empty options at the end."""
    num = max((at for at, text in enumerate(options, 1) if text.strip()), default=0)
    return list(options[:num])


def open_question(name: str, question: str, answer: str, video: str, groups: Groups) -> Sample:
    """Makes a sample that asks for an answer in words."""
    prompt = f"{_stem(question, name)}\n{ASK_WORDS}"
    return Sample(_prompt(name, prompt, video, answer.strip(), "oe"), video, groups=groups)


def grounding(name: str, caption: str, window_s: Sequence[float], video: str) -> Sample:
    """Makes a sample that asks when something happens."""
    if len(window_s) != 2 or not 0 <= window_s[0] < window_s[1] < math.inf:
        raise BadRow("wrong window", f"the window of {name} is {list(window_s)}, expected [start, end] in seconds")
    prompt = f"When in the video does this happen: {_stem(caption, name)}\n{ASK_WINDOW}"
    return Sample(_prompt(name, prompt, video, f"[{window_s[0]:.1f}, {window_s[1]:.1f}]", "tvg"), video)


def options_in(text: str) -> tuple[str, list[str]]:
    """Splits a text into the question and the options in its last lines, `(A) …`."""
    lines = text.rstrip().split("\n")
    first = max((at for at, line in enumerate(lines) if (match := LETTERED.match(line)) and match[1] == "A"), default=0)
    return "\n".join(lines[:first]), unlettered(lines[first:])


def unlettered(options: Sequence[str]) -> list[str]:
    """Removes the letters from options; they must be in order."""
    matches = [LETTERED.match(option) for option in options]
    letters = "".join(match[1] if match else "?" for match in matches)
    if letters != LETTERS[: len(letters)]:
        raise BadRow("wrong options", f"their letters are {letters}: {' | '.join(options)[:200]}")
    return [match[2] for match in matches if match]


def _stem(text: str, name: str) -> str:
    stem = checked_encodable(text.replace(PLACEHOLDER, ""), "a question").strip()
    if not stem:
        raise BadRow("empty question", f"the question of {name}")
    check_text(stem, "a question")
    return stem


def _prompt(name: str, question: str, video: str, answer: str, kind: str, subtitles: str = "") -> Prompt:
    try:
        check_ground_truth(answer, kind)
    except ValueError as problem:
        raise BadRow("unreadable ground truth", f"{name}: {problem}") from None
    return Prompt(name, question, (video,), answer, kind, (subtitles,))
