"""Your own terms of R: a function in a file that the config names.

A function with a parameter `completions` is called once per group and returns a number for each episode, as in TRL.
Other functions are called once per episode and return a list of terms.

Async functions run in the event loop, others in a thread, both with a timeout. If the function raises, times out or
returns anything else, its episodes are missing; they never count as 0.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from operator import index
from typing import Any, TypeVar

from paravt_jax.rewards.grammar import Place
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import LENGTH, OwnTerm
from rollout.records import Episode
from rollout.threads import in_daemon_thread
from rollout.tools import Outcome
from rollout.user_code import await_user_code, load_function

ARGUMENTS = ("question", "answer", "question_type", "turns", "calls", "outcomes")
COMPLETIONS = "completions"  # a function with this parameter scores groups
GROUP_ARGUMENTS = (COMPLETIONS, "prompts", "answers", *ARGUMENTS)  # lists with an entry per episode
DEADLINE_S = 60.0  # per call; a later result makes its episodes missing
MAX_SHOWN_CHARS = 100  # characters of a return value in an error
Result = TypeVar("Result")


class PluginError(Exception):
    """The function returned no valid terms."""


@dataclass(frozen=True)
class ExecutedCall:
    """A call of an episode and its outcome."""

    turn: int
    span: tuple[int, int]  # range of characters in the turn, tags included
    name: str
    arguments: Mapping[str, Any]  # as the model wrote them
    outcome: Outcome
    response: str  # the text returned to the model


@dataclass(frozen=True)
class _OwnFunction:
    """A function with a timeout."""

    function: Callable[..., Any]
    deadline_s: float

    async def _call(self, arguments: Mapping[str, Any], read: Callable[[Any], Result]) -> Result:
        """Calls the function and reads its result. Raises PluginError."""
        work, timeout = partial(self.function, **arguments), asyncio.timeout(self.deadline_s)
        try:
            async with timeout:
                result = await await_user_code(
                    work() if inspect.iscoroutinefunction(self.function) else in_daemon_thread(work)
                )
            return read(result)
        except PluginError:
            raise
        except Exception as problem:
            if timeout.expired():
                raise PluginError(f"it returned nothing within {self.deadline_s:g} s") from None
            raise PluginError(f"{type(problem).__name__}: {problem}") from problem


@dataclass(frozen=True)
class Plugin(_OwnFunction):
    """Scores episodes. Use `load_plugin`."""

    columns: tuple[str, ...] = ()  # data columns that the function takes

    async def terms(self, episode: Episode, answer: str, question_type: str) -> tuple[OwnTerm, ...]:
        """Calls the function for an episode. Raises PluginError."""
        arguments = _arguments(episode, answer, question_type)
        return await self._call(arguments, lambda terms: _checked_terms(terms, arguments["turns"]))


@dataclass(frozen=True)
class GroupPlugin(_OwnFunction):
    """Scores groups. Use `load_plugin`."""

    name: str  # name of the term
    arguments: tuple[str, ...]  # GROUP_ARGUMENTS that the function takes
    columns: tuple[str, ...]  # data columns that the function takes

    async def terms(
        self, episodes: Sequence[Episode], answer: str, question_type: str, columns: Mapping[str, Any]
    ) -> list[OwnTerm | None]:
        """Calls the function for a group. A term is None if the function returned None. Raises PluginError."""
        each = [_arguments(episode, answer, question_type) for episode in episodes]
        lists = {name: [arguments[name] for arguments in each] for name in ARGUMENTS}
        lists |= {"prompts": lists["question"], "answers": lists["answer"]}
        lists |= {COMPLETIONS: ["\n".join(turns) for turns in lists["turns"]]}
        taken = {name: lists[name] for name in self.arguments}
        taken |= {name: [columns[name]] * len(episodes) for name in self.columns}
        return await self._call(taken, lambda values: self._terms_of(values, len(episodes)))

    def _terms_of(self, values: Any, num_episodes: int) -> list[OwnTerm | None]:
        is_list = isinstance(values, list | tuple) and all(isinstance(value, Real | None) for value in values)
        if not is_list or len(values) != num_episodes:
            raise PluginError(f"expected a list of {num_episodes} numbers, got {values!r:.{MAX_SHOWN_CHARS}}")
        return [None if value is None else OwnTerm(self.name, float(value)) for value in values]


def load_plugin(reward: RewardConfig) -> Plugin | GroupPlugin | None:
    """Loads the function that `reward.plugin` names; None if it is not set."""
    if not reward.plugin:
        return None
    function = load_function("reward.plugin", reward.plugin)
    parameters = inspect.signature(function).parameters
    if COMPLETIONS in parameters:
        return _group_plugin(reward.plugin, function, parameters.values())
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as problem:
        raise ValueError(f"reward.plugin={reward.plugin} must take {', '.join(ARGUMENTS)}: {problem}") from None
    return Plugin(function, DEADLINE_S)


def _group_plugin(
    location: str, function: Callable[..., Any], parameters: Collection[inspect.Parameter]
) -> GroupPlugin:
    """Makes a group plugin. Parameters without a default that are not in GROUP_ARGUMENTS are data columns."""
    name = location.rpartition(":")[2]
    try:
        OwnTerm(name, 0.0)
        if name == LENGTH:
            raise ValueError(f"{LENGTH} is the term of train.truncated=soft")
    except ValueError as problem:
        raise ValueError(f"reward.plugin={location}: the function's name is its term's: {problem}") from None
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    names = GROUP_ARGUMENTS if takes_all else [p.name for p in named if p.name in GROUP_ARGUMENTS]
    columns = [p.name for p in named if p.name not in GROUP_ARGUMENTS and p.default is p.empty]
    return GroupPlugin(function, DEADLINE_S, name, tuple(names), tuple(columns))


def _arguments(episode: Episode, answer: str, question_type: str) -> dict[str, Any]:
    return {
        "question": episode.task.question,
        "answer": answer,
        "question_type": question_type,
        "turns": [turn.text for turn in episode.turns],
        "calls": [
            ExecutedCall(number, call.call.span, call.call.name, call.call.arguments, call.outcome, call.response)
            for number, turn in enumerate(episode.turns)
            for call in turn.calls
        ],
        "outcomes": episode.outcomes,
    }


def _checked_terms(terms: Any, turns: Sequence[str]) -> tuple[OwnTerm, ...]:
    if not isinstance(terms, list | tuple) or not all(isinstance(term, OwnTerm) for term in terms):
        raise PluginError(f"expected a list of paravt_jax.rewards.OwnTerm, got {terms!r:.{MAX_SHOWN_CHARS}}")
    repeated = [name for name, count in Counter([LENGTH, *(term.name for term in terms)]).items() if count > 1]
    if repeated:
        raise PluginError(f"two terms have the name {repeated[0]}")
    for term in terms:
        for turn, start, end in term.places:
            if not 0 <= turn < len(turns) or not 0 <= start < end <= len(turns[turn]):
                raise PluginError(
                    f"the term {term.name} has the place ({turn}, {start}, {end}), which is not in the turns"
                )
    return tuple(
        replace(
            term,
            value=float(term.value),
            weight=float(term.weight),
            places=tuple(Place(*map(index, span)) for span in term.places),
        )
        for term in terms
    )
