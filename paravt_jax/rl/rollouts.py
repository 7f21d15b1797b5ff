"""Visits of prompts into groups of scored episodes.

A step's groups are begun when the policy is recent enough: with max_staleness 0 when the step before is done, otherwise
as many steps earlier as that allows, so that no token is ever older than allowed and nothing has to be thrown away.
Whatever an engine, a video or the judge fails to give makes an episode missing: it is counted, and never a reward of 0.
Nothing that one of them says or does ends a run, unless most of a step's episodes are missing.

With train.oversample more groups are begun than are wanted, and the last ones aborted. Which those are depends on
time, so such a run is repeated by its log (`rl/replay.py`) and not by its seed. A prompt that was aborted is given
back, and waited for the next time: none is lost for being slow.

Of several hosts each plays its part of the visits, whose numbers host 0 gives out, and hears of what the others played.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from jaxtyping import Bool

from paravt_jax.config import TrainConfig, Truncated, VideoConfig
from paravt_jax.data.budget import budgets_of
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.visits import Cursor, Visit, Visits
from paravt_jax.learner.advantages import GroupAdvantages, GroupRewards, group_advantages, group_rewards
from paravt_jax.learner.credit import advantage_places, main_advantages, struct_mask
from paravt_jax.learner.settings import ANCHORS, AdvantageConfig, Anchor
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import Plugin, PluginError
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import RewardTerms, find_prediction, reward_terms, with_needed_calls
from paravt_jax.rl.dealing import dealt
from paravt_jax.rl.truncation import is_cut_off, length_term
from paravt_jax.run.hosts import ALONE, Hosts
from rollout.chat import Chat
from rollout.engine.protocol import DeadlineExceeded, EngineError
from rollout.episode import Agent, Episode, Overview, Task
from rollout.user_code import await_user_code
from rollout.video.errors import VideoError

Reason = Literal["deadline", "engine", "video", "judge", "plugin", "aborted", "other"]  # why an episode is missing
REASONS = get_args(Reason)
ABORT_GRACE_S = 1.0  # for an engine to say what an aborted request had sampled


@dataclass(frozen=True, eq=False)
class Member:
    """An episode and what it earned; `episode` is None where there is none, and `terms` where it has no score."""

    id: str
    episode: Episode | None = None
    terms: RewardTerms | None = None
    format_reward: float = 0.0  # R_fmt by the default rules, so that arms with other rewards compare
    problem: str = ""  # why it is missing
    reason: Reason = "other"  # the same in a word, where it is
    num_lost: int = 0  # tokens that the main agent had sampled when an episode ended that is not kept
    left_out: bool = False  # counts in its group's statistics, and is not learnt from

    @property
    def missing(self) -> bool:
        return bool(self.problem)


@dataclass(frozen=True, eq=False)
class Group:
    """The episodes of one visit of a prompt, all with the same frames to begin with."""

    visit: Visit[Prompt]
    frame_budget: int
    members: list[Member]
    advantages: GroupAdvantages
    away: bool = False  # played by another host, which has its pixels and packs it

    @property
    def keep(self) -> Bool[np.ndarray, " G"]:
        """Of the members, those whose tokens are learnt from."""
        return self.advantages.keep & [not member.left_out for member in self.members]

    @property
    def teaches(self) -> bool:
        return bool(self.keep.any())


@dataclass(frozen=True, eq=False)
class Player:
    """Plays episodes and scores them: an agent, a reward, and what it needs: a judge of open answers, a plugin."""

    agent: Agent
    reward: RewardConfig
    judge: Judge | None
    seed: int
    plugin: Plugin | None = None
    truncated: Truncated = "learn"

    async def play(
        self, overview: Overview, prompt: Prompt, number: int, version: int | None, begun: list[Episode]
    ) -> Member:
        """One episode of a prompt, all of it of one version if one is given. It is added to `begun` as it begins."""
        name = f"{overview.task.id}/{number}"
        try:
            episode = await await_user_code(self.agent.run(overview, number, self.seed, version, begun.append))
            return await await_user_code(self.scored(name, episode, prompt))
        except Exception as problem:  # whatever it is, it is this episode's
            said = f"{type(problem).__name__}: {problem}"
            num_lost = sum(episode.ledger.num_sampled for episode in begun if episode.id == name)
            return Member(name, problem=said, reason=_reason(problem), num_lost=num_lost)

    async def scored(self, name: str, episode: Episode, prompt: Prompt) -> Member:
        """An episode with what it earns."""
        if episode.finish == "abort":
            return Member(name, episode, problem="aborted", reason="aborted")
        turns = [turn.text for turn in episode.turns]
        judged = None
        if self.judge is not None and prompt.question_type == "oe":
            prediction = find_prediction(turns, self.reward)
            judged = await self.judge.judge(prompt.question, prompt.answer, prediction) if prediction else None
        asked = (turns, episode.outcomes, prompt.answer, prompt.question_type)
        try:
            own = await self.plugin.terms(episode, prompt.answer, prompt.question_type) if self.plugin else ()
        except PluginError as problem:
            return Member(name, episode, problem=f"reward.plugin: {problem}", reason="plugin")
        if self.truncated == "soft":
            own = (*own, length_term(episode, self.agent.config.max_new_tokens))
        tools = self.agent.signatures
        terms = reward_terms(*asked, self.reward, judged, prompt.question, own, tools)
        fixed = reward_terms(*asked, RewardConfig(), question=prompt.question, tools=tools)
        if terms.missing:
            return Member(name, episode, terms, fixed.format, "no verdict of the judge", "judge")
        left_out = self.truncated == "leave_out" and is_cut_off(episode)
        return Member(name, episode, terms, fixed.format, left_out=left_out)

    async def play_all(
        self,
        task: Task,
        prompt: Prompt,
        num_episodes: int,
        version: int | None = None,
        on_done: Callable[[], object] = lambda: None,
        begun: list[Episode] | None = None,
    ) -> list[Member]:
        """So many episodes of one prompt, which begin with the same frames; `on_done` is called when one is.

        All are added to `begun` as they begin.
        """
        begun = [] if begun is None else begun

        async def one(overview: Overview, number: int) -> Member:
            member = await self.play(overview, prompt, number, version, begun)
            on_done()
            return member

        try:
            overview = await await_user_code(self.agent.overview(task))
        except Exception as problem:
            said = f"overview: {type(problem).__name__}: {problem}"
            return [Member(f"{task.id}/{n}", problem=said, reason=_reason(problem)) for n in range(num_episodes)]
        members = await asyncio.gather(*(one(overview, number) for number in range(num_episodes)))
        return scored_together(members, self.reward)


@dataclass(eq=False)
class _Begun:
    """A group while it is played."""

    visit: Visit[Prompt]
    frame_budget: int
    episodes: list[Episode]  # so far
    playing: asyncio.Task[Group] = field(init=False)

    @property
    def teaches(self) -> bool:
        return self.playing.done() and self.playing.result().teaches

    @property
    def num_sampled(self) -> int:
        return sum(episode.num_sampled for episode in self.episodes)


@dataclass(eq=False)
class _Spent:
    """What a step took of this host, beside the groups that it learns from."""

    aborted: list[_Begun] = field(default_factory=list)
    seconds: float = 0.0  # of playing


AnyGroup = TypeVar("AnyGroup", Group, _Begun)


class Rollouts:
    """Collects the groups of one step after another."""

    def __init__(
        self,
        player: Player,
        visits: Visits[Prompt],
        cursor: Cursor,
        train: TrainConfig,
        video: VideoConfig,
        advantage: AdvantageConfig,
        on_progress: Callable[[str], None] = lambda text: None,
        hosts: Hosts = ALONE,
    ):
        self.player, self.visits, self.cursor = player, visits, cursor
        self._hosts = hosts
        self._train, self._video, self._advantage = train, video, advantage
        self._on_progress = on_progress
        self._running: dict[int, asyncio.Task[tuple[list[Group], _Spent]]] = {}  # by step
        self._num_begun = self._num_done = 0
        self._cost: dict[str, float] = {}
        self.played_s = 0.0  # by this host, for the step that was taken last

    async def take(self, step: int) -> list[Group]:
        """The groups of a step, those of later steps begun as far as staleness allows."""
        train = self._train
        for ahead in range(step, min(step + train.steps_ahead, train.num_steps) + 1):
            if ahead not in self._running:
                self._running[ahead] = asyncio.create_task(self._collect(ahead))
        groups, spent = await self._running[step]
        del self._running[step]
        self._cost = _oversampling(groups, spent.aborted) if train.oversample else {}
        self.played_s = spent.seconds
        self._check(groups)
        return groups

    def metrics(self) -> dict[str, float]:
        """What oversampling cost in the step that was taken last."""
        return self._cost

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _collect(self, step: int) -> tuple[list[Group], _Spent]:
        """Groups for one step; those that teach nothing are replaced, as often as max_resamples says."""
        train, groups, spent = self._train, [], _Spent()
        for _ in range(1 + train.max_resamples):
            num_wanted = train.prompts_per_step - sum(group.teaches for group in groups)
            if not num_wanted:
                break
            groups += await self._round(step, num_wanted, spent)
        return over_step(groups, self.player.reward, self._advantage), spent

    async def _round(self, step: int, num_wanted: int, spent: _Spent) -> list[Group]:
        """Groups of all hosts, until so many teach or all are done."""
        num_again = self.cursor.num_again
        visits = [self.visits[number] for number in await self._take(step, num_wanted + self._train.oversample)]
        budgets = budgets_of(visits, self._video, self.player.seed)

        async def play(begun: Sequence[_Begun]) -> list[Group]:
            began_s = time.monotonic()
            whole, too_late = await self._play(begun, num_again, num_wanted)
            spent.aborted += too_late
            spent.seconds += time.monotonic() - began_s
            return [one.playing.result() for one in whole]

        begun = [_Begun(visit, budget, []) for visit, budget in zip(visits, budgets, strict=True)]
        groups = await dealt(self._hosts, f"groups of step {step}", begun, play, (Group, Member))
        own = range(self._hosts.index, len(groups), self._hosts.num)
        return [group if place in own else replace(group, away=True) for place, group in enumerate(groups)]

    async def _take(self, step: int, num: int) -> list[int]:
        """Numbers of visits; host 0 has the book of them."""
        own = self.cursor.take(num) if self._hosts.leads else []
        numbers, *_ = await self._hosts.gathered(f"visits of step {step}", own)
        if not self._hosts.leads:
            self.cursor.take_these(numbers)
        return numbers

    async def _play(
        self, begun: Sequence[_Begun], num_again: int, num_wanted: int
    ) -> tuple[list[_Begun], list[_Begun]]:
        """The groups that are whole when so many teach, and those that were aborted then."""
        self._num_begun += self._train.group_size * len(begun)
        async with asyncio.TaskGroup() as tasks:
            for one in begun:
                one.playing = tasks.create_task(self._group(one))
            running = {one.playing for one in begun}
            while running and not _enough(begun, num_again, num_wanted):
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            whole = list(learnable([one for one in begun if one.playing.done()], num_wanted))
            aborted = [one for one in begun if one not in whole]
            await self._abort(aborted)
        self.cursor.give_back(one.visit.number for one in aborted)
        return whole, aborted

    async def _group(self, begun: _Begun) -> Group:
        # Synchronous rollouts are of one version, or they are missing.
        version = None if self._train.max_staleness else self.player.agent.engine.version
        visit, size = begun.visit, self._train.group_size
        task = task_of(visit, begun.frame_budget)
        members = await self.player.play_all(task, visit.item, size, version, self._count_done, begun.episodes)
        return Group(visit, task.frame_budget, members, advantages_of(members, self.player.reward, self._advantage))

    async def _abort(self, begun: Sequence[_Begun]) -> None:
        """Ends groups that nobody waits for. First the engine says what it has sampled, for that is what they cost."""
        running = [one for one in begun if not one.playing.done()]
        if running:
            told = asyncio.create_task(self._tell([episode.id for one in running for episode in one.episodes]))
            _, late = await asyncio.wait([told, *(one.playing for one in running)], timeout=ABORT_GRACE_S)
            for task in late:
                task.cancel()

    async def _tell(self, aborted: Sequence[str]) -> None:
        await asyncio.gather(*map(self.player.agent.engine.abort, aborted), return_exceptions=True)

    def _count_done(self) -> None:
        self._num_done += 1
        self._on_progress(f"rollout {self._num_done}/{self._num_begun}")

    def _check(self, groups: Sequence[Group]) -> None:
        """A step that lost most of its episodes would go on with noise; better to stop and say why."""
        missing = [member for group in groups for member in group.members if member.missing]
        num_episodes = sum(len(group.members) for group in groups)
        if len(missing) > self._train.max_missing_frac * num_episodes:
            raise RuntimeError(
                f"{len(missing)} of {num_episodes} episodes are missing, more than train.max_missing_frac="
                f"{self._train.max_missing_frac}; for example {missing[0].id}: {missing[0].problem}"
            )


def _enough(begun: Sequence[_Begun], num_again: int, num_wanted: int) -> bool:
    """So many teach, and the first ones, which were given back before, are done."""
    return all(one.playing.done() for one in begun[:num_again]) and sum(one.teaches for one in begun) >= num_wanted


def learnable(groups: Iterable[AnyGroup], num_wanted: int) -> Iterator[AnyGroup]:
    """What a step has place for: the first so many that teach, and all that teach nothing."""
    for group in groups:
        if num_wanted or not group.teaches:
            num_wanted -= group.teaches
            yield group


def _oversampling(groups: Sequence[Group], aborted: Sequence[_Begun]) -> dict[str, float]:
    """What was thrown away, as far as the engine said what it had sampled."""
    episodes = [member.episode for group in groups for member in group.members if member.episode is not None]
    used, lost = sum(one.num_sampled for one in episodes), sum(one.num_sampled for one in aborted)
    return {
        "rollout/num_groups_aborted": float(len(aborted)),
        "rollout/aborted_tokens_frac": lost / max(1, used + lost),
    }


async def evaluate(
    player: Player,
    prompts: Sequence[Prompt],
    frame_budget: int,
    num_samples: int = 1,
    on_done: Callable[[], object] = lambda: None,
) -> list[Member]:
    """So many episodes of every prompt, in the order of the prompts; `on_done` is called when a prompt is."""

    async def one(prompt: Prompt) -> list[Member]:
        members = await player.play_all(_task(f"validation-{prompt.id}", prompt, frame_budget), prompt, num_samples)
        on_done()
        return members

    return [member for members in await asyncio.gather(*map(one, prompts)) for member in members]


def scored_together(members: Sequence[Member], reward: RewardConfig) -> list[Member]:
    """The episodes of a prompt, with what they earn for what the others did."""
    terms = with_needed_calls([member.terms for member in members], reward)
    return [replace(member, terms=earned) for member, earned in zip(members, terms, strict=True)]


def advantages_of(members: Sequence[Member], reward: RewardConfig, advantage: AdvantageConfig) -> GroupAdvantages:
    return group_advantages(_rewards_of(members, reward, advantage), advantage)


def over_step(groups: list[Group], reward: RewardConfig, advantage: AdvantageConfig) -> list[Group]:
    """The groups of a step, with advantages in the unit that all of them together give."""
    if advantage.normalise != "batch":
        return groups
    step = [_rewards_of(group.members, reward, advantage) for group in groups]
    return [
        replace(group, advantages=group_advantages(rewards, advantage, step))
        for group, rewards in zip(groups, step, strict=True)
    ]


def _rewards_of(members: Sequence[Member], reward: RewardConfig, advantage: AdvantageConfig) -> GroupRewards:
    terms = [None if member.missing else member.terms for member in members]
    return group_rewards(terms, anchor_scale=reward.anchor_weight * reward.format_weight, config=advantage)


def records(
    groups: Sequence[Group], step: int, chat: Chat, anchors: Collection[Anchor] = ANCHORS
) -> list[dict[str, Any]]:
    """Every episode of a step, as RUN/episodes keeps it."""
    return [
        {
            "step": step,
            "visit": group.visit.number,
            "epoch": group.visit.epoch,
            "frame_budget": group.frame_budget,
            "answer": group.visit.item.answer,
            "question_type": group.visit.item.question_type,
            **member_record(member),
            "advantage": asdict(group.advantages.of(number))
            | {"keep": bool(group.keep[number]), "places": _advantage_places(group, number, chat, anchors)},
        }
        for group in groups
        for number, member in enumerate(group.members)
    ]


def _advantage_places(group: Group, number: int, chat: Chat, anchors: Collection[Anchor]) -> list[list[float | int]]:
    """Turn, characters and advantage of whatever is learnt from, before a penalty of its KL."""
    member = group.members[number]
    if not group.keep[number] or member.episode is None or member.terms is None:
        return []
    structural = struct_mask(member.episode, member.terms.tags, chat, anchors)
    advantage = main_advantages(member.episode, group.advantages.of(number), member.terms, structural, chat)
    return [[*place, value] for place, value in advantage_places(member.episode, advantage, chat)]


def member_record(member: Member) -> dict[str, Any]:
    record: dict[str, Any] = {"id": member.id} if member.episode is None else member.episode.to_record()
    record |= {"missing": member.missing, "problem": member.problem}
    if member.missing:
        record |= {"reason": member.reason, "num_lost": member.num_lost}
    if member.terms is not None:
        names = ("total", "accuracy", "format", "base", "anchor", "think_first", "balanced", "tool", "prediction")
        record["reward"] = {name: getattr(member.terms, name) for name in names}
        record["reward"]["credits"] = [asdict(credit) for credit in member.terms.credits]
        record["reward"]["own"] = [asdict(term) for term in member.terms.own]
    return record


def task_of(visit: Visit[Prompt], frame_budget: int) -> Task:
    return _task(f"{visit.number:06d}-{visit.item.id}", visit.item, frame_budget)


def _reason(problem: Exception) -> Reason:
    if isinstance(problem, DeadlineExceeded | TimeoutError):
        return "deadline"
    return "engine" if isinstance(problem, EngineError) else "video" if isinstance(problem, VideoError) else "other"


def _task(name: str, prompt: Prompt, frame_budget: int) -> Task:
    return Task(name, prompt.question, prompt.videos, max(frame_budget, len(prompt.videos)), prompt.subtitles)
