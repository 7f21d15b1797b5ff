"""A policy on held-out prompts: by frame budget, by the way calls are made, by type of question.

python -m paravt_jax.eval --config configs/eval_8b.yaml [a.b=c …]

Every pair of budget and dispatch is a cell. A cell that is done is kept, so that an evaluation that was interrupted
goes on where it was. The agent loop is that of training. What an engine, a video or the judge failed to give is counted
as missing, and never as a wrong answer.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from model_port.cli import run_cli
from paravt_jax.config import EvalConfig, to_record
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.rows import left_out
from paravt_jax.rewards.judge import Judge
from paravt_jax.rl.metrics import member_metrics
from paravt_jax.rl.rollouts import Member, Player, evaluate, member_record
from paravt_jax.run.command import config_parser, read_config
from paravt_jax.run.compiles import use_compilation_cache
from paravt_jax.run.directory import held, write_settings
from paravt_jax.run.log import whole_file
from paravt_jax.run.policy import policy_of
from paravt_jax.run.process import say
from paravt_jax.run.threads import in_thread
from paravt_jax.sampling.opening import frame_reader, open_engine
from rollout.episode import Agent, Dispatch

RESULTS_FILE = "eval.json"
SHOWN = {
    "accuracy": "accuracy_mean",
    "f_tau": "format_reward",
    "kappa": "tool_calls_mean",
    "tool use": "tool_use_frac",
    "reward": "reward_mean",
    "tokens": "sampled_tokens_mean",
    "missing": "num_missing",
}
Cell = dict[str, Any]


async def run_eval(config: EvalConfig) -> list[Cell]:
    """The cells, in the order of dispatches and budgets."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(held(config.run_dir))
        loaded = load_prompts(
            config.data.validation, video_root=config.data.video_root, max_bad_frac=config.data.max_bad_frac
        )
        for remark in left_out(config.data.validation, loaded.bad):
            say(remark)
        prompts = loaded.prompts[: config.eval.max_prompts]
        _check_same(directory, config)
        write_settings(to_record(config), directory)
        wanted: list[tuple[Dispatch, int]] = [
            (how, budget) for how in config.eval.dispatches for budget in config.eval.frame_budgets
        ]
        if not all(_cell_file(directory, *cell).exists() for cell in wanted):
            player = await _open_player(config, directory, stack)
            for dispatch, budget in wanted:
                if not _cell_file(directory, dispatch, budget).exists():
                    agent = player.agent.with_settings(dispatch=dispatch)
                    await _fill(
                        directory, dispatch, budget, replace(player, agent=agent), prompts, config.eval.num_samples
                    )
        cells = [json.loads(_cell_file(directory, *cell).read_text()) for cell in wanted]
        with whole_file(directory / RESULTS_FILE) as file:
            file.write(json.dumps({"model": config.model.path, "cells": cells}, indent=2).encode() + b"\n")
    return cells


def table(cells: Iterable[Cell]) -> str:
    """As Markdown, one line for each cell."""
    columns = ["dispatch", "frames", *SHOWN, "mcq", "tvg", "oe"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        values = [f"{cell['metrics'][key]:.3g}" for key in SHOWN.values()]
        by_type = [cell["by_type"].get(kind, {}).get("accuracy_mean") for kind in ("mcq", "tvg", "oe")]
        values += ["" if value is None else f"{value:.3g}" for value in by_type]
        lines.append(f"| {cell['dispatch']} | {cell['frame_budget']} | {' | '.join(values)} |")
    return "\n".join(lines)


async def _open_player(config: EvalConfig, directory: Path, stack: AsyncExitStack) -> Player:
    judge = await stack.enter_async_context(Judge(config.judge)) if config.judge is not None else None
    policy = await policy_of(config, directory)
    frames = await stack.enter_async_context(frame_reader(config.video, policy.contract))
    engine = await open_engine(
        config.engine,
        policy,
        await in_thread(policy.load) if config.engine.kind == "jax" else None,
        0,
        say,
        dtype=config.model.dtype,
        max_context_tokens=config.rollout.max_context_tokens,
        max_pixels=config.video.max_pixels,
    )
    stack.push_async_callback(engine.close)
    return Player(Agent(engine, frames, policy.chat, config.rollout), config.reward, judge, config.seed)


async def _fill(
    directory: Path,
    dispatch: Dispatch,
    budget: int,
    player: Player,
    prompts: Sequence[Prompt],
    num_samples: int,
) -> None:
    name = f"{dispatch}, {budget} frames"
    with tqdm(total=len(prompts), desc=name, disable=not sys.stderr.isatty()) as bar:
        members = await evaluate(player, prompts, budget, num_samples, on_done=lambda: bar.update(1))
    types = [prompt.question_type for prompt in prompts for _ in range(num_samples)]
    cell = {
        "dispatch": dispatch,
        "frame_budget": budget,
        "metrics": member_metrics(members),
        "by_type": {
            kind: member_metrics([member for member, of in zip(members, types, strict=True) if of == kind])
            for kind in dict.fromkeys(types)
        },
    }
    with whole_file(directory / f"episodes_{dispatch}_{budget}.jsonl") as file:
        for member, prompt in zip(members, (p for p in prompts for _ in range(num_samples)), strict=True):
            record = {"answer": prompt.answer, "question_type": prompt.question_type, **member_record(member)}
            file.write(json.dumps(record).encode() + b"\n")
    if all(member.missing for member in members):
        raise RuntimeError(f"{name}: every episode is missing; for example {_problem(members)}")
    with whole_file(_cell_file(directory, dispatch, budget)) as file:
        file.write(json.dumps(cell).encode())
    if int(cell["metrics"]["num_missing"]):
        say(f"{name}: {int(cell['metrics']['num_missing'])} episodes are missing, for example {_problem(members)}")


def _problem(members: Sequence[Member]) -> str:
    return next(f"{member.id}: {member.problem}" for member in members if member.missing)


def _cell_file(directory: Path, dispatch: str, budget: int) -> Path:
    return directory / f"cell_{dispatch}_{budget}.json"


def _check_same(directory: Path, config: EvalConfig) -> None:
    """Cells of another model or of other prompts must not be mixed with those to come."""
    path = directory / "config.json"
    if not path.exists() or not any(directory.glob("cell_*.json")):
        return
    before, now = json.loads(path.read_text())["config"], to_record(config)
    changed = sorted(key for key in now if key not in ("eval", "engine", "mesh") and before.get(key) != now[key])
    if changed:
        raise ValueError(
            f"{directory} has cells of an evaluation with other settings ({', '.join(changed)}); choose another run_dir"
        )


def main() -> None:
    parser = config_parser(
        "paravt_jax.eval",
        "Evaluates a policy on held-out prompts. Run again with the same run_dir, it goes on where it was.",
    )
    config = read_config(
        parser, parser.parse_args(), EvalConfig, "configs/eval_8b.yaml is an example", "data.validation=FILE"
    )
    if config is None:
        return
    use_compilation_cache()
    print(table(asyncio.run(run_eval(config))))


if __name__ == "__main__":
    run_cli(main)
