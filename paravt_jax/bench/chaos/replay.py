"""A run's log, learnt from once more: it must hold everything that the run's weights came from.

The episodes are made again from their records, with frames that are decoded anew, and go through the trainer's own
updates in one undisturbed process. Its checkpoint must then have the bytes of the run's.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_port.progress import counted
from paravt_jax.bench.chaos.recorder import Sampled
from paravt_jax.bench.smoke_run import CONFIG, SETTINGS
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.rl.opening import opened
from paravt_jax.rl.rollouts import Group, Member, Player, advantages_of, scored_together
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, load_jsonl
from paravt_jax.run.training import CHECKPOINTS_DIR
from rollout.episode import Call, Episode, Task, Turn
from rollout.ledger import Ledger, Segment
from rollout.picture import Picture
from rollout.prompter import Prompter
from rollout.tools import ToolCall, Window
from rollout.video.box import Box

OF_THE_MACHINE = ("time/", "perf/")  # metrics that no two runs share
ARRAYS = ("params", "optimizer")  # folders of a checkpoint


async def replay(run_dir: Path, settings: Sequence[str], directory: Path) -> tuple[list[str], Counter[Sampled]]:
    """Where the run is not what its log leads to, and everything that was sampled according to the log."""
    problems: list[str] = []
    sampled: Counter[Sampled] = Counter()
    rows = {row["step"]: row for row in load_jsonl(run_dir / METRICS_FILE)}
    own = ("engine.kind=jax", f"run_dir={directory}", f"train.num_steps={len(rows)}")
    config = load_config(CONFIG, *SETTINGS, *settings, *own)
    async with opened(config) as run:
        player, visits = run.rollouts.player, run.rollouts.visits
        for step, row in counted(rows.items(), "replaying the log", "step"):
            groups = []
            records = load_jsonl(run_dir / EPISODES_DIR / f"{step:06d}.jsonl")
            for number, of_visit in itertools.groupby(records, lambda record: record["visit"]):
                visit, of_group = visits[number], list(of_visit)
                members = [await _member(record, visit.item, player) for record in of_group]
                members = scored_together(members, player.reward)
                advantages = advantages_of(members, player.reward, config.advantage)
                groups.append(Group(visit, of_group[0]["frame_budget"], members, advantages))
            sampled.update(_sampled(groups, run.policy.chat.image_id))
            run.rollouts.cursor.take(len(groups))
            for key, value in (await run.update(groups)).items():
                if not key.startswith(OF_THE_MACHINE) and not _same(row.get(key), value):
                    problems.append(f"step {step}: {key} is {row.get(key)} in the log and {value} in its replay")
    one, other = (path / CHECKPOINTS_DIR / str(len(rows)) for path in (run_dir, directory))
    return problems + _differing(one, other), sampled


async def _member(record: Mapping[str, Any], prompt: Prompt, player: Player) -> Member:
    if record["missing"]:
        return Member(record["id"], problem=record["problem"])
    episode = await _episode(record, prompt, player.agent.prompter)
    return await player.scored(record["id"], episode, prompt)


async def _episode(record: Mapping[str, Any], prompt: Prompt, prompter: Prompter) -> Episode:
    task = Task(record["task"], prompt.question, prompt.videos, record["frame_budget"])
    overview = await prompter.overview(task)
    turns = []
    for turn in record["turns"]:
        calls = [await _call(call, prompt, prompter) for call in turn["calls"]]
        turns.append(Turn(turn["text"], turn["finish"], tuple(turn["token_span"]), calls))
    ledger = _ledger(record["segments"], overview.pictures)
    return Episode(record["id"], task, ledger, turns, record["finish"])


async def _call(record: Mapping[str, Any], prompt: Prompt, prompter: Prompter) -> Call:
    call = Call(ToolCall(tuple(record["span"]), record["name"]), record["outcome"], record["response"])
    if record["segments"] is not None:
        window, video = Window(*record["window_s"]), prompt.videos[0]
        box = record.get("box")
        shown = prompter.detail(video, window.start_s, Box(*box)) if box else prompter.crop(video, window)
        call.report = _ledger(record["segments"], [frame.picture for frame in await shown])
    return call


def _ledger(records: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]) -> Ledger:
    by_key = {picture.key: picture for picture in pictures}
    return Ledger(
        [
            Segment(
                record["kind"],
                np.array(record["ids"], np.int32),
                tuple(by_key[picture["key"]] for picture in record.get("pictures", ())),
                np.array(record["behavior_logp"], np.float32) if "behavior_logp" in record else None,
                record.get("version"),
            )
            for record in records
        ]
    )


def _sampled(groups: Sequence[Group], image_id: int) -> Iterator[Sampled]:
    """What was sampled in one go, with all that lay before it."""
    ledgers = (
        ledger for group in groups for member in group.members if member.episode for ledger in member.episode.ledgers
    )
    for ledger in ledgers:
        before: list[Segment] = []
        for sampled, run in itertools.groupby(ledger.segments, lambda segment: segment.kind == "sampled"):
            segments = list(run)
            if sampled:
                yield Sampled.of(
                    np.concatenate([segment.ids for segment in before]),
                    [picture.png_base64 for segment in before for picture in segment.pictures],
                    np.concatenate([segment.ids for segment in segments]),
                    np.concatenate(
                        [segment.behavior_logp for segment in segments if segment.behavior_logp is not None]
                    ),
                    [segment.version for segment in segments for _ in segment.ids if segment.version is not None],
                )
            before += segments


def _same(logged: float | None, now: float) -> bool:
    return logged == now or (logged is None and not math.isfinite(now))


def _differing(checkpoint: Path, other: Path) -> list[str]:
    problems = []
    for folder in ARRAYS:
        paths = [path for path in sorted((other / folder).rglob("*")) if path.is_file() and path.name[0].isdecimal()]
        for path in paths:
            name = path.relative_to(other)
            if not (checkpoint / name).is_file() or (checkpoint / name).read_bytes() != path.read_bytes():
                problems.append(f"checkpoint {checkpoint.name}: {name} is not what a replay of the log gives")
        if not paths:
            problems.append(f"checkpoint {checkpoint.name}: {folder} is empty")
    return problems
