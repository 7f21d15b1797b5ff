"""Manages the health, ownership and weights of an engine's SGLang servers.

Each server has a health loop that probes it and compares its weight label. A server that refuses connections, misses
several probes, or has other weights than this engine gave it is ejected, and returns only with the current weights.
Servers that this engine started are restarted. Only one run publishes to a server (`rollout.engine.labels`); a server
that another run takes over is retired.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rollout.engine.answers import Fingerprint, probe_body
from rollout.engine.http import HttpClient, ServerUnreachable
from rollout.engine.labels import Label, Labels, ServerOwned, taken_over
from rollout.engine.protocol import EngineError, Weights
from rollout.engine.publishing import WeightFiles, load_weights
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.server import Server
from rollout.terminal import say

ANY_VERSION = 2**31 - 1


class Fleet:
    """An engine's servers. Call `open` before use and `close` at the end."""

    def __init__(self, servers: Sequence[ServerState], settings: SGLangSettings, behind_router: bool):
        self.servers = list(servers)
        self.settings = settings
        self.client = HttpClient()  # separate connections, so that probes do not wait for requests
        self.version: int | None = None  # None until the first server reports one
        self._behind_router = behind_router  # a router also sends requests to servers that are not admitted
        self._labels = Labels(self.client, settings)
        self.owner = f"{settings.run}/" if settings.run else ""  # empty: taken from the first server's label
        self._published = False  # `files` has the weights of `version`
        self._adopted = False  # another process publishes for this run
        self._fingerprint: Fingerprint | None = None  # of the current weights; None before the first check
        self.files = WeightFiles(settings.weights_dir)
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()  # a server came up or went down
        self._background: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    async def open(self, on_progress: Callable[[str], None]) -> None:
        """Waits until one server is up or lacks only weights. Raises if another live run owns any of them."""
        if self.settings.run:
            await self._claim_all(on_progress)
        self._loops += [asyncio.create_task(self._health_loop(server)) for server in self.servers]
        await self.wait_until_up(time.monotonic() + self.settings.answer_s, or_without_weights=True)

    async def close(self) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*self._background, return_exceptions=True)  # bounded by their own deadlines
        await self.files.close()
        await self.client.close()
        managed = [server.managed for server in self.servers if server.managed is not None]
        await asyncio.gather(*(server.stop(self.settings.stop_grace_s) for server in managed))

    @property
    def newest(self) -> int:
        """The newest version a server may have; unbounded after `adopt`, since the publisher may be ahead."""
        return ANY_VERSION if self._adopted else self.version or 0

    @staticmethod
    def oldest(servers: Sequence[ServerState]) -> int:
        """The oldest version that may sample a request that is sent to these servers now."""
        return min((server.version for server in servers if server.up and server.version is not None), default=0)

    async def publish(self, weights: Weights, version: int) -> None:
        assert self.settings.run, "an engine without SGLangSettings.run only samples"
        async with self._publishing:
            await self.files.write(weights)  # while the servers sample
            self._published, self._adopted, self.version, self._fingerprint = True, False, version, None
            await self._load([s for s in self.servers if s.up or s.awaits_weights or self._gets_routed_requests(s)])
            await self._check_fingerprints([server for server in self.servers if server.version == version])
        for server in self.servers:
            if server.up:
                server.num_restarts = 0
        try:
            await self.wait_until_up(time.monotonic() + self.settings.load_deadline_s)
        except EngineError:
            raise EngineError(
                f"no server took the weights of version {version}: {self._problems(self.servers)}"
            ) from None

    async def adopt(self, version: int) -> None:
        async with self._publishing:
            self._published, self._adopted, self.version, self._fingerprint = False, True, version, None
            await asyncio.gather(*(self._adopt(server) for server in self.servers if server.up))
            await self._check_fingerprints([server for server in self.servers if server.up])
        for server in self.servers:
            server.probe_now.set()
        await self.wait_until_up(time.monotonic() + self.settings.load_deadline_s)

    async def wait_until_up(self, deadline_s: float, *, url: str = "", or_without_weights: bool = False) -> None:
        """Waits until the server at `url`, or any server, is up."""

        def waited() -> list[ServerState]:
            return [server for server in self.servers if url in ("", server.url)]

        while not any(server.up or (or_without_weights and server.awaits_weights) for server in waited()):
            if all(server.retired for server in waited()):
                raise EngineError(f"no server is left: {self._problems(waited())}")
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(
                    f"no server answers: {self._problems(waited())}; start one: python -m rollout.serve --model MODEL"
                ) from None

    def eject_stale(self, server: ServerState, problem: str) -> None:
        """Ejects a server with the wrong weights; it must load the current ones before it samples again."""
        server.version = None
        self._eject(server, problem)

    def abort_later(self, urls: Sequence[str], rids: Sequence[str]) -> None:
        task = asyncio.create_task(self.abort(urls, rids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def abort(self, urls: Sequence[str], rids: Sequence[str]) -> None:
        async def end(url: str, rid: str) -> None:
            with contextlib.suppress(EngineError):  # the request ends by its max_new_tokens or with its server
                await self.client.post(f"{url}/abort_request", {"rid": rid}, self.settings.control_deadline_s)

        await asyncio.gather(*(end(url, rid) for rid in rids for url in urls))

    def watch(self, source: str, list_urls: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        """Polls the list of servers and applies its changes."""

        async def poll() -> None:
            last, reported = "", ""
            while True:
                await asyncio.sleep(self.settings.probe_every_s)
                problem = ""
                try:
                    self._apply_list(await list_urls(), source)
                except Exception as error:  # an invalid list must not end the loop
                    problem = str(error)
                if problem == last != reported:  # twice in a row, so the file is not just being written
                    if problem:
                        say(f"the list of servers is not updated: {problem}")
                    reported = problem
                last = problem

        self._loops.append(asyncio.create_task(poll()))

    def _apply_list(self, urls: Sequence[str], source: str) -> None:
        for server in [server for server in self.servers if server.url not in urls]:
            self.servers.remove(server)
            self._retire(server, f"{source} no longer lists it")
        present = {server.url for server in self.servers}
        for server in [ServerState(url) for url in urls if url not in present]:
            self.servers.append(server)
            self._loops.append(asyncio.create_task(self._health_loop(server)))

    # Ownership

    async def _claim_all(self, on_progress: Callable[[str], None]) -> None:
        """Claims all servers that answer; the health loops claim the others later."""
        claims = (self._claim(server, self.settings.take_over, on_progress) for server in self.servers)
        results = await asyncio.gather(*claims, return_exceptions=True)
        if owned := [problem for problem in results if isinstance(problem, ServerOwned)]:
            raise EngineError("; ".join(map(str, owned)))
        for problem in results:
            if problem is not None and not isinstance(problem, EngineError):
                raise problem

    async def _claim(
        self, server: ServerState, take_over: bool = False, on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Claims a server for this run. Raises ServerOwned if another live run owns it or has taken it over."""
        first = not self._published and not self._adopted
        await self._labels.claim(server.url, on_progress, was_claimed=server.claimed, first=first, take_over=take_over)
        server.claimed = True

    async def _check_label(self, server: ServerState) -> None:
        """Ejects a server with unexpected weights, and answers another run that asks for the server."""
        version = server.version
        try:
            label = await self._labels.fetch(server.url)
            if server.loading or server.version != version or not server.up:
                return  # its weights changed in the meantime
            if label.owner != self.owner:
                self.eject_stale(server, f"it has the weights {label}, expected version {version} of this run")
            elif label.asker:
                await self._answer(server, version)
            elif label.version != version and not (self._adopted and (label.version or 0) > (version or 0)):
                self.eject_stale(server, f"it has weights of version {label.version}, expected version {version}")
        except EngineError:  # the probe reports the cause
            return

    async def _answer(self, server: ServerState, version: int | None) -> None:
        if self.settings.run and not self._adopted:
            async with server.labeling:
                if server.version == version:
                    await self._labels.publish(server.url, Label(self.owner, version))

    async def _is_ours(self, server: ServerState) -> bool:
        """Returns whether a server still belongs to this run; retires it if not, and ejects it if it does not answer.

        A server that was restarted must load all tensors again.
        """
        try:
            label = await self._labels.fetch(server.url)
        except EngineError as problem:  # the other servers would be paused until its next call fails too
            server.version = None
            self._eject(server, str(problem))
            return False
        if label.is_foreign(self.owner):
            self._retire(server, taken_over(label))
        elif server.version is None or label != Label(self.owner, server.version):
            self.files.forget(server)
        return not server.retired

    # Weights

    def _gets_routed_requests(self, server: ServerState) -> bool:
        """Returns whether a router may already send requests to a server that this engine has not admitted."""
        return self._behind_router and server.claimed and not server.missed_probes and not server.retired

    async def _load(self, servers: Sequence[ServerState]) -> None:
        """Loads the published weights into these servers concurrently; servers that fail are ejected."""
        assert self.version is not None
        ours = await asyncio.gather(*map(self._is_ours, servers))
        servers = [server for server, is_ours in zip(servers, ours, strict=True) if is_ours]
        label = Label(self.owner, self.version)
        problems = await load_weights(self.client, self.files, servers, label, self.settings)
        for server in servers:
            if server.url in problems:
                server.version = None
                eject = self._retire if server.refuses_adapters else self._eject
                eject(server, problems[server.url])

    async def _adopt(self, server: ServerState) -> None:
        try:
            await self._sync_weights(server)
        except EngineError as problem:
            self._eject(server, str(problem))

    async def _check_fingerprints(self, servers: Sequence[ServerState]) -> None:
        """Checks the first server, which sets the reference, and then all others concurrently."""
        for some in (servers[:1], servers[1:]):
            await asyncio.gather(*map(self._check_fingerprint, some))

    async def _check_fingerprint(self, server: ServerState) -> None:
        """Admits a server if its fingerprint matches the first server's since the last publish; ejects it otherwise."""
        try:
            answer = await self.client.post(f"{server.url}/generate", probe_body(), self.settings.control_deadline_s)
            fingerprint = Fingerprint.of(answer, server.url)
        except EngineError as problem:
            return self._eject(server, str(problem))
        self._fingerprint = self._fingerprint or fingerprint
        if problem := fingerprint.problem(self._fingerprint):
            server.version = None  # it must reload the weights before it is admitted
            return self._eject(server, f"it is another model than version {self.version} of this run: {problem}")
        if server.out_since_s is not None:
            say(f"{server.url} gets requests again, after {time.monotonic() - server.out_since_s:.0f} s")
        server.up, server.problem, server.missed_probes, server.paused = True, "", 0, False
        server.awaits_weights, server.out_since_s = False, None
        self._changed.set()

    async def _sync_weights(self, server: ServerState) -> None:
        """Loads the published weights into a server; before the first publish, reads the version that it has."""
        label = await self._labels.fetch(server.url)
        self.owner = self.owner or label.owner
        if self._published:
            # Both must match, because a server with the right label may have loaded only part of the weights.
            if server.version != self.version or label != Label(self.owner, self.version):
                await self._load([server])
            return
        if self.version is None and label.owner == self.owner:
            self.version = label.version
        if label.owner != self.owner or label.version is None or label.version != self.version:
            server.awaits_weights = server.claimed and not self._adopted
            self._changed.set()
            reason = f"another server of version {self.version}" if self.version is not None else "nothing is published"
            has = f"weights of version {label.version}" if label.owner == self.owner else f"the weights {label}"
            raise EngineError(f"{server.url} has {has}, {reason}; publish, or restart them")
        server.version = self.version

    # Health

    async def _health_loop(self, server: ServerState) -> None:
        while not server.retired:
            server.probe_now.clear()
            try:
                await self._supervise(server)
            except Exception as problem:  # a server's answer must not end its health loop
                self._eject(server, f"{type(problem).__name__}: {problem}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.probe_every_s):
                    await server.probe_now.wait()

    async def _supervise(self, server: ServerState) -> None:
        if server.up and not server.loading:
            await self._check_label(server)
        problem = await self._probe(server)
        if server.loading:
            return
        if problem and server.paused:
            problem = await self._resume(server) or await self._probe(server)
        while problem and not server.retired:
            server.missed_probes += 1
            if server.missed_probes >= self.settings.max_missed_probes or not server.up:
                self._eject(server, problem)
            if server.managed is None or server.missed_probes < self.settings.max_missed_probes:
                return
            await self._restart(server)
            problem = await self._probe(server)
        if server.up:
            server.missed_probes = 0
        elif not server.retired:
            await self._admit(server)

    async def _probe(self, server: ServerState) -> str:
        """Probes a server and returns its problem, or "". An idle server generates one token for the probe."""
        if server.managed is not None and not server.managed.running:
            server.missed_probes = self.settings.max_missed_probes
            return str(server.managed.exit_error())
        try:
            await self.client.get(f"{server.url}/health", self.settings.probe_deadline_s)
        except ServerUnreachable as problem:
            server.missed_probes = self.settings.max_missed_probes
            return str(problem)
        except EngineError as problem:
            return str(problem)
        return ""

    async def _resume(self, server: ServerState) -> str:
        """Resumes a paused server, because it answers no probes while paused. Returns the problem, or ""."""
        try:
            await self.client.post(f"{server.url}/continue_generation", {}, self.settings.control_deadline_s)
        except EngineError as problem:
            return str(problem)
        return ""

    async def _admit(self, server: ServerState) -> None:
        """Puts a server that answers into service, with the current weights."""
        try:
            await self.abort([server.url], server.rids_to_abort)
            server.rids_to_abort.clear()
            if self.settings.run:
                await self._claim(server)
            async with self._publishing:
                await self._sync_weights(server)
                if server.version == self.version:
                    await self._check_fingerprint(server)
        except ServerOwned as problem:
            self._retire(server, str(problem))
        except EngineError as problem:
            server.problem = str(problem)

    def _eject(self, server: ServerState, problem: str) -> None:
        if server.up and not server.retired:
            server.out_since_s = time.monotonic()
            say(f"{server.url} gets no requests until it recovers: {problem}")
        server.up, server.problem, server.awaits_weights = False, problem, False
        for call in server.calls:
            call.cancel()
        self._changed.set()

    def _retire(self, server: ServerState, problem: str) -> None:
        server.retired, server.version = True, None
        self._eject(server, problem)
        say(f"{server.url} gets no more requests: {problem}")

    async def _restart(self, server: ServerState) -> None:
        assert server.managed is not None
        if server.num_restarts == self.settings.max_restarts:
            return self._retire(server, f"{server.problem} (gave up after {server.num_restarts} restarts)")
        server.num_restarts += 1
        try:
            await server.managed.stop(grace_s=0)
            say(f"restart {server.num_restarts} of {self.settings.max_restarts}: {server.managed.exit_error()}")
            server.managed = await Server.start(server.managed.settings, deadline_s=self.settings.start_deadline_s)
            server.rids_to_abort.clear()
            server.version = None
        except (OSError, RuntimeError, ValueError) as problem:
            server.problem = str(problem)
            say(f"{server.url} could not be restarted: {problem}")

    def _problems(self, servers: Sequence[ServerState]) -> str:
        return "; ".join(f"{server.url}: {server.problem or 'up'}" for server in servers)
