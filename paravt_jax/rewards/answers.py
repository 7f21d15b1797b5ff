"""Parses and compares answers: option letters, time intervals and words.

These functions never raise on the model's text: they return None for an unreadable answer, which earns nothing. They
also parse ground truths, where None means an error in the data.
"""

import math
import re
import string
import unicodedata
from collections import Counter

from rollout.tools import parse_seconds

MARKUP = str.maketrans(
    {"[": "(", "{": "(", "]": ")", "}": ")", "。": ".", "–": "-", "—": "-"} | dict.fromkeys("*_`\"'“”‘’$", "")
)
ELEMENT = re.compile(r"</?[a-z][a-z0-9]{0,9}/?>", re.IGNORECASE)  # an HTML element
BULLETS, MARKS = "-+#>=•→⇒ ", "✅☑✔✓\ufe0f "  # before an option: "- B", "=> B", "#B"; on either side: "B ✅"
WHOLE = re.compile(r"(?:[0-9]{1,2}[.)] ?)?(?:\( ?([A-J]) ?\)[.,:;!?]*|([A-J])[.,:;!?)]*)", re.IGNORECASE)
# Patterns accept at most eight hedges: unbounded, a hedge that can also start a pattern would take quadratic time.
HEDGES = r"is|are|was|be|would|should|must|will|the|correct|right|best|option|choice|letter|its|probably|likely"
# "B. red", "B) red", "B: red" or "B" at the start of a line, but not "e.g." or "A.M."
LISTED = re.compile(r"^([A-J])(?:[.:)](?=\s|$|[^\W\d]{2})|$)", re.IGNORECASE | re.MULTILINE)
# "B - the dog", "B | the dog", "B, the dog", "B (the dog)", "B because …", "B is correct" at the start of the text
LEADING = re.compile(
    r"^([A-HJ])(?= [-|] \w|, \w| ?\(\w{2}| (?:because|since|as)\b| is (?:the )?(?:correct|right|best|answer|true)\b)",
    re.IGNORECASE,
)
BRACKETED = re.compile(r"(?<![\w)])\( ?([A-J]) ?\)", re.IGNORECASE)
STATING = r"answers?|choose|pick|select|(?:id|ill|i would|i will) go with|correct letter|correct(?=\s?:)"
# "option B", "the answer is B", "I choose B", "I'd go with B", "Letter B", not "the answer is D.C." or "option B-roll"
NAMED = re.compile(
    rf"(?:\b(?:{STATING}|options?|choices?)|^(?:the )?letter)\b[\s:=]*"
    rf"(?:\b(?:{HEDGES})\b[\s:=]*){{0,8}}"
    r"\b([A-J])\b(?!-\w|\.\w(?:\.|\b))",
    re.IGNORECASE | re.MULTILINE,
)
# "It's B", "Thus, B."
CONCLUDED = re.compile(
    rf"\b(?:its|it is|thus|so|therefore|hence)\b[\s,:]*(?:\b(?:{HEDGES}|it is)\b[\s:=]*){{0,8}}\b([A-HJ])\b"
    r"(?=\s?(?:$|[.!,;]|or\b|and\b|because\b|since\b))(?!\.\w)",
    re.IGNORECASE | re.MULTILINE,
)
STATED = re.compile(rf"(?:{STATING})\b", re.IGNORECASE)
# after an answer, "Option A is a cat" describes A and does not choose it
DESCRIBED = re.compile(
    r"\s(?:is|shows|says|has|was|describes)\s(?!also|correct|right|true|possible|the\s)", re.IGNORECASE
)
# "B and C", "B, not C", "B (or C)", "A. B."; the separator is empty only in lists like the last
ALSO = re.compile(
    r"\s?\(?((?:(?:[,/|&;+-]|\b(?:and|or|not|nor|but|also|maybe|then)\b)\s?)*)\(?([A-J])\b", re.IGNORECASE
)
# "B. red or C. blue", "The answer is B. It could also be C."
ALTERNATIVE = re.compile(
    r"\b(?:(?:or|and)\s(?:maybe\s)?(?:letter\s|(?=\w[.):]\s?\w{2}))"
    r"|(?:could|may|might|can)\s(?:also\s)?be\s(?:option\s)?\(?)([A-J])\b",
    re.IGNORECASE,
)
# "(B) since (A) is not shown": (A) is a reason, not an answer
REASON = re.compile(rf"\b(because|since|as)\s\([A-J]\)(?={DESCRIBED.pattern})", re.IGNORECASE)
REJECTED = re.compile(r"\b(?:not|nor|neither|except|than|instead of)\s(?:the\s)?$", re.IGNORECASE)
IN_A_SENTENCE = (NAMED, CONCLUDED, ALTERNATIVE)  # in these, "a" and "I" may be words
REJECTED_CHARS = 20  # before an option, searched for REJECTED
# text after the letters "a" and "I"; otherwise they are words
AFTER_LETTER = re.compile(r"\s?(?:$|[.,:;!?)/&\n]|(?:is|are|because|since|as|and|or)\b)", re.IGNORECASE)
OPTION_LINE = re.compile(r"^([A-J])[.):] ?\S.*$", re.MULTILINE)  # an option in a question
LIST_CONTINUES = re.compile(r"\s?(?:$|[.,:;!?)/&\n])")

