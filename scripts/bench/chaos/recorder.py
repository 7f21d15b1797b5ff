"""A proxy in front of a server that records every sampled answer, to compare with the trainer's log.

It also keeps the weights that were published last, so that a fault can load older ones again.
"""

import asyncio
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web

from rollout.engine.labels import Label

MAX_BODY_BYTES = 2**28
NUM_KEPT, NUM_COPIES = 2, 5  # published versions kept; copies, of which a server may still be reading an older one
LOAD_S = 60.0


class Sampled(NamedTuple):
    """A server's answer to one request; equal answers are interchangeable."""

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


def sampled_by(sent: dict[str, Any], answer: dict[str, Any]) -> Sampled:
    meta, ids = answer["meta_info"], answer["output_ids"]
    versions = [-1] * len(ids)
    for span in meta["weight_versions"] if ids else []:
        version = Label.of(span["version"]).version
        versions[span["start"] : span["end"]] = [-1 if version is None else version] * (span["end"] - span["start"])
    logps = [logp for logp, *_ in meta.get("output_token_logprobs", [])]
    return Sampled.of(sent["input_ids"], sent.get("image_data", []), ids, logps, versions)


class Published(NamedTuple):
    label: Label
    path: Path


class Recorder:
    """Proxies `server_url` at `url`. Call `await start()` first and `close` at the end."""

    def __init__(self, record: Callable[[dict[str, Any], dict[str, Any]], object], directory: Path):
        """`record` gets every generation's request and answer; `directory` stores copies of published weights."""
        self.server_url = ""  # set once the server has started
        self.url = ""
        self._record, self._directory = record, directory
        self._published: list[Published] = []
        self._copies: list[Path] = []
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._forward)
        # When a client disconnects, the proxy closes its connection to the server, so the server stops computing.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()

    async def roll_back(self, server_url: str = "", *, claim_current: bool = False) -> bool:
        """Loads the second newest weights into the server without the trainer's knowledge. Returns whether that worked.

        They carry their own label; with `claim_current` they falsely carry the newest label.
        """
        if len(self._published) < NUM_KEPT:
            return False
        older, current = self._published
        label = current.label if claim_current else older.label
        body = {"model_path": str(older.path), "flush_cache": False, "weight_version": str(label)}
        url = f"{server_url or self.server_url}/update_weights_from_disk"
        try:
            async with asyncio.timeout(LOAD_S), self._session.post(url, json=body) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # the server is down
            return False

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        try:
            url = f"{self.server_url}{request.path_qs}"
            async with self._session.request(request.method, url, data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()  # behaves as if nothing listened on this port
            raise web.HTTPBadGateway from None
        if response.status == 200 and request.path == "/generate":
            sent = json.loads(body)
            if "input_ids" in sent:  # health probes send text
                self._record(sent, json.loads(answer))
        elif response.status == 200 and request.path == "/update_weights_from_disk":
            await self._keep(json.loads(body))
        return web.Response(status=response.status, body=answer, headers=headers)

    async def _keep(self, sent: dict[str, Any]) -> None:
        """Copies published weights; a trainer that restarted may publish a version again, with other weights."""
        label = Label.of(sent["weight_version"])
        path = self._directory / str(next(self._numbers))
        await asyncio.to_thread(shutil.copytree, sent["model_path"], path)
        older = [published for published in self._published if (published.label.version or 0) < (label.version or 0)]
        self._published = [*older, Published(label, path)][-NUM_KEPT:]
        self._copies.append(path)
        for copy in self._copies[:-NUM_COPIES]:
            await asyncio.to_thread(shutil.rmtree, copy)
            self._published = [published for published in self._published if published.path != copy]
        self._copies = self._copies[-NUM_COPIES:]
