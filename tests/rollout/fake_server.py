"""A server that speaks as much of SGLang's HTTP as the engine uses, and misbehaves on demand."""

import asyncio
from collections import Counter
from typing import Any

from aiohttp import web


class FakeServer:
    """`mode` is how /generate behaves; every path that was asked for is counted."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.healthy = True
        self.version = "default"
        self.delay_s = 0.0
        self.fail_paths: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.bodies: dict[str, list[Any]] = {}
        self.running = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FakeServer":
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked[path] += 1
        body = await request.json() if request.can_read_body else None
        self.bodies.setdefault(path, []).append(body)
        if path in self.fail_paths:
            return web.json_response({"success": False, "message": "no"}, status=400)
        if path == "/health":
            if self.mode == "hung":
                await asyncio.sleep(60)
            return web.Response(status=200 if self.healthy else 503)
        if path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path != "/generate":
            return web.json_response({"success": True})
        self.running += 1
        try:
            return await self._generate(request, body)
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self.delay_s)
        if self.mode == "hung":
            await asyncio.sleep(60)
        if self.mode == "500":
            return web.Response(status=500, text="Internal Server Error")
        if self.mode == "400":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.mode == "drop":
            assert request.transport is not None
            request.transport.abort()
        if self.mode == "garbage":
            return web.Response(text="<html>it works</html>")
        answer = self._good(body["sampling_params"]["max_new_tokens"])
        if self.mode == "short logp":
            answer["meta_info"]["output_token_logprobs"].pop()
        if self.mode == "nan":
            answer["meta_info"]["output_token_logprobs"][0][0] = float("nan")
        if self.mode == "no version":
            del answer["meta_info"]["weight_versions"]
        return web.json_response(answer)

    def _good(self, num_tokens: int) -> dict[str, Any]:
        ids = list(range(5, 5 + num_tokens))
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "length", "length": num_tokens},
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "weight_versions": [{"version": self.version, "start": 0, "end": num_tokens}],
                "prompt_tokens": 3,
                "cached_tokens": 1,
            },
        }
