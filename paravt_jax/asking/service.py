"""Serves an agent over HTTP: OpenAI's chat completions, model list, health and metrics.

A question takes minutes of GPU time, so the number of concurrent questions is limited. Some more questions may wait;
further requests get HTTP 429 with Retry-After. A request counts as a question once its body has arrived. Disconnecting
cancels the request. Every question has a deadline, which includes its waiting time.
"""

import asyncio
import errno
import itertools
import json
import math
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import ClientConnectionResetError, web

from model_port.progress import Meter
from model_port.terminal import say
from paravt_jax.asking.access import AccessControl, Handler
from paravt_jax.asking.answerer import Answer, Answerer, Listener
from paravt_jax.asking.body import Bodies
from paravt_jax.asking.media import Sources
from paravt_jax.asking.openai import (
    RETRY_S,
    BadRequest,
    Question,
    RequestError,
    chunk,
    completion,
    last_chunks,
    parse_question,
)
from paravt_jax.asking.terminal import TextStream, clock
from rollout.endpoint.errors import ContentFiltered
from rollout.engine.protocol import DeadlineExceeded, EngineError, Health, RequestRejected
from rollout.records import Call
from rollout.server import check_port
from rollout.video.errors import ImageError, VideoError, VideoTimeout, VideoUnavailable

HEADERS_DEADLINE_S = 20.0  # for a connection to send the headers of a request, from its start or last response
WRITE_DEADLINE_S = 60.0
HEALTH_S = 1.0  # requests to /health within this time share a check
MAX_WAITING = 8  # waiting questions, as a multiple of `max_questions`


