"""An engine that replies from a script, for tests and for replaying recorded episodes as requests."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from rollout.engine.protocol import (
    DeadlineExceeded,
    Generation,
    Health,
    Request,
    ServerHealth,
    VersionMismatch,
    Weights,
)

Reply = Callable[[Request], Coroutine[Any, Any, Sequence[int]]]
SCRIPT_LOGP = -0.5  # the log-prob of every token


class ScriptedEngine:
    """An engine that replies with the ids from `reply`, cut to max_new_tokens, and records all requests."""

    def __init__(self, reply: Reply, version: int = 0):
        self._reply, self._version = reply, version
        self.requests: list[Request] = []
        self._running: dict[asyncio.Future[Sequence[int]], str] = {}  # pending replies -> episode

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        if request.version not in (None, self._version):
            raise VersionMismatch(f"the script has version {self._version}, expected version {request.version}")
        started_s = time.monotonic()
        reply = asyncio.ensure_future(self._reply(request))
        self._running[reply] = request.episode
        try:
            await asyncio.wait([reply], timeout=request.deadline_s)
        finally:
            del self._running[reply]
            reply.cancel()  # no effect if it is done
        if not reply.done():
            raise DeadlineExceeded(f"the script gave no reply in {request.deadline_s} s")
        ids = np.array([] if reply.cancelled() else reply.result(), np.int32)[: request.sampling.max_new_tokens]
        if request.on_tokens is not None:
            for number in range(len(ids)):
                request.on_tokens(ids[: number + 1].tolist())
        stopped = len(ids) > 0 and int(ids[-1]) in request.sampling.stop_ids
        finish = "abort" if reply.cancelled() else "stop" if stopped else "length"
        return Generation(
            ids,
            behavior_logp=np.full(len(ids), SCRIPT_LOGP, np.float32),
            versions=np.full(len(ids), self._version, np.int32),
            finish=finish,
            num_prompt_tokens=len(request.ids),
            server="script",
            latency_s=time.monotonic() - started_s,
        )

    async def publish(self, weights: Weights, version: int) -> None:
        self._version = version

    async def health(self) -> Health:
        return Health((ServerHealth("script", True, self._version),))

    async def abort(self, episode: str | None = None) -> None:
        for reply, its_episode in list(self._running.items()):
            if episode in (None, its_episode):
                reply.cancel()

    async def close(self) -> None:
        """Does nothing."""
