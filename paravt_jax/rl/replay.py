"""Replays a run: the learner trains on its logged episodes, without an engine.

Each episode is rebuilt from its record: ids, log-probs and versions come from the log; frames are decoded again and
checked by their keys. Rewards are recomputed from the text, so their settings may differ; only a judge's verdicts come
from the log. With unchanged settings, every number equals the run's, bit for bit.
"""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from model_port.layout import CHECKPOINTS_DIR, RECORD_FILE
from paravt_jax.config import TrainConfig
from paravt_jax.config.keys import change_text
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, PromptSample, SampleOrder
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.judge import Judge
from paravt_jax.rl.episodes import Rollout, RolloutWorker, task_of
from paravt_jax.rl.groups import Group, advantages_of, for_step, over_step
from paravt_jax.rl.scheduler import UnlessStopped, always
from paravt_jax.run.directory import SETTINGS_FILE, SETTINGS_LOG_FILE, changed_settings, settings_of
from paravt_jax.run.fingerprints import own_sums
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, last_step, load_jsonl, rows_by_step
from rollout.engine.protocol import EngineError, Request
from rollout.ledger import Ledger, Segment
from rollout.parts import Shown, pictures_of
from rollout.picture import Picture
from rollout.prompter import Overview
from rollout.records import Call, Episode, Turn
from rollout.tools import ToolCall, Window, find_calls
from rollout.video.box import Box
from rollout.video.errors import VideoError

OF_THE_MACHINE = ("time/", "perf/")  # prefixes of metrics that depend on the machine
SHOWN_KEYS = 3  # differing metrics to print


@dataclass(frozen=True)
class LoggedSteps:
    """A run's log, from the first step with episodes to the last step."""

    run_dir: Path
    first: int
    last: int
    checkpoint: Path | None  # state before the first logged step; None: the model in the settings

    @classmethod
    def of(cls, run_dir: Path, replay_dir: str, *, needs_verdicts: bool) -> "LoggedSteps":
        """Opens a run's log. Raises ValueError if it lacks data for a replay, such as a judge's verdicts."""
        if Path(replay_dir).resolve() == run_dir.resolve():
            raise ValueError(f"run_dir={replay_dir} is the run to replay; choose another run_dir")
        if not (run_dir / METRICS_FILE).exists():
            raise ValueError(f"{run_dir} is not a run, because it has no {METRICS_FILE}; choose a run's run_dir")
        last = last_step(run_dir)
        paths = [path for path in (run_dir / EPISODES_DIR).glob("*.jsonl") if path.stem.isdecimal()]
        steps = {int(path.stem) for path in paths} & {*range(1, last + 1)}
        if not steps or "sft" in settings_of(run_dir):  # an SFT run logs samples in this directory
            raise ValueError(f"{run_dir} has no RL episodes; choose a run of paravt_jax.train")
        first = min(steps)
        if lost := sorted({*range(first, last + 1)} - steps):
            raise ValueError(
                f"{run_dir / EPISODES_DIR} lacks the episodes of step {', '.join(map(str, lost))}, but has earlier and "
                f"later steps; restore the files"
            )
        if needs_verdicts and not (settings_of(run_dir).get("judge") or {}).get("model"):
            raise ValueError(
                f"reward.oe_mode=llm needs a judge's verdicts, and {run_dir} had no judge; do not change it"
            )
        return cls(run_dir.absolute(), first, last, _checkpoint_of(run_dir, first - 1) if first > 1 else None)

    def episodes(self, step: int) -> Iterator[dict[str, Any]]:
        return load_jsonl(self.run_dir / EPISODES_DIR / f"{step:06d}.jsonl")

    def remarks(self, settings: Mapping[str, Any]) -> list[str]:
        """Log lines for a replay with these settings; the first line lists the settings that differ from the run's."""
        path = self.run_dir / SETTINGS_LOG_FILE
        later = [row["after_step"] for row in load_jsonl(path) if row["after_step"]] if path.exists() else []
        changes = changed_settings(settings, self.run_dir, own_sums(settings)).items()
        changed = [change_text(key, *values) for key, values in changes if key != "run_dir"]
        return [
            "; ".join([f"replaying steps {self.first} to {self.last} of {self.run_dir}", *changed]),
            *(f"its settings changed after step {step}; the replay uses the last ones" for step in later),
        ]

    def lend_checkpoint(self, directory: Path) -> None:
        """Hard-links the run's first checkpoint into `directory`, unless it has checkpoints."""
        checkpoints = directory / CHECKPOINTS_DIR
        if self.checkpoint is None or any(entry.name.isdecimal() for entry in checkpoints.glob("*")):
            return
        partial = checkpoints / f".{self.checkpoint.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.checkpoint, partial, copy_function=_link_or_copy)
        partial.rename(checkpoints / self.checkpoint.name)

    def compared(self, replay_dir: Path) -> str:
        """Compares the metrics of a replay in `replay_dir` with the run's."""
        ours, theirs = (rows_by_step(directory / METRICS_FILE) for directory in (replay_dir, self.run_dir))
        steps = [step for step in sorted(ours) if self.first <= step <= self.last]
        if not steps:
            return f"no step was logged, so none was compared with {self.run_dir}"
        differ = {step: keys for step in steps if (keys := differing(theirs.get(step, {}), ours[step]))}
        if not differ:
            return f"all {len(steps)} steps have the same metrics as in {self.run_dir}"
        step, keys = next(iter(differ.items()))
        logged = theirs.get(step, {})
        printed = [f"{key} is {ours[step][key]} and was {logged.get(key)}" for key in keys[:SHOWN_KEYS]]
        more = f", and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
        return (
            f"{len(differ)} of {len(steps)} steps have other metrics than {self.run_dir}, first step {step}: "
            f"{'; '.join(printed)}{more}"
        )


