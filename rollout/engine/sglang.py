"""Combines SGLang servers into one engine: requests go to servers that are up, and a failed server only costs time.

When a server is ejected, its running requests move to other servers. A request is sent again only when its previous
server can no longer answer it, and only its first answer is used, so no sample is lost or counted twice.
`rollout.engine.fleet` manages weights, health and ownership; `rollout.engine.routing` chooses servers.

With an sglang-router, requests go to the router. Everything else goes directly to the servers that the router lists,
because a router forwards neither weights nor labels nor aborts.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engine.answers import Expected, answer_bytes, generation_of, ids_so_far
from rollout.engine.discovery import listed_urls, router_among, urls_behind
from rollout.engine.fleet import Fleet
from rollout.engine.http import HttpClient, ServerUnavailable
from rollout.engine.labels import WrongLabel
from rollout.engine.protocol import (
    DeadlineExceeded,
    EngineError,
    Generation,
    Health,
    Request,
    RequestRejected,
    Sampling,
    ServerHealth,
    VersionMismatch,
    Weights,
)
from rollout.engine.routing import Routing, routing_key
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.picture import Picture
from rollout.server import Server, ServerSettings

RID_CHARS = 16

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """Discards progress messages."""


class SGLangEngine:
    """An engine of SGLang servers. Create it with `connect`, `follow` or `launch`, and call `close` at the end."""

    def __init__(self, servers: Sequence[ServerState], settings: SGLangSettings, router: str = ""):
        self.settings, self._client = settings, HttpClient()
        self.fleet = Fleet(servers, settings, behind_router=bool(router))
        self._routing = Routing(self.fleet, router)

    @classmethod
    async def connect(
        cls, urls: Sequence[str], settings: SGLangSettings | None = None, on_progress: Progress = silent
    ) -> "SGLangEngine":
        """Connects to running servers, or to an sglang-router and the servers behind it, which may come and go.

        At least one server must answer. The engine starts with the policy version that the servers have.
        """
        urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        if not urls:
            raise ValueError("engine.urls is empty; give the URL of at least one SGLang server")
        settings = settings or SGLangSettings()
        router, urls = await router_among(urls, settings.probe_deadline_s)
        engine = await cls.open([ServerState(url) for url in urls], settings, on_progress, router)
        if router:
            engine.fleet.watch(router, lambda: urls_behind(engine.fleet.client, router, settings.control_deadline_s))
        return engine

    @classmethod
    async def follow(
        cls, file: str | Path, settings: SGLangSettings | None = None, on_progress: Progress = silent
    ) -> "SGLangEngine":
        """Connects to the servers in a file with one URL per line, and follows changes of the file."""
        settings = settings or SGLangSettings()
        router, urls = await router_among(listed_urls(file), settings.probe_deadline_s)
        if router:
            raise ValueError(f"{file} lists {router}, which is an sglang-router; name it in engine.urls")
        engine = await cls.open([ServerState(url) for url in urls], settings, on_progress)
        engine.fleet.watch(str(file), lambda: asyncio.to_thread(listed_urls, file))
        return engine

    @classmethod
    async def launch(
        cls, servers: Sequence[ServerSettings], settings: SGLangSettings | None = None, on_progress: Progress = silent
    ) -> "SGLangEngine":
        """Starts servers, whose weights are version 0. They stop with the engine or with this process."""
        settings = settings or SGLangSettings()
        starts = [
            asyncio.create_task(Server.start(server, deadline_s=settings.start_deadline_s, on_progress=on_progress))
            for server in servers
        ]
        try:
            running = await asyncio.gather(*starts)
        except BaseException:  # also on cancellation, because nothing else would stop the servers that are ready
            for start in starts:
                start.cancel()
            started = await asyncio.gather(*starts, return_exceptions=True)
            ready = [server for server in started if isinstance(server, Server)]
            await asyncio.gather(*(server.stop(settings.stop_grace_s) for server in ready))
            raise
        return await cls.open([ServerState(server.url, server) for server in running], settings, on_progress)

    @classmethod
    async def open(
        cls, servers: Sequence[ServerState], settings: SGLangSettings, on_progress: Progress = silent, router: str = ""
    ) -> "SGLangEngine":
        engine = cls(servers, settings, router)
        try:
            await engine.fleet.open(on_progress)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.fleet.servers]

    @property
    def version(self) -> int:
        assert self.fleet.version is not None, "no server had weights of this run, and none were published"
        return self.fleet.version

    async def generate(self, request: Request) -> Generation:
        started_s = time.monotonic()
        deadline_s = started_s + request.deadline_s
        body = await asyncio.to_thread(generate_body, request.ids, request.pictures, request.sampling)
        if self.settings.mixture and not request.on_tokens:  # each message of a stream would repeat all experts
            body["return_routed_experts"] = True
        problems: list[str] = []
        tried: set[str] = set()
        while True:
            server = await self._routing.choose(request.affinity or request.episode, deadline_s, tried)
            oldest = self.fleet.oldest(self._routing.behind(server))
            try:
                answer = await self._attempt(server, request, body, deadline_s)
                latency_s = time.monotonic() - started_s
                expected = Expected(self.fleet.owner, oldest, self.fleet.newest)
                generation = generation_of(answer, request.sampling, expected, self.settings, server.url, latency_s)
                break
            except ServerUnavailable as problem:
                problems.append(str(problem))
                tried.add(server.url)
                for candidate in self._routing.behind(server):
                    candidate.probe_now.set()
                if isinstance(problem, WrongLabel) and server is not self._routing.router:
                    self.fleet.eject_stale(server, str(problem))
            if len(problems) == self.settings.max_attempts:
                raise EngineError(f"a request failed {len(problems)} times: {'; '.join(dict.fromkeys(problems))}")
            backoff_s = min(self.settings.backoff_s * 2 ** (len(problems) - 1), self.settings.max_backoff_s)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        if request.version is not None and not (generation.versions == request.version).all():
            raise VersionMismatch(
                f"{server.url} sampled with policy versions {sorted(set(generation.versions.tolist()))}, expected "
                f"version {request.version}"
            )
        return generation

    async def publish(self, weights: Weights, version: int) -> None:
        """Loads the weights into all servers that are up. A server that fails is ejected and loads them on its return.

        Servers continue to sample while the weights are written and sent, and pause only to load them. Returns when at
        least one server has the weights; raises if none has them in time. Running requests continue with the new
        weights, and each of their tokens is labeled with its version.
        """
        await self.fleet.publish(weights, version)

    async def adopt(self, version: int) -> None:
        """Uses each server as soon as it has this version, which another process publishes."""
        await self.fleet.adopt(version)

    async def wait_for(self, url: str) -> None:
        """Waits until this server has the current weights. Raises if that takes too long."""
        await self.fleet.wait_until_up(time.monotonic() + self.settings.answer_s, url=url)

    async def health(self) -> Health:
        return Health(
            tuple(ServerHealth(server.url, server.up, server.version, server.problem) for server in self.fleet.servers)
        )

    async def abort(self, episode: str | None = None) -> None:
        await asyncio.gather(
            *(
                self.fleet.abort(
                    [server.url for server in self._routing.behind(target)],
                    [rid for rid, name in target.running.items() if episode in (None, name)],
                )
                for target in self._routing.targets
            )
        )

    async def close(self) -> None:
        calls = [task for target in self._routing.targets for task in target.calls]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.close()
        await self.fleet.close()

    async def _attempt(self, server: ServerState, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
        """Sends the request once. If no answer arrives, the request is also aborted on the server."""
        rid = uuid.uuid4().hex[:RID_CHARS]
        remaining_s = deadline_s - time.monotonic()
        call = asyncio.create_task(self._post(server, request, body | {"rid": rid}, remaining_s))
        server.running[rid] = request.episode
        server.calls.add(call)
        answered = False
        try:
            await asyncio.wait([call])
            if call.cancelled():
                raise ServerUnavailable(f"{server.url} was ejected: {server.problem}")
            answer = call.result()
            answered = True
            return answer
        except RequestRejected:
            answered = True
            raise
        except DeadlineExceeded:
            server.probe_now.set()
            raise DeadlineExceeded(
                f"{server.url} did not answer within the {request.deadline_s} s of a request"
            ) from None
        finally:
            call.cancel()
            del server.running[rid]
            server.calls.discard(call)
            if not answered:
                self._abort_on_server(server, rid)

    async def _post(self, server: ServerState, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
        url, max_bytes = f"{server.url}/generate", answer_bytes(request.sampling, self.settings)
        key = routing_key(request.affinity or request.episode)
        if request.on_tokens is None:
            return await self._client.post(url, body, deadline_s, max_bytes, key)
        answer, ids = None, []
        messages = self._client.stream(url, body | {"stream": True}, deadline_s, max_bytes, key)
        async with contextlib.aclosing(messages):
            async for answer in messages:
                ids = ids_so_far(answer, ids, server.url)
                request.on_tokens(ids)
        return answer

    def _abort_on_server(self, server: ServerState, rid: str) -> None:
        if server.up or server.retired:
            self.fleet.abort_later([candidate.url for candidate in self._routing.behind(server)], [rid])
        else:
            server.rids_to_abort.append(rid)


def generate_body(ids: np.ndarray, pictures: Sequence[Picture], sampling: Sampling) -> dict[str, Any]:
    """Returns the body for SGLang's /generate. The first use of a picture encodes it, which takes time."""
    body: dict[str, Any] = {
        "input_ids": ids.tolist(),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,  # disabled, because the model's own files may set it
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # otherwise the stop ids in the model's own files apply
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
    }
    if pictures:
        body["image_data"] = [picture.png_base64 for picture in pictures]
    return body
