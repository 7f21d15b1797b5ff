"""Everything that is open while a policy learns from traces, and what a step asks of it. The counterpart of run.py."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from paravt_jax.config import SftConfig
from paravt_jax.data.rows import left_out
from paravt_jax.data.traces import Trace, load_traces
from paravt_jax.data.visits import Visits
from paravt_jax.imitation.batches import Lesson, Lessons
from paravt_jax.imitation.ledgers import Demonstrator
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.packing import used_frac
from paravt_jax.learner.settings import LossConfig
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.directory import RunPlace
from paravt_jax.run.log import RunLog
from paravt_jax.run.policy import open_policy
from paravt_jax.run.process import Compiles, in_thread, say, unless_stopped
from paravt_jax.sampling.opening import frame_reader

BEGINNING: dict[str, Any] = {"step": 0, "next_visit": 0, "visits": ""}


@dataclass(eq=False)
class SftRun:
    """Use `async with opened(config) as run`."""

    config: SftConfig
    learner: Learner
    lessons: Lessons
    held_out: Sequence[Trace]
    visits: Visits[Trace]
    log: RunLog
    checkpoints: Checkpoints
    stopping: asyncio.Event
    step: int  # steps done
    next_visit: int
    compiles: Compiles
    began_step_s: float = 0.0

    async def next_lesson(self) -> Lesson | None:
        """The next step's traces, or None when there is nothing more to do."""
        self.began_step_s = time.monotonic()
        if self.step == self.config.sft.num_steps:
            return None
        self.log.phase("data")
        return await unless_stopped(self.stopping, self.lessons.take())

    async def imitate(self, lesson: Lesson) -> dict[str, float]:
        data_s = time.monotonic() - self.began_step_s
        for problem in lesson.problems:
            self.log.say(f"left out: {problem}")
        self.log.phase("update")
        begun_s = time.monotonic()
        metrics = await in_thread(lambda: self.learner.imitate(lesson.batches, float(lesson.num_loss_tokens)))
        self.step += 1
        self.next_visit = lesson.next
        return metrics | {"time/data_s": data_s, "time/update_s": time.monotonic() - begun_s}

    def record(self, lesson: Lesson, metrics: dict[str, float]) -> None:
        step_s = time.monotonic() - self.began_step_s
        metrics |= {
            "data/num_traces": float(lesson.num_traces),
            "data/num_left_out": float(len(lesson.problems)),
            "data/epoch": lesson.next / self.visits.num_prompts,
            "perf/dummy_frac": 1.0 - used_frac(lesson.batches),
            "perf/num_batches": float(len(lesson.batches)),
            "perf/tokens_per_s": lesson.num_tokens / step_s,
            "policy_version": float(int(self.learner.state.step)),
            "time/step_s": step_s,
            **self.compiles.taken(),
        }
        self.log.step(self.step, metrics, None)

    async def validate_if_due(self) -> None:
        if not self.held_out or not self._due(self.config.validation.every_steps):
            return
        self.log.phase("validation")
        total, num_tokens = 0.0, 0
        async for batches in self.lessons.of(self.held_out):
            for batch in batches:
                logp = await in_thread(partial(self.learner.log_probs, batch))
                total -= float(logp[batch.loss_mask].sum(dtype=np.float64))
                num_tokens += int(np.count_nonzero(batch.loss_mask))
        if not num_tokens:
            raise RuntimeError(f"not one trace of data.validation={self.config.data.validation} can be shown")
        self.log.validation(self.step, {"validation/loss": total / num_tokens, "policy_version": float(self.step)})

    async def save_if_due(self) -> None:
        if self._due(self.config.checkpoint.every_steps):
            await self.save()

    async def save(self) -> None:
        progress = {"step": self.step, "next_visit": self.next_visit, "visits": self.visits.fingerprint}
        await in_thread(lambda: self.checkpoints.save(self.learner, progress))

    def _due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0 or self.step == self.config.sft.num_steps


@asynccontextmanager
async def opened(config: SftConfig) -> AsyncIterator[SftRun]:
    """Opens a run, from its newest checkpoint if it has one; what is cheap to refuse is refused first."""
    async with AsyncExitStack() as stack:
        place = RunPlace.enter(config, config.sft.num_steps, stack)
        remarks: list[str] = []
        train = _traces(config, config.data.train, remarks)
        held_out = _traces(config, config.data.validation, remarks)[: config.validation.max_prompts]
        say(f"loading {config.model.path}")
        policy = await in_thread(lambda: open_policy(config, place.directory))
        learner = Learner(
            await in_thread(policy.load),
            config.optim,
            LossConfig(kl_coef=0.0),
            temperature=1.0,
            num_steps=config.sft.num_steps,
            mesh=policy.mesh,
        )
        checkpoints, progress = await place.restore(learner, policy)
        progress = progress or BEGINNING
        visits = Visits(train, config.seed, jax.process_index(), jax.process_count())
        place.check_visits(visits, progress["visits"])
        log = place.open_log(progress["step"], remarks)
        frames = await stack.enter_async_context(frame_reader(config, policy))
        demonstrator = Demonstrator(frames, policy.chat, policy.contract, config.rollout)
        lessons = Lessons(demonstrator, visits, progress["next_visit"], learner.model.config, policy.contract, config)
        stack.push_async_callback(lessons.close)
        run = SftRun(
            config=config,
            learner=learner,
            lessons=lessons,
            held_out=held_out,
            visits=visits,
            log=log,
            checkpoints=checkpoints,
            stopping=place.stopping,
            step=progress["step"],
            next_visit=progress["next_visit"],
            compiles=Compiles(),
        )
        yield run
        await run.save()
        await place.finish(log, checkpoints, run.step, run.step)


def _traces(config: SftConfig, path: str, remarks: list[str]) -> Sequence[Trace]:
    if not path:
        return ()
    loaded = load_traces(path, video_root=config.data.video_root, max_bad_frac=config.data.max_bad_frac)
    remarks.extend(left_out(path, loaded.bad))
    return loaded.traces
