"""The SGLang servers of an engine: whose they are, which weights they have, and whether they are healthy.

Each server has a keeper that probes it and compares its label. A server that stops answering, or that has other weights
than it was given, is ejected at once, and comes back only after it holds the current weights. Servers that this engine
started are restarted. A server has one run that publishes to it (`rollout.engine.labels`); one that another run takes
over is given up.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rollout.engine.answers import Fingerprint, probe_body
from rollout.engine.http import HttpClient, ServerUnreachable
from rollout.engine.labels import Claim, Label, Labels, ServerOwned, taken_over
from rollout.engine.protocol import EngineError, Weights
from rollout.engine.publishing import DiskRoute, Route, TensorRoute, each
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.server import Server, ServerSettings, sidecar_python
from rollout.terminal import say

ANY_VERSION = 2**31 - 1


class Fleet:
    """Use `await open()`, and `close` in the end."""

    def __init__(
        self, servers: Sequence[ServerState], settings: SGLangSettings, client: HttpClient, behind_router: bool
    ):
        self.servers = list(servers)
        self.settings, self._client = settings, client
        self.version: int | None = None  # until the first server says
        self._behind_router = behind_router  # which sends requests also to servers that are not up
        self._labels = Labels(client, settings)
        self.owner = f"{settings.run}/" if settings.run else ""  # of labels; empty: the first server says
        self._published: Weights | None = None
        self._adopted = False  # another process publishes for this run
        self._fingerprint: tuple[int | None, Fingerprint] | None = None  # of a version
        self._route = self._make_route()
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()  # some server came up or went down
        self._background: set[asyncio.Task[Any]] = set()
        self._keepers: list[asyncio.Task[None]] = []

    async def open(self, on_progress: Callable[[str], None]) -> None:
        """Returns when one server is up, or needs only weights. Raises where one is another run's that is alive."""
        if self.settings.run:
            await self._claim_all(on_progress)
        self._keepers += [asyncio.create_task(self._keep(server)) for server in self.servers]
        give_up_s = time.monotonic() + self.settings.probe_deadline_s + self.settings.control_deadline_s
        await self.wait_until_up(give_up_s, or_without_weights=True)

    async def close(self) -> None:
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        # These are bounded by their own deadlines.
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._route.close()

    async def stop_managed(self) -> None:
        managed = [server.managed for server in self.servers if server.managed is not None]
        await asyncio.gather(*(server.stop(self.settings.stop_grace_s) for server in managed))

    @property
    def newest(self) -> int:
        """The latest version that a server may have; the process that publishes may be ahead of one that adopts."""
        return ANY_VERSION if self._adopted else self.version or 0

    @staticmethod
    def oldest(servers: Sequence[ServerState]) -> int:
        """The version below which none of them samples a request that is sent now."""
        return min((one.version for one in servers if one.up and one.version is not None), default=0)

    async def publish(self, weights: Weights, version: int) -> None:
        """Loads the weights into all servers that are up; one that fails is ejected, and gets them when it is back."""
        assert self.settings.run, "an engine without SGLangSettings.run only samples"
        async with self._publishing:
            self._published, self._adopted, self.version = weights, False, version
            await self._load([one for one in self.servers if one.up or one.awaits_weights or self._is_asked(one)])
            await self._identify_all([one for one in self.servers if one.version == version])
        try:
            await self.wait_until_up(time.monotonic() + self.settings.load_deadline_s)
        except EngineError:
            raise EngineError(f"no server took the weights of version {version}: {self._problems()}") from None

    async def adopt(self, version: int) -> None:
        """Another process has published this version: whichever server has it is used, the others when they have."""
        async with self._publishing:
            self._published, self._adopted, self.version = None, True, version
            await asyncio.gather(*(self._adopt(server) for server in self.servers if server.up))
            await self._identify_all([server for server in self.servers if server.up])
        for server in self.servers:
            server.suspected.set()
        await self.wait_until_up(time.monotonic() + self.settings.load_deadline_s)

    def check_keepers(self) -> None:
        for keeper in self._keepers:
            if keeper.done() and (problem := keeper.exception()) is not None:
                raise problem

    async def wait_until_up(self, deadline_s: float, *, or_without_weights: bool = False) -> None:
        while not any(one.up or (or_without_weights and one.awaits_weights) for one in self.servers):
            if all(server.given_up for server in self.servers):
                raise EngineError(f"no server is left: {self._problems()}")
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(f"no server answers: {self._problems()}") from None

    def distrust(self, server: ServerState, problem: str) -> None:
        """Ejects a server that has other weights than this engine gave it; it gets them again before it plays."""
        server.version = None
        self._eject(server, problem)
        server.suspected.set()

    def abort_later(self, urls: Sequence[str], rids: Sequence[str]) -> None:
        task = asyncio.create_task(self.abort(urls, rids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def abort(self, urls: Sequence[str], rids: Sequence[str]) -> None:
        async def end(url: str, rid: str) -> None:
            with contextlib.suppress(EngineError):  # it ends by its max_new_tokens, or with the server
                await self._client.post(f"{url}/abort_request", {"rid": rid}, self.settings.control_deadline_s)

        await asyncio.gather(*(end(url, rid) for rid in rids for url in urls))

    def heed(self, name: str, listed: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        """Asks from now on which servers there are."""

        async def heed() -> None:
            last, reported = "", ""
            while True:
                await asyncio.sleep(self.settings.probe_every_s)
                problem = ""
                try:
                    self._keep_only(await listed(), name)
                except (OSError, ValueError, EngineError) as error:
                    problem = str(error)
                if problem and problem == last != reported:  # not only while the list is being written
                    say(f"the servers stay as they are: {problem}")
                    reported = problem
                last = problem

        self._keepers.append(asyncio.create_task(heed()))

    def _keep_only(self, urls: Sequence[str], name: str) -> None:
        """Takes on the servers that are new in a list, and lets go of those that are no longer there."""
        for server in [server for server in self.servers if server.url not in urls]:
            self.servers.remove(server)
            self._give_up(server, f"{name} lists it no more")
        known = {server.url for server in self.servers}
        for server in [ServerState(url) for url in urls if url not in known]:
            self.servers.append(server)
            self._keepers.append(asyncio.create_task(self._keep(server)))

    # Owners

    async def _claim_all(self, on_progress: Callable[[str], None]) -> None:
        """Those that do not answer are claimed by their keepers."""
        claims = (self._claim(server, self.settings.take_over, on_progress) for server in self.servers)
        found = await asyncio.gather(*claims, return_exceptions=True)
        if owned := [problem for problem in found if isinstance(problem, ServerOwned)]:
            raise EngineError("; ".join(map(str, owned)))
        for problem in found:
            if problem is not None and not isinstance(problem, EngineError):
                raise problem

    async def _claim(
        self, server: ServerState, take_over: bool = False, on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Raises ServerOwned where another run has it that is alive, or has taken it from this one."""
        first = self._published is None and not self._adopted
        claim = Claim(server.url, had=server.ours, first=first, take_over=take_over)
        await self._labels.claim(claim, on_progress)
        server.ours = True

    async def _check_label(self, server: ServerState) -> None:
        """Ejects a server that has other weights than it was given, and answers a run that asks for it."""
        version = server.version
        try:
            label = await self._labels.fetch(server.url)
            if server.loading or server.version != version or not server.up:
                return  # it got others meanwhile
            if label.owner != self.owner:
                self.distrust(server, f"it has the weights {label}, and not those of version {version} of this run")
            elif label.asker:
                await self._answer(server, version)
            elif label.version != version and not (self._adopted and (label.version or 0) > (version or 0)):
                self.distrust(server, f"it has weights of version {label.version}, and not of version {version}")
        except EngineError:  # the probe says what is wrong
            return

    async def _answer(self, server: ServerState, version: int | None) -> None:
        if self.settings.run and not self._adopted:
            async with self._publishing:
                if server.version == version:
                    await self._labels.publish(server.url, Label(self.owner, version))

    async def _was_taken(self, server: ServerState) -> bool:
        """Whether another run has taken a server over, which then gets no weights of this one."""
        try:
            label = await self._labels.fetch(server.url)
        except EngineError:  # loading says what is wrong
            return False
        if label.is_foreign(self.owner):
            self._give_up(server, taken_over(label))
        return server.given_up

    # Weights

    def _is_asked(self, server: ServerState) -> bool:
        """A router asks also those of which this engine knows nothing yet."""
        return self._behind_router and server.ours and not server.missed_probes and not server.given_up

    def _make_route(self) -> Route:
        if self.settings.route == "disk":
            return DiskRoute(self._client, self.settings.weights_dir)
        managed = next((server.managed for server in self.servers if server.managed is not None), None)
        local = managed.settings if managed is not None else ServerSettings(Path(), self.settings.device)
        return TensorRoute(self._client, local.python or sidecar_python(), local.environment())

    async def _load(self, servers: Sequence[ServerState]) -> None:
        """Gives servers the published weights, all at the same time; those that fail are ejected."""
        assert self._published is not None
        assert self.version is not None
        taken = await asyncio.gather(*map(self._was_taken, servers))
        servers = [server for server, was_taken in zip(servers, taken, strict=True) if not was_taken]
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
            # Keys and values of the old weights; refused while a request runs, which is why they are paused.
            failed |= await each(left(), post("/flush_cache", {}))
            label = Label(self.owner, self.version)
            try:
                failed |= await self._route.send(left(), self._published, label, self.settings.load_deadline_s)
            except EngineError as problem:  # perhaps half-way: nobody knows what they hold now
                failed |= dict.fromkeys(left(), str(problem))
        eject(failed)
        for server in servers:
            if server.url not in failed:
                server.version = self.version

    @contextlib.asynccontextmanager
    async def _paused(
        self, servers: Sequence[ServerState], left: Callable[[], list[str]], post: Any, failed: dict[str, str]
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

    # Health

    async def _keep(self, server: ServerState) -> None:
        """Looks after one server for as long as the engine lives."""
        while not server.given_up:
            server.suspected.clear()
            try:
                await self._look_after(server)
            except Exception as problem:  # whatever a server says, the others must be kept
                self._eject(server, f"{type(problem).__name__}: {problem}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.probe_every_s):
                    await server.suspected.wait()

    async def _look_after(self, server: ServerState) -> None:
        if server.up and not server.loading:
            await self._check_label(server)
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

    async def _probe(self, server: ServerState) -> str:
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

    async def _let_go_on(self, server: ServerState) -> str:
        """A paused server answers no probe either. What is wrong with one that cannot be told, or nothing."""
        try:
            await self._client.post(f"{server.url}/continue_generation", {}, self.settings.control_deadline_s)
        except EngineError as problem:
            return str(problem)
        return ""

    async def _admit(self, server: ServerState) -> None:
        """Takes a server that answers into service, with the current weights."""
        try:
            await self.abort([server.url], server.abandoned)
            server.abandoned.clear()
            if self.settings.run:
                await self._claim(server)
            async with self._publishing:
                await self._settle_version(server)
                if server.version == self.version:
                    await self._identify(server)
        except ServerOwned as problem:
            self._give_up(server, str(problem))
        except EngineError as problem:
            server.problem = str(problem)

    async def _adopt(self, server: ServerState) -> None:
        try:
            await self._settle_version(server)
        except EngineError as problem:
            self._eject(server, str(problem))

    async def _identify_all(self, servers: Sequence[ServerState]) -> None:
        """All at the same time, but for the one that they are held to."""
        for some in (servers[:1], servers[1:]):
            await asyncio.gather(*map(self._identify, some))

    async def _identify(self, server: ServerState) -> None:
        """Takes a server into service if it computes what the others did with the weights of this version.

        The first one asked after a publish is what the others, and whoever comes back at its address, are held to.
        """
        try:
            answer = await self._client.post(f"{server.url}/generate", probe_body(), self.settings.control_deadline_s)
            found = Fingerprint.of(answer, server.url)
        except EngineError as problem:
            return self._eject(server, str(problem))
        version, expected = self._fingerprint or (None, found)
        if version != self.version:
            self._fingerprint, expected = (self.version, found), found
        if problem := found.problem(expected):
            server.version = None  # it gets the weights once more before it is asked again
            return self._eject(server, f"it is another model than version {self.version} of this run: {problem}")
        server.up, server.problem, server.missed_probes, server.paused = True, "", 0, False
        server.awaits_weights = False
        self._changed.set()

    async def _settle_version(self, server: ServerState) -> None:
        """Gives a server what was published; before the first publish, learns what it has."""
        label = await self._labels.fetch(server.url)
        self.owner = self.owner or label.owner
        if self._published is not None:
            # The same process may still hold them; a label alone could be of weights that came only in part.
            if server.version != self.version or label != Label(self.owner, self.version):
                await self._load([server])
            return
        if self.version is None and label.owner == self.owner:
            self.version = label.version
        if label.owner != self.owner or label.version is None or label.version != self.version:
            server.awaits_weights = server.ours and not self._adopted
            self._changed.set()
            should = f"another server of version {self.version}" if self.version is not None else "nobody published yet"
            has = f"weights of version {label.version}" if label.owner == self.owner else f"the weights {label}"
            raise EngineError(f"{server.url} has {has}, {should}; publish, or restart them")
        server.version = self.version

    def _eject(self, server: ServerState, problem: str) -> None:
        server.up, server.problem, server.awaits_weights = False, problem, False
        for call in server.calls:
            call.cancel()
        self._changed.set()

    def _give_up(self, server: ServerState, problem: str) -> None:
        server.given_up, server.version = True, None
        self._eject(server, problem)
        say(f"{server.url} gets no more requests: {problem}")

    async def _restart(self, server: ServerState) -> None:
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
        return "; ".join(f"{server.url}: {server.problem or 'up'}" for server in self.servers)