TIME = re.compile(r"(?<![^\W\d])[0-9.:]+(?![0-9])")
SECONDS_UNIT = r"(?:s|secs?|seconds?)"
CLOCK = re.compile(
    rf"\b([0-9]+)\s?(?:m|mins?|minutes?)\s?([0-9]{{1,2}}(?:\.[0-9]+)?)\s?{SECONDS_UNIT}\b", re.IGNORECASE
)  # "1m10s"
# "in the video of 64 seconds", "of the 64-second video"
LENGTH = re.compile(
    rf"\b(?:in|of)\s(?:the|this|a)\s(?:video\sof\s[0-9.]+\s?{SECONDS_UNIT}|[0-9.]+[-\s]?{SECONDS_UNIT}\svideo)\b",
    re.IGNORECASE,
)
BETWEEN = re.compile(
    rf"\s?{SECONDS_UNIT}?>?\s?(?:,|->|-|–|—|~|to|and|until|till)?\s?"
    rf"(?:<|[\"']?end(?:_time)?[\"']?\s?[:=]\s?|ends\sat\s|{SECONDS_UNIT}\s|t\s?=\s?)?",
    re.IGNORECASE,
)
# No sign, word or number directly before the time, and no noun that makes the number a count.
BEFORE = re.compile(
    r"(?:.*(?<!\bframe)(?<!\bframes)(?<!\bpage)(?<!\bpages)(?<!\bscore)[^\w.:+-])?", re.DOTALL | re.IGNORECASE
)
OTHER_UNITS = (
    r"m|mins?|minutes?|h|hrs?|hours?|ms|frames?|[ap]\.?m|km|cm|mm|kg|g|lbs?|ft|feet|miles?|percent|fps|years?|people"
)
AFTER = re.compile(rf"\s?{SECONDS_UNIT}?(?![\w%])(?!\s(?:{OTHER_UNITS})\b).*", re.I | re.S)

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("/", " ", string.punctuation.replace("/", "") + "“”‘’«»…–—")
UP_TO_20 = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBERS = {word: 10 * ten for ten, word in enumerate(TENS, 2)} | {word: number for number, word in enumerate(UP_TO_20)}
NUMBER_WORDS = re.compile(rf"\b(?:({'|'.join(TENS)})[- ]({'|'.join(UP_TO_20[1:10])})|({'|'.join(NUMBERS)}))\b")


