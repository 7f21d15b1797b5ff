"""The scoring rules of the released evaluation, written from their behavior.

The release's faults are kept, so that scores are comparable with published scores: a letter inside a sentence counts,
for example the A of "A man", and without a letter the reply's first character is the prediction.
"""

import re

RELEASE = "release"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LONE_LETTER = re.compile(r"\b([A-J])\b")
NAMED_LETTER = re.compile(r"[Aa]nswer\s*(?:is|:)\s*([A-J])")
TIME_TAG = re.compile(r"<time>([^<]+)</time>")
# These match like the release's expressions, but have only one way to match a text, and no match begins inside a
# number. The release's expressions take minutes for a reply of two thousand zeros.
NUMBER = r"\d+(?:\.\d*)?"
DASH = r"\s*[-–—]\s*"
CLOCK = r"(\d+):(\d+(?:\.\d+)?)"
CLOCK_RANGE = re.compile(rf"(?<!\d){CLOCK}{DASH}{CLOCK}")
RANGE = re.compile(rf"(?<!\d)({NUMBER}){DASH}({NUMBER})")
START = re.compile(rf"(?:start(?:ing)?|begin(?:ning)?)(?:\s*time)?[:\s]*({NUMBER})", re.IGNORECASE)
END = re.compile(rf"(?:end(?:ing)?|finish(?:ing)?)(?:\s*time)?[:\s]*({NUMBER})", re.IGNORECASE)
MAX_CLOCK_S = 3600.0

Window = tuple[float, float]


def predicted_letter(reply: str) -> str:
    """Finds a letter A to J in the first `<answer>`, after "answer is", or anywhere; else the first character."""
    text = reply.strip()
    block = ANSWER.search(text)
    matches = (block and LONE_LETTER.search(block[1]), NAMED_LETTER.search(text), LONE_LETTER.search(text))
    return next((match[1] for match in matches if match), text[:1])


def predicted_window(reply: str) -> Window | None:
    """Finds MM:SS - MM:SS or a range of numbers, first in `<time>`; else start and end words; else two numbers."""
    tag = TIME_TAG.search(reply)
    for text in ([tag[1]] if tag else []) + [reply]:
        if window := _range_in(text):
            return window
    starts, ends, numbers = START.findall(reply), END.findall(reply), re.findall(NUMBER, reply)
    if starts and ends:
        return float(starts[0]), float(ends[0])
    return (float(numbers[0]), float(numbers[1])) if len(numbers) > 1 else None


def _range_in(text: str) -> Window | None:
    if match := CLOCK_RANGE.search(text):
        start_s, end_s = (60 * float(match[at]) + float(match[at + 1]) for at in (1, 3))
        if start_s < end_s < MAX_CLOCK_S:
            return start_s, end_s
    if match := RANGE.search(text):
        start_s, end_s = float(match[1]), float(match[2])
        if start_s < end_s:
            return start_s, end_s
    return None
