"""One question about videos, and what comes of it: the answer, what it rests on, and how long each part took."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paravt_jax.rewards.terms import find_prediction
from rollout.episode import Agent, EpisodeCallbacks
from rollout.prompter import Overview, Task
from rollout.records import Episode, Turn


class Listener(EpisodeCallbacks):
    """A watcher that is told of the overview as well."""

    def looked(self, overview: Overview, seconds: float) -> None:
        """The overview is there."""


@dataclass(frozen=True)
class Evidence:
    """A part of a video that was looked at, and what was reported of it."""

    video: str
    start_s: float | int
    end_s: float | int
    report: str


@dataclass(frozen=True)
class Seconds:
    """How long each part took; what a turn's calls took side by side, and would have one after the other."""

    overview: float
    turns: tuple[float, ...]
    calls: tuple[float, ...]  # of each turn that made some
    calls_in_turn: tuple[float, ...]  # likewise, had they waited for each other

    @property
    def total(self) -> float:
        return self.overview + sum(self.turns) + sum(self.calls)


@dataclass(frozen=True, eq=False)
class Reply:
    text: str  # empty where none was given
    evidence: tuple[Evidence, ...]
    seconds: Seconds
    episode: Episode

    @property
    def finish(self) -> str:
        return self.episode.finish

    def to_record(self) -> dict[str, Any]:
        return {
            "question": self.episode.task.question,
            "answer": self.text,
            "finish": self.finish,
            "evidence": [asdict(evidence) for evidence in self.evidence],
            "turns": [turn.text for turn in self.episode.turns],
            "outcomes": self.episode.outcomes,
            "seconds": asdict(self.seconds) | {"total": self.seconds.total},
            "num_prompt_tokens": self.episode.num_prompt_tokens,
            "num_sampled_tokens": self.episode.num_sampled,
        }


@dataclass(frozen=True, eq=False)
class Answerer:
    """An agent, and how many frames of a video it is shown first."""

    agent: Agent
    num_frames: int
    samples_top_p: bool = True  # the engine can; the embedded one cannot

    def with_sampling(self, temperature: float | int, top_p: float | int) -> "Answerer":
        """At a temperature of 0 the likeliest token is among any `top_p`, and no engine has to be asked for it."""
        return replace(
            self, agent=self.agent.with_settings(temperature=temperature, top_p=top_p if temperature else 1.0)
        )

    async def answer(
        self,
        videos: Sequence[str],
        question: str,
        listener: Listener | None = None,
        name: str = "question",
        seed: int = 0,
        max_tokens: int | None = None,
    ) -> Reply:
        """`name` tells questions apart that are asked at the same time; the engine aborts them by it.

        `max_tokens` are sampled by all agents together; None: as many as their settings allow.
        """
        listener = listener or Listener()
        task = Task(name, question, tuple(videos), max(self.num_frames, len(videos)))
        overview = await self.agent.overview(task)
        listener.looked(overview, overview.seconds)
        episode = await self.agent.run(overview, seed=seed, callbacks=listener, max_tokens=max_tokens)
        return Reply(_text(episode), tuple(_evidence(episode)), _seconds(overview.seconds, episode.turns), episode)


def _text(episode: Episode) -> str:
    """What stands between the tags of the answer; without thinking and tags, all that was said last."""
    turns = [turn.text for turn in episode.turns]
    prediction = find_prediction(turns)
    if prediction is None and turns and episode.finish == "done":
        prediction = turns[-1].rpartition("</think>")[2]
    return (prediction or "").strip()


def _evidence(episode: Episode) -> Iterator[Evidence]:
    for call in episode.calls:
        if call.outcome == "ok" and call.window is not None:
            yield Evidence(Path(call.path).name, call.window.start_s, call.window.end_s, call.response)


def _seconds(overview_s: float, turns: Sequence[Turn]) -> Seconds:
    of_calls = [[call.latency_s for call in turn.calls] for turn in turns if turn.calls]
    of_turns = tuple(turn.latency_s for turn in turns)
    return Seconds(overview_s, of_turns, tuple(map(max, of_calls)), tuple(map(sum, of_calls)))
