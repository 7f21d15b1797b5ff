"""Makes JSON calls to SGLang servers. Every call has a deadline, and the error's type says if a retry can help."""

import asyncio
import ipaddress
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn

import aiohttp

from rollout.engine.protocol import DeadlineExceeded, EngineError, RequestRejected

CONNECT_DEADLINE_S = 10.0
MAX_ERROR_CHARS = 300  # an error quotes at most this much of a server's answer
MAX_ANSWER_BYTES = 2**24  # default limit of an answer
KEEPALIVE_S = 2.0  # SGLang closes idle connections after 5 s; a request sent at that moment would be lost
EVENT, LAST_EVENT = b"data: ", b"[DONE]"  # server-sent events
ROUTING_KEY = "X-SMG-Routing-Key"  # an sglang-router sends requests with the same key to the same server
RETRIED = (408, 425, 429)  # an sglang-router answers 429 if its queue is full, and 408 if a request waited too long
MAX_CONNECTIONS = 1024  # per client, to all servers together; every running request holds a connection

Body = bytes | AsyncIterator[bytes] | None


class ServerUnavailable(EngineError):
    """This server failed; a retry or another server may succeed."""


class ServerUnreachable(ServerUnavailable):
    """The connection was refused or broke."""


class HttpClient(AbstractAsyncContextManager["HttpClient"]):
    """A connection pool for all servers."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S)
        # No proxies, because servers are addressed directly. No decompression, so that a small answer stays small.
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)

    async def get(self, url: str, deadline_s: float) -> Any:
        return await self._call("GET", url, None, deadline_s, MAX_ANSWER_BYTES, {})

    async def post(
        self, url: str, body: Any, deadline_s: float, max_bytes: int = MAX_ANSWER_BYTES, routing_key: str = ""
    ) -> Any:
        """Posts a JSON body and returns the parsed answer, or None if it is not JSON."""
        # Encoded in a thread, because the pictures of an overview are megabytes of JSON.
        data = await asyncio.to_thread(_encoded, body)
        return await self._call("POST", url, data, deadline_s, max_bytes, _json_headers(routing_key))

    async def put(self, url: str, parts: AsyncIterator[bytes], num_bytes: int, deadline_s: float) -> Any:
        headers = {"Content-Length": str(num_bytes)}
        return await self._call("PUT", url, parts, deadline_s, MAX_ANSWER_BYTES, headers)

    async def delete(self, url: str, deadline_s: float) -> Any:
        return await self._call("DELETE", url, None, deadline_s, MAX_ANSWER_BYTES, {})

    async def stream(
        self, url: str, body: Any, deadline_s: float, max_bytes: int, routing_key: str = ""
    ) -> AsyncGenerator[Any]:
        """Posts a JSON body and yields the messages of the streamed answer, each of at most `max_bytes`.

        The deadline covers the whole stream.
        """
        data = await asyncio.to_thread(_encoded, body)
        async with self._answer("POST", url, data, deadline_s, _json_headers(routing_key)) as response:
            async for line in _lines(response, max_bytes):
                if line.startswith(EVENT) and not line.endswith(LAST_EVENT):
                    yield _parsed(line.removeprefix(EVENT))

    async def _call(
        self, method: str, url: str, data: Body, deadline_s: float, max_bytes: int, headers: Mapping[str, str]
    ) -> Any:
        async with self._answer(method, url, data, deadline_s, headers) as response:
            return _parsed(await _read(response, max_bytes))

    @asynccontextmanager
    async def _answer(
        self, method: str, url: str, data: Body, deadline_s: float, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields a successful response. Errors of the request, or while the response is read, become engine errors."""
        timeout = aiohttp.ClientTimeout(total=max(deadline_s, 0.001), sock_connect=CONNECT_DEADLINE_S)
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    await _refuse(response, url)
                yield response
        except aiohttp.ConnectionTimeoutError:  # also a TimeoutError, but another server may be reached in time
            raise ServerUnreachable(f"{url} cannot be reached within {CONNECT_DEADLINE_S:g} s") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{url} did not answer in {deadline_s:.1f} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise ServerUnreachable(f"{url} cannot be reached: {_reason(problem)}") from None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()


def _reason(problem: Exception) -> str:
    """Returns the reason of a failed connection, such as "Connection refused", without the names that aiohttp adds."""
    if isinstance(problem, aiohttp.ClientConnectorError) and not isinstance(problem, aiohttp.ClientSSLError):
        number, text = problem.os_error.errno or 0, problem.os_error.strerror or ""
        if reason := os.strerror(number) if number > 0 else text:  # negative: the name cannot be resolved
            return reason
    return str(problem) or type(problem).__name__


async def _refuse(response: aiohttp.ClientResponse, url: str) -> NoReturn:
    text = (await _read(response, MAX_ANSWER_BYTES)).decode(errors="replace")[:MAX_ERROR_CHARS]
    if 400 <= response.status < 500 and response.status not in RETRIED:
        raise RequestRejected(f"{url} answered {response.status}: {text}")
    response.close()  # SGLang closes the connection after an error; do not reuse it
    raise ServerUnavailable(f"{url} answered {response.status}: {text}")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        _check_size(response, len(body), max_bytes)
    return bytes(body)


async def _lines(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    line = bytearray()
    async for part in response.content.iter_any():
        *complete, remainder = part.split(b"\n")
        for end in complete:
            yield bytes(line + end)
            line.clear()
        line += remainder
        _check_size(response, len(line), max_bytes)


def is_loopback(name: str) -> bool:
    """Returns whether a host name or address is the loopback interface of this machine."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _check_size(response: aiohttp.ClientResponse, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        response.close()
        raise ServerUnavailable(f"{response.url} answered with more than {max_bytes} bytes")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


def _json_headers(routing_key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({ROUTING_KEY: routing_key} if routing_key else {})


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()
