"""Sequential tool turns become parallel ones: which may be merged, and what the merged turn says. Pure functions.

A turn is a candidate where it is `<think>…</think><tool_call>…</tool_call>` with one call that can be carried out, and
one tool message follows. Candidates that follow each other directly are merged as long as none of them depended on what
an earlier one of the same merged turn was answered. A call depends on an earlier answer, by its text alone, where

1. the answer was an error, which it may mend;
2. its window lies inside the window of the earlier call on the same video: it zooms in, or looks again;
3. its thinking cites an answer, in words such as "the summary shows" or "the previous crop" (`CITES`);
4. its window begins or ends at a number that the answer names, or holds a time that the answer names and that lies
   outside the windows asked for so far, or its thinking names a time that the answer names. A number in the question,
   in anything else before the merged turn, in its first thinking, or in the windows asked for so far is no evidence.

The rule errs to one side: what only seems to depend stays as it was, and costs a merge.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paravt_jax.rewards.grammar import TAG
from rollout.tools import BadCall, find_calls, window_of

ERROR = "follows an error"
ZOOM = "zooms into an earlier window"
CITED = "thinking cites an earlier answer"
TIME = "uses a time of an earlier answer"
LIMIT = "as many calls as allowed"
SEVERAL = "several calls already"
GRAMMAR = "turn outside the grammar"
FAULTY = "faulty call"
OTHER_TOOL = "call of another tool"
ANSWERS = "not one answer to one call"

TURN = re.compile(r"\s*<think>(.*?)</think>\s*(<tool_call>(.*?)</tool_call>)\s*", re.DOTALL)
FRAME_LABEL = re.compile(r"<\s*\d+(?:\.\d+)?\s*(?:s|sec|seconds?)\s*>")  # the time before a frame, which says nothing
_UNIT = r"(?:s|secs?|seconds?|m|mins?|minutes?)\b"
MENTION = re.compile(
    r"(?<![\w.:])(?:(?:(\d{1,3}):)?(\d{1,3}):(\d{2}(?:\.\d+)?)|(\d+(?:\.\d+)?))(?![\d:])"
    rf"(?:\s*-?\s*({_UNIT})|(?=\s*(?:-|–|to|and)\s*\d+(?:\.\d+)?\s*({_UNIT})))?",
    re.IGNORECASE,
)
BEFORE_CHARS = 60  # of a thinking, that say what a word in it is about
ROUND_DIGITS = 1  # of seconds, to which times are equal

_RESULT = (
    r"(?:summar(?:y|ies)|crops?|clips?|segments?|frames?|results?|responses?|observations?|outputs?|reports?|tool)"
)
_SHOWS = (
    r"(?:show(?:s|ed)?|reveal\w*|confirm\w*|indicat\w*|sa(?:y|ys|id)|mention\w*|describ\w*|contain\w*|depict\w*|"
    r"suggest\w*|report(?:s|ed)|states?|stated|tells?|told|did(?:n't| not)|do(?:es)?(?:n't| not)|ha[ds] no|lack\w*)"
)
_MODAL = (
    r"(?:may|might|could|can|should|would|will|must|if|whether|to(?!\W+\d))"  # what something may show was not seen yet
)
_QUESTION = r"(?:question|options?|choices|overview|quer(?:y|ies)|task|video|duration|initial|sampled|given)"
CITES = re.compile(
    rf"\b{_RESULT}\b(?:\W+(?!{_MODAL}\b)\w+){{0,4}}?\W+{_SHOWS}\b"
    rf"|\b(?:previous|prior|preceding|above|returned|cropped)\s+(?:tool\s+)?(?:{_RESULT}|windows?|calls?|parts?|search)\b"
    r"|\b(?:earlier|last|first|second|third|other)\s+(?:tool\s+)?"
    r"(?:crops?|summar(?:y|ies)|results?|responses?|reports?|outputs?|calls?|search|look|answers?)\b"
    rf"|\b(?:based on|according to|judging by|given)\s+(?:the|this|that|these|those|its|what)\b(?!\s+{_QUESTION}\b)"
    r"|\bas (?:shown|seen|mentioned|described|noted|reported|stated|found|observed)\b"
    r"|\b(?:I|we)(?:'ve| have| had)?(?: just| now| already| can| could)* "
    r"(?:saw|seen?|found|learn(?:ed|t)|confirmed|discovered|noticed|observed|located|know|knew)\b"
    r"|\b(?:narrow(?:ed|ing)?|refin(?:e|ed|ing)|again|re-?check\w*|double.?check\w*|instead)\b"
    r"|\bstill\s+(?:not|need|unclear|un\w+|do(?:es)?(?:n't| not))\b"
    r"|\b(?:nothing|not|none)\s+(?:(?:is|was|happens?|happened|seen|found)\s+)?(?:there|in (?:that|this|it))\b",
    re.IGNORECASE,
)
# Words before it that make it about the overview, or about what is not known yet.
NOT_CITED = re.compile(
    r"\b(?:overview|initial|given|sampled|sparse)\W+(?:\w+\W+)?$|\b(?:if|whether)\W+(?:\w+\W+){0,2}$", re.IGNORECASE
)


@dataclass(frozen=True)
class ToolTurn:
    """A candidate: one call and its answer."""

    at: int  # the number of the assistant's message; the answer is the next
    think: str
    block: str  # the call as it stands, tags included
    video: str | None
    window_s: tuple[float, float]
    answer: str


@dataclass(frozen=True)
class Stop:
    """Why a tool turn was not merged into what came before it."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Merging:
    groups: tuple[tuple[ToolTurn, ...], ...]  # of candidates, in order; those of one turn are not merged
    stops: tuple[Stop, ...]

    @property
    def merges(self) -> bool:
        return any(len(group) > 1 for group in self.groups)


