"""SGLang servers as one engine: requests go to a server that is up, and a server that fails costs nothing but time.

When a server is ejected, whatever it was computing is given to others. A request is sent again only after the server
that had it is known not to answer it, and its first answer is the only one used, so nothing is lost or counted twice.
Weights, health and owners of the servers are `rollout.engine.fleet`.

Behind an sglang-router the servers are those that it lists. Requests go to the router, everything else to each server,
since a router passes on neither weights nor labels nor aborts.
"""

import asyncio
import contextlib
import hashlib
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
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.picture import Picture
from rollout.server import Server, ServerSettings

RID_CHARS = 16
MAX_HOMES = 100_000  # prefixes whose server is remembered
MAX_IMBALANCE = 8  # requests more than elsewhere, from which on computing a prefix again is quicker than waiting


class SGLangEngine:
    """Use `await SGLangEngine.connect(urls)` or `.launch(settings)`, and `close` in the end."""

    def __init__(self, servers: Sequence[ServerState], settings: SGLangSettings, client: HttpClient, router: str = ""):
        self.settings, self._client = settings, client
        self.fleet = Fleet(servers, settings, client, behind_router=bool(router))
        self._router = ServerState(router, up=True) if router else None
        self._asked = [self._router] if self._router else self.fleet.servers  # for samples
        self._homes: dict[str, ServerState] = {}  # affinity -> the server whose cache knows the prefix

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        settings: SGLangSettings | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> "SGLangEngine":
        """To servers that somebody else runs, at the version that their weights have. At least one must answer.

        Or to an sglang-router, and the servers behind it, which may come and go.
        """
        urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        if not urls:
            raise ValueError("engine.urls is empty; give the URL of at least one SGLang server")
        settings = settings or SGLangSettings()
        router, urls = await router_among(urls, settings.probe_deadline_s)
        engine = await cls._begin([ServerState(url) for url in urls], settings, on_progress, router)
        if router:
            engine.fleet.heed(router, lambda: urls_behind(engine._client, router, settings.control_deadline_s))
        return engine

    @classmethod
    async def follow(
        cls,
        file: str | Path,
        settings: SGLangSettings | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> "SGLangEngine":
        """To the servers that a file lists, a URL on each line, also when it changes: they may come and go."""
        settings = settings or SGLangSettings()
        router, urls = await router_among(listed_urls(file), settings.probe_deadline_s)
        if router:
            raise ValueError(f"{file} lists {router}, which is an sglang-router; name it in engine.urls")
        engine = await cls._begin([ServerState(url) for url in urls], settings, on_progress)
        engine.fleet.heed(str(file), lambda: asyncio.to_thread(listed_urls, file))
        return engine

    @classmethod
    async def launch(
        cls,
        servers: Sequence[ServerSettings],
        settings: SGLangSettings | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> "SGLangEngine":
        """Starts the servers, whose weights are version 0; they end with the engine, or with this process."""
        settings = settings or SGLangSettings()
        starts = [
            asyncio.create_task(Server.start(one, deadline_s=settings.start_deadline_s, on_progress=on_progress))
            for one in servers
        ]
        started = await asyncio.gather(*starts, return_exceptions=True)
        failures = [server for server in started if isinstance(server, BaseException)]
        up = [server for server in started if isinstance(server, Server)]
        if failures:
            await asyncio.gather(*(server.stop(settings.stop_grace_s) for server in up))
            raise failures[0]
        return await cls._begin([ServerState(server.url, server) for server in up], settings, on_progress)

    @classmethod
    async def _begin(
        cls,
        servers: Sequence[ServerState],
        settings: SGLangSettings,
        on_progress: Callable[[str], None] = lambda text: None,
        router: str = "",
    ) -> "SGLangEngine":
        engine = cls(servers, settings, HttpClient.make(), router)
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
        problems: list[str] = []
        tried: set[str] = set()
        while True:
            server = await self._choose(request.affinity or request.episode, deadline_s, tried)
            oldest = self.fleet.oldest(self._behind(server))
            try:
                answer = await self._ask(server, request, body, deadline_s)
                latency_s = time.monotonic() - started_s
                expected = Expected(self.fleet.owner, oldest, self.fleet.newest)
                generation = generation_of(
                    answer, request.sampling, expected, self.settings.vocab_size, server.url, latency_s
                )
                break
            except ServerUnavailable as problem:
                problems.append(str(problem))
                tried.add(server.url)
                for one in self._behind(server):
                    one.suspected.set()
                if isinstance(problem, WrongLabel) and server is not self._router:
                    self.fleet.distrust(server, str(problem))
            if len(problems) == self.settings.max_attempts:
                raise EngineError(f"a request failed {len(problems)} times: {'; '.join(dict.fromkeys(problems))}")
            backoff_s = min(self.settings.backoff_s * 2 ** (len(problems) - 1), self.settings.max_backoff_s)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        if request.version is not None and not (generation.versions == request.version).all():
            raise VersionMismatch(
                f"{server.url} sampled with policy versions {sorted(set(generation.versions.tolist()))}, version "
                f"{request.version} was asked for"
            )
        return generation

    async def publish(self, weights: Weights, version: int) -> None:
        """Loads the weights into all servers that are up; one that fails is ejected, and gets them when it is back.

        Returns when one server has them, or raises where none does in time.

        Requests that are running go on with the new weights, their tokens labelled. `weights` must stay readable until
        the next call returns: a server that comes back later needs them.
        """
        await self.fleet.publish(weights, version)

    async def adopt(self, version: int) -> None:
        """Another process has published this version: whichever server has it is used, the others when they have."""
        await self.fleet.adopt(version)

    async def health(self) -> Health:
        return Health(
            tuple(ServerHealth(server.url, server.up, server.version, server.problem) for server in self.fleet.servers)
        )

    async def abort(self, episode: str | None = None) -> None:
        await asyncio.gather(
            *(
                self.fleet.abort(
                    [one.url for one in self._behind(server)],
                    [rid for rid, of in server.running.items() if episode in (None, of)],
                )
                for server in self._asked
            )
        )

    async def close(self) -> None:
        calls = [task for server in self._asked for task in server.calls]
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.fleet.close()
        await self._client.close()
        await self.fleet.stop_managed()

    def _behind(self, server: ServerState) -> list[ServerState]:
        """Those that may have had a request: a router says nobody where it sent it."""
        return self.fleet.servers if server is self._router else [server]

    # Requests

    async def _choose(self, affinity: str, deadline_s: float, tried: set[str]) -> ServerState:
        """The server that knows the prefix, or the one with the fewest requests; one not tried yet, if there is."""
        self.fleet.check_keepers()
        await self.fleet.wait_until_up(deadline_s)
        up = [server for server in self._asked if server.up]
        up = [server for server in up if server.url not in tried] or up
        idlest = min(up, key=lambda server: len(server.running))
        home = self._homes.pop(affinity, None)
        if home not in up:
            home = idlest
        self._homes[affinity] = home  # now the youngest
        while len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return home if len(home.running) <= len(idlest.running) + MAX_IMBALANCE else idlest

    async def _ask(self, server: ServerState, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
        """One attempt. Whatever ends it other than an answer also ends the computation on the server."""
        rid = uuid.uuid4().hex[:RID_CHARS]
        remaining_s = deadline_s - time.monotonic()
        call = asyncio.create_task(self._sample(server, request, body | {"rid": rid}, remaining_s))
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
            server.suspected.set()
            raise DeadlineExceeded(
                f"{server.url} did not answer within the {request.deadline_s} s of a request"
            ) from None
        finally:
            call.cancel()
            del server.running[rid]
            server.calls.discard(call)
            if not answered:
                self._abandon(server, rid)

    async def _sample(self, server: ServerState, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
        url, on_tokens, max_bytes = f"{server.url}/generate", request.on_tokens, answer_bytes(request.sampling)
        key = routing_key(request.affinity or request.episode)
        if on_tokens is None:
            return await self._client.post(url, body, deadline_s, max_bytes, key)
        answer, ids = None, []
        messages = self._client.stream(url, body | {"stream": True}, deadline_s, max_bytes, key)
        async with contextlib.aclosing(messages):
            async for answer in messages:
                ids = ids_so_far(answer, ids, server.url)
                on_tokens(ids)
        return answer

    def _abandon(self, server: ServerState, rid: str) -> None:
        if server.up or server.given_up:
            self.fleet.abort_later([one.url for one in self._behind(server)], [rid])
        else:
            server.abandoned.append(rid)


def routing_key(affinity: str) -> str:
    """For a router, which keeps requests of one key on one server; a header takes no text of a data set."""
    return hashlib.blake2s(affinity.encode(), digest_size=8).hexdigest()


def generate_body(ids: np.ndarray, pictures: Sequence[Picture], sampling: Sampling) -> dict[str, Any]:
    """What SGLang's /generate takes; encoding the pictures takes time when they are shown for the first time."""
    body: dict[str, Any] = {
        "input_ids": ids.tolist(),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # else the ids of the model's own files would stop it as well
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
    }
    if pictures:
        body["image_data"] = [picture.png_base64 for picture in pictures]
    return body
