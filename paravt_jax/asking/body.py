"""Reads and parses JSON requests within limits of time and memory.

60 MB of `[],[]…` become gigabytes of Python objects, so values are counted before the text is parsed.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from paravt_jax.asking.openai import RETRY_S, RequestError

MAX_BODY_BYTES = 64 * 2**20  # includes videos sent inside the request
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES  # limit for all bodies in memory; small bodies are always accepted
SMALL_BODY_BYTES = 2**20
BODY_DEADLINE_S = 60.0
MAX_DEPTH = 32
MAX_ITEMS = 100_000  # values, names and separators
# Strings match as a whole, and unterminated strings match to the end of the text, so the scan takes linear time.
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]|,', re.DOTALL)


@dataclass
class Bodies:
    """Reads request bodies and limits their total size."""

    num_bytes: int = 0

    @asynccontextmanager
    async def json(self, request: web.Request) -> AsyncIterator[Any]:
        """Reads a body, which counts towards the limit until the context ends, because its question keeps its media."""
        if request.content_type != "application/json":
            raise RequestError(415, "the Content-Type must be application/json")
        sizes: list[int] = []
        try:
            yield await asyncio.to_thread(parse_json, await self._read(request, sizes))
        finally:
            self.num_bytes -= sum(sizes)

    async def _read(self, request: web.Request, sizes: list[int]) -> bytes:
        """Reads a body. Appends each chunk's size to `sizes`, so that incomplete bodies count too."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                async for chunk in request.content.iter_any():
                    body += chunk
                    sizes.append(len(chunk))
                    self.num_bytes += len(chunk)
                    if len(body) > MAX_BODY_BYTES:
                        raise RequestError(413, f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")
                    if len(body) > SMALL_BODY_BYTES and self.num_bytes > MAX_BODIES_BYTES:
                        raise RequestError(503, "the server has too many large requests", "unavailable", RETRY_S)
            return bytes(body)
        except TimeoutError:
            raise RequestError(408, f"the request did not arrive within {BODY_DEADLINE_S:.0f} s", "timeout") from None
        except web.RequestPayloadError:
            raise RequestError(400, "the body does not match its encoding") from None


def parse_json(text: bytes) -> Any:
    if b"\0" in text:  # in UTF-16 or UTF-32, TOKEN would not match strings
        raise RequestError(400, "the body must be JSON in UTF-8")
    depth = 0
    for number, token in enumerate(TOKEN.finditer(text)):
        first = text[token.start()]
        depth += (first in b"[{") - (first in b"]}")
        if number >= MAX_ITEMS or depth > MAX_DEPTH:
            raise RequestError(400, f"the body has more than {MAX_ITEMS} values, or is nested deeper than {MAX_DEPTH}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not valid JSON") from None
