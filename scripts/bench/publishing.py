"""Publishing weights to servers, compared with a plain copy of the same bytes.

The copy is the lower bound: bytes are written once to shared memory and read by as many readers at the same time.
Receivers stand in for servers: they only read the files into memory. Real servers also load them.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from aiohttp import web

from model_port.safetensors_io import SINGLE_FILE
from rollout.engine.protocol import Weights
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.supervisor import SHARED_MEMORY

UP_DEADLINE_S = 60.0
LOOK_EVERY_S = 0.05
SCORED = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]}}  # the answer to a probe


class Receiver:
    """The part of SGLang's HTTP interface that a publish uses."""

    def __init__(self, num_bytes: int):
        self._memory = np.ones(num_bytes, np.uint8)  # zeros would allocate memory only when written
        self._label = "default"

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/update_weights_from_disk":
            await asyncio.to_thread(_read_file, Path(body["model_path"]) / SINGLE_FILE, self._memory)
            self._label = body["weight_version"]
        if request.path == "/update_weight_version":
            self._label = body["new_version"]
        if request.path == "/generate":
            return web.json_response(SCORED)
        return web.json_response({"success": True, "weight_version": self._label})


@asynccontextmanager
async def receivers(num: int, num_bytes: int) -> AsyncIterator[list[str]]:
    """The URLs of `num` receivers."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(num):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", Receiver(num_bytes).answer)
            runner = web.AppRunner(app)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield urls


async def publish_times(urls: Sequence[str], weights: Weights, repeats: int) -> dict[str, float]:
    """Median seconds of a publish to all servers and of a copy to as many readers, in turns."""
    memory = [np.ones(weights.num_bytes, np.uint8) for _ in range(1 + len(urls))]
    seconds: dict[str, list[float]] = {"publish_s": [], "copy_s": []}
    engine = await SGLangEngine.connect(urls, SGLangSettings("bench"))
    try:
        await _all_up(engine)
        for _ in range(1 + repeats):
            start_s = time.perf_counter()
            await engine.publish(weights, engine.version + 1)
            seconds["publish_s"].append(time.perf_counter() - start_s)
            seconds["copy_s"].append(await asyncio.to_thread(copied_s, memory[0], memory[1:]))
        await _all_up(engine)
    finally:
        await engine.close()
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first turn warms up


def copied_s(source: np.ndarray, targets: Sequence[np.ndarray]) -> float:
    """Seconds of a copy."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file, ThreadPoolExecutor(len(targets)) as readers:
        start_s = time.perf_counter()
        file.write(source.data)
        file.flush()
        list(readers.map(lambda target: _read(file.fileno(), target), targets))
        return time.perf_counter() - start_s


def _read_file(path: Path, target: np.ndarray) -> None:
    with path.open("rb") as file:
        _read(file.fileno(), target)


def _read(number: int, target: np.ndarray) -> None:
    """Fills `target`; releases the GIL while it reads."""
    done = 0
    while done < target.nbytes and (got := os.preadv(number, [target[done:].data], done)):
        done += got


async def _all_up(engine: SGLangEngine) -> None:
    """Raises if a server has failed, because the times would be for fewer servers."""
    give_up_s = time.monotonic() + UP_DEADLINE_S
    while down := [server for server in (await engine.health()).servers if not server.alive]:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"{down[0].url} is not up: {down[0].problem}")
        await asyncio.sleep(LOOK_EVERY_S)
