"""Prints a question's progress in a terminal: a line per event, and each call's window as a bar.

Lines are never overwritten, so the output is also readable in a log. Control characters in model text are escaped.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from model_port.hf_files import RECIPE_FILE
from model_port.progress import in_units
from model_port.terminal import visible
from paravt_jax.asking.answerer import Answer, Listener, Seconds
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Overview
from rollout.records import Call, Turn
from rollout.tools import BadCall, ToolCall, Window, video_of, window_of

BAR_COLUMNS, NAME_COLUMNS = 40, 10
MAX_REPORT_CHARS = 300
IN_RECIPE = (
    f"{RECIPE_FILE} of the model's Hugging Face directory, which may not have that file yet; a checkpoint with changed "
    f"files counts as damaged"
)
TAG = re.compile(r"</?(?:think|answer)>\n?")
OPEN_TAG = re.compile(r"</?\w{0,10}$|\ufffd$")  # the next token may complete it to a tag or a character


class TextStream:
    """Returns only the new part of a turn's growing text."""

    def __init__(self) -> None:
        self._turn, self._num_chars = -1, 0

    def next_part(self, turn_number: int, text: str) -> tuple[str, bool]:
        """The new part of a turn's displayed text, and whether it is the turn's first part."""
        is_first = turn_number != self._turn
        if is_first:
            self._turn, self._num_chars = turn_number, 0
        displayed = displayed_text(text)
        part = displayed[self._num_chars :]
        self._num_chars = max(self._num_chars, len(displayed))
        return part, is_first


class Live(Listener):
    """Passes the progress of a question to `write`."""

    wants_tokens = True

    def __init__(self, write: Callable[[str], object]):
        self._write = write
        self._overview: Overview | None = None
        self._text = TextStream()

    def on_overview(self, overview: Overview) -> None:
        self._overview = overview
        names = {path: name for name, path in reversed(overview.names.items())}  # the first name of each path
        for path, info in overview.videos.items():
            name = f" (as {names[path]})" if len(overview.videos) > 1 else ""
            self._write_line("video", f"{visible(path)}, {clock(info.duration_s)}{name}")
        self._write_line("overview", f"{in_units([len(overview.pictures)], 'frame')}, {overview.seconds:.1f} s")

    def on_text(self, turn_number: int, text: str) -> None:
        """Appends the turn's new text; calls are shown when they are made."""
        part, is_first = self._text.next_part(turn_number, text)
        if is_first:
            self._write(f"{'thinking':<{NAME_COLUMNS}}")
        self._write(part.replace("\n", f"\n{'':{NAME_COLUMNS}}"))

    def on_calls(self, turn: Turn, calls: Sequence[ToolCall]) -> None:
        self._write("\n")
        for number, call in enumerate(calls, 1):
            self._write_line(f"call {number}", self._bar_of(call))

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        report = call.response if call.outcome == "ok" else f"{call.outcome}: {call.response}"
        report = " ".join(visible(report).split())
        if len(report) > MAX_REPORT_CHARS:
            report = f"{report[: MAX_REPORT_CHARS - 1]}…"
        self._write_line(f"report {number + 1}", f"({call.latency_s:.1f} s) {report}")

    def _bar_of(self, call: ToolCall) -> str:
        assert self._overview is not None, "an episode starts with its overview"
        try:
            path = video_of(call.arguments, self._overview.names)
            duration_s = float(self._overview.videos[path].duration_s)
            window = window_of(call.arguments, duration_s)
        except BadCall:
            return visible(f"{call.name or 'unreadable call'} {dict(call.arguments) or ''}")[:MAX_REPORT_CHARS]
        return f"|{bar(window, duration_s)}| {clock(window.start_s)} to {clock(window.end_s)}"

    def _write_line(self, name: str, text: str) -> None:
        self._write(f"{name:<{NAME_COLUMNS}}{text}\n")


def displayed_text(text: str) -> str:
    """A turn's thinking and the text before its calls, without tags, an incomplete tag at the end, and final spaces.

    In a turn without calls, the text after the thinking is the answer, which is shown separately.
    """
    text, call, _ = text.partition("<tool_")
    if not call:
        thinking, closing, _ = text.rpartition("</think>")
        text = thinking if closing else text.partition("<answer>")[0]
    return visible(OPEN_TAG.sub("", TAG.sub("", text))).rstrip()


def bar(window: Window, duration_s: float | int) -> str:
    """Draws a window within a video, at least one column wide."""
    begin = min(int(window.start_s / duration_s * BAR_COLUMNS), BAR_COLUMNS - 1)
    end = max(begin + 1, min(BAR_COLUMNS, round(window.end_s / duration_s * BAR_COLUMNS)))
    return "·" * begin + "█" * (end - begin) + "·" * (BAR_COLUMNS - end)


def clock(seconds: float | int) -> str:
    minutes, seconds = divmod(round(seconds, 1), 60)  # rounded first, so that 59.96 s becomes 1:00.0
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{seconds:04.1f}" if hours else f"{minutes}:{seconds:04.1f}"


def why_no_answer(answer: Answer, config: EpisodeConfig, *, has_recipe: bool = True) -> str:
    """The limit that the episode reached, with a way to raise it; empty if there is an answer.

    A model behind an endpoint has no recipe, so its limits are the defaults.
    """
    if answer.text:
        return ""
    if answer.finish == "done":
        return "the model's answer is empty"
    if answer.finish == "abort":
        return "the episode was aborted"
    if answer.finish == "length" and answer.episode.turns[-1].num_tokens >= config.max_new_tokens:
        reached = f"the turn reached its limit of {config.max_new_tokens:,} tokens"
        return (
            f"{reached}; raise rollout.max_new_tokens in {IN_RECIPE}"
            if has_recipe
            else f"{reached}, which --endpoint cannot raise"
        )
    if answer.finish == "length" and not has_recipe:
        num_tokens = answer.episode.turns[-1].num_tokens
        return (
            f"the endpoint cut the turn off after {num_tokens:,} tokens; raise its limits, or pass a smaller --frames"
        )
    full = f"the context of {config.max_context_tokens:,} tokens is full; pass a smaller --frames"
    return f"{full}, or raise rollout.max_context_tokens in {IN_RECIPE}" if has_recipe else full


def summary(answer: Answer) -> Iterator[str]:
    """The answer's evidence and times."""
    windows = [f"{part.video} {clock(part.start_s)} to {clock(part.end_s)}" for part in answer.evidence]
    yield f"{'evidence':<{NAME_COLUMNS}}{', '.join(map(visible, windows)) or 'only the prompt'}"
    yield f"{'time':<{NAME_COLUMNS}}{', '.join(_times(answer.seconds))}"


def _times(seconds: Seconds) -> Iterator[str]:
    yield f"{seconds.total:.1f} s: overview {seconds.overview:.1f}"
    yield f"thinking {sum(seconds.turns):.1f}"
    if seconds.calls:
        yield f"calls {sum(seconds.calls):.1f} (sequentially: {sum(seconds.calls_in_turn):.1f})"
