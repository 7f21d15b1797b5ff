"""Measures the rates of a step from a run's log, to replace published rates in a plan.

Calls, turns and lengths depend on the policy and its data, so they hold on any machine. Decoding time depends on the
videos and the CPU. The rates in OF_DEVICES hold only for the run's kind of device. Rates that a log cannot separate,
for example prefill, keep their published values.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model_port.json_files import read_object
from paravt_jax.config import Config, load_training_config
from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.plan import model_config, update_seconds
from paravt_jax.plan.remat import with_remat
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_time import PUBLISHED, StepParts, StepRates, best, published_bytes
from paravt_jax.run.directory import SETTINGS_FILE
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, load_jsonl
from paravt_jax.run.policy import HF_FILES_DIR

OF_DEVICES = ("memory_frac", "weight_passes", "publish_bytes_per_s", "update")

KEPT = "no logged step determines it"
KEPT_OF: dict[str, str] = dict.fromkeys(
    ("matmul_frac", "hop_s", "picture_s"), "the log does not separate its time from a rollout's"
)
MAX_STEPS = 20  # only the newest steps, which predict the next steps best
LONG_TOKENS = 64  # turns with at least this many tokens measure the time of a token
MAX_BYTES_PER_S = 1e11  # faster publishes sent nothing, for example in a replay
SPREAD = (0.1, 0.9)  # quantiles over steps or turns


class LoggedStep(NamedTuple):
    metrics: Mapping[str, float]
    episodes: Sequence[Mapping[str, Any]]  # without missing episodes


@dataclass(frozen=True)
class Calibration:
    source: str
    rates: StepRates
    kept: Mapping[str, str]  # rate -> reason why it keeps the published value


def calibrated(run_dir: Path, device: DeviceSpec) -> Calibration:
    """Measures rates for a plan on `device` from a run's directory or the JSON of `paravt check`."""
    if run_dir.is_file():
        return _calibration_of_check(run_dir, device)
    settings = run_dir / SETTINGS_FILE
    try:
        config = load_training_config(settings) if settings.is_file() else None
    except ValueError as problem:  # for example a tool whose file has moved; the plan needs its picture count
        raise ValueError(f"--calibrate {settings}: {problem}") from None
    if not isinstance(config, Config):
        absent = f"it has no {SETTINGS_FILE}" if run_dir.exists() else "it does not exist"
        problem = "it is a cold start" if config else absent
        raise ValueError(f"--calibrate {run_dir}: {problem}; give the run_dir of train, or --json of `paravt check`")
    kind, hf_files = json.loads(settings.read_bytes()).get("device_kind"), run_dir / HF_FILES_DIR
    model, _ = model_config(str(hf_files) if hf_files.is_dir() else config.model.path)
    run, is_same = PlannedRl.of(config, model).on_device(device), kind == device.kind
    try:
        steps = list(_steps(run_dir))
        logged = LoggedRates(run, steps, device)
        values, most_picture_s = logged.of_policy() | (logged.of_device() if is_same else {}), logged.most_picture_s()
    except (AttributeError, IndexError, KeyError, TypeError) as problem:
        raise ValueError(f"--calibrate {run_dir}: its log does not match a run of train: {problem!r}") from None
    numbers = [round(step.metrics["step"]) for step in steps]
    source = f"{run_dir}, steps {numbers[0]} to {numbers[-1]}, {config.model.path} on {kind or 'an unknown device'}"
    return _calibration(source, values, most_picture_s, kind, device)


def _calibration_of_check(path: Path, device: DeviceSpec) -> Calibration:
    """Reads only the device's rates, because a check's episodes are shorter than a run's."""
    facts = [stage["facts"] for stage in read_object(path).get("stages", []) if stage["stage"] == "step"]
    if not facts:
        raise ValueError(f"--calibrate {path}: it has no stage `step` of `paravt check`; give its --json or a run_dir")
    kind = facts[0].get("device")
    values = facts[0].get("rates", {}) if kind == device.kind else {}
    return _calibration(f"{path}, a check on {kind}", values, math.inf, kind, device)