def option_letter(text: str, question: str = "") -> str | None:
    """The option A–J that a text commits to; None if it names none or several.

    With the question, a copied option counts as its letter, even if its text contains other letters.

    Case is ignored if the form is unambiguous ("b", "(b)", "b. red", "option b"). The following text distinguishes the
    words "a" and "I" from letters: "the answer is a man" names none.
    """
    if (copied := _copied_option(text, question)) is not None:
        return copied
    text = unicodedata.normalize("NFKC", ELEMENT.sub("", text)).translate(MARKUP)
    text = text.replace("\\boxed", "").replace("\\text", "")
    lines = [" ".join(line.split()).strip(MARKS).lstrip(BULLETS) for line in text.splitlines()]
    text = REASON.sub(r"\1", "\n".join(line for line in lines if line))
    only = WHOLE.fullmatch(text)
    if only is not None:
        return (only[1] or only[2]).upper()
    named: set[str] = set()
    stated = any(STATED.match(match[0]) for match in NAMED.finditer(text))
    for pattern in (LISTED, LEADING, BRACKETED, *IN_A_SENTENCE):
        for match in pattern.finditer(text):
            if pattern in IN_A_SENTENCE and _is_word(match[1], text, match.end(1)):
                continue
            if stated and pattern is NAMED and not STATED.match(match[0]) and DESCRIBED.match(text, match.end()):
                continue
            if REJECTED.search(text[max(0, match.start() - REJECTED_CHARS) : match.start()]):
                return None  # the text also names an option that it rejects
            named.add(match[1].upper())
            also = ALSO.match(text, match.end())
            if also is not None and _continues(also, text):
                named.add(also[2].upper())
    return named.pop() if len(named) == 1 else None


def may_list(question: str, letter: str) -> bool:
    """False only if the question lists options A, B … on lines of their own, and names this letter nowhere."""
    listed = {match[1] for match in OPTION_LINE.finditer(question)}
    return not {"A", "B"} <= listed or re.search(rf"\b{letter}\b", question) is not None


def _copied_option(text: str, question: str) -> str | None:
    """The letter of the question's option whose line the text copies."""
    lines = {" ".join(match[0].split()): match[1] for match in OPTION_LINE.finditer(question)}
    return lines.get(" ".join(text.split()))


def _is_word(letter: str, text: str, end: int) -> bool:
    return letter in "aAiI" and AFTER_LETTER.match(text, end) is None


def _continues(also: re.Match[str], text: str) -> bool:
    if not also[1]:
        return LIST_CONTINUES.match(text, also.end(2)) is not None
    return not _is_word(also[2], text, also.end(2))


def interval(text: str) -> tuple[float, float] | None:
    """The interval in a text, in seconds, in the order written; None if the text has none or several."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = LENGTH.sub("", CLOCK.sub(r"\1:\2", text))
    times = [time for time in TIME.finditer(text) if time[0].strip(".:")]  # skips a lone full stop
    if len(times) != 2:
        return None
    first, second = times
    start_s, end_s = (parse_seconds(time[0].removesuffix(".")) for time in times)  # a full stop may end the sentence
    if start_s is None or end_s is None or not math.isfinite(start_s) or not math.isfinite(end_s):
        return None
    between = text[first.end() : second.start()]
    if BETWEEN.fullmatch(between) is None:
        return None
    if not between.strip() and (text[: first.start()][-1:], text[second.end() :][:1]) not in (("[", "]"), ("(", ")")):
        return None  # two adjacent numbers are an interval only in brackets
    if BEFORE.fullmatch(text[: first.start()]) is None or AFTER.fullmatch(text[second.end() :]) is None:
        return None
    return start_s, end_s


def interval_iou(predicted: tuple[float | int, float | int], true: tuple[float | int, float | int]) -> float:
    """Intersection over union; 0 if an interval is empty or reversed."""
    shared_s = min(predicted[1], true[1]) - max(predicted[0], true[0])
    if shared_s <= 0:
        return 0.0
    return shared_s / (max(predicted[1], true[1]) - min(predicted[0], true[0]))


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces.

    DIFFERS from SQuAD: accents are removed, a slash separates words, and number words up to ninety-nine become digits.
    """
    text = "".join(char for char in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(char))
    text = NUMBER_WORDS.sub(lambda words: str(sum(NUMBERS[word] for word in words.groups() if word)), text)
    return " ".join(ARTICLES.sub(" ", text.translate(NO_PUNCTUATION)).split())


def token_f1(prediction: str, truth: str) -> float:
    """Multiset F1 of the normalized words. DIFFERS from SQuAD: two empty texts do not match."""
    predicted, true = Counter(normalised(prediction).split()), Counter(normalised(truth).split())
    num_shared = (predicted & true).total()
    return 2 * num_shared / (predicted.total() + true.total()) if num_shared else 0.0


def exact_match(prediction: str, truth: str) -> float:
    return float(normalised(prediction) == normalised(truth) != "")
