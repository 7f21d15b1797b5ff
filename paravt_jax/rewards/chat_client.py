"""A client for any OpenAI-compatible `/chat/completions`, with retries, timeouts and token counts.

A reply that its reader rejects is a failed attempt.
"""

import asyncio
import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp

from rollout.setting import setting

CONNECT_DEADLINE_S = 10.0
SHOWN_CHARS = 300  # of a server's reply, in an error
MISCONFIGURED = (401, 403, 404, 405)  # every request would fail like this one
Found = TypeVar("Found")


class EndpointError(RuntimeError):
    """No request can succeed; the message explains the fix."""


class NoReply(Exception):
    """An attempt failed. `final`: another attempt would fail too."""

    def __init__(self, message: str, wait_s: float = 0.0, final: bool = False):
        super().__init__(message)
        self.wait_s, self.final = wait_s, final


def check_no_password(setting: str, url: str) -> None:
    """Rejects a URL with a password, because settings appear in logs and pages. The error does not repeat the URL."""
    try:
        netloc = urlsplit(url).netloc
    except ValueError:
        raise ValueError(f"{setting} is not a URL") from None
    if "@" in netloc:
        raise ValueError(
            f"{setting} has a user or password in it, which would be written to the run's files; remove it, and put a "
            f"key in the environment variable that api_key_env names"
        )


@dataclass(frozen=True)
class Endpoint:
    url: str = setting("", "base URL of an OpenAI-compatible server, including /v1")
    model: str = setting("", "the model's name on that server")
    api_key_env: str = setting("", "name of the environment variable with the API key; empty: no key")

    def __post_init__(self) -> None:
        if not self.is_set:
            return
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.spelled('url')}={self.url!r} must begin with http:// or https://")
        check_no_password(self.spelled("url"), self.url)
        if not self.model:
            raise ValueError(f"{self.spelled('model')} must be the name of a model that {self.url} serves")

    @property
    def is_set(self) -> bool:
        return bool(self.url or self.model)

    def spelled(self, name: str) -> str:
        """The setting's full name, for errors."""
        return name


@dataclass(frozen=True)
class Limits:
    attempt_deadline_s: float = 60.0  # of one request
    max_attempts: int = 4  # per question, then it has no answer
    backoff_s: float = 1.0  # before the second attempt; doubles, up to …
    max_backoff_s: float = 20.0  # … this
    max_concurrent: int = 16  # requests at the same time
    max_reply_tokens: int = 1_024  # room for a model that reasons first


@dataclass(frozen=True)
class ChatRequest(Generic[Found]):
    messages: Sequence[dict[str, Any]]
    read: Callable[[Any], Found]  # parses the reply's content; raises NoReply


@dataclass
class Usage:
    """Totals since the client was opened. Tokens are the server's counts, including rejected replies."""

    num_calls: int = 0  # requests sent
    num_failed_calls: int = 0  # requests without a usable reply
    num_missing: int = 0  # given up after the last attempt
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_problem: str = ""


class ChatClient(AbstractAsyncContextManager["ChatClient"]):
    """Use `async with ChatClient(endpoint) as client`."""

    def __init__(self, endpoint: Endpoint, limits: Limits | None = None):
        self.endpoint, self.limits, self.usage = endpoint, limits or Limits(), Usage()
        self._url = f"{endpoint.url.rstrip('/')}/chat/completions"
        self._key = os.environ.get(endpoint.api_key_env, "").strip() if endpoint.api_key_env else ""
        if endpoint.api_key_env and not self._key:
            spelled = endpoint.spelled("api_key_env")
            raise ValueError(
                f"{spelled}={endpoint.api_key_env} names an environment variable that is not set; "
                f"set it to the key, or leave {spelled} empty for a server without keys"
            )
        self._slots = asyncio.Semaphore(self.limits.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ChatClient":
        limits = self.limits
        timeout = aiohttp.ClientTimeout(total=limits.attempt_deadline_s, sock_connect=CONNECT_DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=limits.max_concurrent)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, make_request: Callable[[], ChatRequest[Found]]) -> Found:
        """Builds a new request for every attempt.

        Raises NoReply after the last attempt, and EndpointError if no request can succeed.
        """
        limits = self.limits
        async with self._slots:
            for attempt in range(limits.max_attempts):
                try:
                    return await self._attempt(make_request())
                except NoReply as problem:
                    self.usage.num_failed_calls += 1
                    self.usage.last_problem = str(problem)
                    if problem.final or attempt == limits.max_attempts - 1:
                        self.usage.num_missing += 1
                        raise
                    backoff_s = limits.backoff_s * 2**attempt * random.uniform(0.5, 1.0)
                    await asyncio.sleep(min(max(backoff_s, problem.wait_s), limits.max_backoff_s))
        raise AssertionError("there is at least one attempt")

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The request."""
        length = self.limits.max_reply_tokens
        return {"model": self.endpoint.model, "messages": messages, "temperature": 0, "max_tokens": length}

    async def _attempt(self, request: ChatRequest[Found]) -> Found:
        if self._session is None:
            raise RuntimeError("the client is not open; use it in `async with`")
        self.usage.num_calls += 1
        try:
            # No redirects: only this server may see the key and the content.
            async with self._session.post(
                self._url, json=self.body(request.messages), allow_redirects=False
            ) as response:
                text = (await response.read()).decode(errors="replace")
        except TimeoutError:
            raise NoReply(f"{self._url} did not answer in {self.limits.attempt_deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise NoReply(f"{self._url} cannot be reached: {problem or type(problem).__name__}") from None
        if self._key:  # some servers repeat the key in errors
            text = text.replace(self._key, "***")
        if response.status != 200:
            error = f"{self._url} answered {response.status}: {text[:SHOWN_CHARS]}"
            if response.status in MISCONFIGURED or 300 <= response.status < 400:
                url, model, key = map(self.endpoint.spelled, ("url", "model", "api_key_env"))
                raise EndpointError(f"{error}; check {url}, {model} and {key}")
            raise NoReply(
                error,
                wait_s=_retry_after_s(response.headers.get("Retry-After", "")),
                final=response.status < 500 and response.status not in (408, 429),
            )
        try:
            reply = json.loads(text)
            self._count_tokens(reply.get("usage"))
            choice = reply["choices"][0]
            content, ended = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise NoReply(f"{self._url} returned no chat completion: {text[:SHOWN_CHARS]}") from None
        try:
            return request.read(content)
        except NoReply as problem:
            if ended != "length":
                raise
            raise NoReply(f"{problem}; it was cut off at {self.limits.max_reply_tokens} tokens") from None

    def _count_tokens(self, reported: Any) -> None:
        """Adds the server's token counts, which are optional."""
        for name in ("prompt_tokens", "completion_tokens") if isinstance(reported, dict) else ():
            number = reported.get(name)
            if isinstance(number, int):
                setattr(self.usage, name, getattr(self.usage, name) + number)


def _retry_after_s(header: str) -> float:
    """The seconds of a Retry-After header; 0 for a date."""
    return float(header) if header.isascii() and header.isdigit() else 0.0