def device_rates(run: PlannedRl, run_dir: Path, device: DeviceSpec) -> dict[str, list[float]]:
    """Measures the device's rates in a run's log; the JSON of `paravt check` has them."""
    return LoggedRates(run, list(_steps(run_dir)), device).of_device()


def _calibration(
    source: str, values: Mapping[str, list[float]], most_picture_s: float, kind: str | None, device: DeviceSpec
) -> Calibration:
    is_same = kind == device.kind
    other = f"the run's device is {kind or 'not in its log'}, not {device.kind}"
    kept = {name: KEPT_OF.get(name, KEPT) for name in PUBLISHED if name not in values}
    kept |= {name: other for name in OF_DEVICES if not is_same}
    rates = dict(PUBLISHED)
    for name, measured in values.items():
        rises = rates[name].best <= rates[name].worst  # whether the worst value is the largest
        ends = np.quantile(measured, SPREAD if rises else SPREAD[::-1]).tolist()
        rates[name] = rates[name]._replace(best=ends[0], worst=ends[1])
    picture = rates["picture_s"]
    if most_picture_s < picture.worst:
        rates["picture_s"] = picture._replace(best=min(picture.best, most_picture_s), worst=most_picture_s)
        del kept["picture_s"]
    return Calibration(source, rates, kept)


def _steps(run_dir: Path) -> Iterator[LoggedStep]:
    rows = list(load_jsonl(run_dir / METRICS_FILE)) if (run_dir / METRICS_FILE).is_file() else []
    rows = [row for row in rows if row.get("rollout/num_episodes") and isinstance(row.get("step"), int)]
    if not rows:
        raise ValueError(
            f"--calibrate {run_dir}: {METRICS_FILE} has no step with rollouts; wait until the run has logged one"
        )
    for row in rows[-MAX_STEPS:]:
        path = run_dir / EPISODES_DIR / f"{row['step']:06d}.jsonl"
        episodes = [episode for episode in load_jsonl(path) if not episode["missing"]] if path.is_file() else []
        yield LoggedStep({key: value for key, value in row.items() if isinstance(value, int | float)}, episodes)


