"""How long a server takes for what it is asked: measured by `python -m paravt_jax.bench rollout`, or from a table.

A server does one thing at a time. Reading a prompt takes as long as its tokens that are in no cache, and frames that
it has not seen yet; decoding a token takes the weights once and, of every sequence, its keys and values.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

SECTION = "service"  # of the file that the bench writes
EMBEDDED_STRIDE = 16  # of model_port's Sampler


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds of one server that has nothing else to do."""

    request_s: float | int  # of any request, before anything is read
    token_s: float | int  # of a token of a prompt, if no cache has it
    shown_s: float | int  # of a frame in a request, also of one that was seen before
    frame_s: float | int  # more, of a frame that was not, beside its tokens
    step_s: float | int  # of a token for every sequence
    row_s: float | int  # more, for each sequence
    context_token_s: float | int  # more, for each token of their contexts
    decode_s: float | int = 0.0  # of a frame of a video, before anybody is asked
    publish_s: float | int = 0.0  # in which nothing is sampled
    max_running: int = 16  # sequences that are decoded together
    stride: int = 1  # tokens that are decoded before anybody is heard again
    prefixes: bool = True  # knows all that it has read since it got its weights; otherwise the last prompt alone
    share: float | int = 0.0  # of what the learner computes on, while it computes; 0: a device of its own

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{SECTION}.{field.name}={value!r} must be a number, 0 or more")
        for name in ("max_running", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{SECTION}.{name}={getattr(self, name)} must be at least 1")
        if not self.step_s + self.row_s:
            raise ValueError(f"{SECTION}.step_s=0 and {SECTION}.row_s=0 would sample in no time")
        if self.share > 1:
            raise ValueError(f"{SECTION}.share={self.share} must be at most 1, all that the learner computes on")

    def read_s(self, *, tokens: int, frames: int, unseen: int) -> float:
        return self.request_s + tokens * self.token_s + frames * self.shown_s + unseen * self.frame_s

    def decoding_s(self, rows: int, context_tokens: int) -> float:
        """Of one token for each of these sequences."""
        return self.step_s + rows * self.row_s + context_tokens * self.context_token_s


def load_service(path: Path) -> ServiceTimes:
    """Of a file that `python -m paravt_jax.bench rollout --json` wrote."""
    try:
        record = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"--service {path} is no JSON: {problem}") from None
    section = record.get(SECTION) if isinstance(record, Mapping) else None
    if not isinstance(section, Mapping):
        raise ValueError(
            f"--service {path} has no {SECTION!r}; python -m paravt_jax.bench rollout --json {path} writes one"
        )
    return _service(section, path)


def _service(section: Mapping[str, Any], path: Path) -> ServiceTimes:
    known = {field.name: field.default is MISSING for field in fields(ServiceTimes)}
    problems = [f"{SECTION}.{name} is not known" for name in section if name not in known]
    if missing := [f"{SECTION}.{name}" for name, needed in known.items() if needed and name not in section]:
        problems.append(f"it is without {', '.join(missing)}")
    problems += [
        f"{SECTION}.{name}={value!r} must be a number"
        for name, value in section.items()
        if type(value) not in (int, float, bool)
    ]
    if problems:
        raise ValueError(f"--service {path}: {'; '.join(problems)}")
    try:
        return ServiceTimes(**section)
    except ValueError as problem:
        raise ValueError(f"--service {path}: {problem}") from None
