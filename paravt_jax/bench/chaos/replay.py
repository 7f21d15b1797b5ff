"""A run's log, learnt from once more: it must hold everything that the run's weights came from.

The trainer's own replay of it, in one undisturbed process, must have the same metrics, and a checkpoint of the same
bytes.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from model_port.layout import CHECKPOINTS_DIR, OPTIMIZER_DIR, PARAMS_DIR
from model_port.progress import counted
from paravt_jax.bench.chaos.recorder import Sampled
from paravt_jax.bench.smoke_run import CONFIG, SETTINGS
from paravt_jax.config import load_config
from paravt_jax.rl.opening import opened
from paravt_jax.rl.replay import differing
from paravt_jax.rl.rollouts import Group
from paravt_jax.run.log import METRICS_FILE, rows_by_step
from rollout.ledger import Segment

ARRAYS = (PARAMS_DIR, OPTIMIZER_DIR)  # folders of a checkpoint


async def replay(run_dir: Path, settings: Sequence[str], directory: Path) -> tuple[list[str], Counter[Sampled]]:
    """Where the run is not what its log leads to, and everything that was sampled according to the log."""
    problems: list[str] = []
    sampled: Counter[Sampled] = Counter()
    rows = rows_by_step(run_dir / METRICS_FILE)
    config = load_config(CONFIG, *SETTINGS, *settings, f"run_dir={directory}", f"train.num_steps={len(rows)}")
    async with opened(config, replay=run_dir) as run:
        for step, row in counted(rows.items(), "replaying the log", "step"):
            groups = await run.collect()
            assert groups is not None
            sampled.update(_sampled(groups, run.policy.chat.image_id))
            metrics = await run.update(groups)
            for key in differing(row, metrics):
                problems.append(f"step {step}: {key} is {row.get(key)} in the log and {metrics[key]} in its replay")
    one, other = (path / CHECKPOINTS_DIR / str(len(rows)) for path in (run_dir, directory))
    return problems + _differing(one, other), sampled


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