@dataclass(eq=False)
class Service:
    """The HTTP service of an agent. Use `service.app()` as an aiohttp application."""

    answerer: Answerer
    model: str
    sources: Sources
    max_questions: int
    deadline_s: float | int
    access: AccessControl = field(default_factory=AccessControl)
    accepted: int = 0  # questions that wait or run
    running: int = 0
    stopping: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0  # includes answers to clients that had disconnected
    seconds: float = 0.0  # total time of the answers
    num_tokens: Counter[str] = field(default_factory=Counter)
    bodies: Bodies = field(default_factory=Bodies)
    deadlines_s: dict[asyncio.BaseTransport | None, float] = field(default_factory=dict)  # by idle connection
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _checking: asyncio.Task[Health] | None = None  # the latest check of the agent's health
    _checked_s: float = 0.0
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_questions)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._timed, _as_errors, self.access.check])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "paravt_jax"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        alive = not self.stopping and (await self._latest_health()).alive
        return web.json_response({"status": "ok" if alive else "unavailable"}, status=200 if alive else 503)

    async def _latest_health(self) -> Health:
        """Checks the agent at most every HEALTH_S, because clients need no key and an endpoint gets a request each."""
        now_s = time.monotonic()
        if self._checking is None or now_s >= self._checked_s + HEALTH_S:
            self._checking, self._checked_s = asyncio.create_task(self.answerer.agent.health()), now_s
        return await asyncio.shield(self._checking)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics(), content_type="text/plain", charset="utf-8")

    def metrics(self) -> str:
        """Metrics in Prometheus text format."""
        lines = ["# TYPE paravt_questions_running gauge", f"paravt_questions_running {self.running}"]
        lines += ["# TYPE paravt_questions_waiting gauge", f"paravt_questions_waiting {self.accepted - self.running}"]
        lines += ["# TYPE paravt_questions_total counter"]
        lines += [f'paravt_questions_total{{outcome="{name}"}} {count}' for name, count in sorted(self.counts.items())]
        lines += ["# TYPE paravt_tokens_total counter"]
        lines += [f'paravt_tokens_total{{kind="{name}"}} {count}' for name, count in sorted(self.num_tokens.items())]
        lines += ["# TYPE paravt_answer_seconds summary", f"paravt_answer_seconds_sum {self.seconds:.3f}"]
        return "\n".join([*lines, f"paravt_answer_seconds_count {self.num_answers}", ""])

    @web.middleware
    async def _timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Sets the idle deadline of a connection, which handles one request at a time."""
        transport = request.transport
        self.deadlines_s[transport] = math.inf
        try:
            return await handler(request)
        finally:
            self.deadlines_s[transport] = time.monotonic() + HEADERS_DEADLINE_S

    async def close_idle(self, server: web.Server) -> None:
        """Closes connections that have sent no request for HEADERS_DEADLINE_S."""
        while True:
            now_s = time.monotonic()
            new_s = now_s + HEADERS_DEADLINE_S
            open_now = {connection.transport: connection for connection in server.connections}
            self.deadlines_s = {transport: self.deadlines_s.get(transport, new_s) for transport in open_now}
            for transport, connection in open_now.items():
                if now_s > self.deadlines_s[transport]:
                    connection.force_close()
            await asyncio.sleep(HEADERS_DEADLINE_S / 10)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._check_free()  # before reading a large body in vain
        async with self.bodies.json(request) as body:
            question = parse_question(body, self.model)
            del body
            self._check_supported(question)
            self._check_free()
            return await self._answer_in_turn(request, question)

    def _check_supported(self, question: Question) -> None:
        if question.temperature and question.top_p != 1 and not self.answerer.samples_top_p:
            raise BadRequest("top_p needs --url or --endpoint; the embedded engine samples from all tokens", "top_p")
        if (question.num_frames or 0) > self.answerer.num_frames:
            raise BadRequest(
                f"num_frames must be at most {self.answerer.num_frames}, the server's --frames", "media_io_kwargs"
            )

    async def _answer_in_turn(self, request: web.Request, question: Question) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self.deadline_s
        self.accepted += 1
        outcome = "failed"
        try:
            async with self._place(deadline):
                response, outcome = await self._answer(request, question, deadline)
            return response
        except (asyncio.CancelledError, ClientConnectionResetError):  # the client disconnected, perhaps during a write
            outcome = "given up"
            if request.transport is not None:  # a regular close would wait until the client reads
                request.transport.abort()
            raise asyncio.CancelledError from None
        finally:
            self.accepted -= 1
            self.counts[outcome] += 1

    @asynccontextmanager
    async def _place(self, deadline: float) -> AsyncIterator[None]:
        """Waits until a question may run, in order of arrival."""
        async with asyncio.timeout_at(deadline):
            await self._places.acquire()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()

    def _check_free(self) -> None:
        if self.stopping:
            raise RequestError(503, "the server is stopping", "unavailable")
        if self.accepted >= (1 + MAX_WAITING) * self.max_questions:
            self.counts["turned away"] += 1
            raise RequestError(
                429,
                f"{self.max_questions} questions run and {MAX_WAITING * self.max_questions} wait, which is the limit",
                "rate_limit",
                self._retry_s(),
            )

    async def _answer(
        self, request: web.Request, question: Question, deadline: float
    ) -> tuple[web.StreamResponse, str]:
        """Answers a question. Returns the response, and the outcome for the metrics."""
        name = f"chatcmpl-{next(self._numbers)}"
        started_s = time.monotonic()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                files = await stack.enter_async_context(self.sources.files_of(question.media))
                subtitles = await self.sources.subtitles_of(files["video"])
            answerer = self.answerer.with_sampling(question.temperature, question.top_p)
            answerer = replace(answerer, num_frames=question.num_frames or answerer.num_frames)

            async def answer(listener: Listener | None = None) -> Answer:
                async with asyncio.timeout_at(deadline):
                    reply = await answerer.answer(
                        files["video"],
                        question.text,
                        listener,
                        name,
                        question.seed,
                        question.max_tokens,
                        question.history,
                        files["image"],
                        subtitles,
                    )
                self._check_complete(reply)
                self._count(reply, started_s)
                return reply

            if question.stream:
                return await self._streamed(request, question, name, answer)
            return web.json_response(completion(await answer(), name, self.model)), "answered"

    async def _streamed(
        self,
        request: web.Request,
        question: Question,
        name: str,
        answer: Callable[[Listener], Coroutine[Any, Any, Answer]],
    ) -> tuple[web.StreamResponse, str]:
        """Streams thinking, calls and reports as reasoning while they happen, and the answer at the end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        outcome, texts = "answered", asyncio.Queue[str | None]()
        answering = asyncio.create_task(answer(_StreamListener(texts.put_nowait)))
        answering.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            await response.prepare(request)
            await _send(response, chunk(name, self.model, {"role": "assistant"}))
            while (text := await texts.get()) is not None:
                await _send(response, chunk(name, self.model, {"reasoning_content": text}))
            for last_chunk in last_chunks(await answering, name, self.model, question.usage_in_stream):
                await _send(response, last_chunk)
        except ClientConnectionResetError:
            raise
        except Exception as problem:  # the status is already sent
            outcome = "failed while streaming"
            await _send(response, _as_request_error(problem).to_json())
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answering
        await _written(response.write_eof(b"data: [DONE]\n\n"))
        return response, outcome

    def _check_complete(self, answer: Answer) -> None:
        if answer.finish == "abort":
            raise EngineError("the engine aborted the question")
        if answer.finish == "context" and not answer.episode.turns:
            max_tokens = self.answerer.agent.config.max_context_tokens
            raise RequestError(
                400,
                f"the messages and their frames do not fit the context of {max_tokens} tokens; send fewer turns or "
                "videos, or shorter texts",
                param="messages",
                code="context_length_exceeded",
            )

    def _count(self, answer: Answer, started_s: float) -> None:
        self.num_answers += 1
        self.seconds += time.monotonic() - started_s
        self.num_tokens["prompt"] += answer.episode.num_prompt_tokens
        self.num_tokens["sampled"] += answer.episode.num_sampled

    def _retry_s(self) -> int:
        """Expected time until a running question is done."""
        mean_s = self.seconds / self.num_answers if self.num_answers else RETRY_S
        return max(1, round(mean_s / self.max_questions))


