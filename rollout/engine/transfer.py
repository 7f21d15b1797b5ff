"""Sends weights to servers of other hosts, which cannot read this host's files.

`rollout.serve` receives them on a second port of its host (`rollout.receiver`). A receiver lists the directories of
weights that it can read. If the learner's is in the list, the server reads that, and nothing is sent. Receivers that
can read each other's directories are on one host, which gets the weights once. With `engine.weights_dir` nothing is
sent, because all servers can read that directory.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout.engine.http import HttpClient, ServerUnavailable
from rollout.engine.labels import WITH_WEIGHTS_PORT
from rollout.engine.protocol import EngineError
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.receiver import OWNER_HEADER

PART_BYTES = 2**20  # sent at a time

Problems = dict[str, str]  # by URL, of the servers that failed


@dataclass(frozen=True)
class Inbox:
    """Where a server's host receives weights."""

    server: ServerState
    address: str
    name: str
    readable: frozenset[str]  # names of directories of weights


class Transfer:
    """Sends the weights of one publish; call `remove` when the servers have loaded them."""

    def __init__(self, client: HttpClient, root: Path, owner: str, settings: SGLangSettings):
        self._client, self._root, self._settings = client, root, settings
        self._headers = {OWNER_HEADER: owner}
        self._filled: list[Inbox] = []
        self.paths: dict[str, str] = {}  # by URL: where a server reads the weights

    async def send(self, directories: Mapping[ServerState, Path]) -> Problems:
        """Sends each server's directory if it cannot read it; servers of one host share one with all that they need."""
        problems: Problems = {}
        found = await asyncio.gather(*map(self._inbox, directories), return_exceptions=True)
        names = {inbox.name for inbox in found if isinstance(inbox, Inbox)}
        hosts: dict[str, list[Inbox]] = {}
        for server, inbox in zip(directories, found, strict=True):
            if isinstance(inbox, Inbox):
                hosts.setdefault(min(names & inbox.readable), []).append(inbox)
            elif isinstance(inbox, EngineError):
                problems[server.url] = str(inbox)
            elif isinstance(inbox, BaseException):
                raise inbox
            else:
                self.paths[server.url] = str(directories[server])
        sent = await asyncio.gather(*(self._send_to_host(inboxes, directories) for inboxes in hosts.values()))
        return problems | {url: problem for one in sent for url, problem in one.items()}

    async def remove(self) -> None:
        async def empty(inbox: Inbox) -> None:
            with suppress(EngineError):  # its next weights replace these
                await self._client.delete(inbox.address, self._settings.control_deadline_s, self._headers)

        await asyncio.gather(*map(empty, self._filled))

    async def _inbox(self, server: ServerState) -> Inbox | None:
        """None if the server reads this host's files."""
        if self._settings.weights_dir or server.managed is not None:
            return None
        info = await self._client.get(f"{server.url}/server_info", self._settings.control_deadline_s)
        address = _address(server.url, info)
        if not address:
            return None
        try:
            inbox = _parsed(server, address, await self._client.get(address, self._settings.control_deadline_s))
        except EngineError as problem:
            raise ServerUnavailable(
                f"{server.url} cannot receive weights: {problem}; open that port (rollout.serve --weights-port), or "
                f"set engine.weights_dir to a directory that all servers can read"
            ) from None
        return None if self._root.name in inbox.readable else inbox

    async def _send_to_host(self, inboxes: Sequence[Inbox], directories: Mapping[ServerState, Path]) -> Problems:
        """Sends to the first inbox that receives everything."""
        files = max((sorted(directories[inbox.server].iterdir()) for inbox in inboxes), key=len)  # all, or the changed
        problems: Problems = {}
        for inbox in inboxes:
            try:
                path = await self._send(inbox, files)
            except EngineError as problem:
                problems[inbox.server.url] = str(problem)
            else:
                self.paths |= {other.server.url: path for other in inboxes if other.server.url not in problems}
                break
        return problems

    async def _send(self, inbox: Inbox, files: Sequence[Path]) -> str:
        """The directory of the received files on the server's host."""
        num_bytes = sum(file.stat().st_size for file in files)
        deadline_s = self._settings.load_deadline_s
        self._filled.append(inbox)
        answer = await self._client.put(inbox.address, _parts(files), num_bytes, deadline_s, self._headers)
        if not isinstance(answer, dict) or not isinstance(directory := answer.get("directory"), str):
            raise ServerUnavailable(f"{inbox.address} does not report where it received the weights")
        return directory


async def _parts(files: Sequence[Path]) -> AsyncIterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            while part := await asyncio.to_thread(file.read, PART_BYTES):
                yield part


def _address(url: str, server_info: Any) -> str:
    """The receiver's address beside a server, or "" if it has none."""
    label = server_info.get("weight_version") if isinstance(server_info, dict) else None
    match = WITH_WEIGHTS_PORT.fullmatch(label) if isinstance(label, str) else None
    host = urlsplit(url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{match[1]}/" if match else ""


def _parsed(server: ServerState, address: str, answer: Any) -> Inbox:
    try:
        name, readable = answer["name"], frozenset(map(str, answer["readable"]))
    except (KeyError, TypeError):
        raise ServerUnavailable(f"{address} does not receive weights") from None
    return Inbox(server, address, str(name), readable | {str(name)})
