"""Subtitles as people leave them: SRT in any encoding, whole or damaged. What is no cue is passed over."""

import re
from typing import NamedTuple

CLOCK = r"(\d{1,3}):(\d{1,2}):(\d{1,2})[,.](\d{1,3})"
TIMES = re.compile(rf"\s*{CLOCK}\s*-->\s*{CLOCK}", re.ASCII)
MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")  # <i>, and where on the screen a line stands


class Cue(NamedTuple):
    start_s: float
    end_s: float
    text: str


def parse_srt(content: bytes) -> list[Cue]:
    """The cues in the order of the file, the text of each on one line."""
    found: list[tuple[float, float, list[str]]] = []
    goes_on = False
    for line in _decoded(content).splitlines():
        if times := TIMES.match(line):
            if goes_on and found[-1][2] and found[-1][2][-1].isdecimal():
                found[-1][2].pop()  # the number of this cue, which no blank line parts from the one before
            found.append((_seconds(*times.groups()[:4]), _seconds(*times.groups()[4:]), []))
            goes_on = True
        elif not line.strip():
            goes_on = False
        elif goes_on:
            found[-1][2].extend(MARKUP.sub("", line).split())
    return [Cue(start_s, end_s, " ".join(words)) for start_s, end_s, words in found if words]


def _seconds(hours: str, minutes: str, seconds: str, decimals: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{decimals}")


def _decoded(content: bytes) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # what editors on Windows wrote for long
        return content.decode("cp1252", errors="replace")
