"""The agent loop with a model behind an endpoint: the same turns, calls and sub-agents, over messages."""

from rollout.dialogue import AgentDialogue
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.dialogue import MessageDialogue
from rollout.endpoint.words import Words
from rollout.engine.protocol import EngineError, Generation, Health, Request, Weights
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.prompter import Closeup, Frames, Overview
from rollout.tools_text import with_tools

NO_IDS = "an endpoint returns text, not token ids and log-probs, so that nothing can be trained on it"


class EndpointEngine:
    """An endpoint as an engine that samples no ids: it can be asked for its health, and closed."""

    version = 0

    def __init__(self, client: EndpointClient):
        self.client = client

    async def generate(self, request: Request) -> Generation:
        raise EngineError(NO_IDS)

    async def publish(self, weights: Weights, version: int) -> None:
        raise EngineError("an endpoint takes no weights")

    async def health(self) -> Health:
        return await self.client.health()

    async def abort(self, episode: str | None = None) -> None:
        """A cancelled request closes its connection, which ends it."""

    async def close(self) -> None:
        await self.client.close()


class EndpointAgent(Agent):
    """`forced_prefix` has no effect, because an endpoint cannot continue a message."""

    def __init__(self, client: EndpointClient, frames: Frames, config: EpisodeConfig | None = None):
        self._set_up(EndpointEngine(client), frames, Words(), config)
        self.client = client

    def with_config(self, config: EpisodeConfig) -> "EndpointAgent":
        return EndpointAgent(self.client, self.frames, config)

    def dialogue(
        self, prompt: Overview | Closeup, ledger: Ledger, *, episode: str, version: int | None, forced: str = ""
    ) -> AgentDialogue:
        messages = prompt.messages
        if isinstance(prompt, Overview) and prompt.tools:
            messages = with_tools(messages, prompt.tools)
        return MessageDialogue(self.client, self.config, ledger, messages, prompt.pictures, self.top_p)
