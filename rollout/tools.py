"""Parses the tool calls in a model's text and their arguments. `rollout.toolbox` runs the calls.

The trained form is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. The base model sometimes writes
`<tool_code>crop_video(…)</tool_code>` instead, a Python call that is parsed as data and never run as Python. All
functions here are pure functions of untrusted text; errors become sentences for the model.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rollout.video.box import Box

CROP_VIDEO = "crop_video"
MAX_CALLS = 64  # per turn; further calls are ignored
MAX_CALL_CHARS = 4_000  # bounds the nesting depth, and with it the parsers' stack
MIN_BOX_FRAC = 0.02  # fraction of a frame's side; a thinner box has no valid picture size
BOX_DIGITS = 4  # finer than a pixel
CLOCK = re.compile(r"(?:(\d{1,3}):)?(\d{1,3}):(\d{1,2}(?:\.\d+)?)")
NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?|[+-]?\.\d+")
OPENING = re.compile(r"<tool_(call|code)>")

Outcome = Literal["ok", "invalid", "unknown_tool", "error", "timeout"]

Signatures = Mapping[str, Sequence[str]]  # callable tools: name -> ordered parameters
_Parsed = list[tuple[str, dict[str, Any]]]  # names and arguments


@dataclass(frozen=True)
class ToolSpec:
    """The description of a tool for the model: its schema, and texts for the prompt."""

    schema: dict[str, Any]
    usage: str  # completes the prompt's "call …"
    effect: str  # describes the call's result in the same sentence

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.schema["function"]["parameters"]["properties"])


def make_schema(name: str, description: str, **parameters: tuple[str, str]) -> dict[str, Any]:
    """Makes a tool's schema for the chat template. A parameter has a JSON type and a description; all are required."""
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


VIDEO_PATH = ("string", "The video, by the name given above.")


def _crop_spec(description: str, effect: str) -> ToolSpec:
    schema = make_schema(
        CROP_VIDEO,
        description,
        video_path=VIDEO_PATH,
        start_time=("number", "Where the part begins, in seconds."),
        end_time=("number", "Where the part ends, in seconds."),
    )
    return ToolSpec(schema, f"{CROP_VIDEO} on the parts of the video that matter", effect)


CROP_VIDEO_SPEC = _crop_spec(
    "Looks closely at one part of a video and reports what happens in it.",
    "each part is looked at closely and reported on",
)
CROP_FRAMES_SPEC = _crop_spec(
    "Shows you the frames of one part of a video.", "the frames of each part are shown to you"
)
CROP_VIDEO_SCHEMA = CROP_VIDEO_SPEC.schema
CROP_VIDEO_ALONE: Signatures = {CROP_VIDEO: CROP_VIDEO_SPEC.parameters}


class BadCall(ValueError):
    """A call is invalid. The model gets the message."""

    def __init__(self, message: str, outcome: Outcome = "invalid"):
        super().__init__(message)
        self.outcome: Outcome = outcome


