"""JSON calls to one SGLang server, every one with a deadline, and every failure told apart by what to do about it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp

from rollout.engine.protocol import DeadlineExceeded, EngineError, RequestRejected

CONNECT_DEADLINE_S = 10.0
SHOWN_CHARS = 300  # of what a server said, in an error
MAX_ANSWER_BYTES = 2**24  # where the question does not bound it
KEPT_S = 2.0  # an idle connection: SGLang closes its side after 5 s, and what is sent just then is lost
EVENT, LAST_EVENT = b"data: ", b"[DONE]"  # of a stream of messages
ROUTING_KEY = "X-SMG-Routing-Key"  # requests with one key should go to one server, says this to an sglang-router
MAX_CONNECTIONS = 1024  # to all servers together: every running request holds one


class ServerUnavailable(EngineError):
    """This server failed at it; another one, or a later attempt, may not."""


class ServerUnreachable(ServerUnavailable):
    """Nobody is there, or the connection broke."""


@dataclass(frozen=True)
class HttpClient:
    """The connections to all servers."""

    session: aiohttp.ClientSession

    @classmethod
    def make(cls) -> "HttpClient":
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEPT_S)
        # Servers are named by address; a proxy meant for the internet must not get these calls. What they send is not
        # unpacked: a small answer stays one.
        return cls(aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False))

    async def get(self, url: str, deadline_s: float) -> Any:
        return await self._call("GET", url, None, deadline_s, MAX_ANSWER_BYTES)

    async def post(
        self, url: str, body: Any, deadline_s: float, max_bytes: int = MAX_ANSWER_BYTES, routing_key: str = ""
    ) -> Any:
        """The answer as JSON, or None where it is not JSON, which no answer that matters to us is."""
        # In a thread: the pictures of an overview are megabytes of JSON.
        data = await asyncio.to_thread(_encoded, body)
        return await self._call("POST", url, data, deadline_s, max_bytes, routing_key)

    async def stream(
        self, url: str, body: Any, deadline_s: float, max_bytes: int, routing_key: str = ""
    ) -> AsyncGenerator[Any]:
        """The messages of an answer as they come, each of at most `max_bytes`; all of them within the deadline."""
        data = await asyncio.to_thread(_encoded, body)
        async with self._answer("POST", url, data, deadline_s, routing_key) as response:
            async for line in _lines(response, max_bytes):
                if line.startswith(EVENT) and not line.endswith(LAST_EVENT):
                    yield _parsed(line.removeprefix(EVENT))

    async def _call(
        self, method: str, url: str, data: bytes | None, deadline_s: float, max_bytes: int, routing_key: str = ""
    ) -> Any:
        async with self._answer(method, url, data, deadline_s, routing_key) as response:
            return _parsed(await _read(response, max_bytes))

    @asynccontextmanager
    async def _answer(
        self, method: str, url: str, data: bytes | None, deadline_s: float, routing_key: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is not an error; whatever goes wrong while it is read is told apart as well."""
        timeout = aiohttp.ClientTimeout(total=max(deadline_s, 0.001), sock_connect=CONNECT_DEADLINE_S)
        headers = {"Content-Type": "application/json"} | ({ROUTING_KEY: routing_key} if routing_key else {})
        try:
            async with self.session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    await _refuse(response, url)
                yield response
        except TimeoutError:
            raise DeadlineExceeded(f"{url} did not answer in {deadline_s:.1f} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise ServerUnreachable(f"{url} cannot be reached: {problem or type(problem).__name__}") from None

    async def close(self) -> None:
        await self.session.close()


async def _refuse(response: aiohttp.ClientResponse, url: str) -> NoReturn:
    said = (await _read(response, MAX_ANSWER_BYTES)).decode(errors="replace")[:SHOWN_CHARS]
    if 400 <= response.status < 500:
        raise RequestRejected(f"{url} answered {response.status}: {said}")
    response.close()  # SGLang closes its side after an error; do not use the connection again
    raise ServerUnavailable(f"{url} answered {response.status}: {said}")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        _check_size(response, len(body), max_bytes)
    return bytes(body)


async def _lines(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    line = bytearray()
    async for part in response.content.iter_any():
        *whole, rest = part.split(b"\n")
        for end in whole:
            yield bytes(line + end)
            line.clear()
        line += rest
        _check_size(response, len(line), max_bytes)


def _check_size(response: aiohttp.ClientResponse, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        response.close()
        raise ServerUnavailable(f"{response.url} answers with more than {max_bytes} bytes")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()
