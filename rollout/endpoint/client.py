"""A client of OpenAI-compatible endpoints that serve one model: sends a dialogue and returns the model's next message.

Requests are spread over the servers; requests with the same affinity prefer the same server, because its prefix cache
has their prompt. A server that fails gets no more requests until a probe succeeds. The client retries only failures
that a retry can fix: lost connections, HTTP 5xx, and HTTP 429, or 503 with Retry-After, after the wait that the server
asks for. All retries happen within the request's deadline.

The API key comes from an environment variable and is sent only to the endpoint. Errors never contain the key, even if
a server repeats it.
"""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollout.endpoint.answers import Reply, get, joined, read_completion, reasoning_of, text_of
from rollout.endpoint.errors import (
    HIDDEN,
    OTHER_LIMIT_NAME,
    SAMPLE_REASONS,
    EndpointError,
    RateLimited,
    Rejected,
    TooLate,
    Unreachable,
    quoted,
    retry_after_s,
    status_error,
)
from rollout.engine.http import is_loopback
from rollout.engine.protocol import Health, ServerHealth
from rollout.terminal import say

if TYPE_CHECKING:
    import openai

CONNECT_DEADLINE_S = 10.0
PROBE_DEADLINE_S = 10.0
PROBE_EVERY_S = 5.0  # for servers that are down
POLL_S = 0.1  # while no server is ready
GIVE_UP_S = 60.0  # default; restarting servers on this machine takes longer
MAX_ATTEMPTS = 5  # per request; HTTP 429 does not count
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0  # the wait doubles after each failure
MAX_DOUBLINGS = 10
MAX_IN_FLIGHT = 64  # requests per server
MAX_BODY_BYTES = 2**26  # of a response; a stream has about 300 bytes per token
MAX_IMBALANCE = 8  # with more extra requests than this, recomputing the prefix elsewhere is faster than waiting
WITHOUT_KEY = "none"  # the client library needs one
RETRIED = (408, 409, 425)  # besides 5xx and 429


@dataclass(eq=False)
class _Endpoint:
    url: str
    api: "openai.AsyncOpenAI"
    running: int = 0
    ready_s: float = 0.0  # no request or probe is sent before this time
    down_since_s: float | None = None  # set while the server is down and gets only probes
    failed_s: float = 0.0  # the time of the latest failed request or probe
    limited: str = ""  # the message of the latest HTTP 429
    num_limited: int = 0  # consecutive waits after HTTP 429 responses that did not name one

    def limit(self, problem: RateLimited) -> None:
        """Sends nothing for as long as the server asks; if it names no wait, for a time that doubles."""
        self.mark_up()  # a server that asks for a wait is not down
        now_s, self.limited = time.monotonic(), str(problem)
        if problem.retry_after_s:
            self.ready_s = max(self.ready_s, now_s + problem.retry_after_s)
        elif self.ready_s <= now_s:  # otherwise this request was sent before the wait, which it must not double
            self.ready_s = now_s + min(BACKOFF_S * 2 ** min(self.num_limited, MAX_DOUBLINGS), MAX_BACKOFF_S)
            self.num_limited += 1

    def mark_down(self, problem: EndpointError) -> None:
        self.failed_s = time.monotonic()
        if self.down_since_s is None:
            self.down_since_s, self.ready_s = self.failed_s, 0.0
            say(f"{problem}; it gets no requests until it answers again")

    def mark_up(self) -> None:
        if self.down_since_s is not None:
            say(f"{self.url} answers again")
            self.down_since_s, self.ready_s = None, 0.0

    @property
    def down_s(self) -> float:
        return 0.0 if self.down_since_s is None else time.monotonic() - self.down_since_s


@dataclass(eq=False)
class _Attempts:
    """A request and its failed attempts."""

    request: dict[str, Any]
    max_tokens: int
    deadline_s: float
    affinity: str
    on_text: Callable[[str], None] | None
    began_s: float = field(default_factory=time.monotonic)
    num_failed: int = 0
    tried: set[str] = field(default_factory=set)
    last: EndpointError | None = None


