"""Stands before a server, passes everything on, and keeps what was sampled: what the trainer logged is held to that."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web

from rollout.engine.labels import Label

MAX_BODY_BYTES = 2**28


class Sampled(NamedTuple):
    """One answer of a server. Two are equal when nothing tells them apart."""

    prompt: bytes  # hash of its ids and pictures
    ids: tuple[int, ...]
    logps: bytes  # float32
    versions: tuple[int, ...]

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int] | np.ndarray,
        png_base64s: Iterable[str],
        ids: Sequence[int] | np.ndarray,
        logps: Sequence[float] | np.ndarray,
        versions: Sequence[int],
    ) -> "Sampled":
        digest = hashlib.blake2b(np.asarray(prompt_ids, np.int32).tobytes(), digest_size=16)
        for png in png_base64s:
            digest.update(png.encode())
        log_probs = np.minimum(np.asarray(logps, np.float32), np.float32(0.0))
        return cls(digest.digest(), tuple(map(int, ids)), log_probs.tobytes(), tuple(versions))


class Recorder:
    """Use `await start()`, and `close` in the end. At `url` it answers as the server at `server_url` does."""

    def __init__(self, sampled: Counter[Sampled]):
        self.server_url = ""  # of a server that is up, or was
        self.url = ""
        self._sampled = sampled
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        # Who hangs up on us hangs up on the server, which then stops computing, as it would without us.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        try:
            url = f"{self.server_url}{request.path_qs}"
            async with self._session.request(request.method, url, data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()  # as if nobody listened here either
            raise web.HTTPBadGateway from None
        if request.path == "/generate" and response.status == 200:
            self._keep(json.loads(body), json.loads(answer))
        return web.Response(status=response.status, body=answer, headers=headers)

    def _keep(self, asked: dict[str, Any], answer: dict[str, Any]) -> None:
        if "input_ids" not in asked:
            return  # a probe
        meta, ids = answer["meta_info"], answer["output_ids"]
        versions = [-1] * len(ids)
        for span in meta["weight_versions"] if ids else []:
            version = Label.of(span["version"]).version
            versions[span["start"] : span["end"]] = [-1 if version is None else version] * (span["end"] - span["start"])
        logps = [logp for logp, *_ in meta.get("output_token_logprobs", [])]
        self._sampled[Sampled.of(asked["input_ids"], asked.get("image_data", []), ids, logps, versions)] += 1
