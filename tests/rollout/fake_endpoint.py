"""A fake OpenAI-compatible endpoint on loopback, with scripted replies and fault injection."""

import asyncio
import gzip
import json
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer, get_port_socket
from async_tests import Decorator, given

from rollout.endpoint.client import EndpointClient

MODEL = "fake/model"
Say = Callable[[dict[str, Any]], str]


def _error(message: str, code: str | int | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


# Error responses (status, body) with the messages of vLLM, SGLang, OpenAI, Gemini's compatible endpoint and OpenRouter.
ERRORS: dict[str, tuple[int, Any]] = {
    "vllm context": (400, _error("This model's maximum context length is 40 tokens. However, you requested 90", 400)),
    "vllm long prompt": (400, {"message": "The prompt (total length 25938) is too long to fit into the model"}),
    "sglang input": (400, {"message": "The input (9 tokens) is longer than the model's context length (4 tokens)."}),
    "sglang pool": (400, {"message": "Input length (9 tokens) exceeds the maximum allowed length (4 tokens)."}),
    "sglang total": (400, {"message": "Requested token count exceeds the model's maximum context length of 4 tokens."}),
    "openai context": (400, _error("too many", "context_length_exceeded")),
    "gemini context": (400, [_error("The input token count (9) exceeds the maximum number of tokens allowed.", 400)]),
    "openai filter": (400, _error("rejected", "content_policy_violation")),
    "azure filter": (400, _error("The response was filtered", "content_filter")),
    "vllm pictures": (400, _error("fake/model is not a multimodal model", 400)),
    "vllm few pictures": (400, _error("At most 0 image(s) may be provided in one prompt.", 400)),
    "sglang pictures": (400, {"message": "image input is not supported for this model"}),
    "openrouter filter": (403, _error("It requires moderation. Your input was flagged for violence.", 403)),
    "openrouter model": (404, _error("No endpoints found for fake/one.", 404)),
    "openrouter pictures": (404, _error("No endpoints found that support image input", 404)),
    "openai pictures": (400, _error("Invalid content type. image_url is only supported by certain models.")),
    "openai key": (401, _error("Incorrect API key provided: KEY.", "invalid_api_key")),
    "gemini key": (400, [_error("API key not valid. Please pass a valid API key.", 400)]),
    "forbidden": (403, _error("KEY may not use this model")),
    "vllm model": (404, _error("The model `fake/model` does not exist.", 404)),
    "gemini model": (404, [_error("models/fake is not found for API version v1main", 404)]),
    "no such path": (404, {"detail": "Not Found"}),
    "quota": (429, _error("You exceeded your current quota.", "insufficient_quota")),
    "no limit": (400, _error("max_completion_tokens is not supported")),
    "rejected": (422, _error("temperature must be 1, not 0")),
    "redirect": (307, "elsewhere"),
    **{str(status): (status, "try again") for status in (408, 409, 425)},
    "500": (500, _error("KEY crashed")),
    "503": (503, "no server"),
}
# Completions without a usable reply: the choice, or the whole body.
CHOICES: dict[str, dict[str, Any]] = {
    "refusal": {"message": {"content": None, "refusal": "I can't help with KEY."}, "finish_reason": "stop"},
    "filtered": {"message": {"content": ""}, "finish_reason": "content_filter"},
    "gemini safety": {"message": {"content": None}, "finish_reason": "SAFETY"},
    "gemini prohibited": {"message": None, "finish_reason": "content_filter: PROHIBITED_CONTENT"},
    "empty": {"message": {"content": ""}, "finish_reason": "stop"},
    "no content": {"message": {"content": None}, "finish_reason": "stop"},
    "other finish": {"message": {"content": "x"}, "finish_reason": "malformed"},
    "parsed calls": {"message": {"content": None, "tool_calls": []}, "finish_reason": "tool_calls"},
    "abort": {"message": {"content": "half"}, "finish_reason": "abort"},
    "error": {"message": {"content": "half"}, "finish_reason": "error"},
    "thinking only": {"message": {"content": ""}, "finish_reason": "max_tokens"},
}


# Malformed JSON bodies: neither a completion, nor a stream message, nor a list of models.
_ODD: tuple[Any, ...] = (
    *(5, None, "x", [], [1], {}),
    *({"error": value} for value in (5, "x", [5], {}, {"code": "9" * 5000}, {"code": 9}, {"message": 5, "code": []})),
    *({name: value} for name in ("choices", "data") for value in (5, "x", {"a": 1}, [5], ["x"], [None], [[]])),
    *({"choices": [{name: value}]} for name in ("message", "delta") for value in (5, "x", [])),
    *(
        {"choices": [{name: {part: value} for name in ("message", "delta")}]}
        for part in ("content", "reasoning_content", "refusal")
        for value in (5, [5], {"a": 1})
    ),
)
ODD = {f"odd {value!r:.60}": json.dumps(value) for value in _ODD} | {"odd depth": "[" * 100_000}
BOMB = gzip.compress(b" " * 2**24)


class FakeEndpoint:
    """A fake endpoint. Each request uses the next of `modes`, the last one repeatedly; "ok" replies `say(body)`."""

    def __init__(self, say: Say | str = "It is red.", *modes: str, port: int = 0):
        self.say, self.modes = say, list(modes) or ["ok"]
        self.key = ""  # the accepted key
        self.models: list[str] | None = [MODEL]  # None: /models does not exist
        self.retry_after = "0.05"
        self.delay_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.running = self.most_running = 0
        self.num_probes = 0
        self.url, self._port = "", port

    async def __aenter__(self) -> "FakeEndpoint":
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._server = TestServer(app, port=self._port, socket_factory=self._listen)
        await self._server.start_server(shutdown_timeout=0.1)
        self._port = self._server.port
        self.url = str(self._server.make_url("/v1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    def _listen(self, host: str, port: int, family: socket.AddressFamily) -> socket.socket:
        self._listener = get_port_socket(host, port, family)
        return self._listener

    async def die(self) -> None:
        """Closes all connections; `__aenter__` restarts the endpoint at the same port.

        It first stops accepting and lets the event loop complete accepted connections. Otherwise asyncio never closes
        a connection that is incomplete when the server closes, and the client waits until its deadline.
        """
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            await asyncio.sleep(0)
        await self._server.close()

    async def _models(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        if self.models is None:
            return web.Response(status=404)
        if refused := self._refused(request):
            return refused
        if self.modes[0] in ODD:
            return web.Response(text=ODD[self.modes[0]], content_type="application/json")
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    def _refused(self, request: web.Request) -> web.Response | None:
        self.headers.append(request.headers)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key and given != self.key:
            return web.json_response({"error": {"message": f"{given} is wrong", "code": "invalid_api_key"}}, status=401)
        return None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if refused := self._refused(request):
            return refused
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            return await self._answer(request, body, self.modes.pop(0) if len(self.modes) > 1 else self.modes[0])
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], mode: str) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if mode in ERRORS:
            status, error = ERRORS[mode]
            headers = {"Location": "http://127.0.0.1:9/v1"} if status == 307 else {}
            return web.Response(status=status, text=json.dumps(error).replace("KEY", key), headers=headers)
        if mode in ("429", "overloaded"):
            status = 429 if mode == "429" else 503
            return web.json_response({"error": "slow"}, status=status, headers={"Retry-After": self.retry_after})
        if mode == "other limit" and "max_tokens" in body:
            message = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": message}}, status=400)
        if mode == "hung":
            await asyncio.sleep(60)
        if mode == "drop":
            request.transport.abort()
        if mode == "html":
            return web.Response(text="<html>it works</html>", content_type="text/html")
        if mode == "broken json":
            return web.Response(text='{"choices": [', content_type="application/json")
        if mode in ODD and body.get("stream"):
            return web.Response(text=f"data: {ODD[mode]}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        if mode in ODD:
            return web.Response(text=ODD[mode], content_type="application/json")
        if mode == "endless":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            while True:
                await response.write(b" " * 2**16)
        if mode == "bomb":
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            return web.Response(body=BOMB, headers=headers)
        if mode == "no choices":
            return web.json_response({"choices": [], "usage": None})
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        if mode in CHOICES:
            choice = json.loads(json.dumps(CHOICES[mode]).replace("KEY", key))
        elif mode == "reasoning":
            field = "reasoning" if body.get("stream") else "reasoning_content"
            choice["message"] |= {"content": "<answer>A</answer>", field: "It is red."}
        else:
            choice["message"]["content"] = self.say if isinstance(self.say, str) else self.say(body)
            choice["finish_reason"] = "length" if mode == "cut off" else "stop"
        if body.get("stream") and mode != "no stream":
            return await self._stream(request, choice, mode)
        return web.json_response(_completion([{"index": 0} | choice]))

    async def _stream(self, request: web.Request, choice: dict[str, Any], mode: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(content: Any) -> None:
            await response.write(f"data: {json.dumps(content)}\n\n".encode())

        for name in ("reasoning", "refusal", "content"):
            for word in ((choice["message"] or {}).get(name) or "").split():
                await send(_chunk({name: f"{word} "}))
        if mode == "broken off":
            request.transport.abort()
            return response
        if mode == "stream error":
            await send({"error": {"object": "error", "message": "longer than the model's context length", "code": 400}})
            return response
        if mode == "failing stream":
            await send({"error": {"object": "error", "message": "out of memory", "code": 500}})
            return response
        if mode != "no end":
            await send(_chunk({}, choice["finish_reason"]))
            await send(_completion([]))
            await send(_chunk({}))  # it undoes neither finish reason nor usage
        await response.write(b"data: [DONE]\n\n")
        return response


def asking(num_endpoints: int = 1, key: str = "") -> Decorator:
    """Makes a test of a client with `num_endpoints` endpoints; `key` is the environment variable with its key."""

    async def start(stack: AsyncExitStack) -> list[Any]:
        endpoints = [await stack.enter_async_context(FakeEndpoint()) for _ in range(num_endpoints)]
        client = EndpointClient([endpoint.url for endpoint in endpoints], MODEL, key)
        stack.push_async_callback(client.close)
        return [client, *endpoints]

    return given(1 + num_endpoints, start)


def _completion(choices: list[Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": choices, "usage": usage}


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
