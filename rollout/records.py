"""The record of an episode: its turns, calls and ledgers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollout.ledger import Ledger
from rollout.parts import TIME_DIGITS, Part, Shown, shown_in, shown_records, text_of
from rollout.prompter import ShownVideo, Task
from rollout.tools import Outcome, ToolCall, Window
from rollout.video.box import Box
from rollout.video.info import TimedPicture


@dataclass(eq=False)
class Call:
    """A call and its result. If it failed early, later fields keep their defaults."""

    call: ToolCall
    outcome: Outcome
    response: str  # text for the main agent
    problem: str = ""  # the error in detail, not shown to the model
    window: Window | None = None
    box: Box | None = None
    report: Ledger | None = None  # the sub-agent's ledger
    seen: tuple[Shown, ...] = ()  # the sub-agent's frames
    latency_s: float = 0.0
    path: str = ""  # of the video
    frames_s: tuple[float | int, ...] = ()  # start times of the sub-agent's frames, or of the frames in the response
    started_s: float = 0.0  # since the start of the episode
    parts: tuple[Part, ...] = ()  # the response for the main agent, if it has pictures

    def respond(self, *parts: Part) -> None:
        self.response, self.parts = text_of(parts), parts if shown_in(parts) else ()
        if self.report is None:
            self.frames_s = tuple(part.time_s for part in parts if isinstance(part, TimedPicture))

    @property
    def content(self) -> tuple[Part, ...]:
        """The response for the main agent, with pictures."""
        return self.parts or (self.response,)

    def to_record(self) -> dict[str, Any]:
        return {
            "name": self.call.name,
            "span": self.call.span,
            "outcome": self.outcome,
            "response": self.response,
            "problem": self.problem,
            "window_s": None if self.window is None else [self.window.start_s, self.window.end_s],
            "box": self.box,
            "path": self.path,
            "frames_s": _rounded(self.frames_s),
            "started_s": round(self.started_s, 4),
            "latency_s": round(self.latency_s, 4),
            "segments": None if self.report is None else self.report.to_record(),
            **({"num_sampled": self.report.num_reported} if self.report and self.report.num_reported else {}),
            "seen": shown_records(self.seen),
            "shown": shown_records(self.parts),
        }


@dataclass(eq=False)
class Turn:
    text: str  # with the forced prefix, without the stop token
    finish: Literal["stop", "length", "abort"]
    token_span: tuple[int, int] = (0, 0)  # in the ledger's ids, from the forced prefix to the last sampled token
    calls: list[Call] = field(default_factory=list)
    latency_s: float = 0.0
    started_s: float = 0.0  # since the start of the episode
    num_sampled: int | None = None  # tokens that an endpoint reports; None if the ledger has the ids

    @property
    def num_tokens(self) -> int:
        return self.num_sampled or self.token_span[1] - self.token_span[0]

    def to_record(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish": self.finish,
            "token_span": self.token_span,
            "started_s": round(self.started_s, 4),
            "latency_s": round(self.latency_s, 4),
            "calls": [call.to_record() for call in self.calls],
            **({} if self.num_sampled is None else {"num_sampled": self.num_sampled}),
        }


@dataclass(eq=False)
class Episode:
    """An episode. While it runs, it has the turns so far."""

    id: str
    task: Task
    ledger: Ledger
    turns: list[Turn] = field(default_factory=list)
    finish: Literal["done", "length", "context", "abort"] = "done"
    seconds: float = 0.0
    num_prompt_tokens: int = 0  # of all requests, with pictures expanded
    num_cached_tokens: int = 0
    videos: tuple[ShownVideo, ...] = ()  # in the overview
    overview_s: float = 0.0  # time to build the overview, which a group shares

    @property
    def calls(self) -> list[Call]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def outcomes(self) -> list[Outcome]:
        return [call.outcome for call in self.calls]

    @property
    def ledgers(self) -> list[Ledger]:
        """The main agent's ledger, then the sub-agents' in call order."""
        return [self.ledger, *(call.report for call in self.calls if call.report is not None)]

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, including sub-agents."""
        return sum(ledger.num_sampled for ledger in self.ledgers)

    def to_record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "task": self.task.id,
            "question": self.task.question,
            "frame_budget": self.task.frame_budget,
            "finish": self.finish,
            "seconds": round(self.seconds, 4),
            "overview_s": round(self.overview_s, 4),
            "videos": [asdict(video) | {"frames_s": _rounded(video.frames_s)} for video in self.videos],
            "segments": self.ledger.to_record(),
            "turns": [turn.to_record() for turn in self.turns],
            **({"sent": sent} if any(sent := [ledger.sent for ledger in self.ledgers]) else {}),
        }


def _rounded(times_s: Sequence[float | int]) -> list[float]:
    return [round(float(time_s), TIME_DIGITS) for time_s in times_s]
