"""Runs episodes and scores them, and makes their records for the log and for other hosts.

If an engine, a video, a plugin or the judge fails, the episode is *missing*: it is counted as missing, gets no reward
(not a reward of 0), and does not end the run.

Hosts exchange only the statistics of their episodes; tokens, texts and frames stay on the host that sampled them. With
these, every host knows all groups of a step, so it normalizes, decides and logs as a single host would.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from paravt_jax.config import Truncated
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import PromptSample, shown_frames
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import GroupPlugin, Plugin, PluginError
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import (
    LENGTH,
    QUESTION_TYPES,
    OwnTerm,
    RewardTerms,
    find_prediction,
    reward_terms,
    with_needed_calls,
    with_own_terms,
)
from rollout.endpoint.errors import EndpointError
from rollout.engine.protocol import DeadlineExceeded, EngineError
from rollout.episode import Agent
from rollout.prompter import Overview, Task
from rollout.records import Episode
from rollout.user_code import await_user_code
from rollout.video.errors import VideoError

Reason = Literal["deadline", "engine", "video", "judge", "plugin", "aborted", "other"]  # why an episode is missing
REASONS = get_args(Reason)
MAX_IN_FLIGHT = 64  # concurrent validation episodes; more would wait in the engine's queue past their deadlines
REWARD_TERMS = ("total", "accuracy", "format", "base", "anchor", "think_first", "balanced", "tool", "prediction")
SOFT_FRAC = 0.2  # fraction of a turn's tokens, at its end, with a penalty; DAPO: 4096 of 20480 (arXiv 2503.14476)


@dataclass(frozen=True)
class EpisodeStats:
    """An episode's statistics for metrics, as JSON values. Reward terms are None without a score."""

    num_turns: int
    num_sampled: int
    cut_off: bool
    outcomes: Mapping[str, int]  # number of calls
    versions: Mapping[str, int]  # sampled tokens, sub-agents' included, by policy version
    total: float | None = None
    accuracy: float | None = None
    anchor: float | None = None
    tool: float | None = None
    parseable: bool | None = None
    own: tuple[tuple[str, float], ...] = ()  # plugin terms and the length penalty

    @property
    def num_executed(self) -> int:
        return self.outcomes.get("ok", 0)

    @classmethod
    def of(cls, episode: Episode, terms: RewardTerms | None) -> "EpisodeStats":
        versions = Counter[str]()
        for segment in (segment for ledger in episode.ledgers for segment in ledger.sampled):
            if segment.version is not None:
                versions[str(segment.version)] += len(segment.ids)
        stats: dict[str, Any] = {
            "num_turns": len(episode.turns),
            "num_sampled": episode.ledger.num_sampled,
            "cut_off": episode.finish != "done",
            "outcomes": dict(Counter(episode.outcomes)),
            "versions": dict(versions),
        }
        if terms is not None:
            stats |= {name: getattr(terms, name) for name in ("total", "accuracy", "anchor", "tool", "parseable")}
            stats["own"] = tuple((term.name, term.value) for term in terms.own)
        return cls(**stats)


@dataclass(frozen=True, eq=False)
class Rollout:
    """An episode and its reward. A missing rollout may lack both, or have `terms` without the judge's score."""

    id: str
    episode: Episode | None = None
    terms: RewardTerms | None = None
    format_reward: float = 0.0  # R_fmt by the default rules, so that runs with different rewards compare
    problem: str = ""  # why the rollout is missing, as a sentence
    reason: str = "other"  # category of the problem: a Reason, or a reason from an endpoint
    num_lost: int = 0  # tokens that the main agent sampled before the episode failed
    left_out: bool = False  # counts in its group's statistics, but has no loss tokens
    remote_stats: EpisodeStats | None = None  # from the host that ran the episode

    @property
    def missing(self) -> bool:
        return bool(self.problem)

    @cached_property
    def stats(self) -> EpisodeStats | None:
        return self.remote_stats if self.episode is None else EpisodeStats.of(self.episode, self.terms)

    def without_episode(self) -> "Rollout":
        """The rollout as other hosts know it."""
        return replace(self, episode=None, terms=None, remote_stats=self.stats)

    def to_message(self) -> dict[str, Any]:
        """Makes the message for the other hosts."""
        return asdict(self.without_episode())

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "Rollout":
        stats = message["remote_stats"]
        return replace(cls(**message), remote_stats=EpisodeStats(**stats) if stats else None)

    def to_record(self) -> dict[str, Any]:
        """Makes the record for RUN/episodes."""
        record: dict[str, Any] = {"id": self.id} if self.episode is None else self.episode.to_record()
        record |= {"missing": self.missing, "problem": self.problem}
        if self.missing:
            record |= {"reason": self.reason, "num_lost": self.num_lost}
        if self.terms is not None:
            record["reward"] = {name: getattr(self.terms, name) for name in REWARD_TERMS}
            record["reward"]["credits"] = [asdict(credit) for credit in self.terms.credits]
            record["reward"]["own"] = [asdict(term) for term in self.terms.own]
        return record


