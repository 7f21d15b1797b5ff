"""Answers one question about videos, images or text alone, with the answer's evidence and timings."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paravt_jax.rewards.terms import find_prediction
from rollout.episode import Agent, EpisodeCallbacks
from rollout.prompter import Overview, Task
from rollout.prompts import PastTurn
from rollout.records import Episode, Turn

SEED_NAME = "question"  # replaces the name of a question with a seed


class Listener(EpisodeCallbacks):
    """An EpisodeCallbacks that also receives the overview."""

    def on_overview(self, overview: Overview) -> None:
        """Called after the overview frames are decoded."""


@dataclass(frozen=True)
class Evidence:
    """A window of a video that the model inspected, and the tool's report on it."""

    video: str
    start_s: float | int
    end_s: float | int
    report: str


@dataclass(frozen=True)
class Seconds:
    """Time spent in each part of an answer. A turn's calls run in parallel."""

    overview: float
    turns: tuple[float, ...]
    calls: tuple[float, ...]  # wall time of the calls, per turn with calls
    calls_in_turn: tuple[float, ...]  # sum over the turn's calls, as if they ran sequentially

    @property
    def total(self) -> float:
        return self.overview + sum(self.turns) + sum(self.calls)


@dataclass(frozen=True, eq=False)
class Answer:
    text: str  # empty if the model gave no answer
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
    """Answers questions with an agent that gets a fixed number of overview frames, but at least one per video."""

    agent: Agent
    num_frames: int
    samples_top_p: bool = True  # SGLang supports top_p, the embedded engine does not

    def with_sampling(self, temperature: float | int, top_p: float | int) -> "Answerer":
        """Sets sampling parameters. At temperature 0, top_p has no effect; 1.0 is sent, which all engines support."""
        agent = self.agent.with_settings(temperature=temperature)
        agent.top_p = top_p if temperature else 1.0
        return replace(self, agent=agent)

    async def answer(
        self,
        videos: Sequence[str],
        question: str,
        listener: Listener | None = None,
        name: str = "question",
        seed: int | None = None,
        max_tokens: int | None = None,
        history: Sequence[PastTurn] = (),
        images: Sequence[str] = (),
        subtitles: Sequence[str] = (),
    ) -> Answer:
        """Answers a question. `name` identifies it among concurrent questions; the engine aborts requests by name.

        With the embedded engine, equal questions with an equal `seed` have equal answers under any name. Without a
        seed, `name` takes its place.
        `history` has the turns before the question; `videos` and `images` belong to all turns, in order. `subtitles`
        has each video's subtitle file or "".
        `max_tokens` limits the tokens of the agent and its sub-agents together. None: only their settings limit them.
        """
        listener = listener or Listener()
        num_frames = max(self.num_frames, len(videos)) if videos else 0
        task = Task(name, question, tuple(videos), num_frames, tuple(subtitles), (), tuple(history), tuple(images))
        overview = await self.agent.overview(task)
        listener.on_overview(overview)
        episode = await self.agent.run(
            overview,
            seed=seed or 0,
            callbacks=listener,
            max_tokens=max_tokens,
            seed_name=None if seed is None else SEED_NAME,
        )
        return Answer(_text(episode), tuple(_evidence(episode)), _seconds(overview.seconds, episode.turns), episode)


def _text(episode: Episode) -> str:
    """The text inside the answer tags; without tags, the last turn without its thinking."""
    turns = [turn.text for turn in episode.turns]
    prediction = find_prediction(turns)
    if prediction is None and turns and episode.finish == "done":
        prediction = turns[-1].rpartition("</think>")[2]
    return (prediction or "").strip()


def _evidence(episode: Episode) -> Iterator[Evidence]:
    """The inspected windows. A video has its file's name, or the prompt's if several files have the same name."""
    prompt_names = {video.path: video.name for video in reversed(episode.videos)}  # the first name of each path
    num_files = Counter(Path(path).name for path in prompt_names)
    for call in episode.calls:
        if call.outcome == "ok" and call.window is not None:
            file = Path(call.path).name
            name = file if num_files[file] == 1 else prompt_names[call.path]
            yield Evidence(name, call.window.start_s, call.window.end_s, call.response)


def _seconds(overview_s: float, turns: Sequence[Turn]) -> Seconds:
    call_times = [[call.latency_s for call in turn.calls] for turn in turns if turn.calls]
    turn_times = tuple(turn.latency_s for turn in turns)
    return Seconds(overview_s, turn_times, tuple(map(max, call_times)), tuple(map(sum, call_times)))
