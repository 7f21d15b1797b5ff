"""Your own terms of R: a function in a file that the config names, called once per episode.

An async function runs in the event loop, any other in a thread, both with a timeout. If it raises, times out or returns
anything but a list of terms, the episode is missing; it never counts as 0.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paravt_jax.rewards.grammar import Place
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import LENGTH, OwnTerm
from rollout.records import Episode
from rollout.threads import in_daemon_thread
from rollout.tools import Outcome
from rollout.user_code import await_user_code, load_function

ARGUMENTS = ("question", "answer", "question_type", "turns", "calls", "outcomes")
DEADLINE_S = 60.0  # per episode; a later result makes the episode missing
MAX_SHOWN_CHARS = 100  # of a return value, in an error


class PluginError(Exception):
    """The function returned no terms for an episode."""


@dataclass(frozen=True)
class ExecutedCall:
    """A call of an episode and its outcome."""

    turn: int
    span: tuple[int, int]  # characters of the turn, tags included
    name: str
    arguments: Mapping[str, Any]  # as the model gave them
    outcome: Outcome
    response: str  # the text that the model got back


@dataclass(frozen=True)
class Plugin:
    """Use `load_plugin`."""

    function: Callable[..., Any]
    deadline_s: float

    async def terms(self, episode: Episode, answer: str, question_type: str) -> tuple[OwnTerm, ...]:
        """Calls the function for an episode. Raises PluginError."""
        turns = [turn.text for turn in episode.turns]
        arguments = {
            "question": episode.task.question,
            "answer": answer,
            "question_type": question_type,
            "turns": turns,
            "calls": executed_calls(episode),
            "outcomes": episode.outcomes,
        }
        work = partial(self.function, **arguments)
        try:
            async with asyncio.timeout(self.deadline_s):
                result = await await_user_code(
                    work() if inspect.iscoroutinefunction(self.function) else in_daemon_thread(work)
                )
            return _checked(result, turns)
        except PluginError:
            raise
        except TimeoutError:
            raise PluginError(f"reward.plugin returned nothing within {self.deadline_s:g} s") from None
        except Exception as problem:
            raise PluginError(f"{type(problem).__name__}: {problem}") from problem


def load_plugin(reward: RewardConfig) -> Plugin | None:
    """The function that the settings name, or None."""
    if not reward.plugin:
        return None
    function = load_function("reward.plugin", reward.plugin)
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as problem:
        raise ValueError(f"reward.plugin={reward.plugin} must take {', '.join(ARGUMENTS)}: {problem}") from None
    return Plugin(function, DEADLINE_S)


def executed_calls(episode: Episode) -> list[ExecutedCall]:
    return [
        ExecutedCall(number, call.call.span, call.call.name, call.call.arguments, call.outcome, call.response)
        for number, turn in enumerate(episode.turns)
        for call in turn.calls
    ]


def _checked(terms: Any, turns: Sequence[str]) -> tuple[OwnTerm, ...]:
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
            places=tuple(Place(*span) for span in term.places),
        )
        for term in terms
    )
