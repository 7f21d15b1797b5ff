"""Settings of the SGLang engine, and the state that it keeps for each server."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.server import Server


class Mixture(NamedTuple):
    """The sizes of a mixture-of-experts model, whose routing decisions the learner replays."""

    num_layers: int
    num_experts: int
    token_experts: int

    @property
    def token_bytes(self) -> int:
        """The bytes per token in an answer: int32 in base64."""
        return 4 * -(-4 * self.num_layers * self.token_experts // 3)


@dataclass(frozen=True)
class SGLangSettings:
    run: str = ""  # id of the run that publishes to the servers; empty: the engine only samples
    take_over: bool = False  # at startup, take servers from another run without asking it
    weights_dir: str = ""  # a directory that all servers can read; empty: this host's memory, and the network
    vocab_size: int = 2**31  # replies with larger ids are rejected
    max_context_tokens: int = 2**18  # limits the size of a reply with experts
    mixture: Mixture | None = None  # if set, ask servers for the experts of each token
    max_attempts: int = 4  # per request, over all servers
    backoff_s: float = 0.2  # before the second attempt; doubles up to max_backoff_s
    max_backoff_s: float = 5.0
    owner_answers_s: float = 60.0  # a live run answers an ownership question within this time, even while it is busy
    probe_every_s: float = 5.0
    probe_deadline_s: float = 20.0  # a healthy server answers between two steps of its scheduler
    max_missed_probes: int = 2  # consecutive failures before a server is ejected; a refused connection ejects at once
    control_deadline_s: float = 30.0  # for calls that compute nothing, such as pause, flush, label and abort
    load_deadline_s: float = 600.0  # for loading new weights
    start_deadline_s: float = 900.0  # for starting a managed server
    max_restarts: int = 5  # of a managed server, between two publishes
    stop_grace_s: float = 10.0

    @property
    def answer_s(self) -> float:
        """A healthy server is ready within this time after it starts to answer."""
        return self.probe_deadline_s + self.control_deadline_s


@dataclass(eq=False)
class ServerState:
    url: str
    managed: Server | None = None  # set if this engine started it
    up: bool = False
    problem: str = "not probed yet"
    version: int | None = None
    claimed: bool = False  # this run publishes to it
    awaits_weights: bool = False  # healthy, but has no weights of this run yet
    out_since_s: float | None = None  # when it was ejected; None while it is up, and before it was first up
    missed_probes: int = 0
    num_restarts: int = 0
    refuses_adapters: bool = False  # it has another model than the adapter's base, or has no plugin to merge adapters
    retired: bool = False  # gets no more requests or probes
    loading: bool = False  # loading new weights; it answers nothing until it has loaded them
    paused: bool = True  # may be paused, by this engine or by a process that died before it resumed the server
    running: dict[str, str] = field(default_factory=dict)  # request id -> episode
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # cancelled when the server is ejected
    rids_to_abort: list[str] = field(default_factory=list)  # request ids to abort once it answers again
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    labeling: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while its label changes
