"""Runs the agent loop with a model behind an endpoint: the same turns, calls and sub-agents, but in messages.

Only the endpoint knows its tokenizer, so a dialogue has no token ids.
"""

import asyncio
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.chat import TOKEN_PX
from rollout.dialogue import AgentDialogue, SampledTurn, TurnRequest
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.words import EndpointEncoder, escape_control, with_pictures
from rollout.engine.protocol import Health
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger, Segment
from rollout.parts import Part, content_of, pictures_of, text_of
from rollout.picture import Picture
from rollout.prompter import Closeup, Frames, Overview
from rollout.records import Turn
from rollout.tools_text import with_responses, with_tools

CALL, CALL_END = "<tool_call>", "</tool_call>"
CHARS_PER_TOKEN = 3  # low for English, so that token counts are overestimated rather than underestimated
MAX_SEED = 2**31  # some endpoints reject larger seeds


class EndpointAgent(Agent):
    """An agent whose model is an endpoint.

    `forced_prefix` has no effect, because an endpoint cannot continue a message.
    """

    def __init__(self, client: EndpointClient, frames: Frames, config: EpisodeConfig | None = None):
        self._set_up(frames, EndpointEncoder(), config)
        self.client = client

    async def health(self) -> Health:
        return await self.client.health()

    def dialogue(
        self, prompt: Overview | Closeup, ledger: Ledger, *, episode: str, version: int | None, forced: str = ""
    ) -> AgentDialogue:
        messages = prompt.messages
        if isinstance(prompt, Overview) and prompt.tools:
            messages = with_tools(messages, prompt.tools)
        return MessageDialogue(self.client, self.config, ledger, messages, prompt.pictures, self.top_p)


class MessageDialogue:
    """A dialogue in messages. Its ledger records pictures and the endpoint's count of sampled tokens, but no ids."""

    token_px = TOKEN_PX  # a guess, because the endpoint's model is unknown

    def __init__(
        self,
        client: EndpointClient,
        config: EpisodeConfig,
        ledger: Ledger,
        messages: Sequence[Mapping[str, Any]],
        pictures: Sequence[Picture],
        top_p: float | int = 1.0,
    ):
        self._client, self._config, self._ledger, self._top_p = client, config, ledger, top_p
        self._neutral, self._pictures = messages, pictures  # not yet sent
        self._messages: list[dict[str, Any]] = []
        self._num_tokens = 0  # in the dialogue so far, partly estimated
        self._sent = hashlib.blake2b(digest_size=12)
        ledger.segments.append(Segment("prompt", np.zeros(0, np.int32), tuple(pictures)))

    @property
    def room(self) -> int:
        return self._config.max_context_tokens - self._num_tokens

    async def sample(self, request: TurnRequest) -> SampledTurn:
        config = self._config
        await asyncio.to_thread(self._add_pending)
        sampling: dict[str, Any] = {
            "max_tokens": request.max_new_tokens,
            "temperature": config.temperature,
            "top_p": self._top_p,
            "seed": request.seed % MAX_SEED if config.temperature > 0 else None,
            "stop": [CALL_END] if request.ends_after_call else None,
        }
        self._hash(sampling)
        reply = await self._client.complete(
            self._messages,
            **sampling,
            deadline_s=request.deadline_s,
            affinity=request.affinity,
            on_text=request.on_text,
        )
        text = reply.text
        if request.ends_after_call and reply.finish == "stop" and text.rfind(CALL) > text.rfind(CALL_END):
            text += CALL_END  # endpoints leave out the text that stopped them
        self._add({"role": "assistant", "content": escape_control(text)})
        self._ledger.num_reported += reply.num_sampled_tokens
        num_tokens = reply.num_sampled_tokens or len(text) // CHARS_PER_TOKEN  # estimated if not reported
        self._num_tokens = (reply.num_prompt_tokens or self._num_tokens) + num_tokens
        turn = Turn(text, reply.finish, latency_s=reply.latency_s, num_sampled=num_tokens)
        return SampledTurn(turn, num_tokens, reply.num_prompt_tokens)

    def num_tokens(self, responses: Sequence[Sequence[Part]]) -> int:
        pictures = pictures_of(itertools.chain(*responses))
        num_chars = sum(len(text_of(response)) for response in responses)
        return num_chars // CHARS_PER_TOKEN + sum(picture.num_tokens(self.token_px) for picture in pictures)

    def respond(self, responses: Sequence[Sequence[Part]]) -> bool:
        """Adds all tool responses as one user message, as Qwen's chat template does. False if they do not fit."""
        num_tokens = self.num_tokens(responses)
        if num_tokens > self.room:
            return False
        self._pictures = pictures_of(itertools.chain(*responses))
        contents = (content_of(response, EndpointEncoder().escape) for response in responses)
        self._neutral = with_responses([{"role": "tool", "content": content} for content in contents])
        if self._pictures:
            self._ledger.segments.append(Segment("environment", np.zeros(0, np.int32), self._pictures))
        self._num_tokens += num_tokens
        return True

    def _add_pending(self) -> None:
        """Adds the pending messages. This encodes their pictures, which takes time."""
        for message in with_pictures(self._neutral, self._pictures):
            self._add(message)
        self._neutral = []

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._hash(message)

    def _hash(self, content: Any) -> None:
        self._sent.update(json.dumps(content, sort_keys=True).encode())
        self._ledger.sent = self._sent.hexdigest()
