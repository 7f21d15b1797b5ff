"""Runs the samples of a cell with bounded concurrency: only samples in flight are in memory."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from model_port.progress import Meter
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.splits import PublicSplit, Sample
from paravt_jax.evaluation.sample_log import Record, SampleLog, SampleResult, episode_record, result_of, sample_record
from paravt_jax.rl.episodes import RolloutWorker, make_task, missing_group
from paravt_jax.run.threads import in_thread
from rollout.endpoint.errors import REASONS as ENDPOINT_REASONS, SAMPLE_REASONS
from rollout.toolbox.search_subtitles import subtitle_file
from rollout.toolbox.subtitles import Cue, parse_srt
from rollout.tools import BadCall
from rollout.video.errors import VideoError, VideoUnavailable

SUBTITLES = "Subtitles of the video, of the moments that the frames show:\n{lines}\n\n{question}"
ENGINE_REASONS = {"engine", "deadline", *ENDPOINT_REASONS} - set(SAMPLE_REASONS)
MAX_IN_FLIGHT = 32  # prompts whose episodes run at the same time, their frames in memory


class Recorder(Protocol):
    async def record(self, key: str, sample: Sample) -> Record:
        """Runs a sample. If an engine, a video or the judge fails, the record is missing; the error is not raised."""
        ...


async def run_samples(
    name: str, recorder: Recorder, todo: Mapping[str, Sample], log: SampleLog, finished: Iterable[SampleResult]
) -> None:
    """Runs the samples of a cell and logs each when it ends. `finished` samples only count in the progress.

    Raises RuntimeError if the engine keeps failing; a restart runs the remaining samples.
    """
    tally, samples = Tally(name, finished), iter(todo.items())

    async def work() -> None:
        for key, sample in samples:
            record = await recorder.record(key, sample)
            log.write(record)
            tally.add(result_of(record))
            meter.at(meter.done + 1, tally.summary())
            if tally.num_failed_in_a_row > 2 * MAX_IN_FLIGHT:
                raise RuntimeError(
                    f"{name}: the engine failed {tally.num_failed_in_a_row} samples in a row, the last {tally.problem}"
                    f"; when it works again, restart with the same run_dir: {tally.num_complete} samples are done"
                )

    with Meter(tally.summary(), len(todo), "sample") as meter:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_IN_FLIGHT, len(todo))):
                    tasks.create_task(work())
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None


@dataclass(frozen=True, eq=False)
class EpisodeRecorder:
    """Runs a sample's episodes by this project's protocol."""

    worker: RolloutWorker
    split: PublicSplit | None
    frame_budget: int
    num_samples: int  # episodes per sample

    async def record(self, key: str, sample: Sample) -> Record:
        prompt, subtitles, name = sample.prompt, "", f"validation-{sample.prompt.id}"
        try:
            if self.split is not None and self.split.with_subtitles:
                prompt, subtitles = await self._subtitled(sample)
        except VideoUnavailable as error:
            rollouts = missing_group(name, f"subtitles: {error}", error, self.num_samples)
        else:
            task = make_task(name, prompt, self.frame_budget)
            rollouts = await self.worker.run_group(task, prompt, self.num_samples)
        return sample_record(key, sample, subtitles, [episode_record(each, sample, self.split) for each in rollouts])

    async def _subtitled(self, sample: Sample) -> tuple[Prompt, str]:
        """Adds the subtitle lines on screen in the frames. Returns the prompt, and "shown", "none" or "unreadable".

        An unreadable video is reported later, when the sample runs.
        """
        prompt, agent = sample.prompt, self.worker.agent
        if not prompt.subtitles[0]:
            return prompt, "none"
        try:
            cues = await in_thread(lambda: parse_srt(subtitle_file(prompt.subtitles[0])))
            info = await agent.frames.info(prompt.videos[0], agent.config.min_video_deadline_s)
        except BadCall:
            return prompt, "unreadable"
        except VideoUnavailable:
            raise
        except VideoError:
            return prompt, "none"
        texts = on_screen(cues, agent.prompter.overview_times(info, self.frame_budget))
        if not texts:
            return prompt, "none" if cues else "unreadable"
        question = SUBTITLES.format(lines="\n".join(texts), question=prompt.question)
        return replace(prompt, question=question), "shown"


def on_screen(cues: Sequence[Cue], times_s: Sequence[float | int]) -> list[str]:
    """The distinct texts of cues that are on screen at one of these times, in order."""
    texts = [cue.text for cue in cues if any(cue.start_s <= time_s < cue.end_s for time_s in times_s)]
    return list(dict.fromkeys(texts))


class Tally:
    def __init__(self, name: str, finished: Iterable[SampleResult] = ()) -> None:
        self.name = name
        self.num_complete = self.num_missing = self.num_failed_in_a_row = 0
        self.problem, self._score = "", 0.0
        for result in finished:
            self._count(result)

    def add(self, result: SampleResult) -> None:
        self._count(result)
        self.num_failed_in_a_row = self.num_failed_in_a_row + 1 if result.missing in ENGINE_REASONS else 0

    def _count(self, result: SampleResult) -> None:
        if result.missing:
            self.num_missing, self.problem = self.num_missing + 1, result.problem
        else:
            scores = result.main_scores
            self.num_complete, self._score = self.num_complete + 1, self._score + sum(scores) / len(scores)

    def summary(self) -> str:
        """The text of the progress bar."""
        parts = [self.name]
        if self.num_complete:
            parts.append(f"{100 * self._score / self.num_complete:.1f} % of {self.num_complete} right")
        if self.num_missing:
            parts.append(f"{self.num_missing} missing")
        return " · ".join(parts)
