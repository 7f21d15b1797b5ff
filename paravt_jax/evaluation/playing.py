"""The samples of a cell, so many at a time: however many there are, only those in flight are in memory."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from model_port.progress import Meter
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.splits import PublicSplit, Sample
from paravt_jax.evaluation.lines import Line, Lines, SampleResult, line_of, result_of
from paravt_jax.rewards.official import STRICT
from paravt_jax.rl.episodes import RolloutWorker
from paravt_jax.run.threads import in_thread
from rollout.episode import Task
from rollout.toolbox.search_subtitles import subtitle_file
from rollout.toolbox.subtitles import Cue, parse_srt
from rollout.tools import BadCall
from rollout.video.errors import VideoError
from rollout.video.times import overview_times

SUBTITLES = "Subtitles of the video, of the moments that the frames show:\n{lines}\n\n{question}"
ENGINE_REASONS = ("engine", "deadline")


@dataclass(frozen=True, eq=False)
class Playing:
    """A cell while it is played."""

    name: str  # in progress and errors
    worker: RolloutWorker
    split: PublicSplit | None
    frame_budget: int
    num_samples: int  # episodes of a sample
    max_in_flight: int

    async def play(self, todo: Mapping[str, Sample], lines: Lines, so_far: Iterable[SampleResult]) -> None:
        """Every sample of `todo`, by key: each has its line when it ends. What had ended before is counted too.

        An engine that gives nothing any more ends it: what is not played then is played by the next start.
        """
        tally, left = Tally(self.name, so_far), iter(todo.items())

        async def work() -> None:
            for key, sample in left:
                line = await self._line(key, sample)
                lines.write(line)
                tally.add(result_of(line))
                meter.at(meter.done + 1, tally.told())
                self._check(tally)

        with Meter(tally.told(), len(todo), "sample") as meter:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(self.max_in_flight, len(todo))):
                        tasks.create_task(work())
            except ExceptionGroup as problems:
                raise problems.exceptions[0] from None

    async def _line(self, key: str, sample: Sample) -> Line:
        prompt, subtitles = sample.prompt, ""
        if self.split is not None and self.split.with_subtitles:
            prompt, subtitles = await self._subtitled(sample)
        num_frames = max(self.frame_budget, len(prompt.videos))
        task = Task(f"validation-{prompt.id}", prompt.question, prompt.videos, num_frames, prompt.subtitles)
        rollouts = await self.worker.run_group(task, prompt, self.num_samples)
        return line_of(key, sample, subtitles, rollouts, self.split and self.split.official)

    async def _subtitled(self, sample: Sample) -> tuple[Prompt, str]:
        """The prompt with the lines that are on screen with its frames; and whether there are such: shown, none, or
        unreadable. Where the video itself cannot be opened, playing it will say so.
        """
        prompt, agent = sample.prompt, self.worker.agent
        if not prompt.subtitles[0]:
            return prompt, "none"
        try:
            cues = await in_thread(lambda: parse_srt(subtitle_file(prompt.subtitles[0])))
            info = await agent.frames.info(prompt.videos[0], agent.config.min_video_deadline_s)
        except BadCall:
            return prompt, "unreadable"
        except VideoError:
            return prompt, "none"
        said = on_screen(cues, overview_times(info.duration_s, info.num_frames, self.frame_budget))
        if not said:
            return prompt, "none" if cues else "unreadable"
        asked = SUBTITLES.format(lines="\n".join(said), question=prompt.question)
        return replace(prompt, question=asked), "shown"

    def _check(self, tally: "Tally") -> None:
        if tally.num_failed_in_a_row > 2 * self.max_in_flight:
            raise RuntimeError(
                f"{self.name}: the engine failed {tally.num_failed_in_a_row} samples in a row, the last {tally.problem}"
                f"; when it is back, start again with the same run_dir: {tally.num_there} samples are done"
            )


def on_screen(cues: Sequence[Cue], times_s: Sequence[float | int]) -> list[str]:
    """The texts of the cues that cover one of these moments, each once, in their order."""
    seen = [cue.text for cue in cues if any(cue.start_s <= time_s < cue.end_s for time_s in times_s)]
    return list(dict.fromkeys(seen))


@dataclass(eq=False)
class Tally:
    """How a cell goes, as far as it is played."""

    name: str
    so_far: Iterable[SampleResult] = ()
    now_s: Callable[[], float] = time.monotonic
    num_there: int = field(default=0, init=False)
    num_new: int = field(default=0, init=False)
    num_missing: int = field(default=0, init=False)
    num_failed_in_a_row: int = field(default=0, init=False)
    problem: str = field(default="", init=False)
    _score: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._began_s = self.now_s()
        for result in self.so_far:
            self._count(result)

    def add(self, result: SampleResult) -> None:
        self.num_new += 1
        self._count(result)
        self.num_failed_in_a_row = self.num_failed_in_a_row + 1 if result.missing in ENGINE_REASONS else 0

    def _count(self, result: SampleResult) -> None:
        if result.missing:
            self.num_missing, self.problem = self.num_missing + 1, result.problem
        else:
            scores = result.scores(STRICT)
            self.num_there, self._score = self.num_there + 1, self._score + sum(scores) / len(scores)

    def told(self) -> str:
        """As progress has it before the counts and the time that is left."""
        minutes = (self.now_s() - self._began_s) / 60
        parts = [f"{100 * self._score / self.num_there:.1f} % of {self.num_there} right"] if self.num_there else []
        parts += [f"{self.num_missing} missing"] if self.num_missing else []
        parts += [f"{self.num_new / minutes:.1f} a minute"] if self.num_new and minutes else []
        return " · ".join([self.name, *parts])
