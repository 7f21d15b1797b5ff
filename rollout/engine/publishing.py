"""Publishes new weights to running servers.

While the servers continue to sample, the weights are written once as safetensors, to /dev/shm if they fit or to a
directory that servers on other hosts can read, and sent to hosts that cannot read them. Then the servers are paused,
load the weights, and resume. A server that has the previous weights loads only the tensors that have changed, for
example not the frozen vision tower. A server's scheduler loads the weights and sets their label in the same step.
"""

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engine.http import HttpClient
from rollout.engine.labels import Label
from rollout.engine.protocol import EngineError, RequestRejected, Weights
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.engine.transfer import Problems, Transfer, num_bytes
from rollout.engine.weight_root import WeightRoot

ALL, CHANGED = "all", "changed"  # directories of all tensors' files, and of links to the files that have changed
ADAPTER_SCHEME = "adapter:"  # prefix of a model path with an adapter's tensors, which only our SGLang plugin can load
ADAPTER_INFO = "adapter"  # name of the tensor that has the adapter's scale and base as JSON
DTYPE_NAMES = {"uint8": "U8", "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
REMEDY = "; with lora.rank, start the servers with `python -m rollout.serve --model` and the adapter's base model"
PART_BYTES = 2**20  # size of a comparison; a trained tensor already differs in its first part
WRITERS = 8  # threads; each writes one tensor at a time


async def load_weights(
    client: HttpClient, files: "WeightFiles", servers: Sequence[ServerState], label: Label, settings: SGLangSettings
) -> Problems:
    """Sends the weights to hosts that cannot read the files, then pauses all servers, loads the weights and resumes.

    Running requests wait; their keys and values are recomputed afterwards. Returns the problems of servers that failed.
    """
    transfer = Transfer(client, files.root, label.owner, settings)
    try:
        problems = await transfer.send({server: files.directory(server) for server in servers})
        ready = [server for server in servers if server.url not in problems]
        paths = {url: f"{files.scheme}{path}" for url, path in transfer.paths.items()}
        async with AsyncExitStack() as stack:
            for server in ready:
                await stack.enter_async_context(server.labeling)
            problems |= await _load_paused(client, paths, ready, label, settings)
    finally:
        await transfer.remove()
    files.loaded |= {server for server in servers if server.url not in problems}
    return problems


async def _load_paused(
    client: HttpClient, paths: Mapping[str, str], servers: Sequence[ServerState], label: Label, settings: SGLangSettings
) -> Problems:
    """Pauses the servers, flushes their caches, loads the weights and resumes. `paths` maps URLs to weight files."""
    problems: Problems = {}
    refused: list[str] = []

    def healthy() -> list[str]:
        return [server.url for server in servers if server.url not in problems]

    def post(path: str, body: Any) -> Callable[[str], Coroutine[Any, Any, Any]]:
        return lambda url: client.post(f"{url}{path}", body, settings.control_deadline_s)

    async def load(url: str) -> Any:
        body = {"model_path": paths[url], "flush_cache": False, "weight_version": str(label)}
        try:
            return await client.post(f"{url}/update_weights_from_disk", body, settings.load_deadline_s)
        except RequestRejected as problem:
            if not paths[url].startswith(ADAPTER_SCHEME):
                raise
            refused.append(url)
            raise EngineError(f"{problem}{REMEDY}") from None

    try:
        for server in servers:
            server.loading = server.paused = True
        problems |= await post_all(healthy(), post("/pause_generation", {"mode": "retract"}))
        # The cache has keys and values of the old weights. SGLang only flushes it while no request runs.
        problems |= await post_all(healthy(), post("/flush_cache", {}))
        problems |= await post_all(healthy(), load)
    finally:
        problems |= await post_all([*healthy(), *refused], post("/continue_generation", {}))
        for server in servers:
            server.loading, server.paused = False, server.url in problems
            server.refuses_adapters = server.url in refused
    for server in servers:
        if server.url not in problems:
            server.version = label.version
    return problems


async def post_all(urls: Sequence[str], call: Callable[[str], Coroutine[Any, Any, Any]]) -> Problems:
    """Makes the same call to all servers concurrently. Returns the problems of servers that failed."""
    answers = await asyncio.gather(*(call(url) for url in urls), return_exceptions=True)
    problems = {}
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, EngineError):
            problems[url] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif isinstance(answer, dict) and answer.get("success") is False:
            problems[url] = f"{url}: {answer.get('message')}"
    return problems


