"""A fake server with fault injection and the part of SGLang's HTTP API that the engine uses."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.engine.publishing import ADAPTER_SCHEME


def good_answer(ids: Sequence[Any], version: str = "t/0", logp: Any = -0.5, **meta: Any) -> dict[str, Any]:
    """Returns a response of /generate; `logp` is the first token's."""
    logps = [[-0.5 if number else logp, token, None] for number, token in enumerate(ids)]
    answer = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "output_token_logprobs": logps,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        "prompt_tokens": 3,
        "cached_tokens": 1,
    }
    return {"output_ids": [*ids], "meta_info": answer | meta}


def _tensor(path: Path) -> str:
    """Returns the name of a file's only tensor."""
    content = path.read_bytes()
    ((name, _),) = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).items()
    return name


class FakeServer:
    """A fake server whose `mode` selects the behavior of /generate; with servers in `behind` it is a router."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port
        self.mode = "ok"
        self.healthy = True
        self.version = self.first_label = "default"
        self.weights = ""  # the label of the loaded weights
        self.delay_s = self.load_s = 0.0  # duration of sampling, and of loading weights
        self.paused = False
        self.model = 0.0  # identifies the model
        self.fail_paths: set[str] = set()
        self.behind: list[FakeServer] = []
        self.requests: Counter[str] = Counter()
        self.bodies: dict[str, list[Any]] = {}
        self.read: list[str] = []  # names of the tensors of each load
        self.running = 0
        self.sent_bytes = 0
        self.url = ""

    async def __aenter__(self) -> "FakeServer":
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app, port=self.port)
        await self._server.start_server(shutdown_timeout=0.1)
        self.url = str(self._server.make_url("/")).rstrip("/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _answer(self, request: web.Request, passed_on: Any = None) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else passed_on
        path = "/probe" if body and "text" in body else request.path
        self.requests[path] += 1
        self.bodies.setdefault(path, []).append(body)
        if self.behind:
            return await self._route(request, body)
        if path in self.fail_paths:
            return web.json_response({"success": False, "message": "no"}, status=400)
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        if path == "/update_weights_from_disk":
            await asyncio.sleep(self.load_s)
            directory = Path(body["model_path"].removeprefix(ADAPTER_SCHEME))
            self.read.append(" ".join(sorted(map(_tensor, directory.glob("*.safetensors")))))
            self.version = self.weights = body["weight_version"]
        while self.paused and path in ("/health", "/probe", "/generate"):
            await asyncio.sleep(0.01)
        if path == "/health":
            if self.mode == "hung":
                await asyncio.sleep(60)
            return web.Response(status=200 if self.healthy else 503)
        if path == "/server_info":
            return web.json_response({"version": "0.5.23", "weight_version": self.first_label})
        if path == "/model_info":
            return web.json_response({"weight_version": self.version, "model_path": "served.hf"})
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/probe":
            scored = [[None if n == 0 else -0.5 - self.model - len(self.weights), 5 + n, None] for n in range(20)]
            return web.json_response({"meta_info": {"input_token_logprobs": scored}})
        if path != "/generate":
            return web.json_response({"success": True})
        self.running += 1
        try:
            return await self._generate(request, body)
        finally:
            self.running -= 1

    async def _route(self, request: web.Request, body: Any) -> web.StreamResponse:
        """Behaves like an sglang-router: only lists its servers and forwards requests by their routing key."""
        if request.path == "/workers":
            return web.json_response({"workers": [{"url": server.url} for server in self.behind]})
        if request.path != "/generate":
            return web.json_response({"error": "no route"}, status=404)
        key = int(request.headers["X-SMG-Routing-Key"], 16)
        return await self.behind[key % len(self.behind)]._answer(request, body)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self.delay_s)
        if self.mode == "hung":
            await asyncio.sleep(60)
        if self.mode == "500":
            return web.Response(status=500, text="Internal Server Error")
        if self.mode == "429":
            return web.Response(status=429, text="Too Many Requests")
        if self.mode == "400":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.mode == "drop":
            request.transport.abort()
        if self.mode == "garbage":
            return web.Response(text="<html>it works</html>")
        answer = good_answer(range(5, 5 + body["sampling_params"]["max_new_tokens"]), self.version)
        if self.mode == "redirect":
            raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere")
        if self.mode == "nested":
            return web.Response(text="[" * 200_000)
        if self.mode == "endless":
            return await self._endless(request)
        if self.mode == "wrong":
            del answer["meta_info"]
        if body.get("stream"):
            return await self._stream(request, answer)
        return web.json_response(answer)

    async def _stream(self, request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        """Streams one message per token."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = answer["output_ids"]
        for number in range(1, len(ids) + 1):
            first = number - 1 if self.mode == "pieces" else 0
            message = answer | {"output_ids": ids[first:number]}
            await response.write(f"data: {json.dumps(message)}\n\n".encode())
            if self.mode == "broken off":
                request.transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**20)
            self.sent_bytes += 2**20
