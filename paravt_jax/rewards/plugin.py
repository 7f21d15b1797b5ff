"""Terms of R that a user wrote: a function in a file that the config names, asked once for every episode.

An async function runs in the event loop, any other in a thread of its own, either with a deadline. Whatever it raises,
whatever it gives that is no list of terms, and an answer that does not come make the episode missing: never a 0.
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
from rollout.episode import Episode
from rollout.threads import in_daemon_thread
from rollout.tools import Outcome
from rollout.user_code import await_user_code, load_function

ARGUMENTS = ("question", "answer", "question_type", "turns", "calls", "outcomes")
DEADLINE_S = 60.0  # of one episode; a later result makes the episode missing
SHOWN_CHARS = 100  # of what a function gave, in an error


class PluginError(Exception):
    """A function gave no terms of an episode."""


@dataclass(frozen=True)
class PlayedCall:
    """A call of an episode and what came of it; there is one for every outcome."""

    turn: int
    span: tuple[int, int]  # characters of the turn, tags included
    name: str
    arguments: Mapping[str, Any]  # as the model gave them
    outcome: Outcome
    response: str  # what the model was told


@dataclass(frozen=True)
class Plugin:
    """Use `load_plugin`."""

    function: Callable[..., Any]
    deadline_s: float

    async def terms(self, episode: Episode, answer: str, question_type: str) -> tuple[OwnTerm, ...]:
        """What the function says of an episode. Raises PluginError."""
        turns = [turn.text for turn in episode.turns]
        given = {
            "question": episode.task.question,
            "answer": answer,
            "question_type": question_type,
            "turns": turns,
            "calls": played_calls(episode),
            "outcomes": episode.outcomes,
        }
        work = partial(self.function, **given)
        try:
            async with asyncio.timeout(self.deadline_s):
                found = await await_user_code(
                    work() if inspect.iscoroutinefunction(self.function) else in_daemon_thread(work)
                )
            return _checked(found, turns)
        except PluginError:
            raise
        except TimeoutError:
            raise PluginError(f"reward.plugin returned nothing within {self.deadline_s:g} s") from None
        except Exception as problem:
            raise PluginError(f"{type(problem).__name__}: {problem}") from problem


def load_plugin(reward: RewardConfig) -> Plugin | None:
    """The function that the settings name; None where they name none."""
    place = reward.plugin
    if not place:
        return None
    function = load_function("reward.plugin", place)
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as problem:
        raise ValueError(f"reward.plugin={place} must take {', '.join(ARGUMENTS)}: {problem}") from None
    return Plugin(function, DEADLINE_S)


def played_calls(episode: Episode) -> list[PlayedCall]:
    return [
        PlayedCall(number, call.call.span, call.call.name, call.call.arguments, call.outcome, call.response)
        for number, turn in enumerate(episode.turns)
        for call in turn.calls
    ]


def _checked(found: Any, turns: Sequence[str]) -> tuple[OwnTerm, ...]:
    if not isinstance(found, list | tuple) or not all(isinstance(term, OwnTerm) for term in found):
        raise PluginError(f"expected a list of paravt_jax.rewards.OwnTerm, got {found!r:.{SHOWN_CHARS}}")
    twice = [name for name, count in Counter([LENGTH, *(term.name for term in found)]).items() if count > 1]
    if twice:
        raise PluginError(f"there are two terms of the name {twice[0]}")
    for term in found:
        for turn, start, end in term.places:
            if not 0 <= turn < len(turns) or not 0 <= start < end <= len(turns[turn]):
                raise PluginError(f"the term {term.name} has a place ({turn}, {start}, {end}) that is not in the turns")
    return tuple(
        replace(
            term,
            value=float(term.value),
            weight=float(term.weight),
            places=tuple(Place(*place) for place in term.places),
        )
        for term in found
    )
