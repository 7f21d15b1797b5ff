"""Replays a run's log without faults: the weights must follow from the log alone.

The replay runs in one process. A run of one host must have the same metrics and the same checkpoint, to the last bit; a
run of several hosts sums gradients in another order, so its metrics must agree closely. Every replayed update is
compared with the log, episode by episode.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_port.layout import ADAPTER_FILE, CHECKPOINTS_DIR, OPTIMIZER_DIR, PARAMS_DIR
from model_port.progress import counted
from paravt_jax.config import load_config
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.rl.groups import Group
from paravt_jax.rl.replay import differing
from paravt_jax.rl.setup import open_run
from paravt_jax.run.log import METRICS_FILE, rows_by_step
from rollout.ledger import Segment
from scripts.bench.chaos.account import accounting_problems
from scripts.bench.chaos.checks import episodes_of
from scripts.bench.chaos.recorder import Sampled
from scripts.bench.hosts import difference
from scripts.bench.smoke_run import CONFIG, SETTINGS

HOSTS_TOLERANCE = 2e-2


async def replay(
    run_dir: Path, settings: Sequence[str], directory: Path, num_hosts: int = 1
) -> tuple[list[str], Counter[Sampled]]:
    """Returns the differences between the run and its replay, and all samples in the log."""
    problems: list[str] = []
    sampled: Counter[Sampled] = Counter()
    rows = rows_by_step(run_dir / METRICS_FILE)
    config = load_config(CONFIG, *SETTINGS, *settings, f"run_dir={directory}", f"train.num_steps={len(rows)}")
    episodes = episodes_of(run_dir)
    async with open_run(config, replay=run_dir) as run:
        used, chat = parts_used(run.training.learner), run.policy.chat
        for step, row in counted(rows.items(), "replaying the log", "step"):
            groups = await run.collect()
            assert groups is not None
            sampled.update(_sampled(groups, chat.image_id))
            used.clear()
            metrics = await run.update(groups)
            problems += accounting_problems(
                step, episodes[step], used, run.policy.chat.visual_ids, config.train.subagent_loss
            )
            for key in differing(row, metrics):
                if num_hosts > 1 and difference(row.get(key), metrics[key]) <= HOSTS_TOLERANCE:
                    continue
                problems.append(f"step {step}: {key} is {row.get(key)} in the log and {metrics[key]} in its replay")
    if num_hosts == 1:
        checkpoint, replayed = (path / CHECKPOINTS_DIR / str(len(rows)) for path in (run_dir, directory))
        problems += _differing(checkpoint, replayed)
    return problems, sampled


def parts_used(learner: Learner) -> list[StepPart]:
    """Returns a list that collects the inputs of all later updates."""
    used: list[StepPart] = []
    update = learner.update

    def recorded(parts: Sequence[StepPart], *arguments: Any, **settings: Any) -> dict[str, float]:
        used.extend(parts)
        return update(parts, *arguments, **settings)

    learner.update = recorded
    return used


def _sampled(groups: Sequence[Group], image_id: int) -> Iterator[Sampled]:
    """Yields every sampled span with its prompt."""
    ledgers = (
        ledger
        for group in groups
        for rollout in group.rollouts
        if rollout.episode
        for ledger in rollout.episode.ledgers
    )
    for ledger in ledgers:
        prompt: list[Segment] = []
        for sampled, run in itertools.groupby(ledger.segments, lambda segment: segment.kind == "sampled"):
            segments = list(run)
            if sampled:
                yield Sampled.of(
                    np.concatenate([segment.ids for segment in prompt]),
                    [picture.png_base64 for segment in prompt for picture in segment.pictures],
                    np.concatenate([segment.ids for segment in segments]),
                    np.concatenate(
                        [segment.behavior_logp for segment in segments if segment.behavior_logp is not None]
                    ),
                    [segment.version for segment in segments for _ in segment.ids if segment.version is not None],
                )
            prompt += segments


def _differing(checkpoint: Path, other: Path) -> list[str]:
    problems, adapter = [], other / ADAPTER_FILE
    trained = [adapter] if adapter.is_file() else _arrays_in(other / PARAMS_DIR)
    for folder, paths in ((PARAMS_DIR, trained), (OPTIMIZER_DIR, _arrays_in(other / OPTIMIZER_DIR))):
        for path in paths:
            name = path.relative_to(other)
            if not (checkpoint / name).is_file() or (checkpoint / name).read_bytes() != path.read_bytes():
                problems.append(f"checkpoint {checkpoint.name}: {name} differs between the run and its replay")
        if not paths:
            problems.append(f"checkpoint {checkpoint.name}: {folder} is empty")
    return problems


def _arrays_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0].isdecimal()]
