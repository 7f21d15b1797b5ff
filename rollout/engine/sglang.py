"""SGLang servers as one engine: requests go to a server that is up, and a server that fails costs nothing but time.

Each server has a keeper that probes it. A server that stops answering is ejected at once, whatever it was computing is
given to others, and it comes back only after it holds the current weights. Servers that this engine started are
restarted. A request is sent again only after the server that had it is known not to answer it, and its first answer is
the only one used, so nothing is lost or counted twice.

Behind an sglang-router the servers are those that it lists. Requests go to the router, everything else to each server,
since a router passes on neither weights nor labels nor aborts.
"""

import asyncio
import contextlib
import hashlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout.engine.answers import Fingerprint, answer_bytes, generation_of, ids_so_far, probe_body
from rollout.engine.http import HttpClient, ServerUnavailable, ServerUnreachable
from rollout.engine.listing import listed_urls, router_among, urls_behind
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
from rollout.engine.publishing import DiskRoute, Route, TensorRoute, each
from rollout.picture import Picture
from rollout.server import Device, Server, ServerSettings, sidecar_python

UNLABELLED = "default"  # what a server calls the weights it was started with
RID_CHARS = 16
MAX_HOMES = 100_000  # prefixes whose server is remembered
MAX_IMBALANCE = 8  # requests more than elsewhere, from which on computing a prefix again is quicker than waiting


@dataclass(frozen=True)
class SGLangSettings:
    route: Literal["disk", "tensors"] = "disk"
    weights_dir: str = ""  # for route=disk: a directory that all servers see; empty: this host's memory
    vocab_size: int = 2**31  # of the model: no server can give an id beyond it
    device: Device = "cuda"  # of servers that somebody else runs on this host, for route=tensors
    max_attempts: int = 4  # of a request, over all servers
    backoff_s: float = 0.2  # before the second attempt; doubles, up to …
    max_backoff_s: float = 5.0
    probe_every_s: float = 5.0
    probe_deadline_s: float = 20.0  # a healthy server answers between two steps of its scheduler
    max_missed_probes: int = 2  # in a row; a refused connection counts as all of them
    control_deadline_s: float = 30.0  # of a call that computes nothing: pause, flush, label, abort
    load_deadline_s: float = 600.0  # of loading new weights
    start_deadline_s: float = 900.0  # of a managed server
    max_restarts: int = 5  # of one managed server
    stop_grace_s: float = 10.0


@dataclass(eq=False)
class _KnownServer:
    """One server as this engine knows it."""

    url: str
    managed: Server | None = None
    up: bool = False
    problem: str = "not probed yet"
    version: int | None = None
    missed_probes: int = 0
    num_restarts: int = 0
    given_up: bool = False
    loading: bool = False  # new weights; until then it answers nobody
    paused: bool = True  # perhaps: by us, or by a process that was killed before it let it go on
    running: dict[str, str] = field(default_factory=dict)  # request id -> episode
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # to be given up when the server is ejected
    abandoned: list[str] = field(default_factory=list)  # request ids to abort when it answers again
    suspected: asyncio.Event = field(default_factory=asyncio.Event)  # probe now


