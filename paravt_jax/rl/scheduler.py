"""Collects the groups of each step.

With train.max_staleness=0 a step's groups start after the previous step. With a larger bound they start as many steps
early as it allows, so that no token is ever too old and no episode is discarded. Missing episodes end the run only
above train.max_missing_frac.

With train.oversample, more groups start than the step needs, and the slowest are aborted. Timing decides which groups
are aborted, so such a run is reproducible from its log (`rl/replay.py`), not from its seed. The prompt of an aborted
group comes first in the next step, which waits for it, so slow prompts are not lost.

If no groups start early, the overviews of the next step are still decoded early, while the learner updates.

With several hosts, each host runs its share of the groups and receives the others' statistics.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Protocol, TypeVar

import numpy as np

from paravt_jax.config import TrainConfig, VideoConfig
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, PromptSample, SampleOrder, budgets_of
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rl.episodes import RolloutWorker, task_of
from paravt_jax.rl.groups import Group, advantages_of, for_step, over_step, rewards_of
from paravt_jax.rl.metrics import missing_remark
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.sampling.engines import MEMORY_BYTES
from rollout.prompter import Task
from rollout.records import Episode
from rollout.user_code import await_user_code
from rollout.video.store import MEMORY_PER_PIXEL_BYTE

ABORT_GRACE_S = 1.0  # time for an engine to report the tokens of an aborted request
Item = TypeVar("Item")
Result = TypeVar("Result")


class UnlessStopped(Protocol):
    """Runs the work and returns its result. When a host has to stop, cancels the work and returns None on all hosts."""

    def __call__(self, work: Awaitable[Result], /) -> Awaitable[Result | None]: ...


async def always(work: Awaitable[Result], /) -> Result | None:
    return await work


def scatter(items: Sequence[Item], hosts: Hosts) -> Sequence[Item]:
    """The items that this host works on: every num-th."""
    return items[hosts.index :: hosts.num]


def interleave(by_host: Sequence[Sequence[Item]]) -> list[Item]:
    """Restores the order of the items from the parts of all hosts (the inverse of `scatter`)."""
    return [item for items in zip_longest(*by_host, fillvalue=None) for item in items if item is not None]


@dataclass(eq=False)
class PendingGroup:
    """A group with running episodes."""

    sample: PromptSample[Prompt]
    frame_budget: int
    episodes: list[Episode]  # started so far
    task: asyncio.Task[Group] = field(init=False)

    @property
    def has_signal(self) -> bool:
        return self.task.done() and self.task.result().has_signal

    @property
    def num_sampled(self) -> int:
        return sum(episode.num_sampled for episode in self.episodes)


@dataclass(eq=False)
class StepCost:
    """This host's aborted groups in a step, and its rollout time."""

    aborted: list[PendingGroup] = field(default_factory=list)
    seconds: float = 0.0  # spent on rollouts