@dataclass(frozen=True)
class ToolCall:
    """A call in a turn. `problem` is set if it is not a valid call of an available tool."""

    span: tuple[int, int]  # characters of the turn, including tags
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: BadCall | None = None

    @property
    def well_formed(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Window:
    """A part of a video, which a call asks for."""

    start_s: float
    end_s: float
    clamped: bool = False  # the requested end is beyond the end of the video


def find_calls(text: str, tools: Signatures = CROP_VIDEO_ALONE) -> list[ToolCall]:
    """Returns a turn's calls in order, up to MAX_CALLS: those after its first `</think>`; without one, all."""
    begin = text.find("</think>") + 1  # 0 without one
    calls: list[ToolCall] = []
    while len(calls) < MAX_CALLS and (opening := OPENING.search(text, begin)) is not None:
        kind = opening.group(1)
        closing = text.find(f"</tool_{kind}>", opening.end())
        following = OPENING.search(text, opening.end())
        if closing < 0 or (following is not None and following.start() < closing):
            begin = following.start() if following is not None else len(text)
            problem = BadCall(f"the call was not closed with </tool_{kind}>")
            calls.append(ToolCall((opening.start(), begin), problem=problem))
            continue
        begin = closing + len(f"</tool_{kind}>")
        read = _read_json if kind == "call" else partial(_read_python, tools=tools)
        calls.extend(_read(text[opening.end() : closing], (opening.start(), begin), read, tools))
    return calls[:MAX_CALLS]


def _read(body: str, span: tuple[int, int], read: Callable[[str], _Parsed], tools: Signatures) -> Iterator[ToolCall]:
    try:
        if len(body) > MAX_CALL_CHARS:
            raise BadCall(f"the call is longer than {MAX_CALL_CHARS} characters")
        for name, arguments in read(body):
            yield ToolCall(span, name, arguments, None if name in tools else _unknown(tools))
    except BadCall as problem:
        yield ToolCall(span, problem=problem)


def _unknown(tools: Signatures) -> BadCall:
    listing = "the only tool is" if len(tools) == 1 else "the tools are"
    return BadCall(f"there is no tool of this name, {listing} {', '.join(tools)}", "unknown_tool")


def _read_json(body: str) -> _Parsed:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        raise BadCall('the call is not valid JSON, expected {"name": …, "arguments": {…}}') from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadCall('the call has no name, expected {"name": …, "arguments": {…}}')
    if not isinstance(call.get("arguments"), dict):
        raise BadCall('the call has no arguments object, expected {"name": …, "arguments": {…}}')
    return [(call["name"], call["arguments"])]


def _read_python(body: str, tools: Signatures) -> _Parsed:
    """Reads a call from each statement, optionally inside print(…); arguments must be literals."""
    expected = _signature(next(iter(tools)), tools)
    try:
        with warnings.catch_warnings(action="ignore"):  # syntax warnings about the model's code
            statements = ast.parse(body.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadCall(f"the call cannot be read, expected {expected}") from None
    if not statements:
        raise BadCall(f"the call is empty, expected {expected}")
    return [_read_statement(statement, tools) for statement in statements]


def _signature(name: str, tools: Signatures) -> str:
    return f"{name}({', '.join(tools[name])})"


def _read_statement(statement: ast.stmt, tools: Signatures) -> tuple[str, dict[str, Any]]:
    call: Any = statement.value if isinstance(statement, ast.Expr) else None
    if _is_named_call(call) and call.func.id == "print" and len(call.args) == 1 and not call.keywords:
        call = call.args[0]
    if not _is_named_call(call):
        raise BadCall(f"only calls can stand here, such as {_signature(next(iter(tools)), tools)}")
    called = call.func.id if call.func.id in tools else next(iter(tools))  # an unknown name is reported later
    if len(call.args) > len(tools[called]) or any(keyword.arg is None for keyword in call.keywords):
        raise BadCall(f"the arguments cannot be read, expected {_signature(called, tools)}")
    named: dict[str, ast.expr] = dict(zip(tools[called], call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg in named:
            raise BadCall(f"the argument {keyword.arg} is given twice")
        named[keyword.arg] = keyword.value
    try:
        arguments = {name: ast.literal_eval(value) for name, value in named.items()}
        repr(arguments)  # a number in base 16 may have more digits than Python prints in base 10
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise BadCall("the arguments must be plain numbers or strings") from None
    return call.func.id, arguments


def _is_named_call(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def video_of(arguments: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Returns the path of the video that a call names; a path from the model itself is never opened.

    If there is only one video, a call may omit its name.
    """
    videos = sorted(set(names.values()))
    name = arguments.get("video_path")
    if name is None and len(videos) == 1:
        return videos[0]
    if not isinstance(name, str) or name not in names:
        raise BadCall("video_path is not one of the videos of this conversation")
    return names[name]


def window_of(arguments: Mapping[str, Any], duration_s: float | int) -> Window:
    """Returns the window that a call asks for, clamped to the end of the video."""
    start_s, end_s = (_seconds(arguments, key) for key in ("start_time", "end_time"))
    if start_s < 0:
        raise BadCall(f"start_time {start_s:.1f} is negative")
    if start_s >= end_s:
        raise BadCall(f"start_time {start_s:.1f} is not before end_time {end_s:.1f}")
    if start_s >= duration_s:
        raise BadCall(
            f"start_time {start_s:.1f} lies beyond the end of the video, which lasts {duration_s:.1f} seconds"
        )
    return Window(start_s, min(end_s, float(duration_s)), clamped=end_s > duration_s)


def moment_of(arguments: Mapping[str, Any], duration_s: float | int) -> float:
    time_s = _seconds(arguments, "time")
    if time_s < 0:
        raise BadCall(f"time {time_s:.1f} is negative")
    if round(time_s, 1) > round(duration_s, 1):  # a prompt shows the duration with one decimal
        raise BadCall(f"time {time_s:.1f} lies beyond the end of the video, which lasts {duration_s:.1f} seconds")
    return time_s


def box_of(arguments: Mapping[str, Any]) -> Box:
    if "box" not in arguments:
        raise BadCall("box is missing")
    sides = arguments["box"]
    fractions = [side for side in sides if _is_fraction(side)] if isinstance(sides, list | tuple) else []
    if len(fractions) != 4 or len(sides) != 4:
        raise BadCall("box is not [x0, y0, x1, y1], four fractions of the frame from 0 to 1")
    box = Box(*(round(float(side), BOX_DIGITS) for side in fractions))
    if box.right - box.left < MIN_BOX_FRAC or box.bottom - box.top < MIN_BOX_FRAC:
        raise BadCall(f"box must have x0 before x1 and y0 before y1, each by {MIN_BOX_FRAC} of the frame or more")
    return box


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _seconds(arguments: Mapping[str, Any], key: str) -> float:
    if key not in arguments:
        raise BadCall(f"{key} is missing")
    value = arguments[key]
    seconds = parse_seconds(value) if isinstance(value, str) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e300 else math.inf
    if seconds is None or not math.isfinite(seconds):
        raise BadCall(f"{key} is not a time, expected seconds or MM:SS")
    return seconds


def parse_seconds(text: str) -> float | None:
    """Parses a number, `MM:SS` or `HH:MM:SS`. Returns None for other texts."""
    text = text.strip()
    if NUMBER.fullmatch(text):
        return float(text)
    clock = CLOCK.fullmatch(text)
    if clock is None:
        return None
    hours, minutes, seconds = clock.groups()
    if float(seconds) >= 60 or (hours is not None and int(minutes) >= 60):
        return None
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