class SGLangEngine:
    """Use `await SGLangEngine.connect(urls)` or `.launch(settings)`, and `close` in the end."""

    def __init__(self, servers: Sequence[_KnownServer], settings: SGLangSettings, client: HttpClient, router: str = ""):
        self.settings = settings
        self._servers = list(servers)
        self._router = _KnownServer(router, up=True) if router else None
        self._asked = [self._router] if self._router else self._servers  # for samples
        self._client = client
        self._version: int | None = None  # until the first server says
        self._published: Weights | None = None
        self._fingerprint: tuple[int, Fingerprint] | None = None  # of a version
        self._route = self._make_route()
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()  # some server came up or went down
        self._homes: dict[str, _KnownServer] = {}  # affinity -> the server whose cache knows the prefix
        self._background: set[asyncio.Task[Any]] = set()
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self._servers]

    @classmethod
    async def connect(cls, urls: Sequence[str], settings: SGLangSettings | None = None) -> "SGLangEngine":
        """To servers that somebody else runs, at the version that their weights have. At least one must answer.

        Or to an sglang-router, and the servers behind it, which may come and go.
        """
        urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        if not urls:
            raise ValueError("engine.urls is empty; give the URL of at least one SGLang server")
        settings = settings or SGLangSettings()
        router, urls = await router_among(urls, settings.probe_deadline_s)
        engine = await cls._begin([_KnownServer(url) for url in urls], settings, router)
        if router:
            engine._heed(router, lambda: urls_behind(engine._client, router, settings.control_deadline_s))
        return engine

    @classmethod
    async def follow(cls, file: str | Path, settings: SGLangSettings | None = None) -> "SGLangEngine":
        """To the servers that a file lists, a URL on each line, also when it changes: they may come and go."""
        settings = settings or SGLangSettings()
        router, urls = await router_among(listed_urls(file), settings.probe_deadline_s)
        if router:
            raise ValueError(f"{file} lists {router}, which is an sglang-router; name it in engine.urls")
        engine = await cls._begin([_KnownServer(url) for url in urls], settings)
        engine._heed(str(file), lambda: asyncio.to_thread(listed_urls, file))
        return engine

    @classmethod
    async def launch(
        cls,
        servers: Sequence[ServerSettings],
        settings: SGLangSettings | None = None,
        on_progress: Callable[[str], None] | None = None,
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
        return await cls._begin([_KnownServer(server.url, server) for server in up], settings)

    @classmethod
    async def _begin(
        cls, servers: Sequence[_KnownServer], settings: SGLangSettings, router: str = ""
    ) -> "SGLangEngine":
        engine = cls(servers, settings, HttpClient.make(), router)
        try:
            await engine._wait_until_up(time.monotonic() + settings.probe_deadline_s + settings.control_deadline_s)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def version(self) -> int:
        assert self._version is not None, "an engine begins with a server that is up"
        return self._version

    async def generate(self, request: Request) -> Generation:
        started_s = time.monotonic()
        deadline_s = started_s + request.deadline_s
        body = await asyncio.to_thread(generate_body, request.ids, request.pictures, request.sampling)
        problems: list[str] = []
        tried: set[str] = set()
        while True:
            server = await self._choose(request.affinity or request.episode, deadline_s, tried)
            try:
                answer = await self._ask(server, request, body, deadline_s)
                latency_s = time.monotonic() - started_s
                generation = generation_of(
                    answer, request.sampling, self.version, self.settings.vocab_size, server.url, latency_s
                )
                break
            except ServerUnavailable as problem:
                problems.append(str(problem))
                tried.add(server.url)
                server.suspected.set()
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
        async with self._publishing:
            self._published, self._version = weights, version
            # A router asks also those of which this engine knows nothing yet.
            servers = [one for one in self._servers if one.up or (self._router and not one.missed_probes)]
            await self._load(servers)
            await self._identify_up(servers)
        try:
            await self._wait_until_up(time.monotonic() + self.settings.load_deadline_s)
        except EngineError:
            raise EngineError(f"no server took the weights of version {version}: {self._problems()}") from None

    async def adopt(self, version: int) -> None:
        """Another process has published this version: whichever server has it is used, the others when they have."""
        async with self._publishing:
            self._published, self._version = None, version
            await asyncio.gather(*(self._adopt(server) for server in self._servers if server.up))
            await self._identify_up(self._servers)
        await self._wait_until_up(time.monotonic() + self.settings.load_deadline_s)

    async def health(self) -> Health:
        return Health(
            tuple(ServerHealth(server.url, server.up, server.version, server.problem) for server in self._servers)
        )

    async def abort(self, episode: str | None = None) -> None:
        await asyncio.gather(
            *(
                self._abort(server, [rid for rid, of in server.running.items() if episode in (None, of)])
                for server in self._asked
            )
        )

    async def close(self) -> None:
        tasks = [*self._keepers, *(task for server in self._asked for task in server.calls)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # These are bounded by their own deadlines.
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._route.close()
        await self._client.close()
        managed = [server.managed for server in self._servers if server.managed is not None]
        await asyncio.gather(*(server.stop(self.settings.stop_grace_s) for server in managed))

    # Requests

    async def _choose(self, affinity: str, deadline_s: float, tried: set[str]) -> _KnownServer:
        """The server that knows the prefix, or the one with the fewest requests; one not tried yet, if there is."""
        for keeper in self._keepers:
            if keeper.done() and (problem := keeper.exception()) is not None:
                raise problem
        await self._wait_until_up(deadline_s)
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

    async def _wait_until_up(self, deadline_s: float) -> None:
        while not any(server.up for server in self._servers):
            if all(server.given_up for server in self._servers):
                raise EngineError(f"no server is left: {self._problems()}")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(_loop_time(deadline_s)):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(f"no server answers: {self._problems()}") from None

    async def _ask(self, server: _KnownServer, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
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

    async def _sample(self, server: _KnownServer, request: Request, body: dict[str, Any], deadline_s: float) -> Any:
        url, heard, max_bytes = f"{server.url}/generate", request.heard, answer_bytes(request.sampling)
        key = routing_key(request.affinity or request.episode)
        if heard is None:
            return await self._client.post(url, body, deadline_s, max_bytes, key)
        answer, ids = None, []
        messages = self._client.stream(url, body | {"stream": True}, deadline_s, max_bytes, key)
        async with contextlib.aclosing(messages):
            async for answer in messages:
                ids = ids_so_far(answer, ids, server.url)
                heard(ids)
        return answer

    def _abandon(self, server: _KnownServer, rid: str) -> None:
        if server.up:
            self._later(self._abort(server, [rid]))
        else:
            server.abandoned.append(rid)

    async def _abort(self, server: _KnownServer, rids: Sequence[str]) -> None:
        """A router says nobody where it sent a request, so all servers are told."""
        urls = self.urls if server is self._router else [server.url]

        async def end(url: str, rid: str) -> None:
            with contextlib.suppress(EngineError):  # it ends by its max_new_tokens, or with the server
                await self._client.post(f"{url}/abort_request", {"rid": rid}, self.settings.control_deadline_s)

        await asyncio.gather(*(end(url, rid) for rid in rids for url in urls))

    # Weights

    def _make_route(self) -> Route:
        if self.settings.route == "disk":
            return DiskRoute(self._client, self.settings.weights_dir)
        managed = next((server.managed for server in self._servers if server.managed is not None), None)
        local = managed.settings if managed is not None else ServerSettings(Path(), self.settings.device)
        return TensorRoute(self._client, local.python or sidecar_python(), local.environment())

    async def _load(self, servers: Sequence[_KnownServer]) -> None:
        """Gives servers the published weights, all at the same time; those that fail are ejected."""
        assert self._published is not None
        assert self._version is not None
        control_s = self.settings.control_deadline_s

        def eject(problems: dict[str, str]) -> None:
            for server in servers:
                if server.url in problems:
                    server.version = None
                    self._eject(server, problems[server.url])

        def post(path: str, body: Any) -> Callable[[str], Coroutine[Any, Any, Any]]:
            return lambda url: self._client.post(f"{url}{path}", body, control_s)

        def left() -> list[str]:
            return [server.url for server in servers if server.url not in failed]

        failed: dict[str, str] = {}
        async with self._paused(servers, left, post, failed):
            try:
                failed |= await self._route.send(left(), self._published, self._version, self.settings.load_deadline_s)
            except EngineError as problem:  # perhaps half-way: nobody knows what they hold now
                failed |= dict.fromkeys(left(), str(problem))
            # Keys and values of the old weights; refused while a request runs, which is why they are paused.
            failed |= await each(left(), post("/flush_cache", {}))
            label = {"new_version": str(self._version), "abort_all_requests": False}
            failed |= await each(left(), post("/update_weight_version", label))
        eject(failed)
        for server in servers:
            if server.url not in failed:
                server.version = self._version

    @contextlib.asynccontextmanager
    async def _paused(
        self, servers: Sequence[_KnownServer], left: Callable[[], list[str]], post: Any, failed: dict[str, str]
    ) -> AsyncIterator[None]:
        """Running requests wait, and their keys and values are computed anew afterwards."""
        try:
            for server in servers:
                server.loading = server.paused = True
            failed |= await each(left(), post("/pause_generation", {"mode": "retract"}))
            yield
        finally:
            failed |= await each(left(), post("/continue_generation", {}))
            for server in servers:
                server.loading, server.paused = False, server.url in failed

    # Keeping servers

    async def _keep(self, server: _KnownServer) -> None:
        """Looks after one server for as long as the engine lives."""
        while not server.given_up:
            try:
                await self._look_after(server)
            except Exception as problem:  # whatever a server says, the others must be kept
                self._eject(server, f"{type(problem).__name__}: {problem}")
            server.suspected.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.probe_every_s):
                    await server.suspected.wait()

    def _heed(self, name: str, listed: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        """Asks from now on which servers there are."""

        async def heed() -> None:
            while True:
                await asyncio.sleep(self.settings.probe_every_s)
                with contextlib.suppress(OSError, ValueError, EngineError):  # it is being written, or gone for a moment
                    self._keep_only(await listed(), name)

        self._keepers.append(asyncio.create_task(heed()))

    def _keep_only(self, urls: Sequence[str], name: str) -> None:
        """Takes on the servers that are new in a list, and lets go of those that are no longer there."""
        for server in [server for server in self._servers if server.url not in urls]:
            self._servers.remove(server)
            server.given_up = True
            self._eject(server, f"{name} lists it no more")
        known = {server.url for server in self._servers}
        for server in [_KnownServer(url) for url in urls if url not in known]:
            self._servers.append(server)
            self._keepers.append(asyncio.create_task(self._keep(server)))

    async def _look_after(self, server: _KnownServer) -> None:
        problem = await self._probe(server)
        if server.loading:
            return
        if problem and server.paused:
            problem = await self._let_go_on(server) or await self._probe(server)
        while problem and not server.given_up:
            server.missed_probes += 1
            if server.missed_probes >= self.settings.max_missed_probes or not server.up:
                self._eject(server, problem)
            if server.managed is None or server.missed_probes < self.settings.max_missed_probes:
                return
            await self._restart(server)
            problem = await self._probe(server)
        if server.up:
            server.missed_probes = 0
        elif not server.given_up:
            await self._admit(server)

    async def _probe(self, server: _KnownServer) -> str:
        """What is wrong with a server, or nothing. It generates a token unless it is already generating."""
        if server.managed is not None and not server.managed.running:
            server.missed_probes = self.settings.max_missed_probes
            return str(server.managed.ended_by_itself())
        try:
            await self._client.get(f"{server.url}/health", self.settings.probe_deadline_s)
        except ServerUnreachable as problem:
            server.missed_probes = self.settings.max_missed_probes
            return str(problem)
        except EngineError as problem:
            return str(problem)
        return ""

    async def _let_go_on(self, server: _KnownServer) -> str:
        """A paused server answers no probe either. What is wrong with one that cannot be told, or nothing."""
        try:
            await self._client.post(f"{server.url}/continue_generation", {}, self.settings.control_deadline_s)
        except EngineError as problem:
            return str(problem)
        return ""

    async def _admit(self, server: _KnownServer) -> None:
        """Takes a server that answers into service, with the current weights."""
        try:
            await self._abort(server, server.abandoned)
            server.abandoned.clear()
            async with self._publishing:
                await self._settle_version(server)
                if server.version == self._version and await self._identify(server):
                    server.up, server.problem, server.missed_probes, server.paused = True, "", 0, False
                    self._changed.set()
        except EngineError as problem:
            server.problem = str(problem)

    async def _adopt(self, server: _KnownServer) -> None:
        try:
            await self._settle_version(server)
        except EngineError as problem:
            self._eject(server, str(problem))

    async def _identify_up(self, servers: Sequence[_KnownServer]) -> None:
        """All at the same time, but for the one that they are held to."""
        up = [server for server in servers if server.up]
        for some in (up[:1], up[1:]):
            await asyncio.gather(*map(self._identify, some))

    async def _identify(self, server: _KnownServer) -> bool:
        """Whether a server computes what the others did with the weights of this version; else it is ejected.

        The first one asked after a publish is what the others, and whoever comes back at its address, are held to.
        """
        try:
            answer = await self._client.post(f"{server.url}/generate", probe_body(), self.settings.control_deadline_s)
            found = Fingerprint.of(answer, server.url)
        except EngineError as problem:
            self._eject(server, str(problem))
            return False
        version, expected = self._fingerprint or (None, found)
        if version != self._version:
            self._fingerprint, expected = (self.version, found), found
        if problem := found.problem(expected):
            server.version = None  # it gets the weights once more before it is asked again
            self._eject(server, f"it is another model than version {self._version} of this run: {problem}")
        return not problem

    async def _settle_version(self, server: _KnownServer) -> None:
        """Gives a server what was published; before the first publish, learns what it has."""
        info = await self._client.get(f"{server.url}/model_info", self.settings.control_deadline_s)
        label = str(info.get("weight_version")) if isinstance(info, dict) else ""
        if self._published is not None:
            # The same process may still hold them; a label alone could be of another run.
            if server.version != self._version or label != str(self._version):
                await self._load([server])
            return
        if label == UNLABELLED:
            body = {"new_version": "0", "abort_all_requests": False}
            await self._client.post(f"{server.url}/update_weight_version", body, self.settings.control_deadline_s)
            label = "0"
        if not label.isdecimal():
            raise EngineError(f"{server.url} calls its weights {label!r}, which is no policy version; restart it")
        if self._version is None:
            self._version = int(label)
        if int(label) != self._version:
            raise EngineError(
                f"{server.url} has weights of version {label}, another server of version {self._version}; "
                f"publish, or restart them"
            )
        server.version = self._version

    def _eject(self, server: _KnownServer, problem: str) -> None:
        server.up, server.problem = False, problem
        for call in server.calls:
            call.cancel()
        self._changed.set()

    async def _restart(self, server: _KnownServer) -> None:
        assert server.managed is not None
        if server.num_restarts == self.settings.max_restarts:
            server.given_up = True
            server.problem += f" (given up after {server.num_restarts} restarts)"
            self._changed.set()
            return
        server.num_restarts += 1
        try:
            await server.managed.stop(grace_s=0)
            server.managed = await Server.start(server.managed.settings, deadline_s=self.settings.start_deadline_s)
            server.abandoned.clear()
            server.version = None
        except (OSError, RuntimeError, ValueError) as problem:
            server.problem = str(problem)

    def _problems(self) -> str:
        return "; ".join(f"{server.url}: {server.problem or 'up'}" for server in self._servers)

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def routing_key(affinity: str) -> str:
    """For a router, which keeps requests of one key on one server; a header takes no text of a data set."""
    return hashlib.blake2s(affinity.encode(), digest_size=8).hexdigest()


def _loop_time(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


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