class RolloutScheduler:
    """Starts and collects the groups of each step."""

    def __init__(
        self,
        worker: RolloutWorker,
        order: SampleOrder[Prompt],
        cursor: Cursor,
        train: TrainConfig,
        video: VideoConfig,
        advantage: AdvantageConfig,
        on_progress: Callable[[str], None] = lambda text: None,
        hosts: Hosts = ALONE,
    ):
        self.worker, self.order, self.cursor = worker, order, cursor
        self._hosts = hosts
        self._train, self._video, self._advantage = train, video, advantage
        self._on_progress = on_progress
        self._running: dict[int, asyncio.Task[tuple[list[Group], StepCost]]] = {}  # by step
        self._sampling: set[PendingGroup] = set()
        self._num_sampled = 0  # tokens of groups that are no longer in `_sampling`
        self._popped = 0, 0.0  # tokens and time at the last `pop_sampled`
        self._num_started = self._num_done = 0
        self._cost: dict[str, float] = {}
        self._decoding: asyncio.Task[None] | None = None  # overviews of the next step
        self.rollout_s = 0.0  # this host's rollout time in the last returned step

    @property
    def runs_ahead(self) -> bool:
        """Whether rollouts continue during updates."""
        return self._train.steps_ahead > 0

    async def next_groups(self, step: int, unless_stopped: UnlessStopped = always) -> list[Group] | None:
        """Returns the groups of a step, or None if a host stops. Starts later steps as early as staleness allows.

        Hosts exchange groups only here; rollouts that run ahead of the learner need no other host.
        """
        train = self._train
        if not self._running:
            self._popped = self._popped[0], time.monotonic()
        for ahead in range(step, min(step + train.steps_ahead, train.num_steps) + 1):
            if ahead not in self._running:
                self._running[ahead] = asyncio.create_task(self._collect())
        collected = await unless_stopped(self._running[step])
        if collected is None:
            return None
        groups, cost = collected
        del self._running[step]
        if self._hosts.num > 1:
            groups = await self._exchange(groups)
            for _ in range(train.max_resamples):
                if not (num_wanted := self._num_wanted(groups)):
                    break
                more = await unless_stopped(self._sample_round(num_wanted, cost))
                if more is None:
                    return None
                groups += await self._exchange(more)
        groups = over_step(groups, self.worker.reward, self._advantage)
        self._cost = _oversampling_metrics(groups, cost.aborted) if train.oversample else {}
        self.rollout_s = cost.seconds
        self._check_missing(groups)
        if step < train.num_steps and not train.steps_ahead:
            self.decode_ahead()
        return groups

    def decode_ahead(self) -> None:
        """Starts to decode the overviews of the next samples into the frame store, using at most half of it.

        The samples stay in the queue. The step that needs a broken video reports the error.
        """
        samples = [self.order[number] for number in self.cursor.peek(self._train.prompts_per_step)]
        budgets = budgets_of(samples, self._video, self.worker.seed)
        num_frames = np.cumsum(budgets)
        fits = num_frames * 3 * self._video.max_pixels * MEMORY_PER_PIXEL_BYTE <= MEMORY_BYTES / 2
        own = scatter([task_of(*pair) for pair in compress(zip(samples, budgets, strict=True), fits)], self._hosts)
        if self._decoding is not None:
            self._decoding.cancel()  # the step that needed it is over
        self._decoding = asyncio.create_task(self._decode(own))

    async def _decode(self, tasks: Sequence[Task]) -> None:
        async def decode(task: Task) -> None:  # drops the result, which would stay in memory
            await await_user_code(self.worker.agent.overview(task))

        await asyncio.gather(*map(decode, tasks), return_exceptions=True)

    def pop_sampled(self) -> tuple[int, float]:
        """Tokens sampled on this host, and the seconds, since the last call or the start of the first rollout."""
        (num_before, before_s), now_s = self._popped, time.monotonic()
        num = self._num_sampled + sum(group.num_sampled for group in self._sampling)
        self._popped = num, now_s
        return num - num_before, now_s - before_s

    def metrics(self) -> dict[str, float]:
        """The cost of oversampling in the last returned step."""
        return self._cost

    async def close(self) -> None:
        tasks = [*self._running.values(), *filter(None, [self._decoding])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _num_wanted(self, groups: Sequence[Group]) -> int:
        return self._train.prompts_per_step - sum(group.has_signal for group in groups)

    async def _collect(self) -> tuple[list[Group], StepCost]:
        """Samples groups for one step, replacing groups without signal up to max_resamples times.

        With several hosts, samples only this host's part of the first round, because all hosts must agree on how many
        groups to replace.
        """
        num_rounds = 1 + self._train.max_resamples if self._hosts.num == 1 else 1
        groups, cost = [], StepCost()
        for _ in range(num_rounds):
            if not (num_wanted := self._num_wanted(groups)):
                break
            groups += await self._sample_round(num_wanted, cost)
        return groups, cost

    async def _sample_round(self, num_wanted: int, cost: StepCost) -> list[Group]:
        """Runs this host's groups until enough have signal or all are done. All hosts draw the same samples."""
        num_again = self.cursor.num_again
        samples = [self.order[number] for number in self.cursor.take(num_wanted + self._train.oversample)]
        budgets = budgets_of(samples, self._video, self.worker.seed)
        pending = [PendingGroup(sample, budget, []) for sample, budget in zip(samples, budgets, strict=True)]
        start_s = time.monotonic()
        finished, aborted = await self._run_until_enough(scatter(pending, self._hosts), num_again, num_wanted)
        cost.aborted += aborted
        cost.seconds += time.monotonic() - start_s
        return [group.task.result() for group in finished]

    async def _exchange(self, own: Sequence[Group]) -> list[Group]:
        """Gathers a round's groups from all hosts, in the order of their samples."""
        messages = [group.to_message(rewards_of(group.rollouts, self.worker.reward, self._advantage)) for group in own]
        local = {group.sample.number: group for group in own}
        return [
            local.get(number := message["sample"]) or Group.from_message(message, self.order[number])
            for message in interleave(await self._hosts.gather_async("groups", messages))
        ]

    async def _run_until_enough(
        self, pending: Sequence[PendingGroup], num_again: int, num_wanted: int
    ) -> tuple[list[PendingGroup], list[PendingGroup]]:
        """Runs groups until enough have signal, then aborts the rest. Returns finished and aborted groups."""
        self._num_started += self._train.group_size * len(pending)
        async with asyncio.TaskGroup() as tasks:
            for group in pending:
                group.task = tasks.create_task(self._run_group(group))
            running = {group.task for group in pending}
            while running and not _is_enough(pending, num_again, num_wanted):
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finished = list(for_step([group for group in pending if group.task.done()], num_wanted))
            aborted = [group for group in pending if group not in finished]
            await self._abort(aborted)
        self.cursor.give_back(group.sample.number for group in aborted)
        return finished, aborted

    async def _run_group(self, pending: PendingGroup) -> Group:
        # A synchronous rollout with tokens of several policy versions is missing.
        version = None if self._train.max_staleness else self.worker.agent.engine.version
        sample, size = pending.sample, self._train.group_size
        task = task_of(sample, pending.frame_budget)
        self._sampling.add(pending)
        try:
            rollouts = await self.worker.run_group(task, sample.item, size, version, self._count_done, pending.episodes)
        finally:
            self._sampling.discard(pending)
            self._num_sampled += pending.num_sampled
        return Group(sample, task.frame_budget, rollouts, advantages_of(rollouts, self.worker.reward, self._advantage))

    async def _abort(self, pending: Sequence[PendingGroup]) -> None:
        """Aborts groups. The engine first gets time to report the tokens sampled so far, which metrics count."""
        running = [group for group in pending if not group.task.done()]
        if running:
            episodes = [episode.id for group in running for episode in group.episodes]
            aborting = asyncio.gather(*map(self.worker.agent.engine.abort, episodes), return_exceptions=True)
            _, unfinished = await asyncio.wait([aborting, *(group.task for group in running)], timeout=ABORT_GRACE_S)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _count_done(self) -> None:
        self._num_done += 1
        self._on_progress(f"rollout {self._num_done}/{self._num_started}")

    def _check_missing(self, groups: Sequence[Group]) -> None:
        """Raises if too many episodes of a step are missing, because the step would train on noise."""
        rollouts, max_frac = [rollout for group in groups for rollout in group.rollouts], self._train.max_missing_frac
        if sum(rollout.missing for rollout in rollouts) > max_frac * len(rollouts):
            self._hosts.all_failed = True
            raise RuntimeError(missing_remark(rollouts, f"train.max_missing_frac={max_frac}"))


def _is_enough(pending: Sequence[PendingGroup], num_again: int, num_wanted: int) -> bool:
    """Whether enough groups have signal, and the first `num_again`, which were aborted before, are done."""
    again_done = all(group.task.done() for group in pending[:num_again])
    return again_done and sum(group.has_signal for group in pending) >= num_wanted


def _oversampling_metrics(groups: Sequence[Group], aborted: Sequence[PendingGroup]) -> dict[str, float]:
    """Counts aborted groups, and their tokens as far as the engine reported them."""
    episodes = [rollout.episode for group in groups for rollout in group.rollouts if rollout.episode is not None]
    used, lost = sum(episode.num_sampled for episode in episodes), sum(group.num_sampled for group in aborted)
    return {
        "rollout/num_groups_aborted": float(len(aborted)),
        "rollout/aborted_tokens_frac": lost / max(1, used + lost),
    }
