"""Sends weights to servers on other hosts, which cannot read this host's files.

`rollout.serve` receives weights on a second port of its host (`rollout.receiver`). A receiver lists the weight
directories that it can read. If the list has the learner's directory, the server reads it, and nothing is sent.
Receivers that can read each other's directories are on the same host, which gets the weights once. With
`engine.weights_dir` nothing is sent, because all servers can read that directory.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from rollout.engine.http import HttpClient, ServerUnavailable
from rollout.engine.labels import WITH_WEIGHTS_PORT
from rollout.engine.protocol import EngineError
from rollout.engine.settings import ServerState, SGLangSettings

PART_BYTES = 2**20  # chunk size of an upload

Problems = dict[str, str]  # URL of each server that failed -> its problem


@dataclass(frozen=True)
class Inbox:
    """The place where a server's host receives weights."""

    server: ServerState
    address: str  # the receiver's URL
    name: str  # of the directory that the receiver made for the weights


class Transfer:
    """Sends the weights of one publish; call `remove` when the servers have loaded them."""

    def __init__(self, client: HttpClient, root: Path, owner: str, settings: SGLangSettings):
        self._client, self._root, self._settings = client, root, settings
        self._owner = urlencode({"owner": owner})
        self._inboxes: list[Inbox] = []
        self.paths: dict[str, str] = {}  # server URL -> the path where the server reads the weights

    async def send(self, directories: Mapping[ServerState, Path]) -> Problems:
        """Sends directories to servers that cannot read them, and sets `paths`.

        Servers on the same host share the largest of their directories.
        """
        if self._settings.weights_dir:
            self.paths = {server.url: str(directory) for server, directory in directories.items()}
            return {}
        problems: Problems = {}
        room = max(map(num_bytes, directories.values()), default=0)
        await asyncio.gather(*(self._find(*each, room, problems) for each in directories.items()))
        hosts: dict[str, list[Inbox]] = {}
        for inbox, host in zip(self._inboxes, await asyncio.gather(*map(self._host, self._inboxes)), strict=True):
            hosts.setdefault(host, []).append(inbox)
        await asyncio.gather(*(self._send_to_host(inboxes, directories, problems) for inboxes in hosts.values()))
        return problems

    async def remove(self) -> None:
        async def empty(inbox: Inbox) -> None:
            with suppress(EngineError):  # the next weights replace these
                await self._client.delete(f"{inbox.address}?{self._owner}", self._settings.control_deadline_s)

        await asyncio.gather(*map(empty, self._inboxes))

    async def _find(self, server: ServerState, directory: Path, room: int, problems: Problems) -> None:
        """Records the server's inbox, or the directory's path if the server can read it."""
        try:
            inbox = await self._inbox(server, room)
        except EngineError as problem:
            problems[server.url] = str(problem)
        else:
            if inbox is None:
                self.paths[server.url] = str(directory)
            else:
                self._inboxes.append(inbox)

    async def _inbox(self, server: ServerState, room: int) -> Inbox | None:
        """Opens an inbox on the server's host. Returns None if the server can read this host's files."""
        if server.managed is not None:
            return None
        deadline_s = self._settings.control_deadline_s
        address = _address(server.url, await self._client.get(f"{server.url}/server_info", deadline_s))
        if not address:
            return None
        try:
            if self._root.name in await self._readable(address):
                return None
            answer = await self._client.post(f"{address}?{self._owner}&num_bytes={room}", {}, deadline_s)
            return Inbox(server, address, _text(answer, "name", address))
        except EngineError as problem:
            raise ServerUnavailable(
                f"{server.url} cannot receive weights: {problem}; open that port (rollout.serve --weights-port), or "
                f"set engine.weights_dir to a directory that all servers can read"
            ) from None

    async def _host(self, inbox: Inbox) -> str:
        """Returns an id of the inbox's host: equal for inboxes that can read each other's directories."""
        names = {other.name for other in self._inboxes}
        try:
            return min(names & await self._readable(inbox.address), default=inbox.name)
        except EngineError:  # sending reports the cause
            return inbox.name

    async def _readable(self, address: str) -> set[str]:
        answer = await self._client.get(address, self._settings.control_deadline_s)
        if not isinstance(answer, dict) or not isinstance(names := answer.get("readable"), list):
            raise ServerUnavailable(f"{address} does not receive weights")
        return set(map(str, names))

    async def _send_to_host(
        self, inboxes: Sequence[Inbox], directories: Mapping[ServerState, Path], problems: Problems
    ) -> None:
        """Sends the directory to a host: tries its inboxes in turn until one receives everything."""
        directory = max((directories[inbox.server] for inbox in inboxes), key=num_bytes)  # of all or changed tensors
        for inbox in inboxes:
            try:
                path = await self._send(inbox, directory)
            except EngineError as problem:
                problems[inbox.server.url] = str(problem)
            else:
                self.paths |= {other.server.url: path for other in inboxes if other.server.url not in problems}
                break

    async def _send(self, inbox: Inbox, directory: Path) -> str:
        """Sends the directory to an inbox. Returns the path of the received files on the server's host."""
        url, deadline_s = f"{inbox.address}?{self._owner}", self._settings.load_deadline_s
        answer = await self._client.put(url, _parts(directory), num_bytes(directory), deadline_s)
        return _text(answer, "path", inbox.address)


async def _parts(directory: Path) -> AsyncIterator[bytes]:
    for path in directory.iterdir():
        with path.open("rb") as file:
            while part := await asyncio.to_thread(file.read, PART_BYTES):
                yield part


def num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def _address(url: str, server_info: Any) -> str:
    """Returns the URL of the receiver on a server's host, or "" if there is none."""
    label = server_info.get("weight_version") if isinstance(server_info, dict) else None
    match = WITH_WEIGHTS_PORT.fullmatch(label) if isinstance(label, str) else None
    host = urlsplit(url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{match[1]}/" if match else ""


def _text(answer: Any, key: str, address: str) -> str:
    if not isinstance(answer, dict) or not isinstance(text := answer.get(key), str):
        raise ServerUnavailable(f"{address} does not receive weights: its answer has no {key}")
    return text
