"""A trace that was learnt from, as RUN/episodes keeps it: in the form of an episode that nobody scores."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paravt_jax.data.prompts import PLACEHOLDER
from paravt_jax.data.traces import Trace
from paravt_jax.imitation.ledgers import Rendered
from rollout.ledger import Ledger
from rollout.tools import BadCall, ToolCall, find_calls, window_of


def sample_record(rendered: Rendered, step: int) -> dict[str, Any]:
    trace, ledger = rendered.trace, rendered.ledger
    first = next(number for number, message in enumerate(trace.messages) if message.role == "assistant")
    return {
        "step": step,
        "id": trace.id,
        "question": trace.messages[first - 1].text.replace(PLACEHOLDER, "").strip(),
        "frame_budget": len(ledger.segments[0].pictures),
        "videos": [asdict(video) for video in rendered.videos],
        "segments": ledger.to_record(),
        "turns": [
            {"text": text, "told": told, "token_span": span, "calls": [_call(call) for call in find_calls(text)]}
            for (text, told), span in zip(_turns(trace), _spans(ledger), strict=True)
        ],
    }


def _turns(trace: Trace) -> Iterator[tuple[str, str]]:
    """What the assistant said, and what it was told then."""
    turns: list[tuple[str, str]] = []
    for message in trace.messages:
        text = message.text.replace(PLACEHOLDER, "")
        if message.role == "assistant":
            turns.append((text, ""))
        elif turns:
            said, told = turns[-1]
            turns[-1] = (said, f"{told}\n{text}".strip())
    yield from turns


def _spans(ledger: Ledger) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(len(segment.ids) for segment in ledger.segments))
    return [
        (end - len(segment.ids), end)
        for segment, end in zip(ledger.segments, ends, strict=True)
        if segment.kind == "sampled"
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    """As it was written; how long the video is, the trace does not say."""
    window = None
    if call.well_formed:
        try:
            found = window_of(call.arguments, math.inf)
            window = [found.start_s, found.end_s]
        except BadCall:
            pass  # of a tool without a window
    return {"name": call.name, "span": call.span, "outcome": "imitated", "window_s": window}