@dataclass(frozen=True, eq=False)
class RolloutWorker:
    """Runs and scores episodes: an agent, a reward, and optionally a judge of open answers and a plugin."""

    agent: Agent
    reward: RewardConfig
    judge: Judge | None
    seed: int
    plugin: Plugin | GroupPlugin | None = None
    truncated: Truncated = "learn"

    async def run_group(
        self,
        task: Task,
        prompt: Prompt,
        num_episodes: int,
        version: int | None = None,
        on_done: Callable[[], object] = lambda: None,
        started: list[Episode] | None = None,
    ) -> list[Rollout]:
        """Runs the episodes of a prompt, which share their first frames.

        `on_done` is called after each episode; each is added to `started` when it starts.
        """
        started = [] if started is None else started

        async def run_one(overview: Overview, number: int) -> Rollout:
            rollout = await self.run_episode(overview, prompt, number, version, started)
            on_done()
            return rollout

        try:
            overview = await await_user_code(self.agent.overview(task))
        except Exception as error:
            problem = f"{', '.join(task.videos) or 'images'}: {type(error).__name__}: {error}"
            return missing_group(task.id, problem, error, num_episodes)
        rollouts = await asyncio.gather(*(run_one(overview, number) for number in range(num_episodes)))
        return await self.with_group_terms(rollouts, prompt)

    async def run_episode(
        self, overview: Overview, prompt: Prompt, number: int, version: int | None, started: list[Episode]
    ) -> Rollout:
        """Runs an episode. With a `version`, every token must be of that policy version."""
        name = f"{overview.task.id}/{number}"
        try:
            episode = await await_user_code(self.agent.run(overview, number, self.seed, version, started.append))
            return await await_user_code(self.score(name, episode, prompt))
        except Exception as error:  # any failure only invalidates this episode
            num_lost = sum(episode.ledger.num_sampled for episode in started if episode.id == name)
            return Rollout(name, problem=f"{type(error).__name__}: {error}", reason=reason_of(error), num_lost=num_lost)

    async def score(self, name: str, episode: Episode, prompt: Prompt) -> Rollout:
        """Scores an episode, without the terms that depend on its group."""
        if episode.finish == "abort":
            return Rollout(name, episode, problem="aborted", reason="aborted")
        turns = [turn.text for turn in episode.turns]
        judged = None
        if self.judge is not None and prompt.question_type == "oe":
            prediction = find_prediction(turns)
            judged = await self.judge.judge(prompt.question, prompt.answer, prediction) if prediction else None
        scored = (turns, episode.outcomes, prompt.answer, prompt.question_type)
        own: tuple[OwnTerm, ...] = ()
        try:
            if isinstance(self.plugin, Plugin):
                own = await self.plugin.terms(episode, prompt.answer, prompt.question_type)
        except PluginError as error:
            return Rollout(name, episode, problem=f"reward.plugin: {error}", reason="plugin")
        if self.truncated == "soft":
            own = (*own, OwnTerm(LENGTH, length_penalty(episode, self.agent.config.max_new_tokens)))
        tools = self.agent.signatures
        terms = reward_terms(*scored, self.reward, judged, prompt.question, own, tools)
        default = RewardConfig(plugin=self.reward.plugin)
        by_default = reward_terms(*scored, default, question=prompt.question, tools=tools)
        if terms.missing:
            problem = (self.judge and self.judge.last_problem) or "no verdict of the judge"
            return Rollout(name, episode, terms, by_default.format, problem, "judge")
        left_out = self.truncated == "leave_out" and episode.finish != "done"
        return Rollout(name, episode, terms, by_default.format, left_out=left_out)

    async def with_group_terms(self, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Rollout]:
        """Adds the reward terms that depend on the whole group to the rollouts of a prompt."""
        if isinstance(self.plugin, GroupPlugin):
            rollouts = await self._with_scores(self.plugin, rollouts, prompt)
        if prompt.question_type not in QUESTION_TYPES:
            problem = f"reward.plugin: no score, and a question of type {prompt.question_type} has no other"
            rollouts = [_missing_without_term(rollout, problem) for rollout in rollouts]
        terms = with_needed_calls([rollout.terms for rollout in rollouts], self.reward)
        return [replace(rollout, terms=own) for rollout, own in zip(rollouts, terms, strict=True)]

    async def _with_scores(self, plugin: GroupPlugin, rollouts: Sequence[Rollout], prompt: Prompt) -> list[Rollout]:
        """Adds the plugin's scores to the rollouts that are not missing."""
        episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None and not rollout.missing]
        row = prompt.answer, prompt.question_type, dict(prompt.columns)
        try:
            scores = iter(await plugin.terms(episodes, *row) if episodes else ())
        except PluginError as error:
            problem = f"reward.plugin: {error}"
            return [each if each.missing else _as_missing(each, problem) for each in rollouts]
        return [each if each.missing else _scored(each, next(scores)) for each in rollouts]