class _StreamListener(Listener):
    """Turns episode events into text for the stream."""

    wants_tokens = True

    def __init__(self, write: Callable[[str], object]):
        self._write, self._text = write, TextStream()

    def on_text(self, turn_number: int, text: str) -> None:
        part, _ = self._text.next_part(turn_number, text)
        if part:
            self._write(part)

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        window = "" if call.window is None else f" {clock(call.window.start_s)} to {clock(call.window.end_s)}"
        self._write(f"\n[{call.call.name or 'call'}{window}: {call.response}]\n")


async def _send(response: web.StreamResponse, message: Any) -> None:
    await _written(response.write(f"data: {json.dumps(message)}\n\n".encode()))


async def _written(writing: Coroutine[Any, Any, None]) -> None:
    """Writes with a deadline. A client that does not read in time counts as disconnected."""
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await writing
    except TimeoutError:
        raise ClientConnectionResetError("the client stopped reading") from None


@web.middleware
async def _as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as problem:
        return _error(RequestError(problem.status, problem.reason))
    except Exception as problem:
        return _error(_as_request_error(problem))


def _as_request_error(problem: Exception) -> RequestError:
    match problem:
        case RequestError():
            return problem
        case VideoTimeout() | DeadlineExceeded() | TimeoutError():
            return RequestError(504, "the question was not answered within the deadline", "timeout")
        case (
            VideoUnavailable()
            | MemoryError()
            | OSError(errno=errno.EMFILE | errno.ENFILE | errno.ENOMEM | errno.ENOSPC)
        ):
            _log_traceback(problem)
            return RequestError(503, "the server lacks memory, disk or open files", "unavailable", RETRY_S)
        case ImageError():
            say(str(problem))
            return BadRequest("an image cannot be read")
        case VideoError():
            return BadRequest(str(problem))
        case ContentFiltered():
            return RequestError(400, "the endpoint withheld the answer", param="messages", code="content_filter")
        case RequestRejected():
            _log_traceback(problem)
            return BadRequest("the model rejects the question; send fewer videos or a shorter text")
        case EngineError():
            _log_traceback(problem)
            return RequestError(503, "the engine is not available", "unavailable", RETRY_S)
        case _:
            _log_traceback(problem)
            return RequestError(500, "internal error; see the server's log", "server_error")


def _log_traceback(problem: Exception) -> None:
    """Logs details only for the operator, because they contain addresses, paths and code."""
    say("".join(traceback.format_exception(problem)).rstrip())


def _error(problem: RequestError) -> web.Response:
    headers = {} if problem.retry_s is None else {"Retry-After": str(problem.retry_s)}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status == 504:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients would run the question two more times
    return web.json_response(problem.to_json(), status=problem.status, headers=headers)


def bind_port(host: str, port: int) -> socket.socket:
    """Binds the port before the model loads, which takes minutes. Clients can connect once `serve` listens."""
    check_port(f"--port {port}", port)
    with ExitStack() as on_error:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, OverflowError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise ValueError(f"cannot listen at --host {host} --port {port}: {reason}") from None
        on_error.pop_all()
        return listener


async def serve(service: Service, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then gives running and waiting questions one deadline to finish."""
    runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    assert runner.server is not None, "set up above"
    closing = asyncio.create_task(service.close_idle(runner.server))
    try:
        await web.SockSite(runner, listener).start()
        await stop.wait()
        service.stopping = True
        with Meter("answering the last questions before stopping"), suppress(TimeoutError):
            async with asyncio.timeout(service.deadline_s):
                while service.accepted:
                    await asyncio.sleep(0.05)
    finally:
        closing.cancel()
        await runner.cleanup()
