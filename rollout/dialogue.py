"""An agent's dialogue with its model: the interface that the turn loop uses, and its implementation with token ids.

`rollout.endpoint.agent` implements the same interface with messages.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollout.chat import Chat
from rollout.engine.protocol import Engine, Request, Sampling
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.parts import Part, pictures_of
from rollout.picture import Picture
from rollout.prompter import Closeup, Overview
from rollout.records import Turn


@dataclass(frozen=True)
class TurnRequest:
    max_new_tokens: int
    seed: int
    deadline_s: float
    affinity: str  # equal for dialogues that share their prompt
    ends_after_call: bool = False  # stop after the first call
    # Called with the whole text so far, whenever it has grown. If a server fails, the text starts again.
    on_text: Callable[[str], None] | None = None


@dataclass(frozen=True)
class SampledTurn:
    turn: Turn
    num_tokens: int  # sampled tokens
    num_prompt_tokens: int  # with pictures expanded
    num_cached_tokens: int = 0
    can_continue: bool = True  # False if the turn has a picture placeholder, which no engine accepts back


class AgentDialogue(Protocol):
    """A dialogue in which the model's turns alternate with tool responses."""

    token_px: int  # side of the square of pixels that becomes one token

    @property
    def room(self) -> int:
        """The number of tokens that the context has left for the next turn."""
        ...

    async def sample(self, request: TurnRequest) -> SampledTurn: ...

    def num_tokens(self, responses: Sequence[Sequence[Part]]) -> int:
        """Returns how many tokens these responses to the last turn would add; an estimate for endpoints."""
        ...

    def respond(self, responses: Sequence[Sequence[Part]]) -> bool:
        """Adds the tool responses to the last turn. Returns False, and adds nothing, if they do not fit."""
        ...


class TokenDialogue:
    """A dialogue whose ids are all recorded in a ledger. Each of the model's turns starts with the text `forced`."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        config: EpisodeConfig,
        ledger: Ledger,
        prompt: Overview | Closeup,
        *,
        episode: str,
        version: int | None,
        forced: str = "",
        top_p: float | int = 1.0,
    ):
        self._engine, self._chat, self._config, self._ledger = engine, chat, config, ledger
        self._episode, self._version, self._top_p = episode, version, top_p
        self._forced, self.token_px = chat.encode(forced), chat.token_px
        ledger.add("prompt", prompt.ids, prompt.pictures)

    @property
    def room(self) -> int:
        return self._room - len(self._forced)

    @property
    def _room(self) -> int:
        used = self._ledger.num_tokens_each(self._chat.image_id, self.token_px)
        return self._config.max_context_tokens - int(used.sum())

    async def sample(self, request: TurnRequest) -> SampledTurn:
        chat, ledger, on_text = self._chat, self._ledger, request.on_text
        begin = len(ledger.ids)
        ledger.add("forced", self._forced)
        stop_ids = (*chat.stop_ids, chat.call_end_id) if request.ends_after_call else chat.stop_ids
        generation = await self._engine.generate(
            Request(
                ids=ledger.ids,
                pictures=ledger.pictures,
                sampling=Sampling(
                    request.max_new_tokens, self._config.temperature, self._top_p, stop_ids=stop_ids, seed=request.seed
                ),
                episode=self._episode,
                deadline_s=request.deadline_s,
                version=self._version,
                affinity=request.affinity,
                on_tokens=None if on_text is None else lambda ids: on_text(self._text(ids)),
            )
        )
        ledger.add_sampled(generation)
        span = begin, len(ledger.ids)
        return SampledTurn(
            Turn(self._text(generation.ids), generation.finish, span, latency_s=generation.latency_s),
            num_tokens=len(generation.ids),
            num_prompt_tokens=generation.num_prompt_tokens,
            num_cached_tokens=generation.num_cached_tokens,
            can_continue=chat.visual_ids.isdisjoint(generation.ids.tolist()),
        )

    def num_tokens(self, responses: Sequence[Sequence[Part]]) -> int:
        return num_expanded(*self._environment(responses), self.token_px)

    def respond(self, responses: Sequence[Sequence[Part]]) -> bool:
        ids, pictures = self._environment(responses)
        if num_expanded(ids, pictures, self.token_px) > self._room:
            return False
        self._ledger.add("environment", ids, pictures)
        return True

    def _environment(self, responses: Sequence[Sequence[Part]]) -> tuple[np.ndarray, tuple[Picture, ...]]:
        ids = self._chat.after_turn(self._ledger.ids, responses)
        return ids, pictures_of(itertools.chain(*responses))

    def _text(self, ids: Any) -> str:
        """Returns the text of a turn, with the forced prefix and without a final stop token."""
        ids = self._chat.without_stop(ids)
        return self._chat.decode([*self._forced, *ids])


def num_expanded(ids: np.ndarray, pictures: Sequence[Picture], token_px: int) -> int:
    """Returns the number of tokens after the picture placeholders are expanded."""
    return len(ids) - len(pictures) + sum(picture.num_tokens(token_px) for picture in pictures)
