"""Opens a run: what is cheap to refuse first, then model, checkpoint, engine, and the gate before the first step."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paravt_jax.config import SYNTHETIC, Config
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.rows import left_out
from paravt_jax.data.synthetic import make_synthetic
from paravt_jax.data.visits import Cursor, Visits
from paravt_jax.learner.learner import Learner
from paravt_jax.rewards.judge import Judge
from paravt_jax.rl.batches import PolicyUpdate
from paravt_jax.rl.rollouts import Rollouts
from paravt_jax.rl.run import Run
from paravt_jax.run.directory import RunPlace
from paravt_jax.run.policy import open_policy
from paravt_jax.run.process import Compiles, in_thread, say
from paravt_jax.sampling.opening import frame_reader, open_engine
from paravt_jax.sampling.score import LearnerScorer
from paravt_jax.sampling.weights import sampling_model
from rollout.check import check, table
from rollout.engine.protocol import Engine
from rollout.engine.sglang import SGLangEngine
from rollout.episode import Agent

PATCH_BUCKET = 64  # of the embedded engine; frames that can never be as large must not be filled up to it
BEGINNING: dict[str, Any] = {"step": 0, "geometric_mask": False, "cursor": Cursor().to_record(), "visits": ""}


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[Run]:
    """Opens a run, from its newest checkpoint if it has one; what is cheap to refuse is refused first."""
    async with AsyncExitStack() as stack:
        place = RunPlace.enter(config, config.train.num_steps, stack)
        train, held_out, remarks = _prompts(config, place.directory)
        judge = await stack.enter_async_context(Judge(config.judge)) if config.judge is not None else None
        say(f"loading {config.model.path}")
        policy = await in_thread(lambda: open_policy(config, place.directory))
        learner = Learner(
            await in_thread(policy.load),
            config.optim,
            config.loss,
            temperature=config.rollout.temperature,
            num_steps=config.train.num_steps * config.train.updates_per_step,
            mesh=policy.mesh,
        )
        checkpoints, progress = await place.restore(learner, policy)
        progress = progress or BEGINNING
        visits, cursor = Visits(train, config.seed), Cursor.from_record(progress["cursor"])
        place.check_visits(visits, progress["visits"])
        log = place.open_log(int(progress["step"]), remarks)
        frames = await stack.enter_async_context(frame_reader(config, policy))
        engine = await open_engine(
            config,
            policy,
            sampling_model(learner.model, config.model.dtype, copied=config.train.max_staleness > 0),
            int(learner.state.step),
            log.phase,
            trainable_vision=config.optim.train_vision,
        )
        stack.push_async_callback(engine.close)
        agent = Agent(engine, frames, policy.chat, config.rollout)
        rollouts = Rollouts(agent, visits, cursor, judge, config, log.phase)
        stack.push_async_callback(rollouts.close)
        run = Run(
            config=config,
            directory=place.directory,
            policy=policy,
            learner=learner,
            policy_update=PolicyUpdate(learner, policy.chat, policy.contract, config),
            engine=engine,
            rollouts=rollouts,
            greedy=Agent(engine, frames, policy.chat, replace(config.rollout, temperature=0.0)),
            judge=judge,
            held_out=held_out,
            frames=frames,
            log=log,
            checkpoints=checkpoints,
            stopping=place.stopping,
            step=int(progress["step"]),
            geometric_mask=bool(progress["geometric_mask"]),
            compiles=Compiles(),
        )
        if config.engine.kind == "sglang":
            await run.publish()  # whatever the servers were started with
            await _check_parity(engine, run)
        yield run
        await run.save()
        await place.finish(log, checkpoints, run.step, run.version)


async def _check_parity(engine: Engine, run: Run) -> None:
    """Refuses to train with servers that compute something else than the learner."""
    assert isinstance(engine, SGLangEngine)
    run.log.phase("parity gate")
    scorer = LearnerScorer(run.learner.model, run.policy.contract)
    found = await check(engine.urls, scorer, run.policy.chat, on_progress=run.log.phase)
    run.log.say(table(found))
    problems = [f"{parity.url}: {problem}" for parity in found for problem in parity.problems]
    if problems:
        raise RuntimeError(f"engine and learner disagree, so nothing was trained: {'; '.join(problems)}")


def _prompts(config: Config, directory: Path) -> tuple[Sequence[Prompt], Sequence[Prompt], list[str]]:
    """Those to train on, the held-out ones, and what is to be said about rows that were left out."""
    made = directory / SYNTHETIC / "train.jsonl"
    if SYNTHETIC in (config.data.train, config.data.validation):
        made = make_synthetic(directory / SYNTHETIC, config.seed)
    remarks = []

    def load(path: str, of_synthetic: Path) -> Sequence[Prompt]:
        if not path:
            return ()
        root = "" if path == SYNTHETIC else config.data.video_root
        path = str(of_synthetic) if path == SYNTHETIC else path
        loaded = load_prompts(path, video_root=root, max_bad_frac=config.data.max_bad_frac)
        remarks.extend(left_out(path, loaded.bad))
        return loaded.prompts

    train = load(config.data.train, made)
    held_out = load(config.data.validation, made.with_name("validation.jsonl"))
    return train, held_out[: config.validation.max_prompts], remarks