class WeightFiles:
    """The latest weights for all servers, with one file per tensor. `close` removes the files."""

    def __init__(self, directory: str | Path = ""):
        self._root = WeightRoot(directory)
        self.scheme = ""  # prefix of the paths that servers get
        self.changed_frac = 1.0  # fraction of the latest weights' bytes that are in changed tensors
        self.loaded: set[ServerState] = set()  # servers that have loaded the latest weights
        self._loaded_previous: set[ServerState] = set()

    def directory(self, server: ServerState) -> Path:
        """Returns the files for a server: the changed tensors if it has the previous weights, otherwise all."""
        has_previous = server in self._loaded_previous - self.loaded and not self.scheme
        return self.root / (CHANGED if has_previous else ALL)

    @property
    def root(self) -> Path:
        if self._root.path is None:
            raise EngineError("the latest weights could not be written")
        return self._root.path

    def forget(self, server: ServerState) -> None:
        """Records that a server has lost the weights that it loaded, for example because it was restarted."""
        self._loaded_previous.discard(server)

    async def write(self, weights: Weights) -> None:
        """Replaces the files of tensors that have changed."""
        self._loaded_previous, self.loaded = self.loaded, set()
        root = self._root.path or self._root.make(weights.num_bytes)
        try:
            names = await asyncio.to_thread(_write_changed, weights, root)
        except BaseException as problem:
            self._root.remove()
            if isinstance(problem, OSError):
                raise EngineError(
                    f"the weights cannot be written into {root} ({problem.strerror}); free some space there, or name "
                    f"another directory with engine.weights_dir"
                ) from None
            raise
        self.scheme = ADAPTER_SCHEME if ADAPTER_INFO in names else ""
        self.changed_frac = num_bytes(root / CHANGED) / num_bytes(root / ALL)

    async def close(self) -> None:
        await asyncio.to_thread(self._root.remove)


def _write_changed(weights: Weights, root: Path) -> set[str]:
    """Replaces the files of tensors that have changed, and links to them. Returns the names of all tensors."""
    shutil.rmtree(root / CHANGED, ignore_errors=True)
    for directory in (root / ALL, root / CHANGED):
        directory.mkdir(exist_ok=True)
    names, name = set(), ""
    with ThreadPoolExecutor(WRITERS) as pool:
        writes: deque[Future[None]] = deque()
        for name, tensor in weights.tensors():
            names.add(name)
            writes.append(pool.submit(_write, root, name, tensor))
            if len(writes) > WRITERS:  # bounds the number of tensors in memory
                writes.popleft().result()
        for write in writes:
            write.result()
    if not any((root / CHANGED).iterdir()):
        _link(root, name)  # SGLang cannot load an empty directory
    for path in (root / ALL).iterdir():
        if path.name.removesuffix(".safetensors") not in names:  # from before a switch between adapter and model
            path.unlink()
    return names


def _write(root: Path, name: str, tensor: np.ndarray) -> None:
    """Writes a tensor's file and a link to it, unless the file already has this content.

    The old file is replaced, not overwritten, because a server past its deadline may still read it.
    """
    path = root / ALL / f"{name}.safetensors"
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    info = {"dtype": DTYPE_NAMES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [0, data.nbytes]}
    header = json.dumps({name: info}).encode()
    header = len(header).to_bytes(8, "little") + header
    if path.exists() and _same(np.memmap(path, np.uint8, "r"), header, data):
        return
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(header)
        file.write(data.data)
    new.replace(path)
    _link(root, name)


def _link(root: Path, name: str) -> None:
    (root / CHANGED / f"{name}.safetensors").symlink_to(f"../{ALL}/{name}.safetensors")


def _same(old: np.ndarray, header: bytes, data: np.ndarray) -> bool:
    start = len(header)
    parts = (slice(first, first + PART_BYTES) for first in range(0, data.size, PART_BYTES))
    return (
        old.size == start + data.size
        and old[:start].tobytes() == header
        and all(np.array_equal(old[start:][part], data[part]) for part in parts)
    )