async def no_reply(request: Request) -> NoReturn:
    raise EngineError("a replay samples nothing")


class Verdict(Judge):
    """A judge that returns its logged score."""

    def __init__(self, score: float | None):
        self._score = score

    async def judge(self, question: str, answer: str, prediction: str) -> float | None:
        return self._score


class Replay:
    """Reads the groups of each step from a run's log; replaces `RolloutScheduler`."""

    rollout_s = 0.0

    def __init__(
        self,
        log: LoggedSteps,
        worker: RolloutWorker,
        order: SampleOrder[Prompt],
        cursor: Cursor,
        train: TrainConfig,
        advantage: AdvantageConfig,
    ):
        self.log, self.worker, self.order, self.cursor = log, worker, order, cursor
        self._train, self._advantage = train, advantage

    async def next_groups(self, step: int, unless_stopped: UnlessStopped = always) -> list[Group] | None:
        return await unless_stopped(self._groups(step))

    async def _groups(self, step: int) -> list[Group]:
        """Rebuilds the groups of a step. With changed rewards, more groups may have signal than the step needs."""
        try:
            by_sample = itertools.groupby(self.log.episodes(step), lambda record: record["visit"])
            rebuilt = [self._group(self.order[number], list(records)) for number, records in by_sample]
            groups = list(for_step(await asyncio.gather(*rebuilt), self._train.prompts_per_step))
        except KeyError as problem:
            raise ValueError(
                f"{self.log.run_dir}: an episode of step {step} has no {problem}, because another version logged it; "
                f"replay it with the git_commit of {self.log.run_dir / SETTINGS_FILE}"
            ) from None
        except VideoError as problem:
            raise ValueError(f"a video of step {step} of {self.log.run_dir} can no longer be read: {problem}") from None
        self.cursor.take_these(group.sample.number for group in groups)
        return over_step(groups, self.worker.reward, self._advantage)

    def metrics(self) -> dict[str, float]:
        """No metrics, because a log has no aborted groups."""
        return {}

    async def _group(self, sample: PromptSample[Prompt], records: Sequence[Mapping[str, Any]]) -> Group:
        task = task_of(sample, records[0]["frame_budget"])
        logged = records[0]["id"].rpartition("/")[0]
        if task.id != logged:
            raise ValueError(
                f"{self.log.run_dir} has {logged} as sample {sample.number}, but data.train now has {task.id}; "
                f"set data.train and seed as in the run"
            )
        if len(records) != self._train.group_size:
            raise ValueError(
                f"train.group_size={self._train.group_size}, but {logged} has {len(records)} episodes in "
                f"{self.log.run_dir}; set it to that"
            )
        overview = await self.worker.agent.overview(task) if any("segments" in record for record in records) else None
        rollouts = [await self._rollout(record, sample.item, overview) for record in records]
        rollouts = await self.worker.with_group_terms(rollouts, sample.item)
        advantages = advantages_of(rollouts, self.worker.reward, self._advantage)
        return Group(sample, task.frame_budget, rollouts, advantages)

    async def _rollout(self, record: Mapping[str, Any], prompt: Prompt, overview: Overview | None) -> Rollout:
        if "segments" not in record:
            return Rollout(
                record["id"], problem=record["problem"], reason=record["reason"], num_lost=record["num_lost"]
            )
        assert overview is not None
        score = record["reward"]["accuracy"] if "reward" in record else None
        worker = replace(self.worker, judge=Verdict(score)) if self.worker.reward.oe_mode == "llm" else self.worker
        return await worker.score(record["id"], await self._episode(record, overview), prompt)

    async def _episode(self, record: Mapping[str, Any], overview: Overview) -> Episode:
        turns, paths = [], dict(zip((v["path"] for v in record["videos"]), overview.task.videos, strict=False))
        for turn in record["turns"]:
            written = find_calls(turn["text"], self.worker.agent.signatures)[: len(turn["calls"])]
            if len(written) < len(turn["calls"]):
                raise ValueError(
                    f"{self.log.run_dir} has {len(turn['calls'])} calls in a turn of {record['id']}, but "
                    f"{len(written)} are found now: set rollout.tools as in the run, or replay it with its git_commit"
                )
            logged = zip(written, turn["calls"], strict=True)
            calls = [await self._call(call, of_call, paths) for call, of_call in logged]
            text = turn["text"], turn["finish"], tuple(turn["token_span"])
            turns.append(Turn(*text, calls, turn["latency_s"], turn["started_s"]))
        shown = [picture for turn in turns for call in turn.calls for picture in pictures_of(call.parts)]
        ledger = _ledger(record["segments"], [*overview.pictures, *shown])
        ended = record["finish"], record["seconds"]
        overview_s = record["overview_s"]
        return Episode(
            record["id"], overview.task, ledger, turns, *ended, videos=overview.shown_videos, overview_s=overview_s
        )

    async def _call(self, call: ToolCall, record: Mapping[str, Any], paths: Mapping[str, str]) -> Call:
        window = None if record["window_s"] is None else Window(*record["window_s"])
        box = None if record["box"] is None else Box(*record["box"])
        result = record["outcome"], record["response"], record["problem"]
        times = {name: record[name] for name in ("latency_s", "started_s")}
        path, frames_s = paths.get(record["path"], record["path"]), tuple(record["frames_s"])
        done = Call(call, *result, window, box, path=path, frames_s=frames_s, **times)
        if shown := record["shown"]:
            done.parts = (done.response, *await self._pictures(shown, paths))
        if record["segments"] is not None:
            done.seen = await self._pictures(record["seen"], paths)
            done.report = _ledger(record["segments"], pictures_of(done.seen))
        return done

    async def _pictures(self, records: Sequence[Mapping[str, Any]], paths: Mapping[str, str]) -> tuple[Shown, ...]:
        """Loads a call's pictures: decodes frames again, reads stored pictures. `paths` maps moved videos."""
        shown: dict[str, Shown] = {}
        times_s: dict[tuple[str, Box | None], list[float]] = {}
        for record in records:
            if "png" in record:
                shown[record["key"]] = Picture.of_png(record["png"])
                continue
            box = None if record["box"] is None else Box(*record["box"])
            times_s.setdefault((paths.get(record["path"], record["path"]), box), []).append(record["time_s"])
        for (path, box), of_path in times_s.items():
            frames = await self.worker.agent.prompter.frames_at(path, of_path, box)
            shown |= {frame.picture.key: frame for frame in frames}
        return tuple(shown[record["key"]] for record in records if record["key"] in shown)


