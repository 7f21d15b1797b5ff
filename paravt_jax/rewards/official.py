"""What the benchmarks' own harnesses make of a reply: lenient rules, beside which ours of `answers.py` is strict.

Every rule is a function of a reply, the answer and the options, and gives a score in [0, 1]. A reply is what follows
the thinking, or what stands in the last `<answer>` if there is one: these rules would find letters in a thinking, too.
They are kept with their faults, so that a published number can be compared with one made by the same rule; what
departs from them is marked. DIFFERS from the newest lmms-eval, which no longer takes a letter out of a word.
"""

import re
from collections.abc import Sequence

from paravt_jax.rewards.answers import interval_iou

STRICT, OFFICIAL = "strict", "official"  # which rule a score is by
LETTERS = "ABCDEFGHIJ"
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
THINK_END = "</think>"
LEAD_IN = re.compile(r"Best (?:answer|option):")  # its capital is no option
NUMBER = re.compile(r"\d+(?:\.\d+)?")
RANGE = re.compile(rf"({NUMBER.pattern})\s*(?:-|–|—|\bto\b)\s*({NUMBER.pattern})")
NUMBER_TOLERANCE = 0.01
EDGES = ".,:;!?()[]'\"`*"


def reply_of(turns: Sequence[str]) -> str:
    """What of an episode's turns a harness without a grammar would be given."""
    said = turns[-1].rpartition(THINK_END)[2] if turns else ""
    answers = ANSWER.findall(said)
    return (answers[-1] if answers else said).strip()


def first_capital(reply: str, answer: str, options: Sequence[str]) -> float:
    """The first capital that is an option's letter, in whatever word it stands: "Because" is B."""
    return float(_capital(reply, options) == answer)


def first_capital_or_guess(reply: str, answer: str, options: Sequence[str]) -> float:
    """DIFFERS: where no letter is found the harness draws one; here that is worth what a draw is worth on average."""
    found = _capital(reply, options)
    return 1 / len(options) if found is None else float(found == answer)


def mmvu(reply: str, answer: str, options: Sequence[str]) -> float:
    """With options, the letter alone somewhere, in any case, or its text; open, see `_says`.

    DIFFERS: nothing is asked of a judge afterwards, and an empty reply, part of every answer, is wrong.
    """
    if not reply:
        return 0.0
    if not options:
        return float(_says(_plain(reply), _plain(answer)))
    alone = re.search(rf"\b{re.escape(answer)}\b", reply, re.IGNORECASE) is not None
    return float(alone or _plain(options[LETTERS.index(answer)]) in _plain(reply))


def window_iou(reply: str, answer: str, options: Sequence[str]) -> float:
    """Of the first two numbers with a dash or "to" between, else of the first two; swapped if they run backwards."""
    ranges = RANGE.findall(reply)
    times_s = [float(text) for text in (ranges[0] if ranges else NUMBER.findall(reply)[:2])]
    if len(times_s) < 2:
        return 0.0
    true_s = [float(text) for text in NUMBER.findall(answer)]
    return interval_iou((min(times_s), max(times_s)), (true_s[0], true_s[1]))


def _capital(reply: str, options: Sequence[str]) -> str | None:
    found = re.search(f"[{LETTERS[: len(options)]}]", LEAD_IN.sub("", reply))
    return found[0] if found else None


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _says(reply: str, answer: str) -> bool:
    """One contains the other, the first numbers are the same, or all longer words of two to five are there."""
    if answer in reply or reply in answer:
        return True
    numbers = [NUMBER.search(text) for text in (reply, answer)]
    if all(numbers):
        said, true = (float(match[0]) for match in numbers if match)
        if abs(said - true) < NUMBER_TOLERANCE:
            return True
    words = {word.strip(EDGES) for word in reply.split()}
    wanted = [word for word in (word.strip(EDGES) for word in answer.split()) if word]
    return 2 <= len(wanted) <= 5 and all(word in words for word in wanted if len(word) > 2)
