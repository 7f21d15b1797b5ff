"""Runs the trainer as a user does, and builds parts of the trainer from a config."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import forked

from paravt_jax import train as trainer
from paravt_jax.config import Config, load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import load_plugin
from paravt_jax.rl.episodes import RolloutWorker
from paravt_jax.rl.replay import OF_THE_MACHINE
from paravt_jax.rl.scheduler import RolloutScheduler
from paravt_jax.run.hosts import ALONE, Hosts
from rollout.episode import Agent

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "configs" / "smoke_cpu.yaml"
SHORT_PROMPT = [  # without the long tool schema
    "rollout.prompts.system=Call crop_video or zoom_frame.",
    "rollout.prompts.system_has_tools=true",
    "rollout.prompts.with_tool=Look, or answer.",
]
QUICK = [  # a smaller smoke run
    *SHORT_PROMPT,
    "train.prompts_per_step=1",
    "train.group_size=4",
    "rollout.max_new_tokens=16",  # the same row length in every step, also with a tool response
    "rollout.max_context_tokens=512",  # short rows for fast updates; a group has 200 tokens
    "pack.row_tokens=512",
    "video.frame_budgets=[3,4]",
    "video.max_pixels=6144",  # the size of the synthetic videos; more would add padding
    "advantage.filter_zero_variance=false",  # a random model's rewards rarely differ
    "loss.kl_coef=0.01",
    "data.validation=",
]
OPTIMISED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # the user's compiler flags


def rollouts_of(
    agent: Agent,
    order: SampleOrder[Prompt],
    cursor: Cursor,
    config: Config,
    judge: Judge | None = None,
    hosts: Hosts = ALONE,
) -> RolloutScheduler:
    plugin = load_plugin(config.reward)
    worker = RolloutWorker(agent, config.reward, judge, config.seed, plugin, config.train.truncated)
    return RolloutScheduler(worker, order, cursor, config.train, config.video, config.advantage, hosts=hosts)


def arguments(run_dir: Path | str, *overrides: str) -> list[str]:
    return ["--config", str(SMOKE), f"run_dir={run_dir}", *overrides]


def command(run_dir: Path | str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "paravt_jax.train", *arguments(run_dir, *overrides)]


def train(run_dir: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a subprocess."""
    words, environment = command(run_dir, *overrides), os.environ | forked.ENVIRONMENT | variables
    return subprocess.run(words, capture_output=True, text=True, timeout=540, cwd=ROOT, env=environment)


def train_here(run_dir: Path, *overrides: str) -> None:
    """Runs the command in this process, which is faster and checks types."""
    asyncio.run(train_in_loop(run_dir, *overrides))


async def train_in_loop(run_dir: Path, *overrides: str) -> None:
    """Runs the command in the running event loop."""
    await trainer.train(load_config(SMOKE, f"run_dir={run_dir}", *overrides))


def train_forked(run_dir: Path, *overrides: str) -> str:
    """Runs the command in a forked process, which has imported everything. Returns its log."""
    done = forked.run("paravt_jax.train", *arguments(run_dir, *overrides))
    assert done.returncode == 0, done.stderr
    return done.stderr


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_MACHINE)} for row in rows]


def episodes_of(run_dir: Path) -> list[dict]:
    """Returns the logged episodes with paths relative to the run, so that runs can be compared."""
    text = "".join(path.read_text() for path in sorted((run_dir / "episodes").glob("*.jsonl")))
    return [json.loads(line) for line in text.replace(str(run_dir), "RUN").splitlines()]


def arrays_of(run_dir: Path, step: int) -> dict[str, bytes]:
    """Returns the bytes of a checkpoint's array files."""
    checkpoint = run_dir / "checkpoints" / str(step)
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for folder in ("params", "optimizer")
        for path in sorted((checkpoint / folder).rglob("*"))
        if path.is_file() and path.name[0].isdigit()
    }
