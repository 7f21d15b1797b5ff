"""Times publishing weights to servers, compared with a plain copy of all their bytes.

The copy is written once to shared memory and read by as many readers at the same time. A publish sends only the tensors
that changed, which may be fewer bytes.
Receivers stand in for servers: they only read the files into memory. Real servers also load them. The weights alternate
between two versions, so that every publish sends what an update changes. They go through files that all servers read,
or over loopback as to another host, which gets them once for all its servers.
"""

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from aiohttp import web

from rollout import receiver
from rollout.engine.protocol import Weights
from rollout.engine.publishing import ADAPTER_SCHEME, ALL, CHANGED, WeightFiles
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.server import initial_label, settled_port
from rollout.supervisor import SHARED_MEMORY

UP_DEADLINE_S = 60.0
WARM_UP = 2  # publishes that are not counted; the first sends all tensors
LOOK_EVERY_S, WATCH_EVERY_S = 0.05, 0.001
SCORED = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]}}  # the answer to a probe


By = Literal["files", "network"]


class Receiver:
    """A stand-in server with the part of SGLang's HTTP interface that a publish uses."""

    def __init__(self, num_bytes: int, weights_port: int):
        self._memory = np.ones(num_bytes, np.uint8)  # np.zeros would allocate memory only on the first write
        self._label = self._first_label = initial_label(weights_port)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/update_weights_from_disk":
            directory = Path(body["model_path"].removeprefix(ADAPTER_SCHEME))
            await asyncio.to_thread(_read_files, directory, self._memory)
            self._label = body["weight_version"]
        if request.path == "/update_weight_version":
            self._label = body["new_version"]
        if request.path == "/generate":
            return web.json_response(SCORED)
        if request.path == "/server_info":
            return web.json_response({"weight_version": self._first_label})
        return web.json_response({"success": True, "weight_version": self._label})


@asynccontextmanager
async def receivers(num: int, num_bytes: int) -> AsyncIterator[list[str]]:
    """Starts `num` receivers and yields their URLs."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(num):
            app, port = web.Application(), settled_port("127.0.0.1", 0)
            inbox = await stack.enter_async_context(receiver.Receiver.open("127.0.0.1", port))
            app.router.add_route("*", "/{path:.*}", Receiver(num_bytes, port).answer)
            runner = web.AppRunner(app)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            inbox.server_url = urls[-1]
        yield urls


async def publish_times(
    urls: Sequence[str], versions: Sequence[Weights], repeats: int, by: By = "files"
) -> dict[str, float]:
    """Returns median bytes and seconds of a publish to all servers, alternating with a copy to as many readers."""
    memory = [np.ones(versions[0].num_bytes, np.uint8) for _ in range(1 + len(urls))]
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        engine = await SGLangEngine.connect(
            urls, SGLangSettings("bench", weights_dir=directory if by == "files" else "")
        )
        engine.fleet.files = WeightFiles(directory)  # servers do not look here by themselves
        try:
            await _all_up(engine)
            for weights in itertools.islice(itertools.cycle(versions), WARM_UP + repeats):
                row = await _publish_times(engine, weights)
                row["sent_mib"] = _num_bytes(engine.fleet.files) / 2**20
                row["copy_s"] = await asyncio.to_thread(copied_s, memory[0], memory[1:])
                rows.append(row)
            await _all_up(engine)
        finally:
            await engine.close()
    return {name: statistics.median(row[name] for row in rows[WARM_UP:]) for name in rows[0]}


async def _publish_times(engine: SGLangEngine, weights: Weights) -> dict[str, float]:
    """Returns the seconds of a publish, and of the pause in which no server samples."""
    loading_s = []

    async def watch() -> None:
        while True:
            if any(server.loading for server in engine.fleet.servers):
                loading_s.append(time.perf_counter())
            await asyncio.sleep(WATCH_EVERY_S)

    watching, start_s = asyncio.create_task(watch()), time.perf_counter()
    await engine.publish(weights, engine.version + 1)
    publish_s = time.perf_counter() - start_s
    watching.cancel()
    return {"publish_s": publish_s, "paused_s": loading_s[-1] - loading_s[0]}


def _num_bytes(files: WeightFiles) -> int:
    """Counts the bytes of the files that servers read in the latest publish."""
    return sum(path.stat().st_size for path in (files.root / (ALL if files.scheme else CHANGED)).iterdir())


def copied_s(source: np.ndarray, targets: Sequence[np.ndarray]) -> float:
    """Copies `source` to all targets through a file in shared memory. Returns seconds."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file, ThreadPoolExecutor(len(targets)) as readers:
        start_s = time.perf_counter()
        file.write(source.data)
        file.flush()
        list(readers.map(lambda target: _read(file.fileno(), target), targets))
        return time.perf_counter() - start_s


def _read_files(directory: Path, target: np.ndarray) -> None:
    first = 0
    for path in directory.iterdir():
        with path.open("rb") as file:
            first += _read(file.fileno(), target[first:])


def _read(number: int, target: np.ndarray) -> int:
    """Fills `target` from its number's file without holding the GIL. Returns the number of bytes."""
    done = 0
    while done < target.nbytes and (got := os.preadv(number, [target[done:].data], done)):
        done += got
    return done


async def _all_up(engine: SGLangEngine) -> None:
    """Raises if a server has failed, because the times would count fewer servers."""
    give_up_s = time.monotonic() + UP_DEADLINE_S
    while down := [server for server in (await engine.health()).servers if not server.alive]:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"{down[0].url} is not up: {down[0].problem}")
        await asyncio.sleep(LOOK_EVERY_S)
