"""Serves an agent over HTTP: OpenAI's chat completions, model list, health and metrics.

A question takes minutes of GPU time, so the number of concurrent questions is limited; further requests get HTTP 429
with Retry-After. A request counts as a question once its body has arrived. Disconnecting cancels the request, and every
question has a deadline.
"""

import asyncio
import errno
import itertools
import json
import socket
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from model_port.progress import Meter
from model_port.terminal import say
from paravt_jax.asking.answerer import Answerer, Listener, Reply
from paravt_jax.asking.body import Bodies
from paravt_jax.asking.door import Door
from paravt_jax.asking.media import Sources
from paravt_jax.asking.openai import (
    RETRY_S,
    Asked,
    BadRequest,
    Refused,
    chunk,
    completion,
    error,
    last_chunks,
    question_of,
)
from paravt_jax.asking.terminal import clock, spoken
from rollout.engine.protocol import DeadlineExceeded, EngineError, RequestRejected
from rollout.records import Call
from rollout.video.errors import VideoError, VideoTimeout

HEADERS_DEADLINE_S = 20.0  # for a connection without a complete request, from its start or its last response
WRITE_DEADLINE_S = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Service:
    """Use `service.app()` as an aiohttp application."""

    answerer: Answerer
    model: str
    sources: Sources
    max_questions: int
    deadline_s: float | int
    door: Door = field(default_factory=Door)
    running: int = 0
    stopping: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # total time of answered questions
    num_tokens: Counter[str] = field(default_factory=Counter)
    bodies: Bodies = field(default_factory=Bodies)
    busy: Counter[asyncio.BaseTransport] = field(default_factory=Counter)  # connections with a request in progress
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._counted, _as_errors, self.door.check])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "paravt_jax"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        alive = not self.stopping and (await self.answerer.agent.engine.health()).alive
        return web.json_response({"status": "ok" if alive else "unavailable"}, status=200 if alive else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics(), content_type="text/plain", charset="utf-8")

    def metrics(self) -> str:
        """Prometheus text format."""
        lines = ["# TYPE paravt_questions_running gauge", f"paravt_questions_running {self.running}"]
        lines += ["# TYPE paravt_questions_total counter"]
        lines += [f'paravt_questions_total{{outcome="{name}"}} {count}' for name, count in sorted(self.counts.items())]
        lines += ["# TYPE paravt_tokens_total counter"]
        lines += [f'paravt_tokens_total{{kind="{name}"}} {count}' for name, count in sorted(self.num_tokens.items())]
        lines += ["# TYPE paravt_answer_seconds summary", f"paravt_answer_seconds_sum {self.seconds:.3f}"]
        return "\n".join([*lines, f"paravt_answer_seconds_count {self.counts['answered']}", ""])

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        if transport is None:  # the client has disconnected
            return await handler(request)
        self.busy[transport] += 1
        try:
            return await handler(request)
        finally:
            self.busy -= Counter([transport])

    async def close_idle(self, server: web.Server) -> None:
        """Closes connections that have had no complete request for HEADERS_DEADLINE_S."""
        since: dict[Any, float] = {}
        while True:
            now_s = time.monotonic()
            idle = [connection for connection in server.connections if connection.transport not in self.busy]
            since = {connection: since.get(connection, now_s) for connection in idle}
            for connection, since_s in since.items():
                if now_s - since_s > HEADERS_DEADLINE_S:
                    connection.force_close()
            await asyncio.sleep(HEADERS_DEADLINE_S / 10)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._check_free()  # before reading megabytes for nothing
        body = await self.bodies.json(request)
        question = question_of(body, self.model)
        del body
        if question.temperature and question.top_p != 1 and not self.answerer.samples_top_p:
            raise BadRequest("top_p is for servers of SGLang (--url); this one samples from all tokens", "top_p")
        self._check_free()
        self.running += 1
        outcome = "failed"
        try:
            response = await self._answered(request, question)
            outcome = "answered"
            return response
        except asyncio.CancelledError:
            outcome = "given up"
            raise
        finally:
            self.running -= 1
            self.counts[outcome] += 1

    def _check_free(self) -> None:
        if self.stopping:
            raise Refused(503, "the server is stopping", "unavailable")
        if self.running >= self.max_questions:
            self.counts["turned away"] += 1
            raise Refused(429, f"{self.running} questions are being answered", "rate_limit", self._retry_s())

    async def _answered(self, request: web.Request, question: Asked) -> web.StreamResponse:
        name = f"chatcmpl-{next(self._numbers)}"
        started_s = time.monotonic()
        deadline = asyncio.get_running_loop().time() + self.deadline_s
        async with AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                paths = await stack.enter_async_context(self.sources.files_of(question.media))
            answerer = self.answerer.with_sampling(question.temperature, question.top_p)

            async def answer(listener: Listener | None = None) -> Reply:
                async with asyncio.timeout_at(deadline):
                    given = await answerer.answer(
                        paths, question.text, listener, name, question.seed, question.max_tokens
                    )
                self._count(given, started_s)
                return given

            if question.stream:
                return await self._streamed(request, question, name, answer)
            return web.json_response(completion(await answer(), name, self.model))

    async def _streamed(
        self,
        request: web.Request,
        question: Asked,
        name: str,
        answer: Callable[[Listener], Coroutine[Any, Any, Reply]],
    ) -> web.StreamResponse:
        """Streams thinking, calls and reports as reasoning while they happen, and the answer at the end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        told: asyncio.Queue[str | None] = asyncio.Queue()
        answering = asyncio.create_task(answer(_Told(told.put_nowait)))
        answering.add_done_callback(lambda _: told.put_nowait(None))
        try:
            await response.prepare(request)
            await _send(response, chunk(name, self.model, {"role": "assistant"}))
            while (text := await told.get()) is not None:
                await _send(response, chunk(name, self.model, {"reasoning_content": text}))
            for one in last_chunks(await answering, name, self.model, question.usage_in_stream):
                await _send(response, one)
        except (TimeoutError, EngineError, VideoError) as problem:  # the status is already sent; send an error message
            self.counts["failed while streaming"] += 1
            refused = _refusal(problem)
            await _send(response, error(refused.message, refused.kind))
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answering
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _count(self, answer: Reply, started_s: float) -> None:
        self.seconds += time.monotonic() - started_s
        self.num_tokens["prompt"] += answer.episode.num_prompt_tokens
        self.num_tokens["sampled"] += answer.episode.num_sampled

    def _retry_s(self) -> int:
        """Expected time until a running question is done."""
        answered = self.counts["answered"]
        mean_s = self.seconds / answered if answered else RETRY_S
        return max(1, round(mean_s / self.max_questions))


class _Told(Listener):
    """Turns events into text for the stream."""

    wants_tokens = True

    def __init__(self, tell: Callable[[str], object]):
        self._tell = tell
        self._turn, self._said = 0, 0

    def on_text(self, turn_number: int, text: str) -> None:
        if turn_number != self._turn:
            self._turn, self._said = turn_number, 0
        words = spoken(text)
        if len(words) > self._said:
            self._tell(words[self._said :])
            self._said = len(words)

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        where = "" if call.window is None else f" {clock(call.window.start_s)} to {clock(call.window.end_s)}"
        self._tell(f"\n[{call.call.name or 'call'}{where}: {call.response}]\n")


async def _send(response: web.StreamResponse, message: Any) -> None:
    async with asyncio.timeout(WRITE_DEADLINE_S):  # in case the client does not read
        await response.write(f"data: {json.dumps(message)}\n\n".encode())


@web.middleware
async def _as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as problem:
        return _error(Refused(problem.status, problem.reason))
    except Exception as problem:
        return _error(_refusal(problem))


def _refusal(problem: Exception) -> Refused:
    match problem:
        case Refused():
            return problem
        case BadRequest():
            return Refused(400, str(problem), param=problem.param)
        case VideoTimeout() | DeadlineExceeded() | TimeoutError():
            return Refused(504, "the question was not answered in time", "timeout")
        case VideoError():
            return Refused(400, str(problem), param="messages")
        case RequestRejected():
            _tell(problem)
            said = "the model cannot take the question; with fewer videos or a shorter text it may"
            return Refused(400, said, param="messages")
        case EngineError():
            _tell(problem)
            return Refused(503, "the engine does not answer", "unavailable", RETRY_S)
        case MemoryError() | OSError(errno=errno.EMFILE | errno.ENFILE | errno.ENOMEM | errno.ENOSPC):
            _tell(problem)
            return Refused(503, "the server lacks memory, disk or open files", "unavailable", RETRY_S)
        case _:
            _tell(problem)
            return Refused(500, "something went wrong here, which the server's log tells", "server_error")


def _tell(problem: Exception) -> None:
    """Logs details for the operator: they contain addresses, paths and code."""
    say("".join(traceback.format_exception(problem)).rstrip())


def _error(refused: Refused) -> web.Response:
    headers = {} if refused.retry_s is None else {"Retry-After": str(refused.retry_s)}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error(refused.message, refused.kind, refused.param, refused.code)
    return web.json_response(body, status=refused.status, headers=headers)


def bound(host: str, port: int) -> socket.socket:
    """Binds the port before the model loads, which takes minutes. Clients can connect once `serve` listens."""
    with ExitStack() as unless_bound:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            place = unless_bound.enter_context(socket.socket(family, kind, protocol))
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(address)
        except (OSError, OverflowError) as problem:
            said = problem.strerror if isinstance(problem, OSError) else problem
            raise ValueError(f"--port {port} of --host {host} cannot be had: {said}") from None
        unless_bound.pop_all()
        return place


async def serve(service: Service, place: socket.socket, grace_s: float | int, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then gives running questions `grace_s` to finish."""
    runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    assert runner.server is not None, "set up above"
    closing = asyncio.create_task(service.close_idle(runner.server))
    try:
        await web.SockSite(runner, place).start()
        await stop.wait()
        service.stopping = True
        with Meter("stopping, once the questions are answered"), suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while service.running:
                    await asyncio.sleep(0.05)
    finally:
        closing.cancel()
        await runner.cleanup()
