"""Runs the agent loop with a model behind an endpoint: the same turns, calls and sub-agents, but over messages."""

from rollout.dialogue import AgentDialogue
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.dialogue import MessageDialogue
from rollout.endpoint.words import EndpointEncoder
from rollout.engine.protocol import Health
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.prompter import Closeup, Frames, Overview
from rollout.tools_text import with_tools


class EndpointAgent(Agent):
    """An agent whose model is an endpoint.

    `forced_prefix` has no effect, because an endpoint cannot continue a message.
    """

    def __init__(self, client: EndpointClient, frames: Frames, config: EpisodeConfig | None = None):
        self._set_up(frames, EndpointEncoder(), config)
        self.client = client

    def with_config(self, config: EpisodeConfig) -> "EndpointAgent":
        return EndpointAgent(self.client, self.frames, config)

    async def health(self) -> Health:
        return await self.client.health()

    def dialogue(
        self, prompt: Overview | Closeup, ledger: Ledger, *, episode: str, version: int | None, forced: str = ""
    ) -> AgentDialogue:
        messages = prompt.messages
        if isinstance(prompt, Overview) and prompt.tools:
            messages = with_tools(messages, prompt.tools)
        return MessageDialogue(self.client, self.config, ledger, messages, prompt.pictures, self.top_p)
