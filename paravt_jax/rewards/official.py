"""The scoring rules of the benchmarks' own harnesses, more lenient than the strict rules of `answers.py`.

Every rule maps a reply, the answer and the options to a score in [0, 1]. The reply is the content of the last
`<answer>`, or else the text after the thinking, because these rules would also match letters in the thinking. The
harnesses' faults are kept, so that scores are comparable with published scores; deviations are marked. DIFFERS from the
newest lmms-eval, which no longer matches a letter inside a word.
"""

import re
import string
from collections.abc import Sequence

from paravt_jax.rewards.answers import interval_iou

STRICT, OFFICIAL = "strict", "official"
LETTERS = "ABCDEFGHIJ"
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
THINK_END = "</think>"
LEAD_IN = re.compile(r"Best (?:answer|option):")  # LongVideoBench's harness leaves it out
NUMBER = re.compile(r"\d+(?:\.\d+)?")
RANGE = re.compile(rf"(?<!\d)({NUMBER.pattern})\s*(?:-|–|—|\bto\b)\s*({NUMBER.pattern})")
NUMBER_TOLERANCE = 0.01
SUPERSCRIPTS = {ord(digit): f"^{number}" for number, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
ORDER = re.compile(r"o\s*\([^)]+\)")  # an algorithm's complexity


def reply_of(turns: Sequence[str]) -> str:
    """The text that the harness scores as the reply."""
    text = turns[-1].rpartition(THINK_END)[2] if turns else ""
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()


def first_capital(reply: str, answer: str, options: Sequence[str]) -> float:
    """Scores the first capital that is an option's letter, even inside a word: "Best answer: D" means B."""
    return float(_capital(reply, LETTERS[: len(options)]) == answer)


def first_capital_or_guess(reply: str, answer: str, options: Sequence[str]) -> float:
    """Scores the first capital A to E. DIFFERS: without one the harness guesses; this returns the expected score."""
    letter = _capital(LEAD_IN.sub("", reply), LETTERS[:5])
    return 1 / len(options) if letter is None else float(letter == answer)


def mmvu(reply: str, answer: str, options: Sequence[str]) -> float:
    """Multiple choice accepts the letter as a word, the option's text, or the letter anywhere with a word of the text.

    Open questions: see `_matches`. DIFFERS: there is no judge afterwards, and an empty reply, a substring of every
    answer, is wrong.
    """
    if not reply:
        return 0.0
    if not options:
        return float(_matches(_plain(reply), _plain(answer)))
    option, text = options[LETTERS.index(answer)].strip().lower(), reply.lower()
    alone = re.search(rf"\b{answer}\b", reply, re.IGNORECASE) is not None
    named = answer.lower() in text and any(len(word) > 2 and word in text for word in _words(option))
    return float(alone or option in text or named)


def window_iou(reply: str, answer: str, options: Sequence[str]) -> float:
    """IoU of the window of the first two numbers joined by a dash or "to", else of the first two; swapped if reversed.

    DIFFERS: without a dash or "to", the harness reads one number per line, and only in lines with a word such as
    "start", so "[20, 30]" is wrong there.
    """
    ranges = RANGE.findall(reply)
    times_s = [float(text) for text in (ranges[0] if ranges else NUMBER.findall(reply)[:2])]
    if len(times_s) < 2:
        return 0.0
    true_s = [float(text) for text in NUMBER.findall(answer)]
    return interval_iou((min(times_s), max(times_s)), (true_s[0], true_s[1]))


def _capital(reply: str, letters: str) -> str | None:
    match = re.search(f"[{letters}]", reply)
    return match[0] if match else None


def _plain(text: str) -> str:
    return " ".join(text.lower().translate(SUPERSCRIPTS).split())


def _words(text: str) -> list[str]:
    return [stripped for word in text.split() if (stripped := word.strip(string.punctuation))]


def _matches(reply: str, answer: str) -> bool:
    """Whether one contains the other, first numbers or O(…) agree, or the reply has a short answer's longer words."""
    if answer in reply or reply in answer:
        return True
    numbers = [NUMBER.search(text) for text in (reply, answer)]
    if all(numbers):
        predicted, true = (float(match[0]) for match in numbers if match)
        if abs(predicted - true) < NUMBER_TOLERANCE:
            return True
    words, answer_words = _words(reply), _words(answer)
    if 2 <= len(answer_words) <= 5 and all(word in words for word in answer_words if len(word) > 2):
        return True
    orders = [match and match[0] for match in map(ORDER.search, (reply, answer))]
    return orders[0] is not None and orders[0] == orders[1]