@dataclass(frozen=True)
class Times:
    numbers: frozenset[float]  # every number, as seconds where it has a unit
    named: frozenset[float]  # those written as times: with a unit, or MM:SS

    @classmethod
    def of(cls, text: str) -> "Times":
        numbers, named = set(), set()
        for hours, minutes, seconds, number, unit, unit_of_range in MENTION.findall(text):
            unit = unit or unit_of_range
            value = float(number) if number else int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
            value = _rounded(value * 60 if unit.lower().startswith("m") else value)
            numbers.add(value)
            if unit or not number:
                named.add(value)
        return cls(frozenset(numbers), frozenset(named))


def text_of(message: dict[str, Any]) -> str:
    """All that a message says, without pictures and videos."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with this text as its content, in the form that its content has."""
    is_list = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if is_list else text}


def shows_frames(message: dict[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def tool_turns(messages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Numbers of the messages of every tool turn: the assistant's, then its answers."""
    turns: list[list[int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            continue
        if messages[number - 1]["role"] == "assistant":
            turns.append([number - 1])
        turns[-1].append(number)
    return turns


def candidate(messages: Sequence[dict[str, Any]], turn: Sequence[int], answer: str) -> ToolTurn | Stop:
    """`answer` is what the tool is known to have said."""
    said = text_of(messages[turn[0]])
    calls = find_calls(said)
    if len(calls) > 1:
        return Stop(SEVERAL, f"{len(calls)} calls")
    match = TURN.fullmatch(said)
    if match is None or TAG.search(match[1]) or TAG.search(match[3]) or not match[1].strip() or len(calls) != 1:
        return Stop(GRAMMAR, _short(said))
    if calls[0].problem is not None and calls[0].problem.outcome == "unknown_tool":
        return Stop(OTHER_TOOL, calls[0].name)
    if len(turn) != 2:
        return Stop(ANSWERS, f"{len(turn) - 1} answers")
    try:
        if calls[0].problem is not None:
            raise calls[0].problem
        window = window_of(calls[0].arguments, float("inf"))
    except BadCall as problem:
        return Stop(FAULTY, f"{problem}: {_short(match[3])}")
    video = calls[0].arguments.get("video_path")
    return ToolTurn(
        turn[0],
        match[1].strip(),
        match[2],
        video if isinstance(video, str) else None,
        (_rounded(window.start_s), _rounded(window.end_s)),
        answer,
    )


def make_plan(messages: Sequence[dict[str, Any]], answers: dict[int, str], max_parallel: int) -> Merging:
    """Which tool turns become one. `answers` are the texts of tool messages, by their numbers."""
    groups: list[list[ToolTurn]] = []
    stops: list[Stop] = []
    known = Times(frozenset(), frozenset())
    is_open = False  # the last group can take another turn
    for turn in tool_turns(messages):
        tool_turn = candidate(messages, turn, "".join(answers[number] for number in turn[1:]))
        if isinstance(tool_turn, Stop):
            stops.append(tool_turn)
            is_open = False
            continue
        follows = is_open and groups[-1][-1].at + 2 == tool_turn.at
        stop = _stop(tool_turn, groups[-1], known, max_parallel) if follows else None
        if follows and stop is None:
            groups[-1].append(tool_turn)
            continue
        if stop is not None:
            stops.append(stop)
        groups.append([tool_turn])
        is_open = True
        before = [answers.get(number) or text_of(message) for number, message in enumerate(messages[: tool_turn.at])]
        known = Times.of("\n".join([*before, tool_turn.think]))
    return Merging(tuple(map(tuple, groups)), tuple(stops))


def _stop(turn: ToolTurn, group: Sequence[ToolTurn], known: Times, max_parallel: int) -> Stop | None:
    reason = dependence(turn, group, known)
    if reason is None and len(group) >= max_parallel:
        return Stop(LIMIT, f"{max_parallel} calls a turn")
    return reason


def dependence(turn: ToolTurn, group: Sequence[ToolTurn], known: Times) -> Stop | None:
    """How a call depended on the answers to `group`, or None. The rule is that of the module."""
    start_s, end_s = turn.window_s
    for before in group:
        if before.answer.lstrip().lower().startswith("error"):
            return Stop(ERROR, _short(before.answer))
    for before in group:
        same_video = None in (turn.video, before.video) or turn.video == before.video
        if same_video and before.window_s[0] <= start_s and end_s <= before.window_s[1]:
            return Stop(ZOOM, f"{_window(turn)} in {_window(before)}")
    if (cited := cited_answer(turn.think)) is not None:
        return Stop(CITED, _short(cited))
    asked = {time for before in group for time in before.window_s} | {0.0}
    thought = Times.of(turn.think)
    for before in group:
        answer = Times.of(before.answer)
        news = answer.numbers - known.numbers - asked
        for time in sorted(news & {start_s, end_s}):
            return Stop(TIME, f"{_window(turn)} begins or ends at {time:g}, named in {_short(before.answer)!r}")
        named = answer.named - known.numbers - asked
        for time in sorted(named & thought.named):
            return Stop(TIME, f"the thinking names {time:g}, as does {_short(before.answer)!r}")
        for time in sorted(named):
            seen = any(other.window_s[0] <= time <= other.window_s[1] for other in group)
            if start_s <= time <= end_s and not seen:
                return Stop(TIME, f"{_window(turn)} holds {time:g}, named in {_short(before.answer)!r}")
    return None


def cited_answer(thinking: str) -> str | None:
    """The words by which a thinking refers to what a tool said, if it does."""
    for cited in CITES.finditer(thinking):
        if not NOT_CITED.search(thinking[max(0, cited.start() - BEFORE_CHARS) : cited.start()]):
            return cited.group()
    return None


def merged(messages: Sequence[dict[str, Any]], groups: Iterable[Sequence[ToolTurn]]) -> list[dict[str, Any]]:
    """The dialogue with every group as one turn, followed by the answers in the order of the calls."""
    rewritten = list(messages)
    for group in sorted(groups, key=lambda group: -group[0].at):  # from the end, so that numbers stay right
        if len(group) < 2:
            continue
        first, last = group[0].at, group[-1].at + 1
        answers = [messages[turn.at + 1] for turn in group]
        rewritten[first : last + 1] = [with_text(messages[first], merged_text(group)), *answers]
    return rewritten


def merged_text(group: Sequence[ToolTurn]) -> str:
    """One thinking, in which no thought comes twice, and the calls as they stand."""
    thinking = "\n\n".join(dict.fromkeys(turn.think for turn in group))
    return f"<think>\n{thinking}\n</think>\n" + "\n".join(turn.block for turn in group)


def heard(text: str) -> str:
    """What an answer with frames says, without the times before its frames."""
    return FRAME_LABEL.sub(" ", text)


def _rounded(seconds: float) -> float:
    return round(seconds, ROUND_DIGITS)


def _window(turn: ToolTurn) -> str:
    return f"{turn.window_s[0]:g}–{turn.window_s[1]:g} s"


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= 100 else f"{plain[:99]}…"
