"""Everything that is open while a policy is evaluated, and how a cell comes about. The counterpart of run.py."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.progress import Meter
from paravt_jax.config import EvalConfig, to_record
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.rows import left_out
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import load_plugin
from paravt_jax.rl.metrics import member_metrics, parted
from paravt_jax.rl.rollouts import Player, evaluate, member_record
from paravt_jax.run.directory import held, settings_of, write_settings
from paravt_jax.run.log import whole_file
from paravt_jax.run.placement import place_servers
from paravt_jax.run.policy import policy_of
from paravt_jax.run.process import say
from paravt_jax.run.threads import in_thread
from paravt_jax.sampling.opening import frame_reader, open_engine
from rollout.episode import Agent, Dispatch

Cell = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Use `async with opened(config) as evaluation`."""

    directory: Path
    prompts: Sequence[Prompt]
    num_samples: int
    player: Player | None  # None where every cell is done

    def cell(self, dispatch: Dispatch, budget: int) -> Cell:
        return json.loads(_cell_file(self.directory, dispatch, budget).read_text())

    async def fill(self, dispatch: Dispatch, budget: int) -> None:
        """Plays the episodes of a cell and keeps them; the cell itself comes last. One that is done stays."""
        if _cell_file(self.directory, dispatch, budget).exists():
            return
        assert self.player is not None
        player = replace(self.player, agent=self.player.agent.with_settings(dispatch=dispatch))
        name = f"{dispatch}, {budget} frames"
        with Meter(name, len(self.prompts), "prompt") as meter:
            members = await evaluate(player, self.prompts, budget, self.num_samples, on_done=meter.update)
        of_members = [prompt for prompt in self.prompts for _ in range(self.num_samples)]
        with whole_file(self.directory / f"episodes_{dispatch}_{budget}.jsonl") as file:
            for member, prompt in zip(members, of_members, strict=True):
                record = {"answer": prompt.answer, "question_type": prompt.question_type, **member_record(member)}
                file.write(json.dumps(record).encode() + b"\n")
        problem = next((f"{member.id}: {member.problem}" for member in members if member.missing), "")
        if all(member.missing for member in members):
            raise RuntimeError(f"{name}: every episode is missing; for example {problem}")
        by_type = parted((prompt.question_type, member) for member, prompt in zip(members, of_members, strict=True))
        cell = {
            "dispatch": dispatch,
            "frame_budget": budget,
            "metrics": member_metrics(members),
            "by_type": {kind: member_metrics(of_kind) for kind, of_kind in by_type.items()},
        }
        with whole_file(_cell_file(self.directory, dispatch, budget)) as file:
            file.write(json.dumps(cell).encode())
        if problem:
            say(f"{name}: {int(cell['metrics']['num_missing'])} episodes are missing, for example {problem}")


@asynccontextmanager
async def opened(config: EvalConfig) -> AsyncIterator[Evaluation]:
    """Opens an evaluation; a model is loaded only where a cell is missing."""
    async with AsyncExitStack() as stack:
        directory, data = stack.enter_context(held(config.run_dir)), config.data
        loaded = load_prompts(
            data.validation,
            video_root=data.video_root,
            max_bad_frac=data.max_bad_frac,
            allow_outside=data.allow_outside,
        )
        for remark in left_out(data.validation, loaded.bad):
            say(remark)
        _check_same(directory, config)
        write_settings(to_record(config), directory)
        missing = not all(_cell_file(directory, *cell).exists() for cell in config.eval.cells)
        player = await _open_player(config, directory, stack) if missing else None
        yield Evaluation(directory, loaded.prompts[: config.eval.max_prompts], config.eval.num_samples, player)


async def _open_player(config: EvalConfig, directory: Path, stack: AsyncExitStack) -> Player:
    gpus = place_servers(config.engine, 0)  # with servers, nothing is computed here
    judge = await stack.enter_async_context(Judge(config.judge)) if config.judge is not None else None
    plugin = load_plugin(config.reward)
    policy = await policy_of(config, directory)
    frames = await stack.enter_async_context(frame_reader(config.video, policy.contract, config.rollout.detail_factor))
    engine = await open_engine(
        config.engine,
        policy,
        await in_thread(policy.load) if config.engine.kind == "jax" else None,
        0,
        say,
        dtype=config.model.dtype,
        max_context_tokens=config.rollout.max_context_tokens,
        max_pixels=config.video.max_pixels * config.rollout.detail_factor,
        gpus=gpus,
    )
    stack.push_async_callback(engine.close)
    return Player(Agent(engine, frames, policy.chat, config.rollout), config.reward, judge, config.seed, plugin)


def _cell_file(directory: Path, dispatch: str, budget: int) -> Path:
    return directory / f"cell_{dispatch}_{budget}.json"


def _check_same(directory: Path, config: EvalConfig) -> None:
    """Cells of another model or of other prompts must not be mixed with those to come."""
    before, now = settings_of(directory), to_record(config)
    if not before or not any(directory.glob("cell_*.json")):
        return
    changed = sorted(key for key in now if key not in ("eval", "engine", "mesh") and before.get(key) != now[key])
    if changed:
        raise ValueError(
            f"{directory} has cells of an evaluation with other settings ({', '.join(changed)}); choose another run_dir"
        )
