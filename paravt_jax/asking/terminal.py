"""Shows a question in a terminal: one line per event, and the windows of a turn as bars of the video.

Nothing is overwritten, so the output also reads well in a log. Control characters in the model's text are escaped.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from model_port.terminal import visible
from paravt_jax.asking.answerer import Listener, Reply, Seconds
from rollout.prompter import Overview
from rollout.records import Call, Turn
from rollout.tools import BadCall, ToolCall, Window, video_of, window_of

BAR_COLUMNS, NAME_COLUMNS = 40, 10
MAX_REPORT_CHARS = 300
ENDINGS = {
    "done": "the model said nothing",
    "length": "the turn was longer than its tokens; --frames with a smaller number leaves more of the context",
    "context": "the context is full; --frames with a smaller number leaves more of it",
    "abort": "it was aborted",
}
TAG = re.compile(r"</?(?:think|answer)>\n?")
OPEN_TAG = re.compile(r"</?\w{0,10}$|\ufffd$")  # may become a tag, or a character, with the next token


class Live(Listener):
    """Passes the progress of a question to `write`."""

    wants_tokens = True

    def __init__(self, write: Callable[[str], object]):
        self._write = write
        self._overview: Overview | None = None
        self._turn, self._said = -1, 0

    def looked(self, overview: Overview, seconds: float) -> None:
        self._overview = overview
        for path, info in overview.videos.items():
            called = next(name for name, of_path in overview.names.items() if of_path == path)
            self._say(
                "video", f"{visible(path)}, {clock(info.duration_s)}" + f" (as {called})" * (len(overview.videos) > 1)
            )
        self._say("overview", f"{len(overview.pictures)} frames, {seconds:.1f} s")

    def on_text(self, turn_number: int, text: str) -> None:
        """Appends the turn's new text; calls are shown when they are made."""
        if turn_number != self._turn:
            self._turn, self._said = turn_number, 0
            self._write(f"{'thinking':<{NAME_COLUMNS}}")
        words = spoken(text)
        self._write(words[self._said :].replace("\n", f"\n{'':{NAME_COLUMNS}}"))
        self._said = max(self._said, len(words))

    def on_calls(self, turn: Turn, calls: Sequence[ToolCall]) -> None:
        self._write("\n")
        for number, call in enumerate(calls, 1):
            self._say(f"call {number}", self._drawn(call))

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        said = call.response if call.outcome == "ok" else f"{call.outcome}: {call.response}"
        self._say(f"report {number + 1}", f"({call.latency_s:.1f} s) {cut(' '.join(visible(said).split()))}")

    def _drawn(self, call: ToolCall) -> str:
        assert self._overview is not None, "an episode begins with its overview"
        try:
            path = video_of(call.arguments, self._overview.names)
            duration_s = float(self._overview.videos[path].duration_s)
            window = window_of(call.arguments, duration_s)
        except BadCall:
            return visible(f"{call.name or 'no call that can be read'} {dict(call.arguments) or ''}")[:MAX_REPORT_CHARS]
        return f"|{bar(window, duration_s)}| {clock(window.start_s)} to {clock(window.end_s)}"

    def _say(self, name: str, text: str) -> None:
        self._write(f"{name:<{NAME_COLUMNS}}{text}\n")


def spoken(text: str) -> str:
    """The text of a turn without tags and calls, and without an incomplete tag or trailing whitespace at its end."""
    return visible(OPEN_TAG.sub("", TAG.sub("", text.partition("<tool_")[0]))).rstrip()


def bar(window: Window, duration_s: float | int) -> str:
    """Draws a window within a video, at least one column wide."""
    begin = min(int(window.start_s / duration_s * BAR_COLUMNS), BAR_COLUMNS - 1)
    end = max(begin + 1, min(BAR_COLUMNS, round(window.end_s / duration_s * BAR_COLUMNS)))
    return "·" * begin + "█" * (end - begin) + "·" * (BAR_COLUMNS - end)


def clock(seconds: float | int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"


def summary(answer: Reply) -> Iterator[str]:
    """The answer's evidence and times, or why there is no answer."""
    if not answer.text:
        yield f"{'no answer':<{NAME_COLUMNS}}{ENDINGS[answer.finish]}"
    windows = [f"{one.video} {clock(one.start_s)} to {clock(one.end_s)}" for one in answer.evidence]
    yield f"{'rests on':<{NAME_COLUMNS}}{', '.join(map(visible, windows)) or 'the overview alone'}"
    yield f"{'time':<{NAME_COLUMNS}}{', '.join(_times(answer.seconds))}"


def _times(seconds: Seconds) -> Iterator[str]:
    yield f"{seconds.total:.1f} s: overview {seconds.overview:.1f}"
    yield f"thinking {sum(seconds.turns):.1f}"
    if seconds.calls:
        yield f"calls {sum(seconds.calls):.1f} (one after the other: {sum(seconds.calls_in_turn):.1f})"


def cut(text: str) -> str:
    return text if len(text) <= MAX_REPORT_CHARS else f"{text[: MAX_REPORT_CHARS - 1]}…"
