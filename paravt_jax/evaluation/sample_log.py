"""Logs records of samples in RUN/samples_CELL.jsonl, one line per sample, keyed by sample and settings.

A sample is done if no episode is missing. Other samples run again when the evaluation restarts; the last record of
a sample counts. Shards write to RUN/shards/K_of_N. A run without --shard reads the records of all shards too.
"""

import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_port.output_dir import named
from paravt_jax.config import EvalCell
from paravt_jax.data.splits import PublicSplit, Sample
from paravt_jax.rewards.answers import interval, option_letter
from paravt_jax.rewards.official import OFFICIAL, STRICT, reply_of
from paravt_jax.rl.episodes import Rollout
from paravt_jax.rl.metrics import rollout_metrics
from paravt_jax.run.log import load_jsonl

SHARDS_DIR = "shards"

Record = dict[str, Any]


@dataclass(frozen=True)
class SampleResult:
    """The fields of a record that the certificate needs, without the dialogues."""

    id: str
    key: str
    video: str
    question_type: str
    groups: Mapping[str, Sequence[str]]
    subtitles: str
    episodes: tuple[Mapping[str, Any], ...]  # metrics, scores and frames, or the reason why the episode is missing

    @property
    def missing(self) -> str:
        """The reason for a missing episode; empty if no episode is missing."""
        return next((episode["reason"] for episode in self.episodes if episode["missing"]), "")

    @property
    def problem(self) -> str:
        return next((f"{self.id}: {episode['problem']}" for episode in self.episodes if episode["missing"]), "")

    @property
    def answered(self) -> bool:
        return all(episode["answered"] for episode in self.episodes)

    def scores(self, scorer: str) -> list[float]:
        """One score per episode."""
        return [episode["scores"][scorer] for episode in self.episodes]

    @property
    def main_scores(self) -> list[float]:
        """One score per episode, by the protocol's own rule."""
        return [next(iter(episode["scores"].values())) for episode in self.episodes]


def cell_name(cell: EvalCell) -> str:
    return f"{cell.dispatch}_{cell.frame_budget}" + ("" if cell.temperature is None else f"_t{cell.temperature:g}")


def sample_key(settings: str, sample: Sample) -> str:
    """Identifies a record: a hash of the settings and the sample, except the path of its video."""
    prompt = sample.prompt
    values = [settings, prompt.id, prompt.question, prompt.answer, prompt.question_type]
    own = [prompt.messages, prompt.columns]  # only your own rows have these
    content = json.dumps([*values, *(own if any(own) else [])], default=repr)
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def sample_record(key: str, sample: Sample, subtitles: str, episodes: Sequence[Record]) -> Record:
    prompt = sample.prompt
    return {
        "key": key,
        "id": prompt.id,
        "video": sample.video,
        "answer": prompt.answer,
        "question_type": prompt.question_type,
        "groups": {name: list(labels) for name, labels in sample.groups.items()},
        "subtitles": subtitles,
        "episodes": episodes,
    }


def episode_record(rollout: Rollout, sample: Sample, split: PublicSplit | None) -> Record:
    record = rollout.to_record() | {"metrics": rollout_metrics([rollout])}
    if rollout.missing or rollout.episode is None or rollout.terms is None:
        return record
    turns, prompt = [turn.text for turn in rollout.episode.turns], sample.prompt
    scores = {STRICT: rollout.terms.score}
    if split is not None:
        scores[OFFICIAL] = split.official_score(reply_of(turns), sample)
    overview = len(rollout.episode.ledger.segments[0].pictures)
    crops = sum(len(ledger.pictures) for ledger in rollout.episode.ledgers) - overview
    answered = is_answer(rollout.terms.prediction, prompt.question_type, prompt.question)
    return record | {"scores": scores, "answered": answered, "num_frames": overview, "num_crop_frames": crops}


def is_answer(prediction: str | None, question_type: str, question: str) -> bool:
    """Whether the strict rule can parse an answer of this type, right or wrong."""
    if not prediction:
        return False
    if question_type == "mcq":
        return option_letter(prediction, question) is not None
    return question_type != "tvg" or interval(prediction) is not None


class SampleLog:
    """The records of a cell. A directory has one writer at a time."""

    def __init__(self, directory: Path, cell: str):
        self._path = directory / f"samples_{cell}.jsonl"
        self._shards = sorted(directory.glob(f"{SHARDS_DIR}/*/{self._path.name}"))
        if self._path.exists():  # removes an incomplete line of a killed process, because the next record adds to it
            with named(self._path), self._path.open("rb+") as file:
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def read(self, keys: Container[str]) -> dict[str, SampleResult]:
        """The newest result for each key. A missing result never replaces a complete one."""
        results: dict[str, SampleResult] = {}
        paths = filter(Path.exists, (*self._shards, self._path))
        for result in (result for path in paths for result in _results_in(path)):
            key = result.key
            if key in keys and (not result.missing or key not in results or results[key].missing):
                results[key] = result
        return results

    def write(self, record: Record) -> None:
        with named(self._path), self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _results_in(path: Path) -> Iterator[SampleResult]:
    for number, record in enumerate(load_jsonl(path), 1):
        try:
            yield result_of(record)
        except (KeyError, TypeError):
            raise ValueError(
                f"{path}: line {number} is not the record of a sample; restore the file, or remove the line"
            ) from None


def result_of(record: Record) -> SampleResult:
    fields = ("metrics", "scores", "answered", "num_frames", "num_crop_frames", "missing", "problem", "reason")
    fields = (*fields, "sent", "malformed")
    episodes = tuple({name: episode[name] for name in fields if name in episode} for episode in record["episodes"])
    names = ("id", "key", "video", "question_type", "groups", "subtitles")
    return SampleResult(**{name: record[name] for name in names}, episodes=episodes)