def differing(logged: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[str]:
    """Names of the metrics that differ between a step and its replay. The log has non-finite metrics as null."""

    def same(key: str) -> bool:
        value = replayed[key]
        return logged.get(key) == (value if value is None or np.isfinite(value) else None)

    return [key for key in replayed if not key.startswith(OF_THE_MACHINE) and not same(key)]


def _ledger(records: Iterable[Mapping[str, Any]], pictures: Sequence[Picture]) -> Ledger:
    by_key = {picture.key: picture for picture in pictures}
    return Ledger([_segment(record, by_key) for record in records])


def _segment(record: Mapping[str, Any], by_key: Mapping[str, Picture]) -> Segment:
    keys = [picture["key"] for picture in record.get("pictures", ())]
    if unknown := [key for key in keys if key not in by_key]:
        raise ValueError(
            f"{len(unknown)} of {len(keys)} frames differ from the run's: its videos, or the settings of video and "
            f"rollout, have changed"
        )
    logps = np.array(record["behavior_logp"], np.float32) if "behavior_logp" in record else None
    ids = np.array(record["ids"], np.int32)
    return Segment(record["kind"], ids, tuple(by_key[key] for key in keys), logps, record.get("version"))


def _checkpoint_of(run_dir: Path, step: int) -> Path:
    for path in (run_dir / CHECKPOINTS_DIR).glob(f"*/{RECORD_FILE}"):
        if path.parent.name.isdecimal() and json.loads(path.read_bytes())["progress"]["step"] == step:
            return path.parent
    raise ValueError(
        f"the episodes of {run_dir} start with step {step + 1}, but it has no checkpoint of step {step}; "
        f"restore the checkpoint or the episodes"
    )


def _link_or_copy(source: str, target: str) -> None:
    """Hard-links a file, or copies it. Checkpoints are large and their files never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
