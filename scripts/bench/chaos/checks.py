"""Invariants of a run's log, under any faults."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_port.layout import CHECKPOINTS_DIR, RECORD_FILE
from paravt_jax.config import TrainConfig
from paravt_jax.run.checkpoint_files import verify
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, load_jsonl

# Engine and learner both compute in float32, so the right version is far below this bound; at the stage's learning
# rate the previous version is above it.
MAX_KL = 1e-4


def episodes_of(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Groups the logged episodes by step."""
    paths = sorted((run_dir / EPISODES_DIR).glob("*.jsonl"))
    return {int(path.stem): list(load_jsonl(path)) for path in paths}


def problems_of(run_dir: Path, train: TrainConfig) -> list[str]:
    rows, episodes = list(load_jsonl(run_dir / METRICS_FILE)), episodes_of(run_dir)
    steps = list(range(1, len(rows) + 1))
    problems = []
    if [row["step"] for row in rows] != steps or list(episodes) != steps:
        problems.append(f"the log has metrics of steps {[row['step'] for row in rows]}, episodes of {list(episodes)}")
    if [row["policy_version"] for row in rows] != steps:
        problems.append("the policy's version is not the number of its updates in every step")
    for step, in_step in episodes.items():
        problems += _in_step(step, in_step, train)
    problems += [problem for row in rows for problem in _of_weights(row, episodes.get(row["step"], []))]
    return [*problems, *_of_checkpoints(run_dir / CHECKPOINTS_DIR, len(rows), train)]


def _in_step(step: int, episodes: Sequence[Mapping[str, Any]], train: TrainConfig) -> Iterator[str]:
    """Checks that a step has the next prompt samples with all their rollouts, and that token versions are in range."""
    first = (step - 1) * train.prompts_per_step
    expected = [
        (visit, number) for visit in range(first, first + train.prompts_per_step) for number in range(train.group_size)
    ]
    logged = [(episode["visit"], int(episode["id"].rpartition("/")[2])) for episode in episodes]
    if logged != expected:
        yield f"step {step}: prompt samples and rollouts are {logged}"
    newest = step - 1
    for episode in episodes:
        for segments in _ledgers(episode):
            versions = [segment["version"] for segment in segments if segment["kind"] == "sampled"]
            if versions != sorted(versions):
                yield f"step {step}: {episode['id']} has versions {versions}"
            if versions and not newest - train.max_staleness <= versions[0] <= versions[-1] <= newest:
                yield f"step {step}: {episode['id']} has versions {versions}, the newest is {newest}"


def _of_weights(row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Checks version labels by log-probs: tokens labeled with the newest weights must match the learner's."""
    segments = (segment for episode in episodes for ledger in _ledgers(episode) for segment in ledger)
    versions = {segment["version"] for segment in segments if segment["kind"] == "sampled"}
    kl = row.get("mismatch/behavior_kl", 0.0)
    if versions == {row["step"] - 1} and not kl < MAX_KL:
        yield f"step {row['step']}: tokens labelled with version {row['step'] - 1} differ from it by a KL of {kl:.2g}"


def _ledgers(episode: Mapping[str, Any]) -> Iterable[Sequence[Mapping[str, Any]]]:
    if "segments" in episode:
        yield episode["segments"]
        yield from (call["segments"] for turn in episode["turns"] for call in turn["calls"] if call["segments"])


def _of_checkpoints(directory: Path, num_steps: int, train: TrainConfig) -> Iterator[str]:
    yield from (f"{checkpoint}: {problem}" for checkpoint, problem in verify(directory) if problem)
    last = directory / str(num_steps)
    if not last.is_dir():
        yield f"the last step, {num_steps}, has no checkpoint"
        return
    progress = json.loads((last / RECORD_FILE).read_bytes())["progress"]
    cursor = progress["cursor"]
    num_done = num_steps * train.prompts_per_step
    if sorted({*range(num_done), *cursor["again"]}) != list(range(cursor["next"])) or progress["step"] != num_steps:
        yield f"the checkpoint of step {num_steps} has {progress}, but the log has {num_done} prompt samples"
