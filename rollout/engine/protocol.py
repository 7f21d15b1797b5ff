"""The engine protocol: sample from ids and pictures, load new weights, report health, stop.

The ids that an engine returns are the only record of the sampled tokens; text is never sent or compared. Every token
has a policy version: the number of optimizer steps in the weights that sampled it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from rollout.picture import Picture

MIN_TEMPERATURE = 1e-6  # below, logits overflow; SGLang then samples greedily
LOGP_SLACK = 1e-3  # rounding may lift a log-prob this far above 0


class EngineError(RuntimeError):
    """The engine failed. The message goes to the log and names the server, if one failed."""


class RequestRejected(EngineError):
    """The request itself is invalid, so a retry cannot help."""


class DeadlineExceeded(EngineError):
    """The request was not answered within its deadline."""


class VersionMismatch(EngineError):
    """Tokens were sampled with another policy version than the request requires."""


@dataclass(frozen=True)
class Sampling:
    """How to sample the tokens of a request."""

    max_new_tokens: int
    temperature: float | int = 0.7
    top_p: float | int = 1.0
    stop_ids: tuple[int, ...] = ()  # sampling stops after the first of these ids; that id is kept
    seed: int = 0  # used by the embedded engine, whose sampling is reproducible; SGLang ignores it

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"sampling.temperature={self.temperature} must be 0 or a number from {MIN_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p} must be in (0, 1]")


@dataclass(frozen=True, eq=False)
class Request:
    """A request to continue `ids`, which have exactly one placeholder per picture, in the same order."""

    ids: np.ndarray  # int32 [T], placeholders not expanded
    pictures: tuple[Picture, ...]
    sampling: Sampling
    episode: str  # the name for `abort`
    deadline_s: float | int
    version: int | None = None  # the version that must sample every token; None accepts any version
    affinity: str = ""  # requests with equal affinity go to the same server, for its prefix cache; default: episode
    # Called with all ids so far, whenever there are more. After a failed server, sampling starts again with fewer ids.
    on_tokens: Callable[[Sequence[int]], object] | None = None


@dataclass(frozen=True, eq=False)
class Generation:
    """The tokens that a request sampled, each with its log-prob and policy version."""

    ids: np.ndarray  # int32 [n]
    behavior_logp: np.ndarray  # float32 [n], from log_softmax(logits / temperature)
    versions: np.ndarray  # int32 [n], the policy version of each token
    finish: Literal["stop", "length", "abort"]
    num_prompt_tokens: int = 0  # with placeholders expanded
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    server: str = ""
    latency_s: float | int = 0.0
    experts: np.ndarray | None = None  # int16 [prompt and n - 1 tokens, layers, experts per token], for MoE models

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.behavior_logp) == len(self.versions):
            raise ValueError(
                f"{len(self.ids)} ids came with {len(self.behavior_logp)} log-probs and {len(self.versions)} versions"
            )
        if (lowest := np.min(self.ids, initial=0)) < 0:
            raise ValueError(f"the engine returned the id {lowest}, but ids start at 0")
        wrong = self.behavior_logp[~(np.isfinite(self.behavior_logp) & (self.behavior_logp <= LOGP_SLACK))]
        if len(wrong):
            raise ValueError(f"the engine returned the log-prob {wrong[0]:g}, expected a finite number of at most 0")


@dataclass(frozen=True)
class ServerHealth:
    """The state of a server. `version` is that of its weights; None if it is unknown."""

    url: str
    alive: bool
    version: int | None
    problem: str = ""


@dataclass(frozen=True)
class Health:
    """The state of an engine's servers. The engine is alive if one of them is."""

    servers: tuple[ServerHealth, ...] = field(default=())

    @property
    def alive(self) -> bool:
        return any(server.alive for server in self.servers)


class Weights(Protocol):
    """All parameters of a policy version under their Hugging Face names. They can be read repeatedly."""

    @property
    def num_bytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once; bf16 as `ml_dtypes.bfloat16`."""
        ...

    def write(self, directory: Path) -> None:
        """Writes safetensors files, with an index if there are several, into an existing directory."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Samples for agents. Your own engine needs these methods; docs/extend.md has an example."""

    @property
    def version(self) -> int:
        """The policy version that samples new requests."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Samples a continuation. Raises an EngineError if it cannot."""
        ...

    async def publish(self, weights: Weights, version: int) -> None:
        """Returns when every server that gets further requests has these weights."""
        ...

    async def health(self) -> Health:
        """Returns the state of every server."""
        ...

    async def abort(self, episode: str | None = None) -> None:
        """Ends an episode's running requests (None: all); each returns its tokens so far, with finish "abort"."""
        ...

    async def close(self) -> None:
        """Ends running requests, and the servers that this engine started."""
        ...