@dataclass(frozen=True)
class LoggedRates:
    """The rates that a run's steps determine, each with a value per step or turn."""

    run: PlannedRl
    steps: Sequence[LoggedStep]
    device: DeviceSpec

    def of_policy(self) -> dict[str, list[float]]:
        """Rates that depend on the policy and on the videos."""
        values = {
            "calls": self._metric("rollout/tool_calls_mean"),
            "turns": self._metric("rollout/turns_mean"),
            "length": list(self._lengths()),
            "tail": list(self._tails()),
            "overview_s": list(self._overviews_s()),
        }
        return {name: of_rate for name, of_rate in values.items() if of_rate}

    def of_device(self) -> dict[str, list[float]]:
        """Rates that depend on the device; only valid if the run's devices are of this kind."""
        values = {
            "publish_bytes_per_s": list(self._publish_rates()),
            "update": list(self._updates()),
            "memory_frac": list(self._memory_fracs()),
        }
        if values["memory_frac"]:
            values["weight_passes"] = [1.0]  # already included in a token's measured time
        return {name: of_rate for name, of_rate in values.items() if of_rate}

    def _metric(self, key: str) -> list[float]:
        return [step.metrics[key] for step in self.steps if key in step.metrics]

    @cached_property
    def _mean_parts(self) -> StepParts:
        """The parts of a step at the run's mean calls and turns, with rates to measure set to 1."""
        means = {"calls": self._metric("rollout/tool_calls_mean"), "turns": self._metric("rollout/turns_mean")}
        ones = dict.fromkeys(("memory_frac", "update", "weight_passes"), 1.0)
        measured = {name: float(np.mean(of_rate)) for name, of_rate in means.items() if of_rate}
        return StepParts(self.run, self.device, best(PUBLISHED) | ones | {"hop_s": 0.0} | measured)

    def _lengths(self) -> Iterator[float]:
        """Yields each step's ratio of sampled tokens to planned tokens for the same number of calls."""
        for step in self.steps:
            if step.episodes:
                calls = [call for episode in step.episodes for turn in episode["turns"] for call in turn["calls"]]
                planned = self.run.work.with_calls(len(calls) / len(step.episodes))
                sampled = sum(map(_sampled, [*step.episodes, *calls]))
                yield sampled / len(step.episodes) * planned.num_episodes / planned.sampled_tokens

    def _tails(self) -> Iterator[float]:
        """Yields each step's longest episode over the mean. Of a turn's concurrent reports, the longest counts."""
        for step in self.steps:
            lengths = [_sampled(episode) + _longest_reports(episode) for episode in step.episodes]
            if sum(lengths):
                yield max(lengths) * len(lengths) / sum(lengths)

    def _overviews_s(self) -> Iterator[float]:
        """Yields each step's decoding seconds per group, as if no frame had been in the cache."""
        first = self.steps[0].metrics["step"] > 1  # the first total includes earlier steps
        totals = self._increments("perf/video/decode_s"), self._increments("perf/video/decoded_frames")
        spent = zip(self.steps, *totals, strict=False)
        for step, seconds, num_decoded in list(spent)[first:]:
            num_groups = step.metrics.get("rollout/num_groups", 0.0)
            if num_decoded and num_groups and step.episodes:
                yield seconds / num_decoded * _num_frames(step.episodes) / num_groups

    def _increments(self, key: str) -> list[float]:
        """Each step's increase of a running total. Totals restart at 0 when a run resumes."""
        return [now - before if now >= before else now for before, now in pairwise([0.0, *self._metric(key)])]

    def most_picture_s(self) -> float:
        """Upper bound of the time of a picture, as if rollouts waited only for pictures; no bound without servers."""
        rollouts_s = self._metric("time/step_s" if self.run.train.steps_ahead else "time/rollout_s")
        if not self._mean_parts.on_servers or not rollouts_s:
            return math.inf
        return float(np.median(rollouts_s)) * self._mean_parts.sampler.replicas / self._mean_parts.pictures

    def _publish_rates(self) -> Iterator[float]:
        if self._mean_parts.on_servers:
            num_bytes = published_bytes(self.run)
            yield from (
                num_bytes / seconds
                for seconds in self._metric("time/publish_s")
                if seconds * MAX_BYTES_PER_S > num_bytes
            )

    def _updates(self) -> Iterator[float]:
        """Yields the ratio of measured to planned update time, except for steps that compiled a program."""
        run = with_remat(self.run, self.device)
        roofline = update_seconds(run.update, run.model, self.device, run.typical_step())
        if roofline is not None:
            planned_s = self._mean_parts.seconds(roofline.total)["update"]
            for step in self.steps:
                if not step.metrics.get("perf/num_compiles") and "time/update_s" in step.metrics:
                    yield step.metrics["time/update_s"] / planned_s

    def _memory_fracs(self) -> Iterator[float]:
        """Yields each long turn's token time at full bandwidth over the measured time with prefill and waiting."""
        if self.device.memory_tb_per_s is None:
            return
        parts = self._mean_parts
        rows = max(1.0, min(parts.work.num_episodes / parts.sampler.replicas, parts.sampler.rows))
        for turn in (turn for step in self.steps for episode in step.episodes for turn in episode["turns"]):
            num_tokens = turn["token_span"][1] - turn["token_span"][0]
            if num_tokens >= LONG_TOKENS and turn["latency_s"] > 0:
                yield min(1.0, parts.token_s(rows, running=rows) * num_tokens / turn["latency_s"])


def _sampled(record: Mapping[str, Any]) -> int:
    """The number of tokens that an agent sampled: an episode's main agent or a call's sub-agent."""
    return sum(len(segment["ids"]) for segment in record["segments"] or () if segment["kind"] == "sampled")


def _num_frames(episodes: Sequence[Mapping[str, Any]]) -> int:
    """The number of distinct frames in overviews and calls."""
    shown = [video for episode in episodes for video in episode["videos"]]
    shown += [call for episode in episodes for turn in episode["turns"] for call in turn["calls"]]
    return len({(seen["path"], time_s, str(seen.get("box"))) for seen in shown for time_s in seen["frames_s"]})


def _longest_reports(episode: Mapping[str, Any]) -> int:
    return sum(max(map(_sampled, turn["calls"]), default=0) for turn in episode["turns"])
