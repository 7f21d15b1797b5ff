"""Parses the calls in a reply as the released driver does.

The driver never checks a call's name, so every call is a crop. Qwen models sometimes write `<tool_code>` instead.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
TOOL_CODE = re.compile(r"<tool_code>(.*?)</tool_code>", re.DOTALL)
CROP_CODE = re.compile(r"crop_video\s*\((.*)\)", re.DOTALL)
VIDEO_ZOOM = re.compile(r"<video_zoom>(.*?)</video_zoom>", re.DOTALL)
SAGE_JSON = re.compile(r"<json>(.*?)</json>", re.DOTALL)
BEFORE_KEYWORD = re.compile(r",\s*(?=[a-zA-Z_]+\s*=)")
ZOOM_SEPARATOR = re.compile(r"\s+|,\s*")
DEFAULT_LENGTH_S = 10

Call = Any  # any JSON value: `window_of` raises if it is not an object


class MalformedCall(ValueError):
    """Raised for a call that makes the released driver drop the sample."""


def crop_calls(reply: str) -> list[Call]:
    calls = [value for body in TOOL_CALL.findall(reply) for value in _json_values(body.strip())]
    codes = (match[1] for body in TOOL_CODE.findall(reply) if (match := CROP_CODE.match(body.strip())))
    found = (_keywords(BEFORE_KEYWORD.split(code)) for code in codes)
    return calls + [{"arguments": arguments} for arguments in found if arguments]


def zoom_calls(reply: str) -> list[Call]:
    """Parses VideoZoomer's calls: JSON arguments, or start=10 end=20."""
    calls: list[Call] = []
    for body in filter(None, map(str.strip, VIDEO_ZOOM.findall(reply))):
        objects = [value for value in _json_values(body) if isinstance(value, dict)]
        if arguments := objects or list(filter(None, [_keywords(ZOOM_SEPARATOR.split(body))])):
            calls.append({"arguments": arguments[0]})
    return calls


def sage_calls(reply: str) -> list[Call]:
    """Parses the calls that SAGE recommends, if they have a window. The release does not include this parser."""
    calls: list[Call] = []
    for plan in _sage_plans(reply):
        recommended = plan.get("recommended_tools")
        listed = recommended.get("tool_calls") if isinstance(recommended, dict) else None
        listed = listed if isinstance(listed, list) else []
        calls += [call for call in listed if isinstance(call, dict) and _has_window(call.get("arguments"))]
    return calls


def sage_answer(reply: str) -> str:
    """The final answer in SAGE's JSON, else the reply."""
    answers = [plan["final_answer"] for plan in _sage_plans(reply) if isinstance(plan.get("final_answer"), str)]
    return answers[-1] if answers else reply


def _sage_plans(reply: str) -> list[dict[str, Any]]:
    bodies = SAGE_JSON.findall(reply) or [reply]
    return [value for body in bodies for value in _json_values(body) if isinstance(value, dict)]


def _has_window(arguments: Any) -> bool:
    return isinstance(arguments, dict) and not {"start_time", "start"}.isdisjoint(arguments)


CALLS_IN: Mapping[str, Callable[[str], list[Call]]] = {
    "agentic_general": crop_calls,
    "agentic_minimal": crop_calls,
    "agentic_longvt": crop_calls,
    "agentic_videozoomer": zoom_calls,
    "agentic_sage": sage_calls,
}


def window_of(call: Call) -> tuple[float, float]:
    """Start and end of a call's window in seconds."""
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict):
        raise MalformedCall(f"the call {str(call)[:80]} has no arguments")
    try:
        start_s = _seconds(_first_of(arguments, ("start_time", "start"), 0))
        return start_s, _seconds(_first_of(arguments, ("end_time", "end"), start_s + DEFAULT_LENGTH_S))
    except OverflowError:
        raise MalformedCall(f"the call {str(call)[:80]} has a time that is too large") from None


def _first_of(arguments: Mapping[str, Any], names: Iterable[str], default: float) -> Any:
    return next((arguments[name] for name in names if name in arguments), default)


def _seconds(value: Any) -> float:
    """Parses a time: a number, or text with a number, MM:SS or HH:MM:SS; 0 for other values."""
    try:
        return float(value)
    except (TypeError, ValueError):
        parts = value.split(":") if isinstance(value, str) else []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return 0.0
    if len(numbers) not in (2, 3):
        return 0.0
    return sum(number * unit_s for number, unit_s in zip(numbers, (3600, 60, 1)[-len(numbers) :], strict=True))


def _json_values(body: str) -> list[Any]:
    try:
        return [json.loads(body)]
    except (ValueError, RecursionError):
        return []


def _keywords(parts: Iterable[str]) -> dict[str, float | str]:
    pairs = (part.partition("=") for part in parts if "=" in part)
    return {name.strip(): _number_or_text(value.strip().strip("\"'")) for name, _, value in pairs}


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
