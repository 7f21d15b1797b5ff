"""Receives weights for an SGLang server on this host from a learner on another host, on a second port.

    GET /                          returns the names of the weight directories that the server can read
    POST /?owner=RUN/&num_bytes=N  makes a directory with room for weights; returns its name
    PUT /?owner=RUN/               receives single-tensor safetensors files, concatenated; returns their path
    DELETE /?owner=RUN/            removes the directory

The learner then calls SGLang with this path. No name or path comes from the network: files are numbered. A run can send
weights only to a server with its own label or with no run's label (`rollout.engine.labels`). A transfer that is
incomplete, invalid or larger than the free memory leaves no files.
"""

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import StreamReader, web

from rollout.engine.http import HttpClient
from rollout.engine.labels import Labels
from rollout.engine.protocol import EngineError
from rollout.engine.settings import SGLangSettings
from rollout.engine.weight_root import WeightRoot, fits

LENGTH_BYTES = 8  # size of the header's length at the start of a safetensors file
MAX_HEADER_BYTES, MAX_TENSORS = 4096, 100_000
PART_BYTES = 2**20  # read size
STALL_S = 60.0  # timeout without a byte, because a learner whose host is gone leaves its connection open
NUMBER = re.compile(r"[0-9]{1,18}")
INVALID = (ValueError, EOFError, RecursionError, ConnectionError, TimeoutError)


class Receiver:
    """An HTTP service that receives weights. Create it with `open`, and set `server_url` when the server is ready."""

    def __init__(self, root: WeightRoot, client: HttpClient):
        self._root, self._labels = root, Labels(client, SGLangSettings())
        self._receiving = asyncio.Lock()
        self.server_url = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, host: str, port: int, root: WeightRoot | None = None) -> AsyncIterator[Self]:
        root = root or WeightRoot()
        async with HttpClient() as client:
            receiver = cls(root, client)
            app = web.Application()
            app.add_routes([web.get("/", receiver.describe), web.post("/", receiver.prepare)])
            app.add_routes([web.put("/", receiver.receive), web.delete("/", receiver.remove)])
            runner = web.AppRunner(app, access_log=None, read_bufsize=PART_BYTES)
            try:
                await runner.setup()
                await web.TCPSite(runner, host, port).start()
                yield receiver
            finally:
                await runner.cleanup()
                root.remove()

    async def describe(self, request: web.Request) -> web.Response:
        return web.json_response({"readable": self._root.readable()})

    async def prepare(self, request: web.Request) -> web.Response:
        await self._check_owner(request)
        num_bytes = request.query.get("num_bytes", "")
        if not NUMBER.fullmatch(num_bytes):
            raise web.HTTPBadRequest(text="num_bytes must be a number")
        async with self._exclusive():
            self._root.remove()
            try:
                return web.json_response({"name": self._root.make(int(num_bytes)).name})
            except EngineError as problem:
                raise web.HTTPInsufficientStorage(text=str(problem)) from None

    async def receive(self, request: web.Request) -> web.Response:
        await self._check_owner(request)
        num_bytes = request.content_length
        if num_bytes is None:
            raise web.HTTPLengthRequired
        async with self._exclusive():
            directory = self._empty_directory(num_bytes)
            try:
                await _write_files(request.content, num_bytes, directory)
            except BaseException as problem:
                shutil.rmtree(directory)
                if isinstance(problem, INVALID):
                    raise web.HTTPBadRequest(
                        text=f"the weights are not complete safetensors files: {problem}"
                    ) from None
                raise
        return web.json_response({"path": str(directory)})

    async def remove(self, request: web.Request) -> web.Response:
        await self._check_owner(request)
        async with self._exclusive():
            self._root.remove()
        return web.json_response({})

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        if self._receiving.locked():
            raise web.HTTPConflict(text="other weights are being received")
        async with self._receiving:
            yield

    async def _check_owner(self, request: web.Request) -> None:
        """Raises an HTTP error if the server has another run's label."""
        if not self.server_url:
            raise web.HTTPServiceUnavailable(text="the server is starting")
        try:
            label = await self._labels.fetch(self.server_url)
        except EngineError as problem:
            raise web.HTTPServiceUnavailable(text=str(problem)) from None
        if label.is_foreign(request.query.get("owner", "")):
            raise web.HTTPForbidden(text=f"the server has weights of another run, {label.run}")

    def _empty_directory(self, num_bytes: int) -> Path:
        root = self._root.path
        if root is None:
            raise web.HTTPConflict(text="there is no directory for weights; POST makes it")
        for received in root.glob("[!.]*"):  # all but the lock
            shutil.rmtree(received)
        if not fits(root, num_bytes):
            raise web.HTTPInsufficientStorage(text=f"{num_bytes} bytes of weights do not fit into {root.parent}")
        return Path(tempfile.mkdtemp(dir=root))


async def _write_files(content: StreamReader, num_bytes: int, directory: Path) -> None:
    """Writes concatenated files of `num_bytes` in total. Raises ValueError if the content is not such a sequence."""
    number = 0
    while num_bytes:
        if number == MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
        header, data_bytes = await _read_header(content)
        num_bytes -= len(header) + data_bytes
        if num_bytes < 0:
            raise ValueError("a tensor is larger than its transfer")
        with (directory / f"{number:06}.safetensors").open("xb") as file:
            file.write(header)
            while data_bytes:
                part = await _with_timeout(content.read(min(data_bytes, PART_BYTES)))
                if not part:
                    raise ValueError("the transfer is incomplete")
                data_bytes -= file.write(part)
        number += 1


async def _read_header(content: StreamReader) -> tuple[bytes, int]:
    """Reads a file's bytes up to its tensor. Returns them and the tensor's number of bytes."""
    length = await _with_timeout(content.readexactly(LENGTH_BYTES))
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes")
    header = await _with_timeout(content.readexactly(size))
    return length + header, _data_bytes(json.loads(header))


async def _with_timeout(reading: Awaitable[bytes]) -> bytes:
    async with asyncio.timeout(STALL_S):
        return await reading


def _data_bytes(header: Any) -> int:
    match header:
        case dict() if len(header) == 1:
            match next(iter(header.values())):
                case {"data_offsets": [0, int(end)]} if end >= 0:
                    return end
    raise ValueError("not a safetensors file of one tensor")
