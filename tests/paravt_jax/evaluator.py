"""Evaluations without a model, with a copy of a split, fake frames and a scripted engine."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents import FakeFrames, is_subagent
from published import make_copy

from paravt_jax.config import EvalConfig, load_config
from paravt_jax.evaluation import evaluation
from paravt_jax.evaluation.evaluation import Cell
from paravt_jax.rewards.plugin import load_plugin
from paravt_jax.rl.episodes import RolloutWorker
from rollout.chat import Chat
from rollout.engine.protocol import Request
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

Reply = Callable[[str, Request], str]  # (episode name, request) -> the main agent's turn; may raise


def answer(text: str) -> str:
    return f"It is seen in the frames.</think><answer>{text}</answer><|im_end|>"


def config_of(split: str, root: Path, *overrides: str, num_rows: int = 3) -> EvalConfig:
    """Returns the config of an evaluation of a split's copy, which it writes to `root` if it is missing."""
    if not root.exists():
        make_copy(split, root, num_rows)
    settings = {
        "run_dir": f"{root / 'run'}",
        "model": {"path": "scripted"},
        "data": {"split": split, "validation": f"{root}"},
        "rollout": {"max_turns": 3, "max_parallel": 5},
        "eval": {"dispatches": ["none"], "frame_budgets": [3]},
    }
    (root / "config.json").write_text(json.dumps(settings))
    return load_config(root / "config.json", *overrides, schema=EvalConfig)


class Evaluator:
    """Runs evaluations with a scripted engine, and records its requests."""

    def __init__(self, chat: Chat, say: Reply, monkeypatch: Any):
        self.chat, self.say = chat, say
        self.episodes: list[str] = []  # episode names, one per request
        self.prompts: list[str] = []
        self.frames: Any = FakeFrames(duration_s=32)
        monkeypatch.setattr(evaluation, "_open_worker", self.open_worker)

    async def reply(self, request: Request) -> list[int]:
        if is_subagent(self.chat, request):
            return self.chat.encode("A report.<|im_end|>").tolist()
        self.episodes.append(request.episode)
        self.prompts.append(self.chat.decode(request.ids))
        return self.chat.encode(self.say(request.episode, request)).tolist()

    async def open_worker(self, config: EvalConfig, directory: Path, stack: Any, samples: Any) -> RolloutWorker:
        agent = Agent(ScriptedEngine(self.reply), self.frames, self.chat, config.rollout)
        return RolloutWorker(agent, config.reward, None, config.seed, load_plugin(config.reward))

    def run(self, config: EvalConfig, shard: tuple[int, int] | None = None) -> list[Cell]:
        from paravt_jax.eval import run_eval

        return asyncio.run(run_eval(config, shard))
