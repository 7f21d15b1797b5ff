"""Parses SRT subtitles in UTF-8, UTF-16 or Windows' cp1252, even if damaged. Skips lines that belong to no cue."""

import re
from pathlib import Path
from typing import NamedTuple

CLOCK = r"(\d{1,3}):(\d{1,2}):(\d{1,2})[,.](\d{1,3})"
TIMES = re.compile(rf"\s*{CLOCK}\s*-->\s*{CLOCK}", re.ASCII)
MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")  # <i>, and positions on the screen


class Cue(NamedTuple):
    start_s: float
    end_s: float
    text: str


def subtitles_beside(video: str) -> Path:
    """The path of a video's subtitle file, unless another is named. The file may not exist."""
    return Path(video).with_suffix(".srt")


def parse_srt(content: bytes) -> list[Cue]:
    """Returns the cues in file order, each with its text on one line."""
    cues: list[tuple[float, float, list[str]]] = []
    in_cue = False
    for line in _decoded(content).splitlines():
        if times := TIMES.match(line):
            if in_cue and cues[-1][2] and cues[-1][2][-1].isdecimal():
                cues[-1][2].pop()  # this cue's number, if no blank line separates it from the previous cue
            cues.append((_seconds(*times.groups()[:4]), _seconds(*times.groups()[4:]), []))
            in_cue = True
        elif not line.strip():
            in_cue = False
        elif in_cue:
            cues[-1][2].extend(MARKUP.sub("", line).split())
    return [Cue(start_s, end_s, " ".join(words)) for start_s, end_s, words in cues if words]


def _seconds(hours: str, minutes: str, seconds: str, decimals: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{decimals}")


def _decoded(content: bytes) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # older Windows editors wrote cp1252
        return content.decode("cp1252", errors="replace")
