"""Records a trace for RUN/episodes in the format of an episode without scores."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from paravt_jax.data.traces import Trace
from paravt_jax.imitation.render import Rendered
from rollout.ledger import Ledger
from rollout.parts import Part, shown_records
from rollout.tools import BadCall, ToolCall, find_calls, window_of


def sample_record(rendered: Rendered, step: int) -> dict[str, Any]:
    trace, ledger = rendered.trace, rendered.ledger
    first = next(number for number, message in enumerate(trace.messages) if message.role == "assistant")
    return {
        "step": step,
        "id": trace.id,
        "question": trace.messages[first - 1].text.strip(),
        "frame_budget": len(ledger.segments[0].pictures),
        "videos": [asdict(video) for video in rendered.videos],
        "segments": ledger.to_record(),
        "turns": [
            {"text": text, "told": told, "token_span": span, "calls": list(_calls(text, responses))}
            for (text, told), span, responses in zip(
                _turns(trace), _spans(ledger), [*rendered.responses, ()], strict=True
            )
        ],
    }


def _turns(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yields the assistant's turns, each with the text that follows it."""
    turns: list[tuple[str, str]] = []
    for message in trace.messages:
        if message.role == "assistant":
            turns.append((message.text, ""))
        elif turns:
            turn, response = turns[-1]
            turns[-1] = (turn, f"{response}\n{message.text}".strip())
    yield from turns


def _spans(ledger: Ledger) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(len(segment.ids) for segment in ledger.segments))
    return [
        (end - len(segment.ids), end)
        for segment, end in zip(ledger.segments, ends, strict=True)
        if segment.kind == "sampled"
    ]


def _calls(text: str, responses: Sequence[Sequence[Part]]) -> Iterator[dict[str, Any]]:
    """Yields the calls of a turn as written, each with the pictures of its response."""
    for number, call in enumerate(find_calls(text)):
        shown = shown_records(responses[number]) if number < len(responses) else []
        times_s = [frame["time_s"] for frame in shown if "time_s" in frame]
        yield _call(call) | {"shown": shown, "frames_s": times_s}


def _call(call: ToolCall) -> dict[str, Any]:
    """Records a call as written. Its window is unchecked, because a trace does not have the video's duration."""
    window = None
    if call.well_formed:
        try:
            parsed = window_of(call.arguments, math.inf)
            window = [parsed.start_s, parsed.end_s]
        except BadCall:
            pass  # the tool has no window
    return {"name": call.name, "span": call.span, "outcome": "imitated", "window_s": window}