class EndpointClient:
    """A client of one or more servers of the same model. Call `close` at the end.

    `api_key_env` names an environment variable; "" means no key. Requests fail if every server has been down for
    `give_up_s()`.
    """

    def __init__(
        self, urls: Sequence[str], model: str, api_key_env: str = "", give_up_s: Callable[[], float] = lambda: GIVE_UP_S
    ) -> None:
        import openai  # imported late: it takes as long as the rest of this package

        self.model = model
        self._key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
        if api_key_env and not self._key:
            raise ValueError(
                f"engine.api_key_env={api_key_env} names an environment variable that is not set; set it to the key, "
                "or leave engine.api_key_env empty for an endpoint without keys"
            )
        if not (self._key.isascii() and self._key.isprintable()):  # an error about the header would repeat it
            raise ValueError(
                f"the environment variable that engine.api_key_env={api_key_env} names holds no key, which is one line "
                "of printable ASCII"
            )
        self._openai = openai
        self._servers = [_Endpoint(url, self._api(url)) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT * len(self._servers))
        self._give_up_s = give_up_s
        self._limit_name = "max_tokens"
        self._probes: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"EndpointClient({self.urls}, {self.model!r})"

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    async def complete(
        self,
        messages: list[dict[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: list[str] | None = None,
        deadline_s: float,
        affinity: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Samples the assistant's next message. Raises a subclass of EndpointError.

        `on_text` is called with the whole text so far, whenever the text has grown. A retry starts with a new text.
        """
        options = {"seed": seed, "stop": stop or None}
        request = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "top_p": top_p,  # always sent, because vLLM would otherwise use the model's own default
            **{name: value for name, value in options.items() if value is not None},
        }
        started_s = time.monotonic()
        call = _Attempts(request, max_tokens, started_s + deadline_s, affinity, on_text)
        timeout = asyncio.timeout(deadline_s)
        try:
            async with timeout, self._slots:
                reply = await self._retried(call)
        except TimeoutError:
            if not timeout.expired():
                raise
            too_late = TooLate(f"{', '.join(self.urls)} did not answer within the {deadline_s:g} s of a request")
            raise call.last or too_late from None
        return replace(reply, latency_s=time.monotonic() - started_s)

    async def health(self) -> Health:
        """Probes every server now."""
        return Health(tuple(await asyncio.gather(*map(self._health, self._servers))))

    async def models(self) -> dict[str, list[str]]:
        """Maps each reachable server's URL to the models it lists, or to [] if it has no list. Raises EndpointError."""
        lists: dict[str, list[str]] = {}
        problems: list[tuple[_Endpoint, Unreachable]] = []
        for server in self._servers:
            try:
                lists[server.url] = await self._models(server)
            except Unreachable as problem:
                problems.append((server, problem))
        if not lists:
            raise problems[0][1]
        for server, problem in problems:
            server.mark_down(problem)
        return lists

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await asyncio.gather(*(server.api.close() for server in self._servers))

    def _api(self, url: str) -> "openai.AsyncOpenAI":
        timeout = self._openai.Timeout(None, connect=CONNECT_DEADLINE_S)  # `complete` enforces the request's deadline
        # No redirects: only this server may see the key and the dialogue. No proxy for servers on this machine.
        transport = self._openai.DefaultAsyncHttpxClient(
            timeout=timeout,
            follow_redirects=False,
            trust_env=not is_loopback(urlsplit(url).hostname or ""),
            headers={"Accept-Encoding": "identity"},  # no compression, so that a small body stays small in memory
            event_hooks={"response": [_bound_body]},
        )
        return self._openai.AsyncOpenAI(
            base_url=url, api_key=self._key or WITHOUT_KEY, max_retries=0, timeout=timeout, http_client=transport
        )

    async def _retried(self, call: _Attempts) -> Reply:
        while True:
            server = await self._choose(call)
            server.running += 1
            limit_name = self._limit_name
            try:
                reply = await self._send(server, call.request | {limit_name: call.max_tokens}, call.on_text)
                server.num_limited = 0
                return reply
            except RateLimited as problem:
                if problem.is_final:
                    raise
                server.limit(problem)
                call.last = problem
            except Unreachable as problem:
                await self._note_failure(call, server, problem)
            except Rejected as problem:
                if limit_name == "max_completion_tokens" or not OTHER_LIMIT_NAME.search(str(problem)):
                    raise
                self._limit_name = "max_completion_tokens"  # the name that OpenAI's newer models accept
            finally:
                server.running -= 1

    async def _note_failure(self, call: _Attempts, server: _Endpoint, problem: Unreachable) -> None:
        call.num_failed, call.last = call.num_failed + 1, problem
        call.tried.add(server.url)
        if call.num_failed == MAX_ATTEMPTS:
            raise Unreachable(f"a request failed {MAX_ATTEMPTS} times; {problem}") from None
        if len(call.tried) == len(self._servers):  # otherwise another server gets the request at once
            backoff_s = min(BACKOFF_S * 2 ** (call.num_failed - 1), MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _choose(self, call: _Attempts) -> _Endpoint:
        """Waits until a server is ready."""
        while True:
            now_s = time.monotonic()
            self._probe_those_down(now_s)
            up = [server for server in self._servers if server.down_since_s is None]
            if ready := [server for server in up if server.ready_s <= now_s and server.running < MAX_IN_FLIGHT]:
                return self._preferred([s for s in ready if s.url not in call.tried] or ready, call.affinity)
            if all(s.down_s > self._give_up_s() and s.failed_s > call.began_s for s in self._servers):
                raise call.last or Unreachable(f"{', '.join(self.urls)} cannot be reached")
            first = min(up, key=lambda server: server.ready_s, default=None)
            if first is not None and first.ready_s > call.deadline_s:
                raise call.last or RateLimited(first.limited)
            await asyncio.sleep(POLL_S)

    def _probe_those_down(self, now_s: float) -> None:
        for server in self._servers:
            if server.down_since_s is not None and server.ready_s <= now_s:
                server.ready_s = now_s + PROBE_DEADLINE_S + PROBE_EVERY_S  # one probe at a time
                task = asyncio.create_task(self._health(server))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    def _preferred(self, servers: Sequence[_Endpoint], affinity: str) -> _Endpoint:
        idlest = min(servers, key=lambda server: server.running)
        if not affinity:  # as for a judge's requests
            return idlest
        home = max(servers, key=lambda server: hashlib.blake2s(f"{affinity} {server.url}".encode()).digest())
        return home if home.running <= idlest.running + MAX_IMBALANCE else idlest

    async def _send(self, server: _Endpoint, request: dict[str, Any], on_text: Callable[[str], None] | None) -> Reply:
        """Sends a request once. Raises Unreachable or RateLimited if a retry can help."""
        openai = self._openai
        try:
            create = server.api.chat.completions.create
            completion = await (self._streamed(server.url, create, request, on_text) if on_text else create(**request))
            return read_completion(completion, server.url, self._hidden)
        except openai.APIStatusError as problem:
            if problem.status_code == 503 and (wait_s := retry_after_s(problem.response.headers)):
                raise RateLimited(f"{server.url} answered HTTP 503 and asks for a wait", wait_s) from None
            raise self._response_error(server, problem) from None
        except openai.APIConnectionError as problem:
            lost = Unreachable(self._hidden(f"{server.url} cannot be reached: {_cause(problem)}"))
            server.mark_down(lost)
            raise lost from None
        except openai.APIError as problem:  # an error event in a stream
            raise self._stream_error(server, problem) from None
        except (ValueError, RecursionError) as problem:  # invalid JSON
            raise Unreachable(self._hidden(f"{server.url} sent no chat completion: {problem}")) from None

    async def _streamed(
        self, url: str, create: Callable[..., Any], request: dict[str, Any], on_text: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Reads a stream and returns it in the form of a complete chat completion."""
        content, reasoning, refusal, finish, usage, chunk = "", "", "", None, None, None
        async with await create(**request, stream=True, stream_options={"include_usage": True}) as stream:
            async for chunk in stream:
                usage, choices = get(chunk, "usage") or usage, get(chunk, "choices")
                for choice in choices[:1] if isinstance(choices, list) else []:
                    delta, finish = get(choice, "delta"), get(choice, "finish_reason") or finish
                    refusal += text_of(get(delta, "refusal"))
                    more, more_reasoning = text_of(get(delta, "content")), reasoning_of(delta)
                    if more or more_reasoning:
                        content, reasoning = content + more, reasoning + more_reasoning
                        on_text(joined(reasoning, content))
        if chunk is None:
            raise Unreachable(f"{url} sent no stream; it must support stream=true")
        if not finish and not refusal:
            raise Unreachable(f"{url} ended a stream before the end of the reply, without a finish_reason")
        message = {"content": content, "reasoning_content": reasoning, "refusal": refusal}
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}

    def _response_error(self, server: _Endpoint, problem: "openai.APIStatusError") -> EndpointError:
        response = problem.response
        return self._status_error(server, response.status_code, response.text, response.headers)

    def _status_error(self, server: _Endpoint, status: int, text: str, headers: Mapping[str, str]) -> EndpointError:
        if status < 500 and status not in RETRIED:
            return status_error(status, text, server.url, self.model, headers, self._hidden)
        problem = Unreachable(f"{server.url} answered HTTP {status}: {quoted(text, self._hidden)}")
        if status in (502, 503, 504):  # the server behind a proxy is gone or still starting
            server.mark_down(problem)
        return problem

    def _stream_error(self, server: _Endpoint, problem: "openai.APIError") -> EndpointError:
        code, text = str(problem.code or ""), f"{problem.message} {problem.body or ''}"
        by_text = status_error(400, text, server.url, self.model, {}, self._hidden)
        if by_text.reason in SAMPLE_REASONS:
            return by_text
        return self._status_error(server, int(code) if code.isdecimal() and len(code) == 3 else 500, text, {})

    async def _health(self, server: _Endpoint) -> ServerHealth:
        try:
            await self._models(server)
        except Unreachable as problem:
            server.mark_down(problem)
            server.ready_s = time.monotonic() + PROBE_EVERY_S
            return ServerHealth(server.url, False, None, str(problem))
        except EndpointError as problem:  # the server is up, but rejects this request
            server.mark_up()
            return ServerHealth(server.url, True, None, str(problem))
        server.mark_up()
        return ServerHealth(server.url, True, None)

    async def _models(self, server: _Endpoint) -> list[str]:
        openai = self._openai
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                models = get(await server.api.get("/models", cast_to=object), "data")
            return [str(get(model, "id")) for model in models] if isinstance(models, list) else []
        except openai.APIStatusError as problem:
            if problem.status_code == 404:  # some endpoints have no model list
                return []
            raise self._response_error(server, problem) from None
        except (openai.APIError, TimeoutError, ValueError, RecursionError) as problem:
            raise Unreachable(self._hidden(f"{server.url} cannot be reached: {_cause(problem)}")) from None

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if self._key else text


async def _bound_body(response: Any) -> None:
    """Bounds the number of bytes that are read from a response, and disables its decompression."""
    response.headers.pop("Content-Encoding", None)
    read = response.aiter_raw

    async def bounded(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in read(chunk_size):
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise Unreachable(f"{response.url} answered with more than {MAX_BODY_BYTES} bytes")
            yield part

    response.aiter_raw = bounded


def _cause(problem: BaseException) -> str:
    """Describes a connection error by its cause, because the client library's own message has no details."""
    cause = problem.__cause__ or problem
    return str(cause) or type(cause).__name__
