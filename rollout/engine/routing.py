"""Chooses the server for each request.

Requests with the same affinity go to the server that has their prompt in its prefix cache, unless that server has far
more running requests than another. With an sglang-router, the router is the only target, and routes by the same key.
"""

import hashlib

from rollout.engine.fleet import Fleet
from rollout.engine.settings import ServerState

MAX_HOMES = 100_000  # affinities to remember
MAX_IMBALANCE = 8  # with more extra requests than this, recomputing the prefix elsewhere is faster than waiting


class Routing:
    def __init__(self, fleet: Fleet, router: str = ""):
        self._fleet = fleet
        self.router = ServerState(router, up=True) if router else None
        self._homes: dict[str, ServerState] = {}  # affinity -> the server that has its prefix cached

    @property
    def targets(self) -> list[ServerState]:
        return [self.router] if self.router else self._fleet.servers

    def behind(self, target: ServerState) -> list[ServerState]:
        """Returns the servers that may have received a request to `target`; a router does not report its choice."""
        return self._fleet.servers if target is self.router else [target]

    async def choose(self, affinity: str, deadline_s: float, tried: set[str]) -> ServerState:
        """Returns the server that has the prefix cached, or the least busy one. Prefers servers not in `tried`."""
        await self._fleet.wait_until_up(deadline_s)
        up = [server for server in self.targets if server.up]
        up = [server for server in up if server.url not in tried] or up
        idlest = min(up, key=lambda server: len(server.running))
        home = self._homes.pop(affinity, None)
        if home not in up:
            home = idlest
        self._homes[affinity] = home  # reinserted as the most recent
        while len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return home if len(home.running) <= len(idlest.running) + MAX_IMBALANCE else idlest


def routing_key(affinity: str) -> str:
    """Hashes an affinity into the key for a router, because a header cannot hold arbitrary text from a dataset."""
    return hashlib.blake2s(affinity.encode(), digest_size=8).hexdigest()