async def evaluate(worker: RolloutWorker, prompts: Sequence[Prompt], frame_budget: int) -> list[Rollout]:
    """Runs an episode of each prompt. Returns the rollouts in the order of the prompts, without their episodes."""
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def run_one(prompt: Prompt) -> Rollout:
        async with slots:
            task = make_task(f"validation-{prompt.id}", prompt, frame_budget)
            (rollout,) = await worker.run_group(task, prompt, 1)
        return rollout.without_episode()  # its frames would stay in memory

    return await asyncio.gather(*map(run_one, prompts))


def _scored(rollout: Rollout, score: OwnTerm | None) -> Rollout:
    assert rollout.terms is not None
    return replace(rollout, terms=with_own_terms(rollout.terms, () if score is None else (score,)))


def _missing_without_term(rollout: Rollout, problem: str) -> Rollout:
    """Marks the rollout as missing if the plugin gave it no term."""
    own = () if rollout.terms is None else rollout.terms.own
    is_scored = rollout.missing or any(term.name != LENGTH for term in own)
    return rollout if is_scored else _as_missing(rollout, problem)


def _as_missing(rollout: Rollout, problem: str) -> Rollout:
    return replace(rollout, terms=None, problem=problem, reason="plugin")


def task_of(sample: PromptSample[Prompt], frame_budget: int) -> Task:
    return make_task(f"{sample.number:06d}-{sample.item.id}", sample.item, frame_budget)


def make_task(name: str, prompt: Prompt, frame_budget: int) -> Task:
    shown = prompt.videos, shown_frames(frame_budget, prompt.videos), prompt.subtitles, prompt.messages
    return Task(name, prompt.question, *shown, images=prompt.images)


def missing_group(name: str, problem: str, error: Exception, num_episodes: int) -> list[Rollout]:
    """Makes missing rollouts for a prompt whose overview failed."""
    return [Rollout(f"{name}/{number}", problem=problem, reason=reason_of(error)) for number in range(num_episodes)]


def reason_of(error: Exception) -> str:
    if isinstance(error, EndpointError):
        return error.reason
    if isinstance(error, DeadlineExceeded | TimeoutError):
        return "deadline"
    return "engine" if isinstance(error, EngineError) else "video" if isinstance(error, VideoError) else "other"


def length_penalty(episode: Episode, max_new_tokens: int) -> float:
    """DAPO's length penalty: falls from 0 to −1 as the longest turn nears `max_new_tokens`; −1 if cut off."""
    if episode.finish != "done":
        return -1.0
    sampled = episode.ledger.sampled_mask
    longest = max((int(sampled[slice(*turn.token_span)].sum()) for turn in episode.turns), default=0)
    return -max(0.0, 1 - (max_new_tokens - longest) / (SOFT_FRAC * max_new_tokens))
