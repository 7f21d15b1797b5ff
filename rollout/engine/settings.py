"""What an engine knows of each of its SGLang servers, and the numbers that it treats them by."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.server import Device, Server


@dataclass(frozen=True)
class SGLangSettings:
    run: str = ""  # id of the run that publishes to the servers; empty: an engine that only samples
    take_over: bool = False  # at the start, servers that another run publishes to, also if it is alive
    route: Literal["disk", "tensors"] = "disk"
    weights_dir: str = ""  # for route=disk: a directory that all servers see; empty: this host's memory
    vocab_size: int = 2**31  # of the model: no server can give an id beyond it
    device: Device = "cuda"  # of servers that somebody else runs on this host, for route=tensors
    max_attempts: int = 4  # of a request, over all servers
    backoff_s: float = 0.2  # before the second attempt; doubles, up to …
    max_backoff_s: float = 5.0
    owner_answers_s: float = 60.0  # a run that is alive, probes and Python's lock included
    probe_every_s: float = 5.0
    probe_deadline_s: float = 20.0  # a healthy server answers between two steps of its scheduler
    max_missed_probes: int = 2  # in a row; a refused connection counts as all of them
    control_deadline_s: float = 30.0  # of a call that computes nothing: pause, flush, label, abort
    load_deadline_s: float = 600.0  # of loading new weights
    start_deadline_s: float = 900.0  # of a managed server
    max_restarts: int = 5  # of one managed server
    stop_grace_s: float = 10.0


@dataclass(eq=False)
class ServerState:
    """One server as this engine knows it."""

    url: str
    managed: Server | None = None
    up: bool = False
    problem: str = "not probed yet"
    version: int | None = None
    ours: bool = False  # this run publishes to it
    awaits_weights: bool = False  # it is healthy, and has none of this run's
    missed_probes: int = 0
    num_restarts: int = 0
    given_up: bool = False
    loading: bool = False  # new weights; until then it answers nobody
    paused: bool = True  # perhaps: by us, or by a process that was killed before it let it go on
    running: dict[str, str] = field(default_factory=dict)  # request id -> episode
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # to be given up when the server is ejected
    abandoned: list[str] = field(default_factory=list)  # request ids to abort when it answers again
    suspected: asyncio.Event = field(default_factory=asyncio.Event)  # probe now
