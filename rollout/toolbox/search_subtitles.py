"""Searches a video's subtitles without a model, and lists the matching lines with their times."""

import re
import stat
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.parts import cut
from rollout.toolbox.subtitles import Cue, parse_srt
from rollout.toolbox.tool import Tool, ToolArgs, ToolContext, Videos
from rollout.tools import VIDEO_PATH, BadCall, ToolSpec, make_schema

MAX_QUERY_CHARS = 200
MAX_HITS = 20
MAX_LINE_CHARS = 200
MAX_FILE_BYTES = 4 * 2**20  # twenty times the subtitles of a film
WORD = re.compile(r"\w+")

SEARCH_SUBTITLES_SPEC = ToolSpec(
    make_schema(
        "search_subtitles",
        "Searches the subtitles of a video for words and lists the lines that have them, with their times.",
        video_path=VIDEO_PATH,
        query=("string", "The words to look for."),
    ),
    usage="search_subtitles for words that are spoken",
    effect="the lines with the words are listed with their times",
)


class SearchSubtitles(Tool):
    spec = SEARCH_SUBTITLES_SPEC

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        path, query = videos.path_of(arguments), arguments.get("query")
        if not isinstance(query, str) or not words_of(query[: MAX_QUERY_CHARS + 1]):
            raise BadCall("query has no word to look for")
        if len(query) > MAX_QUERY_CHARS:
            raise BadCall(f"query has more than {MAX_QUERY_CHARS} characters")
        if not videos.subtitles.get(path):
            raise BadCall("this video has no subtitles", "error")
        return ToolArgs(path, query=query)

    def run(self, args: ToolArgs, context: ToolContext) -> str:
        return search(parse_srt(subtitle_file(context.videos.subtitles[args.path])), args.query)


def search(cues: Sequence[Cue], query: str) -> str:
    """Lists the lines that contain the most words of the query."""
    words = set(words_of(query))
    counts = [len(words.intersection(words_of(cue.text))) for cue in cues]
    most = max(counts, default=0)
    if not most:
        return f"None of the {len(cues)} lines of the subtitles has these words."
    hits = [cue for cue, count in zip(cues, counts, strict=True) if count == most]
    which = "all of these words" if most == len(words) else f"{most} of these {len(words)} words"
    lines = [f"Lines of the subtitles with {which}, {len(hits)} of {len(cues)}:", *map(_line, hits[:MAX_HITS])]
    return "\n".join([*lines, *([f"The first {MAX_HITS} are listed."] if len(hits) > MAX_HITS else [])])


def words_of(text: str) -> list[str]:
    """Splits a text into words for comparison: casefolded and in Unicode's NFKC form."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _line(cue: Cue) -> str:
    return f"{cue.start_s:.1f} to {cue.end_s:.1f} seconds: {cut(cue.text, MAX_LINE_CHARS)}"


def subtitle_file(path: str) -> bytes:
    """Reads a subtitle file; raises a BadCall if it cannot be read."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # reading a pipe might never end
            raise BadCall("the subtitles cannot be read", "error")
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        raise BadCall("the subtitles cannot be read", "error") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadCall("the subtitles are too large", "error")
    return content
